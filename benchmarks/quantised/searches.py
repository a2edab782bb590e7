"""Searches of int4's scales that were tried, and gain less than the fit that CRISP has.

Each has the arguments and the result of `crisp.model.quantization.fit_scales`, and takes of some
shares of the largest scale, of both signs, the one whose q leave the least weighted squared error.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager

import numpy as np

from crisp.model import quantization
from crisp.model.quantization import GROUP, Array, group_errors

_SHARES = (1.0, 0.94, 0.88, 0.82, 0.76, 0.7, 0.62, 0.54, 0.45, 0.35)
Scale = Callable[[Array, Array, Array, Array], Array]
"""The scale of groups: of the one tried, and sum(m w w), sum(m w q), sum(m q q) of its q."""

SEARCHES: dict[str, Scale] = {
    "searched, as tried": lambda tried, ww, wq, qq: tried,
    "searched, least squares": lambda tried, ww, wq, qq: wq / qq,
    "searched, then fitted": lambda tried, ww, wq, qq: ww / wq,
}


def _search(weights: Array, scales: Array, moments: Array, scale: Scale) -> Array:
    groups = weights.reshape(len(weights), -1, GROUP)  # [rows, groups, 64]
    counts = moments.astype(np.float32).reshape(-1, GROUP)
    weighted, (low, high) = groups * counts, quantization._RANGE["int4"]
    whole = np.einsum("rgk,rgk->rg", weighted, groups)
    largest = np.where(scales == 0, 1, scales).astype(np.float32)
    least, best = np.full(scales.shape, np.inf, np.float32), largest
    for tried in (sign * share * largest for share in _SHARES for sign in (1, -1)):
        q = np.clip(np.rint(groups / tried[..., None]), low, high)
        wq, qq = np.einsum("rgk,rgk->rg", weighted, q), np.einsum("rgk,rgk->rg", q * counts, q)
        usable = wq * tried > 0
        found = scale(tried, whole, np.where(usable, wq, 1), np.where(usable, qq, 1))
        found = np.where(usable, found, tried)
        error = whole - 2 * found * wq + found * found * qq
        best, least = np.where(error < least, found, best), np.minimum(error, least)
    with np.errstate(over="ignore"):
        result = best.astype(np.float16)
    worse = group_errors(groups, result, counts) > group_errors(groups, scales, counts)
    return np.where(worse | ~np.isfinite(result), scales, result)


@contextmanager
def searching(name: str) -> Iterator[None]:
    """Let int4's scales be searched, in a way of SEARCHES, where they would be fitted."""
    before = quantization.fit_scales
    quantization.fit_scales = lambda weights, scales, moments: _search(
        weights, scales, moments, SEARCHES[name]
    )
    try:
        yield
    finally:
        quantization.fit_scales = before
