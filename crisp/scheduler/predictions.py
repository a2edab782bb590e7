"""Predictions: which experts the next MoE layer's event will ask for, and how much they will weigh.

They are made when an event starts, from the trace's guess, the events before or, for an oracle, the
events to come.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

from crisp.errors import CrispError, InvariantError
from crisp.model.spec import ModelSpec
from crisp.policy import Prefetch
from crisp.policy.anticipation import Anticipation, Pairs, pairs_of
from crisp.scheduler.oracle import Future
from crisp.scheduler.retention import Routed
from crisp.scheduler.tasks import Task


class Prediction(NamedTuple):
    """The experts predicted for the next event of a MoE layer."""

    row: int  # the layer
    experts: Sequence[int]  # most wanted first
    weights: Sequence[int] = ()  # of them; none: they do not matter


class Predictions:
    """The predictions of a run, one an event."""

    def __init__(
        self,
        spec: ModelSpec,
        prefetch: Prefetch,
        anticipation: Anticipation | None,
        future: Future | None,
    ) -> None:
        """anticipation: for a prefetcher that is salient; future: for an oracle."""
        self._prefetch, self._anticipation, self._future = prefetch, anticipation, future
        self._n_experts, self._rows = spec.n_experts, len(spec.moe_layers)
        self._used: list[list[int]] = [[] for _ in range(self._rows)]  # in each layer's last event
        self._weighed: list[Pairs] = [[] for _ in range(self._rows)]  # the same, with weights

    def after(
        self, event: int, row: int, tasks: list[Task], guess: Sequence[int], routed: Routed | None
    ) -> Prediction:
        """Predict what follows an event of MoE layer ``row``; its arguments are the scheduler's."""
        following = (row + 1) % self._rows
        if self._anticipation is not None:
            return self._salient(self._anticipation, event, row, following, guess, routed)
        self._used[row] = [task.expert for task in tasks]
        if self._future is not None:
            guess = self._future.tasks(event + 1)
        experts = self._prefetch.experts(guess, self._used[following])
        if experts and max(experts) >= self._n_experts:
            raise CrispError(
                f"prefetch {self._prefetch.name}: asked for expert {max(experts)}, expected 0 to "
                f"{self._n_experts - 1}"
            )
        return Prediction(following, experts)

    def _salient(
        self,
        anticipation: Anticipation,
        event: int,
        row: int,
        following: int,
        guess: Sequence[int],
        routed: Routed | None,
    ) -> Prediction:
        if routed is None:
            raise InvariantError("the prefetcher was not told what the event is routed to")
        self._weighed[row] = pairs_of(routed)
        if self._future is not None:
            weighed = pairs_of(self._future.routing(event + 1))
        elif self._prefetch.source:
            weighed = anticipation.weighed(following, guess)
        else:
            weighed = self._weighed[following]
        return Prediction(
            following, [expert for expert, _ in weighed], [weight for _, weight in weighed]
        )
