"""The geometry of an MoE in a GGUF file: from its fields, and from its tensors."""

from __future__ import annotations

import math
import re
from collections import defaultdict
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from fractions import Fraction
from pathlib import Path

from crisp.errors import CrispError
from crisp.model.gguf_header import GgufHeader, GgufTensor, read_header
from crisp.model.spec import ModelSpec

_IN_LAYER = re.compile(r"blk\.(\d+)\.(.+)")
_ROUTED = re.compile(r"ffn_(gate_up|gate|up|down)_exps\.(weight|bias)")
_LARGEST = 1 << 31


@dataclass(frozen=True, eq=False)
class GgufModel:
    """An MoE in a GGUF file."""

    header: GgufHeader
    spec: ModelSpec
    # by MoE layer: what is routed ("gate", "up", "down", "gate_up"; weights alone) -> its tensor
    routed: Mapping[int, Mapping[str, GgufTensor]]
    architecture: str

    def biases(self, *layers: int) -> list[GgufTensor]:
        """Return the biases of gate (if any) and up, [experts, d_ff], of some MoE layers or all."""
        names = [
            f"blk.{layer}.ffn_{part}_exps.bias"
            for layer in layers or self.spec.moe_layers
            for part in ("gate", "up")[3 - self.spec.matrices :]
        ]
        shape = (self.spec.n_experts, self.spec.d_ff)
        for name in names:
            if name not in self.header.tensors or self.header.tensors[name].shape != shape:
                raise CrispError(f"{self.header.path}: {name}: {list(shape)} numbers were expected")
        return [self.header.tensors[name] for name in names]

    @property
    def types(self) -> dict[str, int]:
        """Routed tensors by the name of their type, the most frequent first."""
        kinds = [tensor.kind for tensors in self.routed.values() for tensor in tensors.values()]
        return {
            kind: kinds.count(kind) for kind in sorted(set(kinds), key=lambda k: -kinds.count(k))
        }


def read_geometry(path: Path) -> ModelSpec:
    """Return the geometry of the MoE in a GGUF file; see `read_model`."""
    return read_model(path).spec


def read_model(path: Path) -> GgufModel:
    """Read the geometry of the MoE in a GGUF file, of any architecture.

    Stored bits are exactly those of the routed tensors, by layer; what a token reads beside them is
    counted from the tensors of each layer. Raises CrispError for a file without routed experts,
    with experts of several sizes, and what `read_header` refuses.
    """
    header = read_header(path)
    fields = _ArchitectureFields(header)
    n_layers = fields.count("block_count") - fields.count("nextn_predict_layers", 0)
    n_experts, top_k = fields.count("expert_count", 0), fields.count("expert_used_count", 0)
    routed, rest = _by_layer(header, n_layers)
    bare = next((n for n in range(n_layers) if n not in routed and n not in rest), None)
    if routed and bare is not None:
        raise CrispError(
            f"{path}: says {n_layers:,} layers (block_count), but has no tensors of layer {bare}"
        )
    if not routed or not n_experts:
        old = any(re.search(r"ffn_(gate|up|down)\.\d+\.weight", name) for name in header.tensors)
        what = "has one tensor for each expert, as before 2024; convert the model anew"
        raise CrispError(f"{path}: {what if old else 'has no routed experts'}")
    shapes = {_expert_shape(tensors, n_experts) for tensors in routed.values()}
    if len(shapes) > 1:
        raise CrispError(
            f"{path}: its layers have experts of {len(shapes)} shapes; one was expected"
        )
    d_ff, d_model, has_gate = shapes.pop()
    if d_model != fields.count("embedding_length"):
        raise CrispError(
            f"{path}: its experts take {d_model} numbers, and embedding_length is "
            f"{fields.count('embedding_length')}"
        )
    layer_bits = [_bits(routed[layer].values()) for layer in sorted(routed)]
    dense = [tensor for tensors in rest.values() for tensor in tensors]
    try:
        spec = ModelSpec(
            name=str(header.fields.get("general.name") or path.stem),
            n_layers=n_layers,
            moe_layers=tuple(sorted(routed)),
            n_experts=n_experts,
            top_k=top_k,
            d_model=d_model,
            d_ff=d_ff,
            dtype_bits=max(1, round(_bits(dense))) if dense else 16,
            bits=layer_bits[0],
            matrices=3 if has_gate else 2,
            biases=any(f"blk.{layer}.ffn_up_exps.bias" in header.tensors for layer in routed),
            dense_params=tuple(
                sum(math.prod(tensor.shape) for tensor in rest.get(layer, ()))
                for layer in range(n_layers)
            ),
            block=math.ceil(Fraction(d_ff, 8 * 16)) * 16,
            config_hash=None,
        ).with_layer_bits(layer_bits)
    except CrispError as error:
        raise CrispError(f"{path}: {error}") from error
    return GgufModel(header, spec, routed, fields.architecture)


class _ArchitectureFields:
    """The fields of a file's architecture."""

    def __init__(self, header: GgufHeader) -> None:
        self._header = header
        self.architecture = str(header.fields.get("general.architecture", ""))
        if not self.architecture:
            raise CrispError(f"{header.path}: lacks general.architecture")

    def count(self, key: str, default: int | None = None) -> int:
        """Return a whole number; CrispError for anything else."""
        name = f"{self.architecture}.{key}"
        value = self._header.fields.get(name, default)
        if type(value) is not int or not 0 <= value < _LARGEST:
            raise CrispError(
                f"{self._header.path}: {name}: found {value!r}, expected a whole number below "
                f"{_LARGEST:,}"
            )
        return value


def _by_layer(
    header: GgufHeader, n_layers: int
) -> tuple[dict[int, dict[str, GgufTensor]], dict[int, list[GgufTensor]]]:
    """Return the weights of routed experts by layer and part, and the other tensors by layer."""
    routed = defaultdict[int, dict[str, GgufTensor]](dict)
    rest = defaultdict[int, list[GgufTensor]](list)
    for name, tensor in header.tensors.items():
        match = _IN_LAYER.fullmatch(name)
        if match is None or int(match[1]) >= n_layers:  # beyond: layers that predict further tokens
            continue
        part = _ROUTED.fullmatch(match[2])
        if part is None:
            rest[int(match[1])].append(tensor)
        elif part[2] == "weight":
            routed[int(match[1])][part[1]] = tensor
    return dict(routed), dict(rest)


def _expert_shape(tensors: Mapping[str, GgufTensor], n_experts: int) -> tuple[int, int, bool]:
    """Return (d_ff, d_model, whether there is a gate) of a layer's experts."""
    down, up = tensors.get("down"), tensors.get("gate_up") or tensors.get("up")
    some = next(iter(tensors.values()))
    if down is None or up is None:
        raise CrispError(f"{some.where}: the layer's other experts' tensors are missing")
    fused = 2 if "gate_up" in tensors else 1
    if len(down.shape) == 3:
        n, d_model, d_ff = down.shape
        expected = {"up": (n, d_ff, d_model), "gate": (n, d_ff, d_model)}
        expected |= {"gate_up": (n, fused * d_ff, d_model), "down": (n, d_model, d_ff)}
        if n == n_experts and all(x.shape == expected[part] for part, x in tensors.items()):
            return d_ff, d_model, fused == 2 or "gate" in tensors
    shapes = ", ".join(f"{part} {list(x.shape)}" for part, x in tensors.items())
    raise CrispError(
        f"{some.where}: the layer's experts are {shapes}; matrices of {n_experts} experts that fit "
        "each other were expected"
    )


def _bits(tensors: Iterable[GgufTensor]) -> Fraction:
    """Return the average bits of a number of these tensors."""
    every = list(tensors)
    return Fraction(8 * sum(x.nbytes for x in every), sum(math.prod(x.shape) for x in every))
