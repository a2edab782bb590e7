"""The numbers of quantised checkpoints: small floats, and integers packed into larger ones."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import numpy as np
import numpy.typing as npt

from crisp.errors import CrispError

Array = npt.NDArray[Any]
Floats = npt.NDArray[np.float32]

# numpy's type that holds the bits, by safetensors' name of a type
BITS_OF: dict[str, Any] = {
    "BOOL": np.uint8, "U8": np.uint8, "I8": np.int8, "I16": np.int16, "I32": np.int32,
    "I64": np.int64, "F16": np.float16, "F32": np.float32, "F64": np.float64,
    "BF16": np.uint16, "F8_E4M3": np.uint8, "F8_E5M2": np.uint8, "F8_E8M0": np.uint8,
}  # fmt: skip
E2M1 = np.array([0, 0.5, 1, 1.5, 2, 3, 4, 6, -0.0, -0.5, -1, -1.5, -2, -3, -4, -6], np.float32)
"""4-bit floats by their bits (OCP Microscaling Formats v1.0, section 5.3.3)."""


def _small_floats(exponent: int, mantissa: int, largest: int) -> Floats:
    """Return the value of each byte: a sign, exponent bits and mantissa bits.

    largest: the byte of the largest finite number; what is above is NaN (E4M3) or, of E5M2, also
    infinite, which no weight is.
    """
    bits = np.arange(128)
    power, fraction = bits >> mantissa, (bits & ((1 << mantissa) - 1)) / (1 << mantissa)
    bias = (1 << (exponent - 1)) - 1
    values = np.where(
        power == 0, fraction * 2.0 ** (1 - bias), (1 + fraction) * 2.0 ** (power - bias)
    )
    values = np.where(bits > largest, np.nan, values)
    return np.concatenate([values, -values]).astype(np.float32)


_TABLES = {
    "F8_E4M3": _small_floats(4, 3, 0x7E),
    "F8_E5M2": _small_floats(5, 2, 0x7B),
    # a power of two alone (the same standard, section 5.4.1); 255 is NaN
    "F8_E8M0": np.append(np.ldexp(np.float32(1), np.arange(-127, 128)), np.nan).astype(np.float32),
}


# The integers of 4 or 2 bits in each byte, the lowest bits first, as bytes of one word: to look
# words up is three times as fast as to shift.
_SPLIT = {
    bits: ((np.arange(256)[:, None] >> np.arange(0, 8, bits)) & ((1 << bits) - 1))
    .astype(np.uint8)
    .view(word)[:, 0]
    for bits, word in ((4, np.uint16), (2, np.uint32))
}


def pair_words(first: Floats, second: Floats) -> npt.NDArray[np.uint64]:
    """Return the two numbers of each byte as one word, [256]; see `_SPLIT` for why.

    first, second: float32 [256], of which the first is stored before the other.
    """
    return np.stack([first, second], axis=1).view(np.uint64)[:, 0]


@dataclass(frozen=True, eq=False)
class StoredPart:
    """A tensor as it is stored, or one expert's share of it."""

    bits: Array  # of the type that numpy has for it, see BITS_OF
    dtype: str  # safetensors' name

    def floats(self) -> Floats:
        """Return the numbers in float32."""
        if self.dtype in _TABLES:
            return _TABLES[self.dtype][self.bits]
        if self.dtype == "BF16":
            return (self.bits.astype(np.uint32) << 16).view(np.float32)
        return self.bits.astype(np.float32)


def powers_of_two(exponents: Array) -> Floats:
    """Return 2 ** (exponent - 127) of E8M0 bytes; NaN for 255."""
    return _TABLES["F8_E8M0"][exponents]


def unpack(packed: Array, bits: int, axis: int) -> npt.NDArray[np.uint8]:
    """Return the unsigned integers in an int32 array, the lowest bits first, along ``axis``.

    bits: 2, 4 or 8. The axis becomes 32 / bits times as long.
    """
    words = np.moveaxis(packed, axis, -1)
    each = np.ascontiguousarray(words).view(np.uint8)  # little-endian: the lowest byte first
    if bits != 8:
        each = _SPLIT[bits][each].view(np.uint8)
    return np.moveaxis(each.reshape(*words.shape[:-1], -1), -1, axis)


def pack(numbers: npt.NDArray[np.uint8], bits: int, axis: int) -> npt.NDArray[np.int32]:
    """Return what `unpack` turns into ``numbers``, whose axis is whole words long."""
    each = np.ascontiguousarray(np.moveaxis(numbers, axis, -1))
    per_byte = 8 // bits
    parts = each.reshape(*each.shape[:-1], -1, per_byte)
    whole = np.zeros(parts.shape[:-1], np.uint8)
    for i in range(per_byte):
        whole |= parts[..., i] << np.uint8(i * bits)
    return np.moveaxis(whole.view(np.int32), -1, axis)


def packable_bits(value: object, where: str) -> int:
    """Return the bits of a packed integer; CrispError for others than 2, 4 and 8."""
    if type(value) is not int or value not in (2, 4, 8):
        raise CrispError(f"{where}: bits: found {value!r}, expected 2, 4 or 8")
    return value
