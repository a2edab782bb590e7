"""Roles: which expert of a pair is the dominant one, and how well two measurements agree (3.3.2).

All of it follows from ``increase`` [layers, E, E]: at [l, i, j] what masking expert i costs in the
pair {i, j}, in whatever measure; NaN where that was not measured.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

Floats = npt.NDArray[np.float32] | npt.NDArray[np.float64]


def dominant(increase: Floats) -> npt.NDArray[np.int16]:
    """Return the expert of each pair whose removal costs more: [layers, E, E], symmetric.

    -1 where one of the two was not measured, or both cost the same: neither is dominant.

    >>> nan = np.nan
    >>> dominant(np.array([[[nan, 3.0, 1.0], [2.0, nan, nan], [1.5, 0.5, nan]]]))[0]
    array([[-1,  0,  2],
           [ 0, -1, -1],
           [ 2, -1, -1]], dtype=int16)
    """
    other = increase.swapaxes(1, 2)
    row, column = np.indices(increase.shape[1:], np.int16)
    larger = np.where(increase > other, row, np.where(increase < other, column, -1))
    return larger.astype(np.int16)


@dataclass(frozen=True)
class Agreement:
    """How well two measurements of the same roles agree; NaN where nothing can be compared."""

    rank: float  # Spearman's correlation, over what every (layer, pair, masked expert) costs
    same: float  # share of pairs with the same dominant expert
    pairs: int  # compared: both say which one it is


def agreement(a: Floats, b: Floats) -> Agreement:
    """Compare two measurements of ``increase`` where both have values.

    >>> a = np.full((1, 3, 3), np.nan)
    >>> a[0, [0, 1, 0, 2], [1, 0, 2, 0]] = [3, 1, 2, 4]
    >>> b = a.copy()
    >>> b[0, 2, 0] = 1.5  # of the pair {0, 2} the first now costs more
    >>> agreement(a, b)  # ranks 3 1 2 4 and 4 1 3 2: 1 - 6 (1 + 0 + 1 + 4) / (4 * 15)
    Agreement(rank=0.4, same=0.5, pairs=2)
    """
    both = np.isfinite(a) & np.isfinite(b)
    one, two = dominant(a), dominant(b)
    decided = np.triu((one >= 0) & (two >= 0), 1)
    pairs = int(decided.sum())
    same = float((one == two)[decided].mean()) if pairs else float("nan")
    return Agreement(_spearman(a[both], b[both]), same, pairs)


def _spearman(a: Floats, b: Floats) -> float:
    """Return Pearson's correlation of the ranks, equal values sharing the mean of theirs."""
    x, y = _ranks(a), _ranks(b)
    x, y = x - x.mean() if len(x) else x, y - y.mean() if len(y) else y
    spread = float(np.sqrt((x @ x) * (y @ y)))
    return float(x @ y) / spread if spread else float("nan")


def _ranks(values: Floats) -> npt.NDArray[np.float64]:
    """Return the rank of each value, equal values sharing the mean of theirs: [n]."""
    _, place, counts = np.unique(values, return_inverse=True, return_counts=True)
    mean: npt.NDArray[np.float64] = np.cumsum(counts) - (counts - 1) / 2
    return mean[place]
