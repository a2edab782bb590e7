"""The order of the experts of a row: absent ones last, the others by falling weight."""

from __future__ import annotations

import numpy as np
import numpy.typing as npt


def sort_experts(
    experts: npt.NDArray[np.int64], weights: npt.NDArray[np.float64] | None, ordered: bool
) -> int:
    """Put absent experts last and, if ``ordered``, the others by falling weight; in place.

    experts, weights [n, k]. Equal weights keep their order. Returns the number of rows changed.
    """
    absent = experts < 0
    rank = np.zeros(experts.shape) if weights is None or not ordered else -weights
    if absent.any():
        rank[absent] = np.inf
    wrong = np.flatnonzero((rank[:, :-1] > rank[:, 1:]).any(axis=1))
    order = np.argsort(rank[wrong], axis=1, kind="stable")
    experts[wrong] = np.take_along_axis(experts[wrong], order, axis=1)
    if weights is not None:
        weights[wrong] = np.take_along_axis(weights[wrong], order, axis=1)
    return len(wrong)
