"""Synthetic traces drawn from how often each expert was used, where no more is known."""

from __future__ import annotations

import numpy as np
import numpy.typing as npt

from crisp.errors import CrispError
from crisp.trace import DECODE, Header, RoutingTrace

_ROWS = 4096  # at most
_DRAW = 256  # rows drawn together
_LARGE = 1 << 40  # counts beyond are scaled down, so that sums of k times them fit


def draw_from_counts(
    counts: npt.NDArray[np.int64], k: int, *, note: str, seed: int = 0
) -> RoutingTrace:
    """Draw a trace of independent decode rows in which expert e has the share of counts[l, e].

    counts [layers, experts]; a layer of zeros is not MoE. Each row has k distinct experts of a
    layer, and the probability that e is one of them is exactly k counts[l, e] / sum(counts[l])
    (systematic sampling along a random order of the experts: Madow, 1949). There are as many rows
    as the counts stand for, 4096 at most. Raises CrispError for counts that no top-k gives.
    """
    layers, n_experts = counts.shape
    moe = np.flatnonzero(counts.any(axis=1))
    scaled = counts >> max(0, int(counts.max()).bit_length() - _LARGE.bit_length())
    total = scaled.sum(axis=1)
    over = np.argwhere(scaled * k > total[:, None])
    if len(over):
        layer, expert = (int(n) for n in over[0])
        share = 100 * counts[layer, expert] / counts[layer].sum()
        raise CrispError(
            f"counts: expert {expert} of layer {layer} has {share:.1f} % of them; of top-{k} it "
            f"could have {100 / k:.1f} % at most"
        )
    rows = int(min(_ROWS, max(1, counts.sum(axis=1).max() // k)))
    experts = np.full((rows, layers, k), -1, np.int16)
    for layer in moe.tolist():
        random = np.random.default_rng([seed, layer])
        steps = total[layer] * np.arange(k)
        for start in range(0, rows, _DRAW):
            n = min(_DRAW, rows - start)
            order = random.permuted(np.tile(np.arange(n_experts), (n, 1)), axis=1)
            ends = np.cumsum(scaled[layer][order] * k, axis=1)  # [n, experts], up to k times total
            first = random.integers(total[layer], size=n)
            # The expert whose stretch holds each of k points that are `total` apart.
            for rank in range(k):
                place = (ends <= (first + steps[rank])[:, None]).sum(axis=1)
                experts[start : start + n, layer, rank] = order[np.arange(n), place]
    return RoutingTrace(
        experts=experts,
        sequence=np.zeros(rows, np.int32),
        position=np.arange(rows, dtype=np.int32),
        phase=np.full(rows, DECODE, np.uint8),
        header=Header(
            n_experts=n_experts,
            top_k=k,
            ordered=False,
            origin="synthetic",
            seed=seed,
            note=note,
        ),
    )
