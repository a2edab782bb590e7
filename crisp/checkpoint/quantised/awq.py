"""AWQ in the packing of its matrix kernel ("gemm"): 4-bit integers packed along the output.

``X.qweight`` int32 [in, out / 8], ``X.qzeros`` int32 [groups, out / 8], ``X.scales`` [groups, out].
The eight integers of a word, the lowest bits first, are of the outputs 0, 2, 4, 6, 1, 3, 5, 7. The
weight is (q - zero) * scale, transposed.
"""

from __future__ import annotations

from collections.abc import Mapping
from functools import partial
from typing import Any

import numpy as np
import numpy.typing as npt

from crisp.checkpoint.quantised.axes import AxisOrder, Order, take
from crisp.checkpoint.quantised.numbers import Array, Floats, pack, unpack
from crisp.checkpoint.quantised.weight import (
    Parts,
    Quantisation,
    QuantisedWeight,
    StoredTensors,
    whole_number,
)
from crisp.errors import CrispError

ORDER = (0, 2, 4, 6, 1, 3, 5, 7)
"""The output of each integer of a word."""
_SCALES = ("F16", "BF16", "F32")


def find(stored: StoredTensors, config: Mapping[str, Any], where: str) -> Quantisation:
    """Return all packed weights; CrispError for other bits and packings."""
    bits = config.get("bits", config.get("w_bit", 4))
    if bits != 4:
        raise CrispError(f"{where}: bits: found {bits!r}, expected 4")
    version = str(config.get("version", "gemm")).lower()
    if version != "gemm":
        raise CrispError(f"{where}: version: found {version!r}, expected gemm")
    key = "group_size" if "group_size" in config else "q_group_size"
    size = whole_number(config, key, where, default=128)
    return Quantisation([_weight(stored, base, size) for base, _ in stored.ending(".qweight")])


def _weight(stored: StoredTensors, base: str, size: int) -> QuantisedWeight:
    name = f"{base}.qweight"
    words = stored.check(name, ("I32",))
    if len(words.shape) != 2:
        raise stored.wrong(name, "I32 [in, out / 8]")
    inputs, out = words.shape[0], words.shape[1] * 8
    size = inputs if size == -1 else size
    groups = -(-inputs // size)
    parts = {"qweight": name, "qzeros": f"{base}.qzeros", "scales": f"{base}.scales"}
    for part in ("qzeros", "scales"):
        stored.need(name, parts[part])
    stored.check(parts["scales"], _SCALES, (groups, out))
    stored.check(parts["qzeros"], ("I32",), (groups, out // 8))
    run = 1 if size >= inputs else size
    of_groups = {} if size >= inputs else {"qzeros": take(0, size), "scales": take(0, size)}
    axes = (
        AxisOrder(1, {"qweight": _move_outputs, "qzeros": _move_outputs, "scales": take(1)}),
        AxisOrder(run, {"qweight": take(0), **of_groups}),
    )
    return QuantisedWeight(
        f"{base}.weight", (out, inputs), parts, partial(decode, size=size), axes=axes
    )


def _move_outputs(words: Array, order: Order) -> Array:
    return pack_outputs(np.take(unpack_outputs(words), order, axis=1))


def decode(parts: Parts, size: int) -> Floats:
    """Return weight [out, in], a view of [in, out]; size: inputs of a group."""
    weight = unpack_outputs(parts["qweight"].bits).astype(np.float32)
    zeros, scales = unpack_outputs(parts["qzeros"].bits), parts["scales"].floats()
    for group, (zero, scale) in enumerate(zip(zeros, scales, strict=True)):
        rows = weight[group * size : (group + 1) * size]
        rows -= zero
        rows *= scale
    return weight.T


def unpack_outputs(words: Array) -> npt.NDArray[np.uint8]:
    """Return integers [..., out] of words [..., out / 8]."""
    q = unpack(words, 4, axis=-1).reshape(*words.shape, 8)
    result = np.empty_like(q)
    result[..., ORDER] = q
    return result.reshape(*words.shape[:-1], -1)


def pack_outputs(q: npt.NDArray[np.uint8]) -> npt.NDArray[np.int32]:
    """Return what `unpack_outputs` turns into ``q``."""
    words = q.reshape(*q.shape[:-1], -1, 8)[..., ORDER]
    return pack(words.reshape(q.shape), 4, axis=-1)
