"""Timelines: what each stream did and when, as rows; sums over them; where they are written.

A row is an interval on a stream. Rows are written in blocks as a run goes on, so memory does not
grow with its length.
"""

from __future__ import annotations

import hashlib
from abc import ABC, abstractmethod
from array import array
from collections.abc import Sequence
from dataclasses import dataclass
from operator import itemgetter
from typing import Any, NamedTuple, Protocol

import numpy as np
import numpy.typing as npt

from crisp.errors import InvariantError
from crisp.scheduler.workload import Step

Rows = npt.NDArray[np.int64]  # [intervals, columns]
Ints = npt.NDArray[np.int64]  # of any other shape

# Kinds of interval; the first two are on the compute stream, the others on the link.
LAYER, COMPUTE, LOAD, PREFETCH = range(4)
KINDS = ("layer", "compute", "load", "prefetch")

COLUMNS = (
    "step",  # forward pass
    "event",  # MoE events count from 0; -1: a layer that is not MoE, or a prefetch
    "layer",
    "kind",  # an index of KINDS
    "expert",  # -1: router and attention
    "first",  # block
    "blocks",
    "start_ns",
    "end_ns",
    "alone_ns",  # what it takes when nothing else runs
    "resident_blocks",  # within the budget, when it ended
)
STEP, EVENT, LAYER_ID, KIND, EXPERT, FIRST, BLOCKS, START, END, ALONE, RESIDENT = range(11)
_FLUSH = 1 << 13  # rows: few enough that the arrays made of them stay in the cache


class Sink(Protocol):
    """A receiver of rows: a file, a window to draw."""

    def write(self, rows: Rows) -> None:
        """Take the next rows, in the order in which their intervals ended."""


class Recorder:
    """A collector of rows, which hands them on in blocks, each the rows of whole events."""

    def __init__(self, sinks: Sequence[Sink]) -> None:
        self._sinks = sinks
        self._values: list[int] = []
        self._jobs: list[int] = []
        self.add = self._values.extend  # add((step, event, ...)): one row, in COLUMNS' order
        self.add_jobs = self._jobs.extend  # (event, load ns, compute ns) of jobs, where costs are
        # known: what an event has to do, in whatever order; see `crisp.sim.bounds.least_times`
        self.sums = TimelineTotals()

    def flush(self, now: int, link_since: int | None, always: bool = False) -> None:
        """Hand on what has been collected, between two events, if it is much or ``always``.

        link_since: when the load that is still in flight began, if there is one.
        """
        if always or len(self._values) >= _FLUSH * len(COLUMNS):
            rows = np.array(self._values, np.int64).reshape(-1, len(COLUMNS))
            self._values.clear()
            self.sums.add(rows, now, link_since)
            self.sums.add_jobs(np.array(self._jobs, np.int64).reshape(-1, 3))
            self._jobs.clear()
            for sink in self._sinks:
                sink.write(rows)


class StreamTimes(NamedTuple):
    """How long the streams did what, in some steps of a run, in ns."""

    compute: int  # routed experts
    layer: int  # router, attention and what else is not a routed expert
    stall: int  # compute idle
    link: int
    both: int  # link and compute busy


@dataclass
class RunTotals(ABC):
    """Sums over a run, whether its timeline was kept or not; in ns unless said otherwise."""

    layer: int = 0  # router, attention and what else is not a routed expert
    compute: int = 0  # routed experts
    link: int = 0
    compute_hidden: int = 0  # routed experts, while the link is busy
    layer_hidden: int = 0
    alone: int = 0  # all computations, as if nothing had to be loaded
    order_bound: int = 0  # every event's tasks in their best order
    blocks_landed: int = 0  # blocks
    blocks_computed: int = 0  # blocks

    @abstractmethod
    def prompt_times(self, prompts: npt.NDArray[np.bool_]) -> StreamTimes:
        """Return how long the streams were busy in steps of prefill: where ``prompts`` [steps]."""

    def digest(self) -> str | None:
        """Return the sha256 of the timeline; None: there is none."""
        return None

    def computed_by_layer(self) -> dict[int, int]:
        """Return the blocks computed in each MoE layer, as a timeline counts them."""
        return {}


class TimelineTotals(RunTotals):
    """Sums over a timeline that is fed block by block."""

    def __init__(self) -> None:
        super().__init__()
        self._until = 0  # all before this has been counted
        self._rows = hashlib.sha256()
        self._computed = np.zeros(0, np.int64)  # [layers]: blocks
        self._compute_until = 0  # when the last computation ended
        self._by_step = array("q")  # [steps, 5]: see `StreamTimes`

    def add(self, rows: Rows, now: int, link_since: int | None) -> None:
        """Count the intervals that ended up to ``now``, and check that none overlap."""
        self._rows.update(rows.tobytes())
        kind = rows[:, KIND]
        on_link = (kind == LOAD) | (kind == PREFETCH)
        link = np.clip(rows[on_link][:, [START, END]], self._until, now)
        if link_since is not None:
            link = np.vstack([link, [[max(link_since, self._until), now]]])
        compute = rows[~on_link][:, [START, END]]
        _check_disjoint(link, "link")
        _check_disjoint(compute, "compute")
        lengths = compute[:, 1] - compute[:, 0]
        hidden = _overlap(compute, link)
        of_experts = kind[~on_link] == COMPUTE
        self.compute += int(lengths[of_experts].sum())
        self.layer += int(lengths[~of_experts].sum())
        self.link += int((link[:, 1] - link[:, 0]).sum())
        self.compute_hidden += int(hidden[of_experts].sum())
        self.layer_hidden += int(hidden[~of_experts].sum())
        self.blocks_landed += int(rows[on_link, BLOCKS].sum())
        computed = rows[kind == COMPUTE]
        self.blocks_computed += int(computed[:, BLOCKS].sum())
        blocks = np.bincount(computed[:, LAYER_ID], computed[:, BLOCKS], len(self._computed))
        blocks[: len(self._computed)] += self._computed
        self._computed = blocks.astype(np.int64)
        layers = int(rows[kind == LAYER, ALONE].sum())
        self.alone += layers
        self.order_bound += layers
        self._add_steps(rows[~on_link], hidden, link)
        self._until = now

    def add_jobs(self, jobs: Rows) -> None:
        """Count what whole events have to do: jobs [n, (event, load ns, compute ns)]."""
        event, load, compute = jobs.T
        self.alone += int(compute.sum())
        self.order_bound += makespan(load, compute, event)

    def prompt_times(self, prompts: npt.NDArray[np.bool_]) -> StreamTimes:
        table = self._table()
        return StreamTimes(*table[prompts[: len(table)].nonzero()].sum(axis=0).tolist())

    def _table(self) -> Ints:
        """Return the times of each step so far, [steps, 5]."""
        return np.frombuffer(self._by_step, np.int64).reshape(-1, len(StreamTimes._fields))

    def _add_steps(self, computations: Rows, hidden: Ints, link: Ints) -> None:
        """Count the times of each step: it lasts from the end of the last computation of the one
        before until the end of its own. What is loaded behind the last one of all is no step's.

        hidden: of each computation, how long the link is busy. link [loads, (start, end)].
        """
        if not len(computations):
            return
        starts, ends = computations[:, START], computations[:, END]
        until = np.concatenate([[self._compute_until], ends])
        of_experts = computations[:, KIND] == COMPUTE
        lengths = ends - starts
        times = np.stack(
            [lengths * of_experts, lengths * ~of_experts, starts - until[:-1],
             np.diff(_covered(until, link)), hidden], axis=1,
        )  # fmt: skip  # [computations, 5]
        step = np.maximum(computations[:, STEP], 0)
        begins = np.flatnonzero(np.diff(step, prepend=-1))
        missing = int(step[-1]) + 1 - len(self._by_step) // times.shape[1]
        self._by_step.extend([0] * (max(0, missing) * times.shape[1]))
        table = self._table()
        table[step[begins]] += np.add.reduceat(times, begins)
        self._compute_until = int(ends[-1])

    def digest(self) -> str:
        """Return the sha256 of all rows so far: a file of them is this run's, and no other's."""
        return self._rows.hexdigest()

    def computed_by_layer(self) -> dict[int, int]:
        return dict(enumerate(self._computed.tolist()))


@dataclass(frozen=True, eq=False)
class StepTimes:
    """When the steps of a run ended and what they loaded, [steps] each."""

    end_ns: Ints
    rows: Ints
    n_bytes: Ints  # issued on the link until then, from the start of the run
    sequence: npt.NDArray[np.int32]  # of the first row
    phase: npt.NDArray[np.uint8]


class StepLog:
    """A log of when every step ended, and what it was."""

    def __init__(self) -> None:
        self._values = array("q")

    def add(self, step: Step, end_ns: int, n_bytes: int = 0) -> None:
        """Log that a step has ended; the next one begins at once. n_bytes: issued until then."""
        self._values.extend(
            (end_ns, len(step.rows), step.phase, step.opens, step.closes, n_bytes, step.rows[0])
        )

    def add_all(self, steps: Sequence[Step], ends: Ints, n_bytes: Ints) -> None:
        """Log that steps have ended, one after the other, at ``ends`` [steps]."""
        table = np.empty((len(steps), 7), np.int64)
        rows, *more = zip(*steps, strict=True)
        columns: list[Any] = [ends, [*map(len, rows)], *more, n_bytes, [*map(itemgetter(0), rows)]]
        for place, column in enumerate(columns):
            table[:, place] = column
        self._values.frombytes(table.tobytes())

    def columns(self) -> tuple[Ints, Ints, Ints, Ints, Ints]:
        """Return (end in ns, rows, phase, opens a prompt, closes one), each [steps]."""
        end, rows, phase, opens, closes = self._table()[:, :5].T
        return end, rows, phase, opens, closes

    def bytes_loaded(self) -> Ints:
        """Return the bytes issued from the start until each step ended, [steps]."""
        return self._table()[:, 5]

    def steps(self, sequence: npt.NDArray[np.int32]) -> StepTimes:
        """Return when steps ended and what they loaded; sequence: of each row of the trace."""
        end, rows, phase, _, _, n_bytes, first = self._table().T
        return StepTimes(
            end.copy(), rows.copy(), n_bytes.copy(), sequence[first], phase.astype(np.uint8)
        )

    def _table(self) -> Ints:
        """Return the log, [steps, 7]: see `add`."""
        return np.frombuffer(self._values, np.int64).reshape(-1, 7)


def makespan(load: Ints, compute: Ints, event: Ints) -> int:
    """Return the shortest time of every event's jobs on two machines, summed (Johnson's rule).

    Jobs [n]: first ``load`` ns on the link, then ``compute`` ns; their order is free within each
    ``event``, and the same on both machines.

    >>> makespan(np.array([4, 1]), np.array([1, 4]), np.array([0, 0]))  # the short load first
    6
    """
    if not len(event):
        return 0
    late = load >= compute
    order = np.lexsort((np.where(late, -compute, load), late, event))
    load, compute, event = load[order], compute[order], event[order]
    starts = np.flatnonzero(np.diff(event, prepend=event[0] - 1))
    loaded = np.cumsum(load)
    computed = np.cumsum(compute)
    # a schedule lasts as long as its longest path: loads up to some job, computations from it on
    path = loaded - computed + compute
    first = np.maximum.reduceat(path, starts)
    before_load = loaded[starts] - load[starts]
    ends = np.append(starts[1:], len(event)) - 1
    return int((first - before_load + computed[ends]).sum())


def _check_disjoint(intervals: Ints, stream: str) -> None:
    """Raise InvariantError unless intervals [n, (start, end)] follow one another."""
    if (intervals[:, 1] < intervals[:, 0]).any() or (intervals[1:, 0] < intervals[:-1, 1]).any():
        raise InvariantError(f"two intervals of the {stream} stream overlap")


def _overlap(intervals: Ints, others: Ints) -> Ints:
    """Return how much of each interval ``others`` cover, which are sorted and disjoint.

    Both are [intervals, (start, end)] in ns.
    """
    return _covered(intervals[:, 1], others) - _covered(intervals[:, 0], others)


def _covered(times: Ints, intervals: Ints) -> Ints:
    """Return how much of the time until each of ``times`` is covered by intervals, sorted and
    disjoint, [intervals, (start, end)] in ns.
    """
    if not len(intervals):
        return np.zeros(len(times), np.int64)
    lengths = intervals[:, 1] - intervals[:, 0]
    before = np.concatenate([[0], np.cumsum(lengths)])
    index = np.searchsorted(intervals[:, 0], times, side="right")
    inside = np.minimum(times - intervals[index - 1, 0], lengths[index - 1])
    covered: Ints = before[index] - np.where(index > 0, lengths[index - 1] - inside, 0)
    return covered
