"""Quantised weights: integers of 8 or 4 bits in groups of 64 that share a scale.

A weight is q * scale, without a zero point. q takes int8's -127 to 127 or int4's -8 to 7; the scale
is a float16 that readers use unchanged, so that a dequantised weight is exact in float32. Groups
lie along d_model in all three matrices of an expert: none spans two neurons.
"""

from __future__ import annotations

from fractions import Fraction
from typing import Any

import numpy as np
import numpy.typing as npt

from crisp.errors import CrispError
from crisp.model.spec import ModelSpec

GROUP = 64
"""Neighbouring weights of a neuron that share a scale."""

BITS = {"int8": 8, "int4": 4}
"""Bits of a weight alone."""

STORED_BITS = {dtype: bits + Fraction(16, GROUP) for dtype, bits in BITS.items()}
"""Bits of a weight together with its share of a scale."""

Array = npt.NDArray[Any]

_RANGE = {"int8": (-127, 127), "int4": (-8, 7)}
# How many steps the weight farthest from 0 and those of the other sign may be from it. int4 is left
# half a step beyond its range on both sides, for a finer step is worth more to it than the ends.
_REACH = {"int8": (127, 127), "int4": (8.5, 7.5)}


def quantize(weights: Array, dtype: str) -> tuple[Array, Array]:
    """Quantise to the nearest q: (q int8 [..., columns], scales float16 [..., columns / 64]).

    weights: finite float32 [..., columns], columns a multiple of 64. No dequantised weight is more
    than half a step (a scale) off. int4 has one q more on the negative side: the weight of a group
    that is farthest from 0 takes that side, so int4's scales may be negative. The scale of a group
    of zeros is 0; where float16 cannot hold it, infinite.
    """
    (low, high), (reach, other) = _RANGE[dtype], _REACH[dtype]
    groups = weights.reshape(*weights.shape[:-1], -1, GROUP)
    above, below = groups.max(-1), -groups.min(-1)
    far, near = np.maximum(above, below), np.minimum(above, below)
    least = np.maximum(far / np.float32(reach), near / np.float32(other)) + 0  # no -0
    with np.errstate(over="ignore"):
        scales = least.astype(np.float16)
        # rounded up, or the farthest weight would be out of reach
        scales = np.where(scales < least, np.nextafter(scales, np.float16(np.inf)), scales)
    if low != -high:
        scales = np.where(above > below, -scales, scales)
    divisors = np.where(scales == 0, 1, scales).astype(np.float32)
    q = np.clip(np.rint(groups / divisors[..., None]), low, high).astype(np.int8)
    return q.reshape(weights.shape), scales


def dequantize(q: Array, scales: Array) -> Array:
    """Return float32 weights of the shape of ``q``: the inverse of `quantize`."""
    groups = q.reshape(*scales.shape, GROUP) * scales.astype(np.float32)[..., None]
    return groups.reshape(q.shape)


def check_groups(spec: ModelSpec, dtype: str) -> None:
    """Raise CrispError unless the neurons of ``spec`` are whole groups."""
    if spec.d_model % GROUP:
        raise CrispError(
            f"--dtype {dtype}: needs a d_model that is a multiple of {GROUP}; that of {spec.name} "
            f"is {spec.d_model}"
        )
