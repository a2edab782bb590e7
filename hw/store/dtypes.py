"""Conversion between types of numbers, as bits: bfloat16, which numpy lacks, is one of them."""

from __future__ import annotations

from typing import Any

import numpy as np
import numpy.typing as npt

Array = npt.NDArray[Any]

# By safetensors' name of a type: the numpy type that holds its bits.
UNSIGNED: dict[str, Any] = {"BF16": np.uint16, "F16": np.uint16, "F32": np.uint32, "F64": np.uint64}
NAMES = {"bf16": "BF16", "fp16": "F16", "fp32": "F32"}  # safetensors' names, by the store's dtype
# The bits of a number's exponent: all of them are set in NaN and infinity alone.
_EXPONENT = {"BF16": 0x7F80, "F16": 0x7C00, "F32": 0x7F800000, "F64": 0x7FF0000000000000}

_TILE = 32  # rows of a matrix that is turned: the lines of a tile stay in a core's cache
_CHUNK = 1 << 17  # numbers that are checked together, in a core's cache


def convert_bits(bits: Array, source: str, target: str) -> Array:
    """Return the bits of the nearest numbers of type ``target`` (ties to even), of the same shape.

    Numbers that ``target`` cannot hold become infinite. bits: of finite numbers of type ``source``.
    """
    if source == target:
        return bits
    if source == "BF16":
        numbers = (bits.astype(np.uint32) << 16).view(np.float32)
    else:
        numbers = bits.view({"F16": np.float16, "F32": np.float32, "F64": np.float64}[source])
    with np.errstate(over="ignore"):
        if target == "F16":
            return numbers.astype(np.float16).view(np.uint16)
        whole = numbers.astype(np.float32).view(np.uint32)
    if target == "F32":
        return whole
    # half of what is cut off, and a little more where the last bit that stays is odd
    even: Array = (whole + 0x7FFF + ((whole >> 16) & 1)) >> 16
    return even.astype(np.uint16)


def copy_rows(matrix: Array, into: Array) -> None:
    """Copy a matrix [rows, columns], in tiles if it is stored column by column."""
    if matrix.strides[1] == matrix.itemsize:
        into[:] = matrix
        return
    for column in range(0, matrix.shape[1], _TILE):
        into[:, column : column + _TILE] = matrix[:, column : column + _TILE]


def pack_bytes(q: Array, dtype: str) -> Array:
    """Return quantised numbers [..., columns] as stored bytes; int4's are [..., columns / 2].

    q: int8, as of `crisp.model.quantization.quantize`.
    """
    if dtype == "int8":
        return q.view(np.uint8)
    low, high = q[..., ::2] & 15, q[..., 1::2] << 4
    return (low | high).view(np.uint8)


def all_finite(bits: Array, kind: str) -> bool:
    """Return whether there is no NaN and no infinity. bits: contiguous, of type ``kind``."""
    mask, flat = bits.dtype.type(_EXPONENT[kind]), bits.reshape(-1)
    parts = (flat[i : i + _CHUNK] for i in range(0, flat.size, _CHUNK))
    return all(np.bitwise_and(part, mask).max() != mask for part in parts)
