"""The geometry in the tensors of a model: their names, shapes and types, and no number of them.

The first number in a tensor's name is its layer. Routed experts are spelled with a tensor for each
expert and matrix, or with one for all experts of a layer; scales, zero points and packed weights
have names of their own behind that.
"""

from __future__ import annotations

import math
import re
from collections import defaultdict
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from fractions import Fraction

from crisp.checkpoint.files import TensorEntry, is_other_part
from crisp.errors import CrispError

_LAYER = re.compile(r"(?P<stack>(?:[A-Za-z_]\w*\.)*?)(?P<layer>\d{1,5})\.(?P<rest>.+)")
_OF_ONE = re.compile(r"(?:^|.*\.)experts\.(?P<expert>\d{1,6})\.(?P<matrix>\w+?)\.(?P<leaf>.+)")
_OF_ALL = re.compile(
    r"(?:^|.*\.)experts\.(?:mlp\.)?(?P<matrix>gate_up_proj|gate_proj|up_proj|down_proj|fc1|fc2)"
    r"(?:[._](?P<leaf>.+))?"
)
_GRANITE = re.compile(r"(?:^|.*\.)block_sparse_moe\.(?P<matrix>\w+put_linear)\.(?P<leaf>.+)")

# how many of an expert's matrices the tensor holds: gate, up and down, by the spelling
_UP = {
    "gate_proj": 1,
    "up_proj": 1,
    "w1": 1,
    "w3": 1,
    "gate_up_proj": 2,
    "fc1": 2,
    "input_linear": 2,
}
_DOWN = ("down_proj", "w2", "fc2", "output_linear")
_WEIGHTS = ("", "weight", "qweight", "weight_packed", "blocks", "packed")
_NEGLECTED = (
    "g_idx",
    "weight_g_idx",
    "weight_shape",
    "quant_map",
    "nested_quant_map",
    "input_scale",
)
_SCALES = (
    "weight_scale", "weight_scale_inv", "weight_scale_2", "scales", "absmax", "nested_absmax",
    "SCB", "weight_zero_point", "input_scale", "output_scale", "inv_freq",
)  # fmt: skip
_FLOATS = {"F64": 64, "F32": 32, "F16": 16, "BF16": 16, "F8_E4M3": 8, "F8_E5M2": 8}


@dataclass(frozen=True)
class TensorGeometry:
    """What tensors say of a model; None: they do not say it."""

    moe_layers: tuple[int, ...]
    n_experts: int
    d_model: int | None
    d_ff: int | None
    matrices: int
    biases: bool
    expert_bits: tuple[int, ...]  # [MoE layers]: stored, of all routed experts but their biases
    dense_params: tuple[int, ...]  # [layers]
    quantised: bool  # some of the experts' weights are not plain floating-point numbers


@dataclass
class _Layer:
    """What the tensors of one layer hold."""

    experts: set[int] = field(default_factory=set)
    n_experts: int = 0
    up: set[str] = field(default_factory=set)
    shapes: dict[str, tuple[int, ...]] = field(default_factory=dict)  # of plain weights
    bits: int = 0
    bias: bool = False
    quantised: bool = False
    dense: Fraction = Fraction(0)


def tensor_geometry(
    tensors: Iterable[TensorEntry], n_layers: int, d_model: int, weight_bits: int | None = None
) -> TensorGeometry | None:
    """Return the geometry of the first ``n_layers`` decoder layers; None: no experts are found.

    d_model: the model's width, which tells the sides of a matrix apart. weight_bits: of a packed
    weight, to count the parameters of packed tensors beside the experts. Layers beyond (those that
    predict further tokens) are left alone. Raises CrispError for layers of several numbers of
    experts.
    """
    stacks: Mapping[str, dict[int, _Layer]] = defaultdict(lambda: defaultdict(_Layer))
    for tensor in tensors:
        place = _LAYER.fullmatch(tensor.name)
        if place is not None and int(place["layer"]) < n_layers:
            layer = stacks[place["stack"]][int(place["layer"])]
            _add(layer, tensor, place["rest"], weight_bits)
    name = max(stacks, key=lambda name: (_moe_count(stacks[name]), "mtp" not in name), default=None)
    if name is None or not _moe_count(stacks[name]):
        return None
    layers = stacks[name]
    moe = tuple(sorted(index for index, layer in layers.items() if layer.up or layer.n_experts))
    counts = {layers[index].n_experts or max(layers[index].experts) + 1 for index in moe}
    if len(counts) > 1:
        raise CrispError(
            f"its layers have {', '.join(map(str, sorted(counts)))} routed experts; one number was "
            "expected"
        )
    sides = {_sides(layers[index], d_model) for index in moe} - {None}
    d_model_of, d_ff = next(iter(sides)) or (None, None) if len(sides) == 1 else (None, None)
    return TensorGeometry(
        moe_layers=moe,
        n_experts=counts.pop(),
        d_model=d_model_of,
        d_ff=d_ff,
        matrices=1 + max(sum(_UP[m] for m in layers[index].up) for index in moe),
        biases=any(layers[index].bias for index in moe),
        expert_bits=tuple(layers[index].bits for index in moe),
        dense_params=tuple(
            math.ceil(layers[index].dense) if index in layers else 0 for index in range(n_layers)
        ),
        quantised=any(layers[index].quantised for index in moe),
    )


def skeleton_bytes(tensors: Iterable[TensorEntry]) -> int:
    """Return at most how many bytes a model's tensors take in memory, but for routed experts.

    Quantised ones are counted as 16-bit numbers, packed ones as four bits a weight.
    """
    sizes = []
    for tensor in tensors:
        place = _LAYER.fullmatch(tensor.name)
        rest = place["rest"] if place is not None else ""
        if any(kind.fullmatch(rest) for kind in (_OF_ONE, _OF_ALL, _GRANITE)):
            continue
        if not is_other_part(tensor.name):
            sizes.append(max(tensor.nbytes, math.ceil(2 * _logical_size(tensor, 4))))
    return sum(sizes)


def _moe_count(layers: Mapping[int, _Layer]) -> int:
    return sum(bool(layer.up or layer.n_experts) for layer in layers.values())


def _add(layer: _Layer, tensor: TensorEntry, rest: str, weight_bits: int | None) -> None:
    """Count a tensor of a layer."""
    one = _OF_ONE.fullmatch(rest)
    found = one or _OF_ALL.fullmatch(rest) or _GRANITE.fullmatch(rest)
    matrix = found["matrix"] if found else ""
    if found is None or not (matrix in _UP or matrix in _DOWN):
        layer.dense += _logical_size(tensor, weight_bits)
        return
    leaf = (found["leaf"] or "").rpartition(".")[2] or (found["leaf"] or "")
    if one is not None:
        layer.experts.add(int(one["expert"]))
    elif tensor.shape and leaf in _WEIGHTS:
        layer.n_experts = tensor.shape[0]
    if leaf == "bias":
        layer.bias = layer.bias or matrix in _UP
        return
    if matrix in _UP and leaf in _WEIGHTS:
        layer.up.add(matrix)
    if leaf in _WEIGHTS:
        layer.quantised = layer.quantised or _FLOATS.get(tensor.dtype, 0) < 16
        if leaf in ("", "weight") and tensor.dtype in _FLOATS:
            shape = tensor.shape if one is not None else tensor.shape[1:]
            layer.shapes.setdefault(matrix, tuple(shape))
    scalars = 1 if one is not None else max(layer.n_experts, 1)
    if leaf not in _NEGLECTED and (leaf in _WEIGHTS or math.prod(tensor.shape) > scalars):
        layer.bits += 8 * tensor.nbytes


def _sides(layer: _Layer, d_model: int) -> tuple[int, int] | None:
    """Return (d_model, d_ff) of a layer's experts by the shapes of its plain weights."""
    for matrix in ("down_proj", "w2", "fc2", "output_linear"):
        shape = layer.shapes.get(matrix)
        if shape is not None and len(shape) == 2:
            out, inner = shape
            # [out, in], as of any linear layer; or transposed, in some modules of all experts
            return (inner, out) if inner == d_model != out else (out, inner)
    return None


def _logical_size(tensor: TensorEntry, weight_bits: int | None) -> Fraction:
    """Return the parameters in a tensor beside the experts; scales and the like are none."""
    leaf = tensor.name.rpartition(".")[2]
    size = Fraction(math.prod(tensor.shape))
    if tensor.dtype in _FLOATS:
        return Fraction(0) if leaf in _SCALES or leaf in _NEGLECTED else size
    if leaf in ("qweight", "weight_packed", "weight", "blocks") and weight_bits:
        return size * {"I32": 32, "U8": 8, "I8": 8}.get(tensor.dtype, 0) / weight_bits
    return Fraction(0)
