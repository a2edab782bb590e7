"""Transitions: the experts that tokens of a combination go to in the next MoE layer.

After EdgeMoE (Yi et al., 2023), which preloads by such statistics of the path so far; here the path
is this layer's combination.
"""

from __future__ import annotations

from dataclasses import dataclass
from itertools import pairwise

import numpy as np
import numpy.typing as npt

from crisp.profile.combinations import Ints, anchors
from crisp.trace import RoutingTrace


@dataclass(frozen=True, eq=False)
class Transitions:
    """The k most frequent experts of the next MoE layer, for each combination of each layer."""

    table: npt.NDArray[np.int16]  # [layers, experts * experts, k], -1 where fewer were seen
    counts: Ints  # [layers, experts]: finds anchors in unordered traces
    ordered: bool

    @classmethod
    def from_trace(cls, trace: RoutingTrace, counts: Ints) -> Transitions:
        """Count all rows of ``trace``.

        counts [layers, experts]: tokens of each expert, as in the trace's `Profile`.
        """
        n, ordered = trace.header.n_experts, trace.header.ordered
        k = trace.experts.shape[2]
        table = np.full((trace.layers, n * n, k), -1, np.int16)
        for layer, after in pairwise(trace.moe_layers):
            here = trace.experts[:, layer].astype(np.int64)  # [rows, k]
            then = trace.experts[:, after].astype(np.int64)  # [rows, k]
            pair = combination_codes(here, counts[layer], ordered)[:, None]
            both = ((pair * n + then)[(pair >= 0) & (then >= 0)]).ravel()
            votes = np.bincount(both, minlength=n * n * n).reshape(n * n, n)
            table[layer] = most_frequent(votes, k)
        return cls(table, counts, ordered)

    def guess(self, layer: int, experts: npt.NDArray[np.int16]) -> npt.NDArray[np.int16]:
        """Return the likely experts of the next layer, given ``experts`` of this one: [rows, k]."""
        pair = combination_codes(experts.astype(np.int64), self.counts[layer], self.ordered)
        likely = self.table[layer][np.maximum(pair, 0)]  # [rows, k]
        return np.where(pair[:, None] < 0, np.int16(-1), likely)


def most_frequent(votes: Ints, k: int) -> npt.NDArray[np.int16]:
    """Return the k largest of each row, falling (ties: the lowest), -1 in the place of zeros.

    >>> most_frequent(np.array([[2, 0, 5, 2], [0, 0, 0, 1]]), 2)
    array([[ 2,  0],
           [ 3, -1]], dtype=int16)
    """
    best = np.argsort(-votes, axis=1, kind="stable")[:, :k]
    occurs = np.take_along_axis(votes, best, 1) > 0
    return np.where(occurs, best, -1).astype(np.int16)


def combination_codes(experts: Ints, counts: Ints, ordered: bool) -> Ints:
    """Return each token's combination in a layer as i * E + j, i <= j: [rows], -1 without experts.

    The anchor with the first other expert; a lone expert is paired with itself. experts [rows, k],
    -1 = absent; counts [E] of the layer.

    >>> combination_codes(np.array([[2, 0, 1], [1, -1, -1], [-1, -1, -1]]), np.zeros(3, int), True)
    array([ 2,  4, -1])
    """
    first = anchors(experts, counts, ordered)
    second = first
    for column in range(experts.shape[1] - 1, -1, -1):
        other = experts[:, column]
        second = np.where((other >= 0) & (other != first), other, second)
    pair = np.minimum(first, second) * len(counts) + np.maximum(first, second)
    return np.where(first < 0, -1, pair)
