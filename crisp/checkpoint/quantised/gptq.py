"""GPTQ: integers packed along the input, an offset and a scale for each group of inputs.

``X.qweight`` int32 [in / n, out], ``X.qzeros`` int32 [groups, out / n], ``X.scales`` [groups, out]
and ``X.g_idx`` int32 [in], the group of each input (in any order under ``desc_act``). n = 32 / bits
integers lie in one word, the lowest bits first. The weight is (q - zero) * scale, transposed. The
first version of the format stores zero - 1, word by word.
"""

from __future__ import annotations

from collections.abc import Mapping
from functools import partial
from typing import Any

import numpy as np

from crisp.checkpoint.quantised.axes import Axes, AxisOrder, Order, take, take_packed
from crisp.checkpoint.quantised.numbers import Array, Floats, pack, packable_bits, unpack
from crisp.checkpoint.quantised.weight import (
    Parts,
    Quantisation,
    QuantisedWeight,
    StoredTensors,
    whole_number,
)
from crisp.errors import CrispError

_SCALES = ("F16", "BF16", "F32")


def find(stored: StoredTensors, config: Mapping[str, Any], where: str) -> Quantisation:
    """Return all packed weights; CrispError for bits that are not understood."""
    bits = packable_bits(config.get("bits"), where)
    size = whole_number(config, "group_size", where, default=-1)
    version = config.get("checkpoint_format") or config.get("format") or "gptq"
    if version not in ("gptq", "gptq_v2"):
        raise CrispError(f"{where}: checkpoint_format: found {version!r}, expected gptq or gptq_v2")
    less_one = version == "gptq"
    weights = [_weight(stored, base, bits, size, less_one) for base, _ in stored.ending(".qweight")]
    return Quantisation(weights)


def _weight(
    stored: StoredTensors, base: str, bits: int, size: int, less_one: bool
) -> QuantisedWeight:
    name, each = f"{base}.qweight", 32 // bits
    words = stored.check(name, ("I32",))
    if len(words.shape) != 2:
        raise stored.wrong(name, f"I32 [in / {each}, out]")
    inputs, out = words.shape[0] * each, words.shape[1]
    groups = 1 if size == -1 else -(-inputs // size)
    parts = {"qweight": name, "qzeros": f"{base}.qzeros", "scales": f"{base}.scales"}
    for part in ("qzeros", "scales"):
        stored.need(name, parts[part])
    stored.check(parts["scales"], _SCALES, (groups, out))
    stored.check(parts["qzeros"], ("I32",), (groups, -(-out // each)))
    if f"{base}.g_idx" in stored.entries:
        parts["g_idx"] = f"{base}.g_idx"
        stored.check(parts["g_idx"], ("I32", "I64"), (inputs,))
    run = partial(
        decode, bits=bits, size=size, less_one=less_one, name=stored.checkpoint.where(name)
    )
    axes = _axes(inputs, out, bits, size, less_one, "g_idx" in parts)
    return QuantisedWeight(f"{base}.weight", (out, inputs), parts, run, axes=axes)


def _axes(inputs: int, out: int, bits: int, size: int, less_one: bool, with_index: bool) -> Axes:
    """Return how outputs and inputs can be ordered: inputs at will where their group is stored."""

    def move_zeros(words: Array, order: Order) -> Array:
        zeros = unpacked_zeros(words, bits, less_one)
        return packed_zeros(np.take(zeros, order, axis=1), bits, less_one)

    words, every = {"qweight": take_packed(bits, 0)}, size == -1 or size >= inputs
    if with_index:
        columns = AxisOrder(1, {**words, "g_idx": take(0)})
    elif every:
        columns = AxisOrder(1, words)
    else:
        columns = AxisOrder(size, {**words, "qzeros": take(0, size), "scales": take(0, size)})
    if out % (32 // bits):
        return None, columns
    rows = AxisOrder(1, {"qweight": take(1), "scales": take(1), "qzeros": move_zeros})
    return rows, columns


def decode(parts: Parts, bits: int, size: int, less_one: bool, name: str) -> Floats:
    """Return weight [out, in], a view of [in, out]. name: for errors."""
    q = unpack(parts["qweight"].bits, bits, axis=0)  # [in, out]
    scales = parts["scales"].floats()  # [groups, out]
    zeros = unpacked_zeros(parts["qzeros"].bits, bits, less_one)[:, : q.shape[1]]
    if "g_idx" in parts:
        group = parts["g_idx"].bits
        if group.min() < 0 or group.max() >= len(scales):
            raise CrispError(f"{name}: g_idx names a group beyond the {len(scales)} there are")
    else:
        group = np.arange(len(q)) // (len(q) if size == -1 else size)
    weight = q.astype(np.float32)
    # runs of inputs of one group, so that no zero and no scale is copied for each weight
    ends = [*(np.flatnonzero(np.diff(group)) + 1), len(group)]
    for first, end in zip([0, *ends], ends, strict=False):
        rows = weight[first:end]
        rows -= zeros[group[first]]
        rows *= scales[group[first]]
    return weight.T


def unpacked_zeros(words: Array, bits: int, less_one: bool) -> Array:
    """Return zeros [groups, out] uint8; less_one: each was stored as one less, borrows included."""
    if less_one:
        words = (words.view(np.uint32) + _one(bits)).view(np.int32)
    return unpack(words, bits, axis=1)


def packed_zeros(zeros: Array, bits: int, less_one: bool) -> Array:
    """Return the words that `unpacked_zeros` makes ``zeros`` of."""
    words = pack(zeros, bits, axis=1)
    return (words.view(np.uint32) - _one(bits)).view(np.int32) if less_one else words


def _one(bits: int) -> np.uint32:
    """Return a word of ones."""
    return np.uint32(sum(1 << shift for shift in range(0, 32, bits)))
