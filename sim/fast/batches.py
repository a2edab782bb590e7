"""Steps as flat arrays: the tasks of every event, and what each of their pieces costs, exactly."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Sequence
from math import gcd, isqrt
from typing import Any

import numpy as np
import numpy.typing as npt

from crisp.hardware.cost import costs_by_row
from crisp.hardware.profile import CostModel
from crisp.model.spec import ModelSpec
from crisp.policy import BoundWidths
from crisp.policy.magnitude import weighed
from crisp.policy.retention import ONE, units
from crisp.profile import Transitions
from crisp.scheduler.workload import Step
from crisp.sim.bounds import least_times
from crisp.sim.fast.rules import positive, refused, within
from crisp.sim.fast.state import Ints, StepBatch
from crisp.sim.fast.unions import distinct, routed, union, union_on
from crisp.trace import RoutingTrace

_ROWS = 2048  # of a batch: few enough to need little memory, enough to make up for its calls
MOST_BLOCKS = 62  # of an expert, where blocks are bits of a word


class CostTable:
    """Costs by a cost model, which is asked once for each thing."""

    def __init__(self, spec: ModelSpec, cost: CostModel) -> None:
        self._cost, self._layers, self._ends = cost, spec.n_layers, spec.n_blocks + 1
        self._grain = gcd(spec.block, spec.d_ff)  # neurons: every block is a multiple of it
        self._pieces: dict[int, int] = {}
        self._by_rows: dict[int, list[int]] = {}
        ends = (spec.neurons(0, blocks) // self._grain for blocks in range(self._ends))
        self.grains = np.array(list(ends), np.int64)
        """[blocks + 1]: grains of so many whole blocks."""

    def pieces(self, first: Ints | int, last: Ints, grains: Ints) -> Ints:
        """ns of blocks [first, last) of some tasks, of so many grains summed over rows.

        It is 0 where there are none of them.
        """
        keys = (grains * self._ends + first) * self._ends + last
        most = int(keys.max(initial=0))
        if most > 4 * keys.size:  # few of many: sorting them is faster than counting
            distinct, place = np.unique(keys, return_inverse=True)
            ns = np.array([self._piece(key) for key in distinct.tolist()], np.int64)
            whole: Ints = ns[place].reshape(keys.shape)
            return whole
        there = np.zeros(most + 1, bool)
        there[keys] = True
        table = np.zeros(most + 1, np.int64)
        for key in np.flatnonzero(there).tolist():
            table[key] = self._piece(key)
        return table.take(keys)

    def layers(self, rows: Ints) -> tuple[Ints, Ints]:
        """Return (ns [layers, kinds], kind of each step), by the rows of each step."""
        kinds, place = np.unique(rows, return_inverse=True)
        table = [self._layers_of(n_rows) for n_rows in kinds.tolist()]
        return np.array(table, np.int64).T.copy(), place

    def _piece(self, key: int) -> int:
        if key not in self._pieces:
            rest, last = divmod(key, self._ends)
            grains, first = divmod(rest, self._ends)
            ns = 0
            if grains:
                ns = positive(
                    self._cost.compute(first, last, grains * self._grain), "a computation"
                )
            self._pieces[key] = ns
        return self._pieces[key]

    def _layers_of(self, rows: int) -> list[int]:
        if rows not in self._by_rows:
            layers = range(self._layers)
            self._by_rows[rows] = [within(self._cost.layer(layer, rows)) for layer in layers]
        return self._by_rows[rows]


class StepBatches:
    """The steps of a run, cut into batches."""

    def __init__(
        self,
        trace: RoutingTrace,
        widths: BoundWidths,
        spec: ModelSpec,
        cost: CostModel,
        *,
        by_block: bool,
        weighs: bool,
        guess: bool,
        following: Transitions | None,
        perfect: bool,
        magnitudes: bool = False,
    ) -> None:
        """weighs: the router's weights are asked for, as `EventScheduler.weighs` says; guess,
        following, perfect: a prefetcher asks for the trace's guesses, for what is usual, or for
        what will be; magnitudes: widths do, for the trace's.
        """
        self._trace, self._widths, self._costs = trace, widths, CostTable(spec, cost)
        self._row_costs: list[CostTable] = []  # [MoE layers], where their experts differ in bytes
        if spec.layer_bits is not None:
            self._row_costs = [CostTable(spec, own) for own in costs_by_row(cost, spec)]
        self._experts, self._moe = spec.n_experts, list(trace.moe_layers)
        self._by_block, self._perfect = by_block, perfect
        self._weighs = weighs
        self._guess = trace.guess if guess else None
        self._magnitudes = trace.magnitudes if magnitudes else None
        self._following = following
        self._wanted: Callable[..., npt.NDArray[np.uint64]] | None = None
        if widths.residency:
            self._wanted = getattr(widths, "wanted", None)
            if self._wanted is None or spec.n_blocks > MOST_BLOCKS:
                raise refused("these widths, which depend on what is resident")
        self.states = 1 if self._wanted is None else spec.n_blocks + 1
        self.skipped = 0  # (token, expert)s of width 0 so far, whatever is resident

    def of(self, steps: Iterable[Step]) -> Iterator[tuple[list[Step], StepBatch]]:
        """Yield some steps at a time, in order."""
        batches = ((some, self._batch(some)) for some in self._cut(steps))
        return _followed(batches) if self._perfect else batches

    def _cut(self, steps: Iterable[Step]) -> Iterator[list[Step]]:
        some: list[Step] = []
        rows, most = 0, max(1, _ROWS // self.states)
        for step in steps:
            some.append(step)
            rows += len(step.rows)
            if rows >= most:
                yield some
                some, rows = [], 0
        if some:
            yield some

    def _batch(self, steps: Sequence[Step]) -> StepBatch:
        counts = np.array([len(step.rows) for step in steps], np.int64)
        first_token = np.concatenate([[0], np.cumsum(counts)])
        rows = np.array([row for step in steps for row in step.rows], np.int64)
        whole = self._trace.experts[rows]
        weights = None if self._trace.weights is None else self._trace.weights[rows]
        worth: npt.NDArray[np.floating[Any]] | None = weights
        if self._magnitudes is not None and weights is not None:
            worth = weighed(weights, self._magnitudes[rows])
        experts = whole
        if len(self._moe) < whole.shape[1]:
            experts = np.ascontiguousarray(whole[:, self._moe])
        seen = bare = np.empty(0, np.int64)
        if self._wanted is None:
            requested = self._asked(self._widths.widths, whole, worth, np.int16, None)
            self.skipped += int(np.count_nonzero(experts >= 0) - np.count_nonzero(requested))
            first_task, entry, width, grains = union(
                experts, requested, first_token, self._experts, self._costs.grains, self._by_block
            )
        else:
            bits = self._asked(self._wanted, whole, worth, np.int64)
            first_task, entry, width, seen, bare, grains = union_on(
                experts, bits, first_token, self._experts, self._costs.grains, self._by_block
            )
        kind_of_task, piece_ns = self._times(entry, width, grains)
        layer_ns, kind_of_step = self._costs.layers(counts)
        taken = width if self._wanted is None else np.zeros(len(entry), np.int64)
        return StepBatch(
            kind_of_step, layer_ns, first_task, entry, width, seen, bare, taken,
            kind_of_task, piece_ns, self._least(piece_ns), first_token, self._guesses(rows, whole),
            *self._routed(experts, weights, first_token),
        )  # fmt: skip

    def _asked(
        self,
        rule: Callable[..., npt.NDArray[Any]],
        experts: npt.NDArray[np.int16],
        weights: npt.NDArray[np.floating[Any]] | None,
        kind: type[np.integer[Any]],
        *more: None,
    ) -> npt.NDArray[Any]:
        """Return what a width policy says: [MoE layers, token rows, k]."""
        requested = np.empty((len(self._moe), len(experts), experts.shape[2]), kind)
        for place, layer in enumerate(self._moe):
            layer_weights = None if weights is None else weights[:, layer]
            requested[place] = rule(layer, experts[:, layer], layer_weights, *more)
        return requested

    def _times(self, entry: Ints, width: Ints, grains: Ints) -> tuple[Ints, Ints]:
        """Return (the kind of each (task, state), ns of each kind's pieces)."""
        if not self._row_costs:
            return self._times_by(self._costs, width, grains)
        row = np.repeat(entry // self._experts, self.states)  # [tasks x states]
        kind_of_task, tables, kinds = np.zeros(len(width), np.int64), [], 0
        for place, costs in enumerate(self._row_costs):
            own = row == place
            kind, table = self._times_by(costs, width[own], grains[own])
            kind_of_task[own] = kinds + kind
            kinds += len(table)
            tables.append(table)
        return kind_of_task, np.concatenate(tables)

    def _times_by(self, costs: CostTable, width: Ints, grains: Ints) -> tuple[Ints, Ints]:
        if not self._by_block:
            return np.arange(len(width)), costs.pieces(0, width, grains[:, 0])[:, None]
        kind_of_task, one_of_kind = distinct(grains)
        grains = grains[one_of_kind]
        kinds, blocks = grains.shape
        upto = np.zeros((kinds, blocks + 1), np.int64)
        np.cumsum(grains, axis=1, out=upto[:, 1:])
        first, last = np.triu_indices(blocks)  # blocks [first, last]
        there = grains[:, last] > 0
        pieces = costs.pieces(first, last + 1, (upto[:, last + 1] - upto[:, first]) * there)
        piece_ns = np.full((kinds, blocks * blocks), -1, np.int64)
        piece_ns[:, first * blocks + last] = np.where(there, pieces, -1)
        return kind_of_task, piece_ns

    def _least(self, piece_ns: Ints) -> Ints:
        if not self._by_block:
            return piece_ns
        blocks = isqrt(piece_ns.shape[1])
        return least_times(piece_ns.reshape(-1, blocks, blocks))

    def _routed(
        self,
        experts: npt.NDArray[np.int16],
        weights: npt.NDArray[np.float16] | None,
        first_token: Ints,
    ) -> tuple[Ints, Ints]:
        """Return (first [events + 2], (entry, mean weight, largest) [3, routed]).

        experts [rows, MoE layers, k]. After the last event comes an empty one.
        """
        if not self._weighs:
            return np.zeros(0, np.int64), np.zeros((3, 0), np.int64)
        if weights is None:
            each = np.full(experts.shape, ONE // experts.shape[2], np.int64)
        else:
            each = units(weights if len(self._moe) == weights.shape[1] else weights[:, self._moe])
        first, found = routed(experts, each, first_token, self._experts)
        return np.append(first, first[-1]), found

    def _guesses(self, rows: Ints, experts: npt.NDArray[np.int16]) -> npt.NDArray[np.int16]:
        """[token rows, MoE layers, k]: what is guessed in a layer's event for the next one."""
        shape = len(self._moe), experts.shape[2]
        if self._guess is None and self._following is None:
            return np.empty((0, *shape), np.int16)
        guesses = np.full((len(rows), *shape), -1, np.int16)
        if self._guess is not None:
            guesses[:, :-1] = self._guess[rows][:, self._moe[1:]]
        elif self._following is not None:
            for place, layer in enumerate(self._moe[:-1]):
                guesses[:, place] = self._following.guess(layer, experts[:, layer])
        return guesses


def _followed(
    batches: Iterable[tuple[list[Step], StepBatch]],
) -> Iterator[tuple[list[Step], StepBatch]]:
    """Yield the same, each batch with the next one's first event behind its own: its tasks, and
    what it is routed to.
    """
    before: tuple[list[Step], StepBatch] | None = None
    for some, batch in batches:
        if before is not None:
            steps, last = before
            tasks = batch.first_task[1]
            first_task = last.first_task.copy()
            first_task[-1] += tasks
            entry = np.concatenate([last.entry, batch.entry[:tasks]])
            last = last._replace(first_task=first_task, entry=entry)
            if len(batch.first_routed):
                count = batch.first_routed[1]
                last.first_routed[-1] += count
                both = np.concatenate([last.routed, batch.routed[:, :count]], axis=1)
                last = last._replace(routed=both)
            yield steps, last
        before = some, batch
    if before is not None:
        yield before
