"""Tiers: HOT, WARM or COLD by cumulative frequency (paper, section 3.3.1)."""

from __future__ import annotations

from fractions import Fraction

import numpy as np
import numpy.typing as npt

from crisp.errors import CrispError
from crisp.profile.combinations import Profile

HOT, WARM, COLD = 0, 1, 2


def tiers(profile: Profile, alpha: Fraction, beta: Fraction) -> npt.NDArray[np.uint8]:
    """Return the tier of every combination of every layer: [layers, E, E], symmetric.

    Within a layer combinations are sorted by count (ties by (i, j)); one is HOT while the share of
    those before it is below ``alpha``, WARM while below ``beta``, else COLD; unseen ones are COLD.
    """
    if not 0 <= alpha <= beta <= 1:
        raise CrispError(f"tiers: need 0 <= alpha <= beta <= 1, found {alpha} and {beta}")
    layers, n, _ = profile.pair_counts.shape
    rows, columns = np.triu_indices(n, 1)  # in the order (i, j)
    result = np.full((layers, n, n), COLD, np.uint8)
    cuts = alpha.numerator, alpha.denominator, beta.numerator, beta.denominator
    for layer in range(layers):
        counts = profile.pair_counts[layer, rows, columns]
        by_count = np.argsort(-counts, kind="stable")
        i, j = rows[by_count], columns[by_count]
        result[layer, i, j] = result[layer, j, i] = sorted_tiers(counts[by_count], *cuts)
    return result


def sorted_tiers(
    counts: npt.NDArray[np.int64], alpha: int, alpha_of: int, beta: int, beta_of: int
) -> npt.NDArray[np.uint8]:
    """Return the tiers of combinations sorted by falling count; cuts alpha/alpha_of, beta/beta_of.

    Integers only, so shares are compared exactly.

    >>> sorted_tiers(np.array([6, 3, 1, 0]), 6, 10, 9, 10)  # before: 0, .6, .9, 1
    array([0, 1, 2, 2], dtype=uint8)
    """
    before = np.cumsum(counts) - counts
    total = counts.sum()
    hot = (before * alpha_of < alpha * total) & (counts > 0)
    warm = (before * beta_of < beta * total) & (counts > 0)
    return np.where(hot, HOT, np.where(warm, WARM, COLD)).astype(np.uint8)
