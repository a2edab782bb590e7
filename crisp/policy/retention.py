"""Retention by saliency: what stays on the device is what is worth most, not what came last.

The saliency of a block is the weight that its expert is expected to have, times the block's mean
contribution, times the sensitivity of its layer: by about so much the loss grows where it is
missing (Le Cun, Denker and Solla, Optimal brain damage, 1989, have the word). The expectation is
3 parts what the profile says and 7 parts a mean over the layer's events that forgets a tenth with
each. Everything is whole numbers, so that every engine and machine decides alike.

The functions over arrays indexed by entry (MoE layer x expert) are plain, so that numba can compile
them.
"""

from __future__ import annotations

from collections.abc import MutableSequence, Sequence
from heapq import heapify, heappop, heapreplace

import numpy as np
import numpy.typing as npt

from crisp.model.spec import ModelSpec
from crisp.policy.widths.contribution import spread_blocks
from crisp.profile import Profile

Array = Sequence[int]
Marks = MutableSequence[int]

ONE = 1 << 24
"""A router weight of 1: any float16 weight is a whole number of these."""
_LARGEST = 1 << 30  # the largest size of a block; with weights up to 16 all products fit 63 bits
_MOST_WEIGHT = 16 * ONE


# -- what the profile says ------------------------------------------------------------------------


def expected_weights(spec: ModelSpec, profile: Profile) -> list[int]:
    """Return the weight that each entry has in the mean of the profile's tokens, in units of ONE.

    Without router weights each of a token's k experts counts 1 / k.
    """
    expected: list[int] = []
    for layer in spec.moe_layers:
        counts = profile.expert_counts[layer].tolist()
        if profile.router_weights is None:
            mean = [ONE * spec.top_k] * len(counts)
        else:
            quantiles = units(profile.router_weights[layer])  # [experts, quantiles]
            mean = [spec.top_k**2 * sum(of) // len(of) for of in quantiles.tolist()]
        # A layer's counts are its tokens times k.
        total = spec.top_k * max(sum(counts), 1)
        expected += [count * weight // total for count, weight in zip(counts, mean, strict=True)]
    return expected


def block_sizes(spec: ModelSpec, profile: Profile) -> list[int]:
    """Return sensitivity x mean contribution of each entry's blocks: [entries x blocks].

    The largest of all is 2^30. All are alike where the profile has no contributions, and all layers
    equally sensitive where it does not say how sensitive each is.
    """
    rows = list(spec.moe_layers)
    if profile.contributions is None:
        return [_LARGEST] * (spec.n_routed * spec.n_blocks)
    sizes = spread_blocks(profile.contributions.astype(np.float64), spec.n_blocks)[rows]
    if profile.sensitivities is not None:
        sizes = sizes * profile.sensitivities[rows].astype(np.float64)[:, None, None]
    scaled = np.rint(sizes / max(float(sizes.max()), 1e-300) * _LARGEST)
    whole: list[int] = scaled.astype(np.int64).ravel().tolist()
    return whole


# -- what an event says ---------------------------------------------------------------------------


def units(weights: npt.NDArray[np.float16]) -> npt.NDArray[np.int64]:
    """Return router weights in units of ONE: exact, but within 0 and 16."""
    exact = weights.astype(np.float64) * ONE
    return np.clip(exact, 0, _MOST_WEIGHT).astype(np.int64)


def routed_weights(
    experts: Sequence[Sequence[int]], weights: npt.NDArray[np.float16] | None
) -> list[tuple[int, int, int]]:
    """Return (expert, mean weight over the event's rows, largest) of all that are routed to.

    experts [rows][k], -1 = absent; weights [rows, k], the router's; None: 1 / k each. What is
    returned is in units of ONE.
    """
    sums: dict[int, int] = {}
    largest: dict[int, int] = {}
    if weights is None:
        by_row = [[ONE // len(row)] * len(row) for row in experts]
    else:
        by_row = units(weights).tolist()
    for row, row_units in zip(experts, by_row, strict=True):
        for expert, weight in zip(row, row_units, strict=True):
            sums[expert] = sums.get(expert, 0) + weight
            largest[expert] = max(weight, largest.get(expert, 0))
    sums.pop(-1, None)
    return [(expert, total // len(experts), largest[expert]) for expert, total in sums.items()]


# -- rules ----------------------------------------------------------------------------------------


def fade(recent: Marks, low: int, high: int) -> None:
    """Forget a tenth of the recent weight of the entries in [low, high), a layer's."""
    for entry in range(low, high):
        recent[entry] = recent[entry] * 9 // 10


def retain(
    kept: Marks,
    held: Array,
    fixed: Array,
    expected: Array,
    recent: Array,
    sizes: Array,
    blocks: int,
    low: int,
    high: int,
    room: int,
    spare: int,
) -> None:
    """Cut ``kept`` [entries] down until the entries in [low, high) hold ``room`` blocks at most.

    The last block of least saliency goes, again and again; ties: the lowest entry. held: leading
    blocks that the event itself reads on the device, of which ``spare`` may go in all. fixed: not 0
    for entries whose ``held`` blocks all stay.

    expected, recent [entries]: weights; sizes [entries x blocks], see `block_sizes`.
    """
    total = 0
    for there in kept[low:high]:
        total += there
    if total <= room:
        return
    of_part = zip(kept[low:high], expected[low:high], recent[low:high])  # noqa: B905  (numba)
    heap = [
        ((3 * profiled + 7 * mean) * sizes[entry * blocks + there - 1], entry)
        for entry, (there, profiled, mean) in enumerate(of_part, low)
        if there > 0
    ]
    heapify(heap)
    while total > room:
        entry = heap[0][1]
        there = kept[entry]
        if there <= held[entry]:
            if spare == 0 or fixed[entry] != 0:
                heappop(heap)  # and with it all blocks before
                continue
            spare -= 1
        kept[entry] = there - 1
        total -= 1
        if there == 1:
            heappop(heap)
            continue
        weight = 3 * expected[entry] + 7 * recent[entry]
        heapreplace(heap, (weight * sizes[entry * blocks + there - 2], entry))
