"""simulate(): one run of a trace under a policy on a simulated machine."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

from crisp.errors import CrispError, nearest
from crisp.event import EventScheduler
from crisp.hardware import HardwareProfile, cost_model
from crisp.model import ModelSpec
from crisp.policy import Budget, Cache, Policy, static_residents
from crisp.profile import Profile
from crisp.run import Run, provenance, summarise
from crisp.timeline import Recorder, Sink, StepLog
from crisp.trace import RoutingTrace
from crisp.workload import PHASES, Step, Workload, chosen_rows, plan
from sim.streams import Streams

GRANULARITIES = ("expert", "block")


@dataclass(frozen=True)
class Conditions:
    """What a run is told beside trace, model, machine, policy and budget."""

    granularity: str = "expert"
    phase: str = "decode"
    batch: int = 1  # concurrent sequences
    chunk: int = 512  # rows of a prefill step
    seed: int = 0
    limit: int | None = None  # rows of the phase

    def __post_init__(self) -> None:
        if self.granularity not in GRANULARITIES:
            raise nearest(self.granularity, GRANULARITIES, "granularity")
        if self.phase not in PHASES:
            raise nearest(self.phase, PHASES, "phase")
        for name in ("batch", "chunk", "limit"):
            value = getattr(self, name)
            if value is not None and value < 1:
                raise CrispError(f"{name} {value}: must be at least 1")
        if self.seed < 0:
            raise CrispError(f"seed {self.seed}: must not be negative")


def simulate(
    trace: RoutingTrace,
    spec: ModelSpec,
    hardware: HardwareProfile,
    policy: Policy,
    budget: Budget,
    profile: Profile,
    conditions: Conditions | None = None,
    *,
    split: str | None = None,
    file: Mapping[str, str] | None = None,
    sinks: Sequence[Sink] = (),
    progress: Callable[[int], None] | None = None,
) -> Run:
    """Run ``trace`` on a simulated machine.

    spec: from `crisp.fitting.fit`, so that it has the trace's layers. profile: the counts that
    tiers, anchors and static caches come from; split: where they come from, in words. file: the
    trace file's name and digest, if ``trace`` is a part of one. sinks: where the timeline goes.
    progress: called with the number of rows of each step that begins.

    Raises CrispError for conditions that do not go together, InvariantError for a fault of ours.
    """
    conditions = conditions or Conditions()
    cost = cost_model(hardware, spec)
    capacity = budget.capacity(spec, policy.cache)
    initial: list[int] | None = None
    if hardware.loads_from == "mapped":  # nothing to load: every expert is where it is computed
        policy = replace(policy, cache=Cache("static", "global"))
        capacity = [spec.n_routed * spec.n_blocks]
    if policy.cache.name == "static":
        initial = static_residents(spec, profile, policy.cache, capacity)

    rows = chosen_rows(trace, conditions.phase, conditions.limit)
    steps = plan(trace, rows, conditions.batch, conditions.chunk)
    if progress is not None:
        steps = _watched(steps, progress)
    widths = policy.width.bind(spec, profile, trace.header.ordered)
    workload = Workload(trace, widths, guess=policy.prefetch.name == "guess")
    scheduler = EventScheduler(
        spec, policy, capacity, granularity=conditions.granularity, cost=cost, initial=initial
    )
    recorder = Recorder(sinks, by_block=conditions.granularity == "block")
    log = StepLog()
    total_ns = Streams(spec, scheduler, cost, workload, recorder, log).run(steps)

    blocks = sum(capacity)
    header = trace.header
    settings: dict[str, Any] = {
        "engine": "simpy",
        "trace": {
            "sha256": trace.digest(),
            "model": header.model,
            "dataset": header.dataset,
            "origin": header.origin,
            "rows": len(rows),
            "file": file and dict(file),
        },
        "profile": {"sha256": profile.digest(), "from": split},
        "model": spec.to_dict(),
        "hardware": hardware.to_dict(),
        "policy": policy.to_dict(),
        "budget": {
            "asked": budget.text,
            "blocks": blocks,
            "bytes": blocks * spec.block_bytes,
            "share": blocks / (spec.n_routed * spec.n_blocks),
        },
        **vars(conditions),
    }
    metrics, unavailable, energy = summarise(
        spec=spec,
        hardware=hardware,
        cost=cost,
        scheduler=scheduler,
        sums=recorder.sums,
        log=log,
        total_ns=total_ns,
        skipped=workload.skipped,
        initial_blocks=sum(initial or ()),
    )
    return Run(settings, metrics, unavailable, provenance(settings, energy))


def _watched(steps: Iterator[Step], progress: Callable[[int], None]) -> Iterator[Step]:
    for step in steps:
        progress(len(step.rows))
        yield step
