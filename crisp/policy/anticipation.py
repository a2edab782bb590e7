"""What missing blocks of predicted experts are worth: what a prefetcher by saliency goes by.

A width policy such as `saliency` loads a missing block where router weight x size of the block
reaches a threshold. A prediction of the next event says which experts come, and what is known of
their weights: what they were, what they will be (an oracle), or what experts of that rank have in
the profile. So each missing block can be told what it would be worth, and those that would not be
loaded then need not be loaded now. Everything is whole numbers.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import NamedTuple

import numpy as np

from crisp.errors import CrispError
from crisp.model.spec import ModelSpec
from crisp.policy.policy import Policy
from crisp.policy.retention import ONE, units
from crisp.policy.widths.contribution import ResidentThresholdWidths
from crisp.profile import Profile

LEAST = ONE * ONE
"""Weight x relative size of a block that is just worth loading."""
_LARGEST = 1 << 32  # with weights up to 16 all products fit 63 bits

Pairs = list[tuple[int, int]]
"""(expert, weight in units of ONE) of predicted experts."""


class Anticipation(NamedTuple):
    """What the profile says that blocks of predicted experts are worth."""

    sizes: Sequence[int]  # [entries x blocks]: in thresholds of the layer, 2^24 each
    by_rank: Sequence[Sequence[int]]  # [MoE layers][k]: weight of an expert of that rank

    def weighed(self, row: int, guess: Sequence[int]) -> Pairs:
        """Return a guess with weights by rank; of an expert of several rows the largest.

        guess: experts of MoE layer ``row``, token by token, rank by rank, -1 = absent.
        """
        by_rank = self.by_rank[row]
        largest: dict[int, int] = {}
        for place, expert in enumerate(guess):
            if expert >= 0:
                weight = by_rank[place % len(by_rank)]
                largest[expert] = max(weight, largest.get(expert, 0))
        return list(largest.items())


def anticipation(spec: ModelSpec, policy: Policy, profile: Profile) -> Anticipation:
    """Return what a policy's prefetcher goes by; CrispError for widths that go by another thing."""
    bound = policy.width.bind(spec, profile, True)
    if not isinstance(bound, ResidentThresholdWidths):
        raise CrispError(
            f"prefetch {policy.prefetch.name}: asks what a block must be worth to be loaded; width "
            f"saliency or contribution-resident was expected, found {policy.width_name}"
        )
    rows = list(spec.moe_layers)
    contributions, least = bound.contributions[rows], bound.thresholds[rows, None, None]
    with np.errstate(divide="ignore", invalid="ignore"):
        relative = np.where(least > 0, contributions / least, np.inf)
    sizes = np.rint(np.minimum(relative * ONE, _LARGEST)).astype(np.int64)
    whole: list[int] = sizes.ravel().tolist()
    return Anticipation(whole, [_weights_by_rank(profile, layer, spec.top_k) for layer in rows])


def _weights_by_rank(profile: Profile, layer: int, k: int) -> list[int]:
    """Return the mean router weight of each k-th part of all that a layer's tokens gave, falling.

    Each expert counts as often as it was routed to, at the quantiles of its weights. With k = 2 and
    weights that sum to 1, the parts are the ranks.
    """
    assert profile.router_weights is not None
    weights = units(profile.router_weights[layer])  # [experts, quantiles]
    often = profile.expert_counts[layer].tolist()
    falling = sorted(
        ((weight, often[expert]) for expert, own in enumerate(weights.tolist()) for weight in own),
        reverse=True,
    )
    part = sum(count for _, count in falling)  # k of these, where each weight counts k times
    sums, begin = [0] * k, 0
    for weight, count in falling:
        end = begin + k * count
        while begin < end:
            rank = begin // part
            upto = min(end, (rank + 1) * part)
            sums[rank] += weight * (upto - begin)
            begin = upto
    return [total // max(part, 1) for total in sums]


def most_worth(
    experts: Sequence[int],
    weights: Sequence[int],
    sizes: Sequence[int],
    resident: Sequence[int],
    staged: Sequence[int],
    base: int,
    blocks: int,
) -> int:
    """Return the entry whose next missing block is worth most, ties: the lowest; -1: none is worth
    loading.

    experts: the predicted ones, of which ``base`` is the first entry, with their ``weights``. The
    others are indexed by entry: sizes [entries x blocks]; resident, staged: leading blocks that are
    there, and those behind them that wait in staging.
    """
    found, most = -1, LEAST
    for place in range(len(experts)):
        entry = base + experts[place]
        first = resident[entry] + staged[entry]
        if first < blocks:
            worth = weights[place] * sizes[entry * blocks + first]
            if worth > most or (worth == most and (found < 0 or entry < found)):
                found, most = entry, worth
    return found


def pairs_of(routed: Iterable[tuple[int, int, int]]) -> Pairs:
    """Return the experts of an event, each with the largest weight that a row gave it."""
    return [(expert, largest) for expert, _, largest in routed]
