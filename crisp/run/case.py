"""What is run, whoever runs it: a trace under a policy within a budget, and its conditions."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, field
from typing import Any

import numpy as np
import numpy.typing as npt

from crisp.errors import CrispError, check_whole, unknown_name
from crisp.hardware.profile import CostModel, HardwareProfile, cost_model
from crisp.model.spec import ModelSpec
from crisp.policy import Budget, Policy
from crisp.policy.cache import capacity_bytes
from crisp.policy.prefetch import PROFILE, ROUTER
from crisp.policy.routing.rules import BoundRouting, RoutingRule
from crisp.policy.routing.weighing import weighings_of
from crisp.profile import Profile, Transitions
from crisp.scheduler.assembly import new_scheduler, starting_state
from crisp.scheduler.oracle import Future, coming_routing, look_ahead
from crisp.scheduler.residency import StartingState
from crisp.scheduler.scheduler import EventScheduler
from crisp.scheduler.workload import PHASES, WHOLE, Step, Workload, chosen_rows, plan
from crisp.trace import RoutingTrace

GRANULARITIES = ("expert", "block")
_DIGITS = 18  # of a number of rows


def parse_chunk(text: str) -> int | str:
    """Return the rows of a chunk, or WHOLE; CrispError for another text."""
    if text == WHOLE:
        return text
    if not (text.isascii() and text.isdecimal() and len(text) <= _DIGITS and int(text)):
        raise CrispError(f"--chunk {text:.40}: expected a number of rows, at least 1, or {WHOLE}")
    return int(text)


@dataclass(frozen=True)
class Conditions:
    """The settings of a run beside trace, model, machine, policy and budget."""

    granularity: str = "expert"
    phase: str = "decode"
    batch: int = 1  # concurrent sequences
    chunk: int | str = 512  # rows of a prefill step; whole: a prompt's
    seed: int = 0
    limit: int | None = None  # rows of the phase

    def __post_init__(self) -> None:
        if self.granularity not in GRANULARITIES:
            raise unknown_name(self.granularity, GRANULARITIES, "granularity")
        if self.phase not in PHASES:
            raise unknown_name(self.phase, PHASES, "phase")
        for name in ("batch", "chunk", "limit"):
            value = getattr(self, name)
            if (name, value) in (("limit", None), ("chunk", WHOLE)):
                continue
            check_whole(value, name)
            if value < 1:
                raise CrispError(f"{name} {value}: must be at least 1")
        check_whole(self.seed, "seed")
        if self.seed < 0:
            raise CrispError(f"seed {self.seed}: must not be negative")

    @property
    def by_block(self) -> bool:
        """Whether blocks are loaded and computed one by one."""
        return self.granularity == "block"


@dataclass(frozen=True, eq=False)
class Case:
    """One run of a trace, but for the machine.

    spec: from `crisp.trace.fitting.fit_to_trace`, so that it has the trace's layers. profile: the
    counts that tiers, anchors and static caches come from; split: where they come from, in words.
    file: the trace file's name and digest, if ``trace`` is a part of one.
    """

    trace: RoutingTrace
    spec: ModelSpec
    policy: Policy
    budget: Budget
    profile: Profile
    conditions: Conditions = field(default_factory=Conditions)
    split: str | None = None
    file: Mapping[str, str] | None = None
    everything: bool = False  # all experts are resident, whatever the budget
    counted: RoutingTrace | None = None  # what the profile was counted from, if that is at hand

    def capacity(self) -> list[int]:
        """Return the blocks that each part of the budget holds."""
        if self.everything:
            return [self.spec.n_routed * self.spec.n_blocks]
        return self.budget.capacity(self.spec, self.policy.cache)

    def start(self) -> StartingState:
        """Return what is on the device before the first event."""
        return starting_state(self.spec, self.policy, self.profile, self.capacity())

    def future(self) -> Future:
        """Return all tasks to come; CrispError where they depend on what is resident.

        For a prefetcher by saliency what they are routed to, which does not depend on it.
        """
        workload = self.workload()
        events = (event for event in workload.events(self.steps()) if event.experts is not None)
        if self.policy.prefetch.rule.salient and not self.policy.routing.active:
            return coming_routing(workload.routed(event) for event in events)
        if workload.depends:
            what = "routing depends" if self.policy.routing.active else "widths depend"
            raise CrispError(
                f"policy {self.policy.name}: {self.policy.oracle} is an oracle, but its {what} on "
                "what is resident: they cannot be known beforehand"
            )
        return look_ahead(
            self.spec,
            ((event.layer, workload.tasks(event, lambda layer: ())) for event in events),
        )

    def order_cost(self, hardware: HardwareProfile | None) -> CostModel | None:
        """Return the costs that the order of a measured run asks for; None: it asks for none.

        Raises CrispError if it does, and there is no ``hardware``.
        """
        check_times(self.policy, hardware)
        return cost_model(hardware, self.spec) if hardware and _timed(self.policy) else None

    def scheduler(self, cost: CostModel | None) -> EventScheduler:
        """Return a scheduler that has seen nothing yet; orders that ask for times need a cost."""
        return new_scheduler(
            self.spec,
            self.policy,
            self.profile,
            self.capacity(),
            granularity=self.conditions.granularity,
            cost=cost,
            future=self.future() if self.policy.oracle else None,
        )

    def workload(self) -> Workload:
        """Return what lays out the tasks of each event."""
        widths = self.policy.width.bind(self.spec, self.profile, self.trace.header.ordered)
        return Workload(
            self.trace,
            widths,
            self.policy.prefetch.source == ROUTER,
            self.following(),
            self._routing(),
            self.asks_magnitudes(),
        )

    def asks_magnitudes(self) -> bool:
        """Return whether widths ask for magnitudes; CrispError for a trace without."""
        trace = self.trace
        if self.policy.predicts and (trace.magnitudes is None or trace.weights is None):
            raise CrispError(
                f"policy {self.policy.name}: magnitude {self.policy.magnitude}: the trace has no "
                "magnitudes; crisp trace capture --magnitudes records them"
            )
        return self.policy.predicts

    def _routing(self) -> BoundRouting | None:
        """Return the rule that chooses experts anew; CrispError for a trace without scores."""
        rule = self.policy.routing
        if not isinstance(rule, RoutingRule):
            return None
        weighings = weighings_of(self.trace, f"routing {self.policy.routing_name}")
        return BoundRouting(rule, self.spec, self.profile, weighings)

    def following(self) -> Transitions | None:
        """Return which experts follow which, if the prefetcher asks; CrispError if unknown."""
        if self.policy.prefetch.source != PROFILE:
            return None
        return Transitions.from_trace(self._counted(), self.profile.expert_counts)

    def _counted(self) -> RoutingTrace:
        """Return the trace that the profile was counted from; CrispError if it is not at hand."""
        if self.counted is None:
            raise CrispError(
                f"prefetch {self.policy.prefetch.name}: asks which experts follow which, which "
                "only a trace says; give --profile TRACE in the place of metadata"
            )
        return self.counted

    def steps(self, progress: Callable[[int], None] | None = None) -> Iterator[Step]:
        """Yield the forward passes; ``progress`` is called with the rows of each that begins."""
        conditions = self.conditions
        steps = plan(self.trace, self.rows(), conditions.batch, conditions.chunk)
        return steps if progress is None else _report_rows(steps, progress)

    def rows(self) -> npt.NDArray[np.int64]:
        """Return the numbers [n] of the trace's rows that are run."""
        return chosen_rows(self.trace, self.conditions.phase, self.conditions.limit)

    def settings(self, engine: str, hardware: dict[str, Any] | None) -> dict[str, Any]:
        """Return all settings, resolved, safe for JSON: what two runs must share to be compared."""
        header, capacity = self.trace.header, self.capacity()
        blocks = sum(capacity)
        profile = {"sha256": self.profile.digest(), "from": self.split}
        if self.policy.prefetch.source == PROFILE:
            profile["trace"] = self._counted().digest()
        return {
            "engine": engine,
            "trace": {
                "sha256": self.trace.digest(),
                "model": header.model,
                "dataset": header.dataset,
                "origin": header.origin,
                "rows": len(self.rows()),
                "file": self.file and dict(self.file),
            },
            "profile": profile if self.policy.profiled else None,  # None: nothing asks for it
            "model": self.spec.to_dict(),
            "hardware": hardware,
            "policy": self.policy.to_dict(),
            "budget": {
                "asked": self.budget.text,
                "blocks": blocks,
                "bytes": capacity_bytes(self.spec, capacity),
                "share": blocks / (self.spec.n_routed * self.spec.n_blocks),
            },
            **vars(self.conditions),
        }


def _report_rows(steps: Iterator[Step], progress: Callable[[int], None]) -> Iterator[Step]:
    for step in steps:
        progress(len(step.rows))
        yield step


def check_times(policy: Policy, hardware: HardwareProfile | None) -> None:
    """Raise CrispError for an order that asks for times where there is no ``hardware``."""
    if hardware is None and _timed(policy):
        raise CrispError(
            f"order {policy.order.name}: asks for times; --hardware PROFILE says whose, and crisp "
            "calibrate measures this machine's"
        )


def _timed(policy: Policy) -> bool:
    return policy.order.rule.timed
