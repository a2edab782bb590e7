"""A run of steps, batch by batch, and what it has counted."""

from __future__ import annotations

import gc
from collections.abc import Iterable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass

import numpy as np

from crisp.hardware.profile import CostModel
from crisp.model.spec import ModelSpec
from crisp.policy import BoundWidths, Policy
from crisp.profile import Following
from crisp.run.timeline import StepLog, Totals
from crisp.scheduler.workload import Step
from crisp.sim.bounds import Belady
from crisp.sim.fast import state as at
from crisp.sim.fast.batches import Batches
from crisp.sim.fast.rules import machine_of, within
from crisp.sim.fast.state import Batch, Machine
from crisp.sim.fast.streams import run
from crisp.trace import RoutingTrace


@dataclass(frozen=True)
class Prefetched:
    """What became of the prefetched blocks."""

    useful: int
    late: int
    wasted: int


@dataclass(frozen=True)
class Decided:
    """What a scheduler counts."""

    done: bool
    event: int
    tasks: int
    hits: int
    partial_hits: int
    blocks_loaded: int
    ahead: Prefetched | None


@dataclass(frozen=True)
class Executed:
    """A run that has ended. resident: blocks of each entry; belady: see
    `crisp.scheduler.belady_bound`.
    """

    total_ns: int
    skipped: int
    decided: Decided
    sums: Totals
    log: StepLog
    resident: list[int]
    belady: int


def execute(
    spec: ModelSpec,
    policy: Policy,
    capacity: Sequence[int],
    initial: Sequence[int] | None,
    *,
    by_block: bool,
    cost: CostModel,
    trace: RoutingTrace,
    widths: BoundWidths,
    steps: Iterable[Step],
    warmth: Sequence[int] | None = None,
    following: Following | None = None,
) -> Executed:
    """Run some steps of a trace; the arguments are those of `EventScheduler` and `Workload`.

    Raises CrispError for what cannot be done exactly.
    """
    rule = policy.order.rule
    batches = Batches(
        trace,
        widths,
        spec,
        cost,
        by_block=by_block,
        whole=rule is not None and rule.timed,
        guess=policy.prefetch.name == "guess",
        following=following,
        perfect=policy.prefetch.name == "perfect",
    )
    machine = machine_of(spec, policy, capacity, initial, warmth, by_block, cost, batches.states)
    belady = Belady(spec, capacity, initial, compiled=True)
    log, most = StepLog(), 0.0
    with _no_collection():
        for some, batch in batches.of(steps):
            most += _most(machine, batch)
            within(int(most))
            ends, loaded_by = np.empty((2, len(some)), np.int64)
            run(machine, batch, ends, loaded_by)
            log.add_all(some, ends, loaded_by)
            _bound(belady, batch)
    return Executed(
        int(machine.now[at.TIME]),
        batches.skipped + int(machine.now[at.SKIPPED]),
        _decided(machine),
        _totals(machine),
        log,
        machine.entries[at.RESIDENT].tolist(),
        belady.blocks,
    )


@contextmanager
def _no_collection() -> Iterator[None]:
    """Let nobody search all objects for cycles: steps are many, and none is part of one.

    A tenth less time a token (at Mixtral's size, crisp: 10.4 us instead of 11.6).
    """
    was = gc.isenabled()
    gc.disable()
    try:
        yield
    finally:
        if was:
            gc.enable()


def _bound(belady: Belady, batch: Batch) -> None:
    """Count the tasks of a batch that has been executed."""
    tasks = len(batch.taken)
    event = np.repeat(np.arange(len(batch.first_task) - 2), np.diff(batch.first_task[:-1]))
    belady.add(event, batch.entry[:tasks], batch.taken)


def _most(machine: Machine, batch: Batch) -> float:
    """ns that a batch cannot exceed: nothing overlaps, and every block is loaded by itself."""
    layers = float(batch.layer_ns.max()) * len(batch.kind_of_step) * len(batch.layer_ns)
    loads = float(batch.width.sum()) * float(machine.load_ns.max())
    return float(batch.piece_ns.sum(dtype=float)) + layers + loads


def _decided(machine: Machine) -> Decided:
    now = machine.now.tolist()
    ahead = None
    if machine.rules[at.PREFETCH] != at.NEVER:
        ahead = Prefetched(now[at.USEFUL], now[at.LATE], now[at.WASTED])
    return Decided(
        done=now[at.LEFT] == 0,
        event=now[at.EVENT],
        tasks=now[at.TASKS],
        hits=now[at.HITS],
        partial_hits=now[at.PARTIAL],
        blocks_loaded=now[at.BLOCKS_LOADED],
        ahead=ahead,
    )


def _totals(machine: Machine) -> Totals:
    now = machine.now.tolist()
    in_flight = now[at.TIME] - now[at.SINCE] if now[at.BUSY] else 0
    return Totals(
        layer=now[at.LAYER_NS],
        compute=now[at.COMPUTE_NS],
        link=now[at.LINK_NS] + in_flight,
        compute_hidden=now[at.COMPUTE_HIDDEN],
        layer_hidden=now[at.LAYER_HIDDEN],
        alone=now[at.LAYER_NS] + now[at.COMPUTE_NS],
        order_bound=now[at.ORDER_BOUND],
        blocks_landed=now[at.BLOCKS_LANDED],
        blocks_computed=now[at.BLOCKS_COMPUTED],
    )
