"""A run of steps, batch by batch, and what it has counted."""

from __future__ import annotations

import gc
from collections.abc import Iterable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

from crisp.hardware.profile import CostModel
from crisp.model.spec import ModelSpec
from crisp.policy import BoundWidths, Policy
from crisp.policy.prefetch import FUTURE, ROUTER
from crisp.profile import Transitions
from crisp.run.counters import FewestLoads
from crisp.run.timeline import RunTotals, StepLog, StreamTimes
from crisp.scheduler.residency import StartingState
from crisp.scheduler.workload import Step
from crisp.sim.bounds import Belady
from crisp.sim.fast import state as at
from crisp.sim.fast.batches import StepBatches
from crisp.sim.fast.rules import machine_of, within
from crisp.sim.fast.state import Ints, Machine, StepBatch
from crisp.sim.fast.streams import run_batch
from crisp.trace import PREFILL, RoutingTrace

NOTHING = StreamTimes(0, 0, 0, 0, 0)


@dataclass(frozen=True)
class FastPrefetchCounts:
    """Bytes of prefetched blocks by what became of them."""

    useful_bytes: int
    late_bytes: int
    wasted_bytes: int


@dataclass(frozen=True)
class FastCounts:
    """Counts of a scheduler at the end of a run."""

    done: bool
    event: int
    tasks: int
    hits: int
    partial_hits: int
    blocks_loaded: int
    bytes_loaded: int
    ahead: FastPrefetchCounts | None


@dataclass
class FastTotals(RunTotals):
    """Sums over a run without a timeline."""

    prompts: StreamTimes = NOTHING  # of the steps of prefill

    def prompt_times(self, prompts: npt.NDArray[np.bool_]) -> StreamTimes:
        return self.prompts


@dataclass(frozen=True)
class Executed:
    """A run that has ended. resident: blocks of each entry; belady: see
    `crisp.scheduler.belady_bound`.
    """

    total_ns: int
    skipped: int
    decided: FastCounts
    sums: RunTotals
    log: StepLog
    resident: list[int]
    belady: FewestLoads


def execute(
    spec: ModelSpec,
    policy: Policy,
    start: StartingState,
    *,
    by_block: bool,
    cost: CostModel,
    trace: RoutingTrace,
    widths: BoundWidths,
    steps: Iterable[Step],
    following: Transitions | None = None,
) -> Executed:
    """Run some steps of a trace; the arguments are those of `EventScheduler` and `Workload`.

    Raises CrispError for what cannot be done exactly.
    """
    batches = StepBatches(
        trace,
        widths,
        spec,
        cost,
        by_block=by_block,
        weighs=policy.weighs,
        guess=policy.prefetch.source == ROUTER,
        following=following,
        perfect=policy.prefetch.source == FUTURE,
        magnitudes=policy.predicts,
    )
    machine = machine_of(spec, policy, start, by_block, cost.load, batches.states)
    belady = Belady(spec, start, compiled=True)
    log, most = StepLog(), 0.0
    before, prompts = np.zeros((2, 6), np.int64)
    with _no_collection():
        for some, batch in batches.of(steps):
            most += _most(machine, batch)
            within(int(most))
            after = np.empty((6, len(some)), np.int64)
            run_batch(machine, batch, after)
            log.add_all(some, after[0], after[1])
            prompts += _of_prompts(some, after, before)
            before = after[:, -1]
            _bound(belady, batch)
    return Executed(
        int(machine.now[at.TIME]),
        batches.skipped + int(machine.now[at.SKIPPED]),
        _decided(machine),
        _totals(machine, prompts),
        log,
        machine.entries[at.RESIDENT].tolist(),
        belady.fewest,
    )


@contextmanager
def _no_collection() -> Iterator[None]:
    """Disable garbage collection: steps are many, and none is part of a cycle.

    A tenth less time a token (at Mixtral's size, crisp: 10.4 us instead of 11.6).
    """
    was = gc.isenabled()
    gc.disable()
    try:
        yield
    finally:
        if was:
            gc.enable()


def _bound(belady: Belady, batch: StepBatch) -> None:
    """Count the tasks of a batch that has been executed."""
    tasks = len(batch.taken)
    event = np.repeat(np.arange(len(batch.first_task) - 2), np.diff(batch.first_task[:-1]))
    belady.add(event, batch.entry[:tasks], batch.taken)


def _most(machine: Machine, batch: StepBatch) -> float:
    """ns that a batch cannot exceed: nothing overlaps, and every block is loaded by itself."""
    layers = float(batch.layer_ns.max()) * len(batch.kind_of_step) * len(batch.layer_ns)
    loads = float(batch.width.sum()) * float(machine.load_ns[:, :-1].max())
    most_pieces = batch.width if machine.rules[at.BY_BLOCK] else 1
    longest = batch.piece_ns.max(axis=1, initial=0)[batch.kind_of_task]
    return float((longest.astype(float) * most_pieces).sum()) + layers + loads


def _decided(machine: Machine) -> FastCounts:
    now = machine.now.tolist()
    ahead = None
    if machine.rules[at.PREFETCH] != at.NEVER:
        ahead = FastPrefetchCounts(now[at.USEFUL], now[at.LATE], now[at.WASTED])
    return FastCounts(
        done=now[at.LEFT] == 0,
        event=now[at.EVENT],
        tasks=now[at.TASKS],
        hits=now[at.HITS],
        partial_hits=now[at.PARTIAL],
        blocks_loaded=now[at.BLOCKS_LOADED],
        bytes_loaded=now[at.BYTES_LOADED],
        ahead=ahead,
    )


def _of_prompts(steps: Sequence[Step], after: Ints, before: Ints) -> Ints:
    """Return what the steps of prefill add to ``after`` [6, steps], see `run_batch`: [6]."""
    prompts = np.array([step.phase for step in steps]) == PREFILL
    if not prompts.any():
        return np.zeros(len(after), np.int64)
    gains = np.diff(after, axis=1, prepend=before[:, None])
    total: Ints = gains[:, prompts].sum(axis=1)
    return total


def _totals(machine: Machine, prompts: Ints) -> FastTotals:
    now = machine.now.tolist()
    in_flight = now[at.TIME] - now[at.SINCE] if now[at.BUSY] else 0
    took, _, compute, layer, link, both = prompts.tolist()
    return FastTotals(
        layer=now[at.LAYER_NS],
        compute=now[at.COMPUTE_NS],
        link=now[at.LINK_NS] + in_flight,
        compute_hidden=now[at.COMPUTE_HIDDEN],
        layer_hidden=now[at.LAYER_HIDDEN],
        alone=now[at.ALONE],
        order_bound=now[at.ORDER_BOUND],
        blocks_landed=now[at.BLOCKS_LANDED],
        blocks_computed=now[at.BLOCKS_COMPUTED],
        prompts=StreamTimes(compute, layer, took - compute - layer, link, both),
    )
