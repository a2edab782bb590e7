"""Which tensors of a checkpoint hold the neurons of routed experts, and where in them each lies.

Checkpoints come in two spellings: one tensor per expert and matrix (``experts.3.w1.weight``,
``experts.3.gate_proj.weight``: [out, in], as of any linear layer), or one per layer and matrix
(``experts.gate_up_proj`` [experts, ...], laid out as in the model's own module). Either way a
tensor is [experts, outer, d_ff, inner] in memory: an order of neurons is applied along its third
axis and everything else stays.
"""

from __future__ import annotations

import re
from collections.abc import Iterator
from dataclasses import dataclass

from crisp.adapter import ExpertLayout, Experts
from crisp.checkpoint.files import SINGLE, Checkpoint, quantised_error
from crisp.errors import CrispError

FLOATS = ("BF16", "F16", "F32", "F64")

# Gate, up and down of one expert as published: by Mixtral and its relatives, by everybody else.
_SEPARATE = (("w1", "w3", "w2"), ("gate_proj", "up_proj", "down_proj"))
# (name in transformers, name in published checkpoints)
_ALIASES = ((".mlp.", ".block_sparse_moe."), ("model.", "backbone."))


@dataclass(frozen=True)
class ExpertTensor:
    """A tensor with weights of neurons, [count, outer, d_ff, inner] in memory."""

    layer: int  # decoder layer
    first: int  # the expert of the first entry; the others follow
    count: int  # experts
    outer: int  # elements in front of the axis of neurons
    d_ff: int
    inner: int  # elements of one neuron behind it


Expected = dict[str, tuple[tuple[int, ...], ExpertTensor | None]]
"""Tensor name -> (its shape, where its neurons are; None: it has none)."""


def expert_tensors(checkpoint: Checkpoint, layout: ExpertLayout) -> dict[str, ExpertTensor]:
    """Return every tensor with weights or biases of routed experts' neurons, by name.

    layout: of the model, whose weights are not read: one on the meta device will do. Raises
    CrispError, naming file and tensor, for a spelling that is not understood, tensors that are
    missing, left over or of another shape, and quantised ones.
    """
    names = _names_by_layer(checkpoint, layout)
    result: dict[str, ExpertTensor] = {}
    for layer in layout.layers:
        prefix, in_layer = names.get(layer.index, ("", []))
        experts = Experts.of(layer)
        expected = _expected(checkpoint, prefix, in_layer, experts, layer.index)
        for name in sorted(set(in_layer) - expected.keys()):
            raise CrispError(f"{checkpoint.where(name)}: is not expected among routed experts")
        for name, (shape, neurons) in expected.items():
            if name not in checkpoint.tensors:
                file = checkpoint.folder / (checkpoint.index or SINGLE)
                raise CrispError(f"{file}: lacks tensor {name!r}")
            tensor = checkpoint.tensors[name]
            if tensor.dtype not in FLOATS:
                raise quantised_error(checkpoint.where(name), f"is {tensor.dtype}")
            if tensor.shape != shape:
                raise CrispError(
                    f"{checkpoint.where(name)}: is {list(tensor.shape)}; "
                    f"{list(shape)} was expected from the config"
                )
            if neurons is not None:
                result[name] = neurons
    return result


def _names_by_layer(
    checkpoint: Checkpoint, layout: ExpertLayout
) -> dict[int, tuple[str, list[str]]]:
    """Return for each decoder layer the prefix of its experts' tensors, and their names.

    Experts beyond the decoder layers (those that predict further tokens) are left out.
    """
    layer_of = {name: layer.index for layer in layout.layers for name in _aliases(layer.name)}
    stacks = [re.escape(name.removesuffix(".")) for name in _aliases(layout.stack + ".")]
    inside = re.compile(rf"(?:{'|'.join(stacks)})\.(\d+)\.")
    result: dict[int, tuple[str, list[str]]] = {}
    for name in checkpoint.tensors:
        prefix, dot, _ = name.partition(".experts.")
        prefix += ".experts"
        if not dot:
            continue
        if prefix in layer_of:
            first_prefix, names = result.setdefault(layer_of[prefix], (prefix, []))
            names.append(name)
            if first_prefix != prefix:
                raise CrispError(f"{checkpoint.where(name)}: there is {names[0]!r} as well")
        elif (match := inside.match(name)) and int(match[1]) < layout.n_layers:
            raise CrispError(f"{checkpoint.where(name)}: is not expected; not understood")
    return result


def _aliases(name: str) -> list[str]:
    """Return a module's name and all the names it may have in a published checkpoint."""
    names = [name]
    for in_transformers, published in _ALIASES:
        names += [x.replace(in_transformers, published, 1) for x in names if in_transformers in x]
    return names


def _expected(
    checkpoint: Checkpoint, prefix: str, names: list[str], experts: Experts, layer: int
) -> Expected:
    """Return the tensors a layer must have, in the spelling that its ``names`` are in."""
    suffixes = [name.removeprefix(f"{prefix}.") for name in names]
    as_in_module = ("gate_up_proj" if experts.has_gate else "up_proj", "down_proj")
    for up, down in (as_in_module, ("fc1.weight", "fc2.weight")):  # the latter: Aria
        if up in suffixes:
            return dict(_one_per_layer(prefix, up, down, experts, layer))
    for parts in _SEPARATE:
        if any(re.fullmatch(rf"\d+\.({'|'.join(parts)})\.weight", name) for name in suffixes):
            if experts.has_bias:
                raise CrispError(
                    f"{checkpoint.where(names[0])}: is of one expert, with biases; not understood"
                )
            return dict(_one_per_expert(prefix, parts, experts, layer))
    in_layer = [x for x in checkpoint.tensors.values() if f".{layer}." in x.name]
    largest = max(in_layer, key=lambda tensor: tensor.nbytes, default=None)
    raise CrispError(
        f"{checkpoint.folder}: the experts of layer {layer} are not in a known spelling "
        f"(its largest tensor: {largest.name if largest else 'none'}); 'experts.N.w1.weight', "
        "'experts.N.up_proj.weight', 'experts.gate_up_proj' and so on were expected"
    )


def _one_per_expert(
    prefix: str, parts: tuple[str, str, str], experts: Experts, layer: int
) -> Iterator[tuple[str, tuple[tuple[int, ...], ExpertTensor | None]]]:
    """Yield (name, (shape, neurons)) of tensors that each hold one matrix of one expert."""
    gate, up, down = parts
    d_ff, d = experts.d_ff, experts.d_model
    for expert in range(experts.n_experts):
        for part in (gate, up) if experts.has_gate else (up,):
            neurons = ExpertTensor(layer, expert, 1, outer=1, d_ff=d_ff, inner=d)
            yield f"{prefix}.{expert}.{part}.weight", ((d_ff, d), neurons)
        neurons = ExpertTensor(layer, expert, 1, outer=d, d_ff=d_ff, inner=1)
        yield f"{prefix}.{expert}.{down}.weight", ((d, d_ff), neurons)


def _one_per_layer(
    prefix: str, up: str, down: str, experts: Experts, layer: int
) -> Iterator[tuple[str, tuple[tuple[int, ...], ExpertTensor | None]]]:
    """Yield (name, (shape, neurons)) of tensors that each hold one matrix of all experts."""
    n, d_ff, d = experts.n_experts, experts.d_ff, experts.d_model
    # A neuron's gate and up stand d_ff apart, or side by side.
    parts = 2 if experts.has_gate else 1
    apart, beside = (parts, 1) if experts.concatenated else (1, parts)
    rows, columns = (d, 1) if experts.transposed else (1, d)  # around them: [in, out] or [out, in]

    def neurons(outer: int, inner: int) -> ExpertTensor:
        return ExpertTensor(layer, 0, n, outer, d_ff, inner)

    out = parts * d_ff
    shape = (n, d, out) if experts.transposed else (n, out, d)
    yield f"{prefix}.{up}", (shape, neurons(rows * apart, beside * columns))
    shape = (n, d_ff, d) if experts.transposed else (n, d, d_ff)
    yield f"{prefix}.{down}", (shape, neurons(columns, rows))
    if experts.has_bias:
        yield f"{prefix}.{up}_bias", ((n, out), neurons(apart, beside))
        yield f"{prefix}.{down}_bias", ((n, d), None)
