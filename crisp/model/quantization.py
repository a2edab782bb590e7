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
_FITTED = 1 << 16  # numbers whose scales are fitted together: they stay in a core's cache


def quantize(weights: Array, dtype: str, moments: Array | None = None) -> tuple[Array, Array]:
    """Quantise to the nearest q: (q int8 [..., columns], scales float16 [..., columns / 64]).

    weights: finite float32 [..., columns], columns a multiple of 64. No dequantised weight is more
    than half a step (a scale) off. int4 has one q more on the negative side: the weight of a group
    that is farthest from 0 takes that side, so int4's scales may be negative. The scale of a group
    of zeros is 0; where float16 cannot hold it, infinite.

    moments: [columns], what each column counts for; see `fit_scales`. Given them, int4's scales are
    fitted, and a weight at an end may be more than half a step off.
    """
    q, scales = _to_nearest(weights, dtype)
    if moments is None or dtype != "int4" or not np.isfinite(scales).all():
        return q, scales
    rows = max(1, _FITTED // weights.shape[-1])
    flat, grouped = weights.reshape(-1, weights.shape[-1]), scales.reshape(-1, scales.shape[-1])
    for first in range(0, len(flat), rows):
        part = slice(first, first + rows)
        grouped[part] = fit_scales(flat[part], grouped[part], moments)
    return _round(weights, scales, "int4"), scales


def fit_scales(weights: Array, scales: Array, moments: Array) -> Array:
    """Return scales of int4, float16 [rows, columns / 64], that shrink weights less than `scales`.

    weights: float32 [rows, columns]; scales: those of `_to_nearest`. int4 cuts off the weights at
    its ends, so that groups come out smaller than they were, all in the same way. With the scale s
    that is returned, and the q of ``scales``, nothing is lost on the whole: sum(m w s q) =
    sum(m w w). q is then rounded anew, which takes a part of that back, and leaves a smaller error.
    m: ``moments``, finite float32 [columns], the mean squares of what the weights are multiplied
    by. A group whose squared error, weighted with m, would grow keeps its scale. Groups do not
    depend on each other.
    """
    groups = weights.reshape(len(weights), -1, GROUP)  # [rows, groups, 64]
    counts = moments.astype(np.float32).reshape(-1, GROUP)
    q = _round(weights, scales, "int4").reshape(groups.shape)
    weighted = groups * counts
    kept = np.einsum("rgk,rgk->rg", weighted, q)
    whole = np.einsum("rgk,rgk->rg", weighted, groups)
    with np.errstate(over="ignore"):
        fitted = (whole / np.where(kept == 0, 1, kept)).astype(np.float16)
    fits = (kept != 0) & np.isfinite(fitted)
    fitted = np.where(fits, fitted, scales)
    worse = group_errors(groups, fitted, counts) > group_errors(groups, scales, counts)
    return np.where(worse, scales, fitted)


def group_errors(groups: Array, scales: Array, counts: Array) -> Array:
    """Return each group's weighted squared error when rounded with these scales, [rows, groups]."""
    flat = groups.reshape(len(groups), -1)
    off = dequantize(_round(flat, scales, "int4"), scales) - flat
    squares = (off * off).reshape(groups.shape)
    errors: Array = np.einsum("rgk,gk->rg", squares, counts)
    return errors


def weighted_error(weights: Array, q: Array, scales: Array, moments: Array) -> tuple[float, float]:
    """Return the weighted squared error of quantised weights, and that of zeros in their place."""
    off = dequantize(q, scales) - weights
    return float((off * off @ moments).sum()), float((weights * weights @ moments).sum())


def _to_nearest(weights: Array, dtype: str) -> tuple[Array, Array]:
    """Return q and the largest scale that each group needs; see `quantize`."""
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
    return _round(weights, scales, dtype), scales


def _round(weights: Array, scales: Array, dtype: str) -> Array:
    """Return the nearest q, int8 of the shape of ``weights``."""
    low, high = _RANGE[dtype]
    groups = weights.reshape(*weights.shape[:-1], -1, GROUP)
    divisors = np.where(scales == 0, 1, scales).astype(np.float32)
    q = np.clip(np.rint(groups / divisors[..., None]), low, high).astype(np.int8)
    return q.reshape(weights.shape)


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
