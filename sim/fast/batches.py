"""Steps as flat arrays: the tasks of every event, and what each of their pieces costs, exactly."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Sequence
from math import gcd

import numpy as np
import numpy.typing as npt

from crisp.hardware import CostModel
from crisp.model import ModelSpec
from crisp.policy import BoundWidths
from crisp.trace import RoutingTrace
from crisp.workload import Step
from sim.fast.compiling import kept
from sim.fast.rules import positive, within
from sim.fast.state import Batch, Ints

_ROWS = 2048  # of a batch: few enough to need little memory, enough to make up for its calls


class Costs:
    """What a cost model says, asked once for each thing."""

    def __init__(self, spec: ModelSpec, cost: CostModel) -> None:
        self._cost, self._layers, self._ends = cost, spec.n_layers, spec.n_blocks + 1
        self._grain = gcd(spec.block, spec.d_ff)  # neurons: every block is a multiple of it
        self._pieces: dict[tuple[int, int, int], int] = {}
        self._by_rows: dict[int, list[int]] = {}

    def pieces(self, first: Ints, last: Ints, neurons: Ints) -> Ints:
        """ns of blocks [first, last) of some tasks, of so many neurons summed over rows."""
        keys, place = distinct((neurons // self._grain * self._ends + first) * self._ends + last)
        found = []
        for key in keys.tolist():
            rest, last_block = divmod(key, self._ends)
            grains, first_block = divmod(rest, self._ends)
            found.append(self._piece(first_block, last_block, grains * self._grain))
        return np.array(found, np.int64)[place]

    def layers(self, rows: Ints) -> tuple[Ints, Ints]:
        """(ns [layers, kinds], kind of each step), by the rows of each step."""
        kinds, place = distinct(rows)
        table = [self._layers_of(own) for own in kinds.tolist()]
        return np.array(table, np.int64).T.copy(), place

    def _piece(self, first: int, last: int, neurons: int) -> int:
        key = first, last, neurons
        if key not in self._pieces:
            self._pieces[key] = positive(self._cost.compute(*key), "a computation")
        return self._pieces[key]

    def _layers_of(self, rows: int) -> list[int]:
        if rows not in self._by_rows:
            layers = range(self._layers)
            self._by_rows[rows] = [within(self._cost.layer(layer, rows)) for layer in layers]
        return self._by_rows[rows]


def distinct(values: Ints) -> tuple[Ints, Ints]:
    """(distinct values >= 0, rising; the place among them of each value).

    >>> [found.tolist() for found in distinct(np.array([7, 3, 7]))]
    [[3, 7], [1, 0, 1]]
    """
    most = int(values.max(initial=0))
    if most > 4 * len(values):  # few of many: sorting them is faster than counting
        found, place = np.unique(values, return_inverse=True)
        return found, place
    there = np.zeros(most + 1, bool)
    there[values] = True
    found = np.flatnonzero(there)
    place_of = np.empty(most + 1, np.int64)
    place_of[found] = np.arange(len(found))
    return found, place_of[values]


class Batches:
    """Cuts the steps of a run into batches."""

    def __init__(
        self,
        trace: RoutingTrace,
        widths: BoundWidths,
        spec: ModelSpec,
        cost: CostModel,
        *,
        by_block: bool,
        whole: bool,
        guess: bool,
    ) -> None:
        """whole: an order asks what each task takes; guess: a prefetcher asks for the trace's."""
        self._trace, self._widths, self._costs = trace, widths, Costs(spec, cost)
        self._experts, self._moe = spec.n_experts, list(trace.moe_layers)
        self._by_block, self._whole = by_block, whole
        self._guess = trace.guess if guess else None
        self._upto = np.array([spec.neurons(0, b) for b in range(spec.n_blocks + 1)], np.int64)
        self.skipped = 0  # (token, expert)s of width 0 so far

    def of(self, steps: Iterable[Step]) -> Iterator[tuple[list[Step], Batch]]:
        """Some steps at a time, in order."""
        some: list[Step] = []
        rows = 0
        for step in steps:
            some.append(step)
            rows += len(step.rows)
            if rows >= _ROWS:
                yield some, self._batch(some)
                some, rows = [], 0
        if some:
            yield some, self._batch(some)

    def _batch(self, steps: Sequence[Step]) -> Batch:
        counts = np.array([len(step.rows) for step in steps], np.int64)
        first_token = np.concatenate([[0], np.cumsum(counts)])
        rows = np.array([row for step in steps for row in step.rows], np.int64)
        experts, widths = self._routing(rows)
        first_task, expert, width, neurons = union(
            experts, widths, first_token, self._experts, self._upto, self._by_block
        )
        piece_ns, whole_ns = self._times(width, neurons)
        layer_ns, kind_of_step = self._costs.layers(counts)
        return Batch(
            kind_of_step,
            layer_ns,
            first_task,
            expert,
            width,
            piece_ns,
            whole_ns,
            first_token,
            self._guesses(rows, experts.shape[2]),
        )

    def _routing(self, rows: Ints) -> tuple[npt.NDArray[np.int16], npt.NDArray[np.int16]]:
        """Experts and widths [token rows, MoE layers, k]."""
        trace = self._trace
        whole = trace.experts[rows]
        weights = None if trace.weights is None else trace.weights[rows]
        experts = np.ascontiguousarray(whole[:, self._moe])
        widths = np.empty_like(experts)
        for place, layer in enumerate(self._moe):
            own = None if weights is None else weights[:, layer]
            widths[:, place] = self._widths.widths(layer, whole[:, layer], own, None)
        self.skipped += int(((widths == 0) & (experts >= 0)).sum())
        return experts, widths

    def _times(self, width: Ints, neurons: Ints) -> tuple[Ints, Ints]:
        whole = np.zeros(len(width), np.int64)
        if not self._by_block:
            pieces = self._costs.pieces(whole, width, neurons[:, 0])
            return pieces[:, None], pieces
        pieces = np.zeros(neurons.shape, np.int64)
        asked = neurons > 0
        block = np.broadcast_to(np.arange(neurons.shape[1]), neurons.shape)[asked]
        pieces[asked] = self._costs.pieces(block, block + 1, neurons[asked])
        if self._whole:
            whole = self._costs.pieces(whole, width, neurons.sum(axis=1))
        return pieces, whole

    def _guesses(self, rows: Ints, k: int) -> npt.NDArray[np.int16]:
        """[token rows, MoE layers, k]: what is guessed in a layer's event for the next one."""
        if self._guess is None:
            return np.empty((0, len(self._moe), k), np.int16)
        found = np.full((len(rows), len(self._moe), k), -1, np.int16)
        found[:, :-1] = self._guess[rows][:, self._moe[1:]]
        return found


def _union(
    experts: npt.NDArray[np.int16],
    widths: npt.NDArray[np.int16],
    first_token: Ints,
    n_experts: int,
    upto: Ints,
    by_block: bool,
) -> tuple[Ints, Ints, Ints, Ints]:
    """`crisp.workload.union` of every event: (first task [events + 1], expert, width, neurons).

    neurons [tasks, 1 or blocks], summed over rows; upto[b]: those of b whole blocks.
    """
    rows, layers, k = experts.shape
    steps, blocks = len(first_token) - 1, len(upto) - 1
    first_task = np.zeros(steps * layers + 1, np.int64)
    expert = np.empty(rows * layers * k, np.int64)
    width = np.zeros(rows * layers * k, np.int64)
    neurons = np.zeros((rows * layers * k, blocks if by_block else 1), np.int64)
    task_of = np.full(n_experts, -1, np.int64)
    tasks = 0
    for step in range(steps):
        for layer in range(layers):
            begin = tasks
            for row in range(first_token[step], first_token[step + 1]):
                for place in range(k):
                    asked, own = widths[row, layer, place], experts[row, layer, place]
                    if asked == 0:
                        continue
                    task = task_of[own]
                    if task < begin:
                        task = task_of[own] = tasks
                        expert[task] = own
                        tasks += 1
                    width[task] = max(width[task], asked)
                    if by_block:
                        for block in range(asked):
                            neurons[task, block] += upto[block + 1] - upto[block]
                    else:
                        neurons[task, 0] += upto[asked]
            first_task[step * layers + layer + 1] = tasks
    return first_task, expert[:tasks], width[:tasks], neurons[:tasks]


union: Callable[..., tuple[Ints, Ints, Ints, Ints]] = kept(_union)
