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
# Shares of the largest scale that a search tries. (Eighty of them leave errors that are a hundredth
# smaller, and take ten times as long.)
_SHARES = (0.94, 0.88, 0.82, 0.76, 0.7, 0.62, 0.54, 0.45, 0.35)
_SEARCHED = 1 << 16  # numbers whose scales are searched together: they stay in a core's cache


def quantize(weights: Array, dtype: str, moments: Array | None = None) -> tuple[Array, Array]:
    """Quantise to the nearest q: (q int8 [..., columns], scales float16 [..., columns / 64]).

    weights: finite float32 [..., columns], columns a multiple of 64. No dequantised weight is more
    than half a step (a scale) off. int4 has one q more on the negative side: the weight of a group
    that is farthest from 0 takes that side, so int4's scales may be negative. The scale of a group
    of zeros is 0; where float16 cannot hold it, infinite.

    moments: [columns], what a squared error counts for in each column; see `search_scales`. Given
    them, int4's scales are searched, and a clipped weight may be more than half a step off.
    """
    q, scales = _to_nearest(weights, dtype)
    if moments is None or dtype != "int4" or not np.isfinite(scales).all():
        return q, scales
    rows = max(1, _SEARCHED // weights.shape[-1])
    flat, grouped = weights.reshape(-1, weights.shape[-1]), scales.reshape(-1, scales.shape[-1])
    for first in range(0, len(flat), rows):
        part = slice(first, first + rows)
        grouped[part] = search_scales(flat[part], grouped[part], moments)
    return _round(weights, scales, "int4"), scales


def search_scales(weights: Array, scales: Array, moments: Array) -> Array:
    """Return better scales of int4, float16 [rows, columns / 64], than the largest ones, `scales`.

    A smaller scale clips a group's largest weights and is nearer to all others. Of some shares of
    the largest scale, of both signs, that one is taken whose q leave the least squared error, each
    with the scale that fits its q best; errors are weighted with ``moments``, finite float32
    [columns], the mean squares of what the weights are multiplied by (as in AWQ, arXiv:2306.00978,
    section 3, and HQQ). No group's weighted error grows, and groups do not depend on each other.
    """
    low, high = _RANGE["int4"]
    groups = weights.reshape(len(weights), -1, GROUP)  # [rows, groups, 64]
    counts = moments.astype(np.float32).reshape(-1, GROUP)
    weighted = groups * counts
    largest = scales.astype(np.float32)
    largest[largest == 0] = 1  # a group of zeros: any scale is as good
    best = np.full(scales.shape, -1, np.float32)
    found = largest.copy()
    q, scratch = np.empty_like(groups), np.empty_like(groups)
    for share in (1.0, *_SHARES):
        for sign in (1, -1):
            np.multiply(groups, (sign / share / largest)[..., None], out=q)
            np.rint(q, out=q)
            np.clip(q, low, high, out=q)
            product = np.einsum("rgk,rgk->rg", weighted, q)
            np.multiply(q, counts, out=scratch)
            square = np.einsum("rgk,rgk->rg", scratch, q)
            # the error with the best scale, product / square, is less than without by this
            gain = product * product / np.where(square > 0, square, 1)
            better = gain > best
            best = np.where(better, gain, best)
            found = np.where(better, product / np.where(square > 0, square, 1), found)
    with np.errstate(over="ignore"):
        candidates = found.astype(np.float16)
    keep = _weighted_errors(groups, scales, counts) <= _weighted_errors(groups, candidates, counts)
    return np.where(keep, scales, candidates)


def _weighted_errors(groups: Array, scales: Array, counts: Array) -> Array:
    """Return each group's weighted squared error when rounded with these scales, [rows, groups]."""
    usable = np.isfinite(scales) & (scales != 0)
    steps = np.where(usable, scales, 1).astype(np.float32)[..., None]
    low, high = _RANGE["int4"]
    off = np.clip(np.rint(groups / steps), low, high) * steps * usable[..., None] - groups
    errors: Array = np.einsum("rgk,rgk->rg", off * off, np.broadcast_to(counts, off.shape))
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
