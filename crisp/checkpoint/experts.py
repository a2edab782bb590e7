"""Where the neurons of the routed experts lie in a checkpoint, in either spelling.

One tensor per expert and matrix (``experts.3.w1.weight``, ``experts.3.gate_proj.weight``: [out,
in], as of any linear layer), or one per layer and matrix (``experts.gate_up_proj`` [experts, ...],
laid out as in the model's own module). Either way a tensor is [experts, outer, d_ff, inner] in
memory: an order of neurons is applied along its third axis and everything else stays.
"""

from __future__ import annotations

import re
from collections.abc import Iterator
from dataclasses import dataclass

from crisp.adapter import Experts, Layout
from crisp.checkpoint.files import SINGLE, Checkpoint, quantised
from crisp.errors import CrispError

FLOATS = ("BF16", "F16", "F32", "F64")

# Gate, up and down of one expert, as published: Mixtral's and its kin's, and everybody else's.
_SEPARATE = (("w1", "w3", "w2"), ("gate_proj", "up_proj", "down_proj"))
# What published checkpoints call what transformers calls otherwise.
_ALIASES = ((".mlp.", ".block_sparse_moe."), ("model.", "backbone."))


@dataclass(frozen=True)
class ExpertTensor:
    """Weights of neurons: elements [count, outer, d_ff, inner] of experts ``first``, ``first`` + 1,
    ... of the decoder layer ``layer``.
    """

    layer: int
    first: int
    count: int
    outer: int
    d_ff: int
    inner: int


Expected = dict[str, tuple[tuple[int, ...], ExpertTensor | None]]
"""Tensor name -> its shape, and where it has neurons (None: it has none)."""


def expert_tensors(checkpoint: Checkpoint, found: Layout) -> dict[str, ExpertTensor]:
    """Every tensor with weights or biases of routed experts' neurons, by name.

    ``found`` is the layout of the model, whose weights are not looked at: a skeleton on the meta
    device will do. Raises CrispError, naming file and tensor, for a spelling that is not
    understood, tensors that are missing, left over or of another shape, and quantised ones.
    """
    names = _by_layer(checkpoint, found)
    result: dict[str, ExpertTensor] = {}
    for layer in found.layers:
        prefix, own = names.get(layer.index, ("", []))
        experts = Experts.of(layer)
        expected = _expected(checkpoint, prefix, own, experts, layer.index)
        for name in sorted(set(own) - expected.keys()):
            raise CrispError(f"{checkpoint.where(name)}: is not expected among routed experts")
        for name, (shape, place) in expected.items():
            if name not in checkpoint.tensors:
                file = checkpoint.folder / (checkpoint.index or SINGLE)
                raise CrispError(f"{file}: lacks tensor {name!r}")
            tensor = checkpoint.tensors[name]
            if tensor.dtype not in FLOATS:
                raise quantised(checkpoint.where(name), f"is {tensor.dtype}")
            if tensor.shape != shape:
                raise CrispError(
                    f"{checkpoint.where(name)}: is {list(tensor.shape)}; "
                    f"{list(shape)} was expected from the config"
                )
            if place is not None:
                result[name] = place
    return result


def _by_layer(checkpoint: Checkpoint, found: Layout) -> dict[int, tuple[str, list[str]]]:
    """Decoder layer -> the prefix of its experts' tensors, and their names.

    Experts beyond the decoder layers (those that predict further tokens) are left alone.
    """
    known = {name: layer.index for layer in found.layers for name in _aliases(layer.name)}
    stack = found.layers[0].name.partition(f".{found.layers[0].index}.")[0]
    stacks = [re.escape(name.removesuffix(".")) for name in _aliases(stack + ".")]
    inside = re.compile(rf"(?:{'|'.join(stacks)})\.(\d+)\.")
    result: dict[int, tuple[str, list[str]]] = {}
    for name in checkpoint.tensors:
        prefix, dot, _ = name.partition(".experts.")
        prefix += ".experts"
        if not dot:
            continue
        if prefix in known:
            before = result.setdefault(known[prefix], (prefix, []))
            before[1].append(name)
            if before[0] != prefix:
                raise CrispError(f"{checkpoint.where(name)}: there is {before[1][0]!r} as well")
        elif (match := inside.match(name)) and int(match[1]) < found.n_layers:
            raise CrispError(f"{checkpoint.where(name)}: is not expected; not understood")
    return result


def _aliases(name: str) -> list[str]:
    names = [name]
    for ours, published in _ALIASES:
        names += [x.replace(ours, published, 1) for x in names if ours in x]
    return names


def _expected(
    checkpoint: Checkpoint, prefix: str, own: list[str], experts: Experts, layer: int
) -> Expected:
    rest = [name.removeprefix(f"{prefix}.") for name in own]
    as_in_module = ("gate_up_proj" if experts.has_gate else "up_proj", "down_proj")
    for first, down in (as_in_module, ("fc1.weight", "fc2.weight")):  # the latter: Aria
        if first in rest:
            return dict(_together(prefix, first, down, experts, layer))
    for parts in _SEPARATE:
        if any(re.fullmatch(rf"\d+\.({'|'.join(parts)})\.weight", name) for name in rest):
            if experts.has_bias:
                raise CrispError(
                    f"{checkpoint.where(own[0])}: is of one expert, with biases; not understood"
                )
            return dict(_one_by_one(prefix, parts, experts, layer))
    inside = [x for x in checkpoint.tensors.values() if f".{layer}." in x.name]
    largest = max(inside, key=lambda tensor: tensor.nbytes, default=None)
    raise CrispError(
        f"{checkpoint.folder}: the experts of layer {layer} are not in a known spelling "
        f"(its largest tensor: {largest.name if largest else 'none'}); 'experts.N.w1.weight', "
        "'experts.N.up_proj.weight', 'experts.gate_up_proj' and so on were expected"
    )


def _one_by_one(
    prefix: str, parts: tuple[str, str, str], experts: Experts, layer: int
) -> Iterator[tuple[str, tuple[tuple[int, ...], ExpertTensor | None]]]:
    gate, up, down = parts
    d_ff, d = experts.d_ff, experts.d_model
    for expert in range(experts.n_experts):
        for part in (gate, up) if experts.has_gate else (up,):
            place = ExpertTensor(layer, expert, 1, outer=1, d_ff=d_ff, inner=d)
            yield f"{prefix}.{expert}.{part}.weight", ((d_ff, d), place)
        place = ExpertTensor(layer, expert, 1, outer=d, d_ff=d_ff, inner=1)
        yield f"{prefix}.{expert}.{down}.weight", ((d, d_ff), place)


def _together(
    prefix: str, first: str, down: str, experts: Experts, layer: int
) -> Iterator[tuple[str, tuple[tuple[int, ...], ExpertTensor | None]]]:
    n, d_ff, d = experts.n_experts, experts.d_ff, experts.d_model
    # A neuron's gate and up stand d_ff apart, or side by side.
    parts = 2 if experts.has_gate else 1
    apart, beside = (parts, 1) if experts.concatenated else (1, parts)
    rows, columns = (d, 1) if experts.transposed else (1, d)  # around them: [in, out] or [out, in]

    def place(outer: int, inner: int) -> ExpertTensor:
        return ExpertTensor(layer, 0, n, outer, d_ff, inner)

    wide = parts * d_ff
    shape = (n, d, wide) if experts.transposed else (n, wide, d)
    yield f"{prefix}.{first}", (shape, place(rows * apart, beside * columns))
    shape = (n, d_ff, d) if experts.transposed else (n, d, d_ff)
    yield f"{prefix}.{down}", (shape, place(columns, rows))
    if experts.has_bias:
        yield f"{prefix}.{first}_bias", ((n, wide), place(apart, beside))
        yield f"{prefix}.{down}_bias", ((n, d), None)
