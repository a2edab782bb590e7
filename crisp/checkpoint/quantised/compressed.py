"""compressed-tensors: integers or 8-bit floats, with scales of a tensor, of rows, groups or blocks.

Packed (``pack-quantized``, w4a16 and w8a16): ``X.weight_packed`` int32 [out, in / n], the lowest
bits first, each integer stored plus half of its range; ``X.weight_scale`` [out, groups];
``X.weight_shape`` [2]; if they are not symmetric ``X.weight_zero_point`` int32 [out / n, groups],
packed along the output; where groups are not runs of inputs ``X.weight_g_idx`` [in]. Plain
(``int-quantized``, ``float-quantized``, ``naive-quantized``): ``X.weight`` int8 or float8 and
``X.weight_scale``. What is stored says which it is; the config only says the size of blocks.
"""

from __future__ import annotations

from collections.abc import Mapping
from functools import partial
from typing import Any

import numpy as np

from crisp.checkpoint.files import TensorEntry
from crisp.checkpoint.quantised.axes import Axes, AxisOrder, Move, take, take_packed
from crisp.checkpoint.quantised.fp8 import FLOATS8, activation_scales, scaled_weight
from crisp.checkpoint.quantised.numbers import Floats, unpack
from crisp.checkpoint.quantised.weight import Parts, Quantisation, QuantisedWeight, StoredTensors
from crisp.errors import CrispError
from crisp.model.fields import Fields

_SCALES = ("BF16", "F16", "F32")
_UNUSED = (".weight_shape", ".weight_zero_point", ".input_zero_point", ".input_global_scale")


def find(stored: StoredTensors, config: Mapping[str, Any], where: str) -> Quantisation:
    """Return all quantised weights; CrispError for a packing that is not understood."""
    block, weights = _block(config, where), []
    for name, entry in stored.entries.items():
        base = name.rpartition(".")[0]
        if name.endswith(".weight_packed"):
            weights.append(_packed(stored, base, entry))
        elif name.endswith(".weight") and entry.dtype in ("I8", *FLOATS8):
            scale = stored.need(name, f"{name}_scale").name
            if f"{name}_zero_point" in stored.entries and entry.dtype == "I8":
                weights.append(_plain_with_zeros(stored, name, scale))
            else:
                weights.append(scaled_weight(stored, name, scale, block))
    unused = [name for name in stored.entries if name.endswith(_UNUSED)]
    return Quantisation(weights, [*unused, *activation_scales(stored)])


def _block(config: Mapping[str, Any], where: str) -> tuple[int, int] | None:
    """Return rows and columns of a block, of whichever group of modules has blocks."""
    groups = config.get("config_groups")
    for group in groups.values() if isinstance(groups, dict) else ():
        weights = group.get("weights") if isinstance(group, dict) else None
        if isinstance(weights, dict) and weights.get("block_structure") is not None:
            return Fields(where, weights).sides("block_structure")
    return None


def _packed(stored: StoredTensors, base: str, words: TensorEntry) -> QuantisedWeight:
    scale = stored.check(stored.need(words.name, f"{base}.weight_scale").name, _SCALES)
    if words.dtype != "I32" or len(words.shape) != 2 or len(scale.shape) != 2:
        raise stored.wrong(words.name, "I32 [out, in / n] with scales [out, groups]")
    out, groups = words.shape[0], scale.shape[1]
    inputs = stored.matrix_shape(stored.need(words.name, f"{base}.weight_shape"))
    bits = next((n for n in (2, 4, 8) if inputs[1] == words.shape[1] * 32 // n), None)
    if bits is None or inputs[0] != out or scale.shape[0] != out or inputs[1] % groups:
        raise CrispError(
            f"{stored.checkpoint.where(words.name)}: {list(words.shape)} words and "
            f"{list(scale.shape)} scales do not make {list(inputs)} numbers of 2, 4 or 8 bits"
        )
    parts = {"packed": words.name, "scale": scale.name}
    if f"{base}.weight_zero_point" in stored.entries:
        parts["zeros"] = f"{base}.weight_zero_point"
        stored.check(parts["zeros"], ("I32",), (-(-out * bits // 32), groups))
    if f"{base}.weight_g_idx" in stored.entries:
        parts["g_idx"] = f"{base}.weight_g_idx"
        stored.check(parts["g_idx"], ("I32", "I64"), (inputs[1],))
    where = stored.checkpoint.where(words.name)
    return QuantisedWeight(
        f"{base}.weight",
        inputs,
        parts,
        partial(decode_packed, bits=bits, name=where),
        axes=_axes(inputs, bits, inputs[1] // groups, parts),
    )


def _axes(shape: tuple[int, int], bits: int, size: int, parts: Mapping[str, str]) -> Axes:
    """Return how rows and columns can be ordered; size: columns that share a scale.

    Columns whose group is stored one by one stay: readers of this format no longer take them.
    """
    of_rows: dict[str, Move] = {"packed": take(0), "scale": take(0)}
    of_columns: dict[str, Move] = {"packed": take_packed(bits, 1)}
    if size < shape[1]:
        of_columns["scale"] = take(1, size)
    if "zeros" in parts:
        of_rows["zeros"] = take_packed(bits, 0)
        if size < shape[1]:
            of_columns["zeros"] = take(1, size)
    each = 32 // bits
    rows = None if "zeros" in parts and shape[0] % each else AxisOrder(1, of_rows)
    if "g_idx" in parts or shape[1] % each:
        return rows, None
    return rows, AxisOrder(size if size < shape[1] else 1, of_columns)


def _plain_with_zeros(stored: StoredTensors, name: str, scale: str) -> QuantisedWeight:
    zeros, shape = stored.entries[f"{name}_zero_point"], stored.entries[name].shape
    scales = stored.check(scale, _SCALES).shape
    if (
        len(shape) != 2
        or len(scales) != 2
        or scales[0] not in (1, shape[0])
        or shape[1] % scales[1]
    ):
        raise stored.wrong(scale, f"scales of groups of {list(shape)}")
    stored.check(zeros.name, ("I8",), scales)
    parts = {"weight": name, "scale": scale, "zeros": zeros.name}
    size = shape[1] // scales[1]
    of_rows = {part: take(0) for part in parts if part == "weight" or scales[0] > 1}
    of_columns: dict[str, Move] = {"weight": take(1)}
    if size < shape[1]:
        of_columns |= {"scale": take(1, size), "zeros": take(1, size)}
    axes = (AxisOrder(1, of_rows), AxisOrder(size if size < shape[1] else 1, of_columns))
    return QuantisedWeight(name, shape, parts, decode_plain, axes=axes)


def decode_packed(parts: Parts, bits: int, name: str) -> Floats:
    """Return weight [out, in]; name: for errors."""
    half = 1 << (bits - 1)
    weight = unpack(parts["packed"].bits, bits, axis=1).astype(np.float32)
    weight -= half
    scale = parts["scale"].floats()  # [out, groups]
    zeros = np.zeros_like(scale)
    if "zeros" in parts:
        zeros = unpack(parts["zeros"].bits, bits, axis=0)[: len(weight)].astype(np.float32) - half
    if "g_idx" in parts:
        group = parts["g_idx"].bits
        if (group >= 0).all():  # -1 stands for "not in another order"
            if group.max() >= scale.shape[1]:
                raise CrispError(f"{name}: weight_g_idx names a group beyond {scale.shape[1]}")
            weight -= zeros[:, group]
            weight *= scale[:, group]
            return weight
    return _by_groups(weight, scale, zeros)


def decode_plain(parts: Parts) -> Floats:
    """Return weight [out, in] of integers with offsets."""
    return _by_groups(parts["weight"].floats(), parts["scale"].floats(), parts["zeros"].floats())


def _by_groups(weight: Floats, scale: Floats, zeros: Floats) -> Floats:
    """Return (weight - zeros) * scale, in place; the latter [out or 1, groups]."""
    groups = weight.reshape(len(weight), scale.shape[1], -1)
    groups -= zeros[..., None]
    groups *= scale[..., None]
    return weight
