"""The cache without a clock: what is resident at each event, when events follow one another.

Without prefetch, load order and residency are functions of the events alone (docs/contract.md), so
whoever only asks what is on the device drives the scheduler here and needs no times.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import NamedTuple, Protocol, cast

import numpy as np
import numpy.typing as npt

from crisp.errors import CrispError
from crisp.model.spec import ModelSpec
from crisp.policy import BoundWidths, Budget, Policy
from crisp.policy.magnitude import weighed
from crisp.policy.retention import routed_weights
from crisp.policy.widths.base import ResidencyWidths, Widths
from crisp.policy.widths.contribution import row_on
from crisp.profile import Profile
from crisp.scheduler.assembly import new_scheduler
from crisp.scheduler.retention import Routed
from crisp.scheduler.tasks import Task
from crisp.scheduler.workload import union


class ReplayCounts(NamedTuple):
    """What a cache has counted so far."""

    tasks: int
    hits: int
    partial_hits: int
    blocks_loaded: int


class RowReplay(Protocol):
    """A policy's cache that is followed row by row, as by `Replay`."""

    in_step: bool

    @property
    def counts(self) -> ReplayCounts:
        """What has been counted so far."""

    def rows(
        self,
        layer: int,
        experts: npt.NDArray[np.int16],
        weights: npt.NDArray[np.float16],
        widths: BoundWidths,
        magnitudes: npt.NDArray[np.float16] | None = None,
    ) -> Widths:
        """Run an event for each of a layer's rows; return the rows' widths [rows, k], in blocks.

        experts [rows, k], -1 = absent; weights [rows, k], the router's. A row's widths depend on
        what the rows before it have left on the device, if ``widths`` look at that. magnitudes
        [rows, k]: what widths multiply weights with; None: nothing.
        """


NewReplay = Callable[[ModelSpec, Policy, Budget, Profile], RowReplay]
"""What makes one: `Replay`, or a faster one that decides alike."""


class Replay:
    """A policy's cache in a budget, event by event.

    Events of one layer must come in order; those of different layers may be interleaved at will
    unless they share a budget or are drawn for (``in_step``).
    """

    def __init__(self, spec: ModelSpec, policy: Policy, budget: Budget, profile: Profile) -> None:
        """Begin; CrispError for a policy whose residency depends on time."""
        if policy.prefetch.active:
            raise CrispError(
                f"policy {policy.name}: what prefetch {policy.prefetch.name} has brought depends "
                "on time, which is not modelled here; prefetch none was expected"
            )
        if policy.order.rule.timed:
            raise CrispError(
                f"policy {policy.name}: order {policy.order.name} asks for times, which are not "
                "modelled here; another order was expected"
            )
        capacity = budget.capacity(spec, policy.cache)
        self.in_step = policy.cache.in_step
        self.scheduler = new_scheduler(
            spec, policy, profile, capacity, granularity="expert", cost=None
        )
        self._rows = {layer: row for row, layer in enumerate(spec.moe_layers)}
        self._n = spec.n_experts

    @property
    def counts(self) -> ReplayCounts:
        """What has been counted so far."""
        counted = self.scheduler
        return ReplayCounts(
            counted.tasks, counted.hits, counted.partial_hits, counted.blocks_loaded
        )

    def rows(
        self,
        layer: int,
        experts: npt.NDArray[np.int16],
        weights: npt.NDArray[np.float16],
        widths: BoundWidths,
        magnitudes: npt.NDArray[np.float16] | None = None,
    ) -> Widths:
        """Run an event for each of a layer's rows, see `RowReplay.rows`."""
        found: list[list[int]] = []
        worth = weights if magnitudes is None else weighed(weights, magnitudes)
        if widths.residency:
            wanted = cast(ResidencyWidths, widths).wanted(layer, experts, worth).tolist()
        else:
            found = widths.widths(layer, experts, worth, None).tolist()
        for place, row in enumerate(experts.tolist()):
            if widths.residency:
                found.append(row_on(row, self.resident(layer), wanted[place]))
            routed = None
            if self.scheduler.weighs:
                routed = routed_weights([row], weights[place : place + 1])
            self.run(layer, union([row], [found[place]]), routed)
        return np.array(found, np.int16).reshape(experts.shape)

    def resident(self, layer: int) -> list[int]:
        """Return the blocks of each expert of a layer that are on the device now: [experts]."""
        start = self._rows[layer] * self._n
        return self.scheduler.residency.resident[start : start + self._n]

    def run(self, layer: int, tasks: list[Task], routed: Routed | None = None) -> None:
        """Run one event from beginning to end; the arguments are those of `EventScheduler`."""
        scheduler = self.scheduler
        scheduler.start(layer, tasks, (), routed)
        while not scheduler.done:
            load = scheduler.next_load()
            if load is not None:
                scheduler.loaded(load)
            while (task := scheduler.next_compute()) is not None:
                scheduler.computed(task)
