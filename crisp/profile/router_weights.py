"""The distribution of the router's weights: for every expert some quantiles, from a histogram.

Histograms of texts of any length can be added up; quantiles are small enough to be kept.
"""

from __future__ import annotations

import numpy as np
import numpy.typing as npt

Ints = npt.NDArray[np.int64]

BINS = 512  # a float16 >= 0 by its exponent and the first four bits of its mantissa: within 3 %
QUANTILES = 32
_SHIFT = 6  # bits of the mantissa that a bin leaves out


def histogram(experts: Ints, weights: npt.NDArray[np.float16], n_experts: int) -> Ints:
    """Count how often each expert was given a weight of each size: [experts, BINS].

    experts [n, k], -1 = absent; weights [n, k]; negative ones count as 0.
    """
    bins = np.maximum(weights, np.float16(0)).view(np.uint16).astype(np.int64) >> _SHIFT
    present = experts >= 0
    flat = (experts * BINS + bins)[present]
    return np.bincount(flat, minlength=n_experts * BINS).reshape(n_experts, BINS)


def quantiles(counts: Ints) -> npt.NDArray[np.float16]:
    """Return the weights that 1/64, 3/64, ... of an expert's lie below: [experts, QUANTILES].

    counts [experts, BINS]; a weight stands in the middle of its bin; 0 where there are none.

    >>> one = histogram(np.zeros((2, 1), int), np.array([[0.25], [0.75]], np.float16), 1)
    >>> quantiles(one)[0, [0, 15, 16, 31]]
    array([0.2578, 0.2578, 0.7656, 0.7656], dtype=float16)
    """
    middle = ((np.arange(BINS) << _SHIFT) + (1 << _SHIFT - 1)).astype(np.uint16).view(np.float16)
    middle[0] = 0
    upto = np.cumsum(counts, axis=1)
    total = upto[:, -1]
    result = np.zeros((len(counts), QUANTILES), np.float16)
    for place in range(QUANTILES):
        # the first bin in which more than (2 place + 1) / 64 of the weights have come
        reached = 2 * QUANTILES * upto > (2 * place + 1) * total[:, None]
        result[:, place] = middle[reached.argmax(axis=1)]
    result[total == 0] = 0
    return result
