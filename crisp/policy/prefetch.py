"""Prefetchers: what the link loads for the next layer when the event's own loads are issued."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np

from crisp.errors import CrispError
from crisp.extensions import find_name, origin_of

ROUTER, PROFILE, FUTURE = "router", "profile", "future"
"""Where predictions of the next layer come from: the next layer's router asked about this layer's
input, as the trace recorded it; the profile's most frequent successors; the events to come."""

Predict = Callable[[Sequence[int], Sequence[int]], Iterable[int]]


def first_seen(experts: Iterable[int]) -> list[int]:
    """Return the distinct present experts in order of first appearance.

    >>> first_seen([3, 1, -1, 3, 2])
    [3, 1, 2]
    """
    return [expert for expert in dict.fromkeys(experts) if expert >= 0]


def predicted_experts(predicted: Sequence[int], used: Sequence[int]) -> Sequence[int]:
    """Follow the prediction."""
    return predicted


def last_used(predicted: Sequence[int], used: Sequence[int]) -> Sequence[int]:
    """Repeat the tasks of the next layer's last event: with one sequence, the previous token's."""
    return used


@dataclass(frozen=True)
class PrefetchRule:
    """A prefetcher: the function that says which experts to load, and the prediction it needs.

    The function gets two sequences of expert ids of the next MoE layer: what ``source`` predicts,
    row by row, rank by rank, -1 where there is none (empty without a source), and the tasks of that
    layer's last event. It returns the experts to load, most wanted first; repetitions and -1 are
    passed over.

    A prefetcher that is ``salient`` takes of them the blocks that the width policy would load, the
    one worth most first: see `crisp.policy.anticipation`.
    """

    predict: Predict | None  # None: nothing is prefetched
    source: str = ""  # ROUTER, PROFILE or FUTURE; empty: it looks at no prediction
    salient: bool = False


PREFETCHERS: dict[str, PrefetchRule] = {
    "none": PrefetchRule(None),
    "previous": PrefetchRule(last_used),
    "guess": PrefetchRule(predicted_experts, ROUTER),
    # Where most tokens of this layer's combination went, in the profile.
    "frequent": PrefetchRule(predicted_experts, PROFILE),
    # An oracle: the tasks of the next event, by first appearance.
    "perfect": PrefetchRule(predicted_experts, FUTURE),
    # Of what each of them predicts, the blocks that are worth loading.
    "saliency(previous)": PrefetchRule(last_used, salient=True),
    "saliency(guess)": PrefetchRule(predicted_experts, ROUTER, salient=True),
    "saliency(frequent)": PrefetchRule(predicted_experts, PROFILE, salient=True),
    "saliency(perfect)": PrefetchRule(predicted_experts, FUTURE, salient=True),
}


@dataclass(frozen=True)
class Prefetch:
    """A prefetcher by name."""

    name: str

    @property
    def rule(self) -> PrefetchRule:
        """How it chooses."""
        return find_name(PREFETCHERS, self.name, "prefetch")

    @property
    def active(self) -> bool:
        """Whether anything is prefetched at all."""
        return self.rule.predict is not None

    @property
    def source(self) -> str:
        """Where its predictions come from; empty: it looks at none."""
        return self.rule.source

    def experts(self, predicted: Sequence[int], used: Sequence[int]) -> list[int]:
        """Return the experts of the next layer to load, most wanted first; see `PrefetchRule`."""
        predict = self.rule.predict
        if predict is None:
            return []
        answer: Any = predict(predicted, used)  # of a plugin it may be anything
        experts = list(answer) if isinstance(answer, Iterable) else [answer]
        if origin_of("prefetch", self.name) is not None:
            wrong = [one for one in experts if not isinstance(one, (int, np.integer))]
            if wrong:
                raise CrispError(
                    f"prefetch {self.name}: returned {wrong[0]!r}, expected ids of experts"
                )
        return first_seen(experts)
