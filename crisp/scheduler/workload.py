"""A trace as the stream of events it stands for: steps, widths, tasks and guesses.

Whatever executes a trace takes this stream, and so exactly the same tasks.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Sequence
from itertools import pairwise
from typing import Any, NamedTuple

import numpy as np
import numpy.typing as npt

from crisp.errors import CrispError
from crisp.policy import BoundWidths
from crisp.policy.magnitude import weighed
from crisp.policy.retention import routed_weights
from crisp.policy.routing.rules import BoundRouting
from crisp.profile import Transitions
from crisp.scheduler.retention import Routed
from crisp.scheduler.tasks import Task
from crisp.trace import DECODE, PREFILL, RoutingTrace

PHASES = ("decode", "prefill", "all")
WHOLE = "whole"  # a chunk that is as long as its prompt
_GATHER = 128  # rows whose widths are looked up at a time: few enough to stay in the cache


class Step(NamedTuple):
    """One forward pass: a token of each active sequence, or a chunk of one prompt."""

    rows: Sequence[int]  # of the trace; decode: in slot order
    phase: int
    opens: bool = False  # the first chunk of a prompt that is run to its end
    closes: bool = False  # the last one


class Event(NamedTuple):
    """One layer of one step; a layer that is not MoE has no experts."""

    step: Step
    layer: int
    experts: Sequence[Sequence[int]] | None  # [rows][k]
    widths: Sequence[Sequence[int]] | None  # blocks; None: they depend on residency
    guess: Sequence[int]  # for the next MoE layer, row by row, rank by rank
    place: slice  # of its rows in the arrays looked up last


def split(trace: RoutingTrace) -> tuple[RoutingTrace, RoutingTrace, str]:
    """(profile part, rest, how): the first half of the sequences, or of the only one's rows."""
    ids, _, ends = trace.sequences()
    if len(ids) > 1:
        half = len(ids) // 2
        cut = int(ends[half - 1])
        how = f"profile: the first {half} of the trace's {len(ids)} sequences; run: the rest"
    else:
        cut = trace.rows // 2
        how = f"profile: the first {cut} of the only sequence's {trace.rows} rows; run: the rest"
    if cut == 0:
        raise CrispError("the trace has a single row: nothing to split; give --profile")
    return trace.select(slice(0, cut)), trace.select(slice(cut, None)), how


def chosen_rows(trace: RoutingTrace, phase: str, limit: int | None) -> npt.NDArray[np.int64]:
    """Return the first ``limit`` rows of ``phase`` (decode, prefill or all); CrispError if none."""
    if phase == "all":
        rows = np.arange(trace.rows)[:limit]
    else:
        rows = np.flatnonzero(trace.phase == {"prefill": PREFILL, "decode": DECODE}[phase])[:limit]
    if not len(rows):
        raise CrispError(f"phase {phase}: the trace has no such rows to simulate")
    return rows


def plan(
    trace: RoutingTrace, rows: npt.NDArray[np.int64], batch: int, chunk: int | str
) -> Iterator[Step]:
    """Yield the steps that execute ``rows`` (rising) of the trace.

    Decode: ``batch`` slots; a step takes one token of each active sequence, and a finished one's
    slot takes the next sequence in order, whose prompt runs first, in chunks of ``chunk`` rows, or
    in one if that is WHOLE.
    """
    cuts = np.flatnonzero(np.diff(trace.sequence[rows])) + 1
    waiting = np.split(rows, cuts)[::-1]
    batch = min(batch, len(waiting))
    prompts: list[list[int]] = [[] for _ in range(batch)]
    slots: list[list[int]] = [[] for _ in range(batch)]  # rows still to decode, reversed
    while True:
        for slot in range(batch):
            if waiting and not prompts[slot] and not slots[slot]:
                rows_of_sequence = waiting.pop()
                decode = trace.phase[rows_of_sequence] == DECODE
                prompts[slot] = rows_of_sequence[~decode].tolist()
                slots[slot] = rows_of_sequence[decode][::-1].tolist()
        if any(prompts):
            first = min(filter(None, prompts))  # of the sequence that came first
            yield from _chunks(first, chunk, _ends_here(trace, first[-1]))
            prompts[prompts.index(first)] = []
        elif batch == 1 and slots[0]:  # most runs, and so without looking round at every token
            for row in reversed(slots[0]):
                yield Step([row], DECODE)
            slots[0] = []
        elif taken := [slot.pop() for slot in slots if slot]:
            yield Step(taken, DECODE)
        else:
            return


def _ends_here(trace: RoutingTrace, row: int) -> bool:
    """Return whether the prompt of ``row`` ends with it: a limit may have cut it."""
    if row + 1 == trace.rows or trace.phase[row + 1] == DECODE:
        return True
    return bool(trace.sequence[row + 1] != trace.sequence[row])


def _chunks(prompt: list[int], chunk: int | str, whole: bool) -> Iterator[Step]:
    size = chunk if isinstance(chunk, int) else len(prompt)
    for start in range(0, len(prompt), size):
        last = start + size >= len(prompt)
        yield Step(prompt[start : start + size], PREFILL, whole and start == 0, whole and last)


class Workload:
    """The events of a run's steps, and their tasks."""

    def __init__(
        self,
        trace: RoutingTrace,
        widths: BoundWidths,
        guess: bool,
        following: Transitions | None = None,
        routing: BoundRouting | None = None,
        magnitudes: bool = False,
    ) -> None:
        """guess: whether the run needs the trace's guesses; following: takes their place.

        routing: chooses experts anew, of a trace with scores; see `choose`. magnitudes: whether
        widths ask for them, of a trace that has some.
        """
        self._trace = trace
        self._policy = widths
        self._routing = routing
        self._at_once = (
            not widths.residency and routing is None
        )  # widths of many rows may be looked up together
        self._guess = trace.guess if guess else None
        self._following = following
        self._experts = trace.experts[:0]
        self._weights, self._scores = trace.weights, trace.scores
        self._asks, self._magnitudes = magnitudes, trace.magnitudes
        self.skipped = 0  # (token, expert)s of width 0, or not used, so far

    @property
    def depends(self) -> bool:
        """Whether tasks depend on what is resident."""
        return not self._at_once

    def events(self, steps: Iterable[Step]) -> Iterator[Event]:
        """Yield all events in order; routing is looked up for many steps at once."""
        some: list[Step] = []
        rows = 0
        for step in steps:
            some.append(step)
            rows += len(step.rows)
            if rows >= _GATHER:
                yield from self._gathered(some)
                some, rows = [], 0
        if some:
            yield from self._gathered(some)

    @property
    def looks(self) -> bool:
        """Whether experts or widths depend on what is resident when their event starts."""
        return not self._at_once

    def choose(self, event: Event, resident: Callable[[int], Sequence[int]]) -> Event:
        """Return an event that starts now, with the experts that its tokens use.

        Without a routing rule those of the trace. resident(layer): blocks of each expert.
        """
        if self._routing is None:
            return event
        assert self._scores is not None
        assert self._weights is not None
        place = event.place, event.layer
        experts, weights = self._experts[place], self._weights[place]
        used, self._weights[place] = self._routing.choose(
            event.layer, self._scores[place], experts, weights, resident(event.layer)
        )
        self.skipped += int((experts >= 0).sum() - (used >= 0).sum())
        self._experts[place] = used
        return event._replace(experts=used.tolist())

    def tasks(self, event: Event, resident: Callable[[int], Sequence[int]]) -> list[Task]:
        """Return the tasks of an event that starts now; resident(layer): blocks of each expert."""
        assert event.experts is not None
        return union(event.experts, self.widths(event, resident))

    def widths(
        self, event: Event, resident: Callable[[int], Sequence[int]]
    ) -> Sequence[Sequence[int]]:
        """Return the widths [rows][k], in blocks, of an event that starts now."""
        if event.widths is not None:
            return event.widths
        return self._widths(event.layer, event.place, resident(event.layer))

    def routed(self, event: Event) -> Routed:
        """Return (expert, mean weight) of all that an event is routed to."""
        assert event.experts is not None
        weights = None if self._weights is None else self._weights[event.place, event.layer]
        return routed_weights(event.experts, weights)

    def weights(self, event: Event) -> npt.NDArray[np.float32]:
        """Return the router's weights [rows, k] of an event; equal ones if the trace has none."""
        if self._weights is None:
            ids = self._experts[event.place, event.layer]
            return np.full(ids.shape, 1 / ids.shape[1], np.float32)
        return self._weights[event.place, event.layer].astype(np.float32)

    def _gathered(self, steps: Sequence[Step]) -> Iterator[Event]:
        rows = np.concatenate([step.rows for step in steps])
        trace, moe = self._trace, self._trace.moe_layers
        self._experts = trace.experts[rows]
        self._weights = None if trace.weights is None else trace.weights[rows]
        self._scores = None if self._routing is None or trace.scores is None else trace.scores[rows]
        if self._asks and trace.magnitudes is not None:
            self._magnitudes = trace.magnitudes[rows]
        ids: dict[int, list[Any]] = {layer: self._experts[:, layer].tolist() for layer in moe}
        widths: dict[int, list[Any]] = {}
        if self._at_once:
            widths = {layer: self._widths(layer, slice(None), None) for layer in moe}
        ahead: dict[int, list[Any]] = {}  # by the layer in whose event the guess is made
        if self._guess is not None:
            guess = self._guess[rows]
            ahead = {layer_now: guess[:, then].tolist() for layer_now, then in pairwise(moe)}
        elif self._following is not None:
            usual = self._following.guess
            ahead = {
                layer_now: usual(layer_now, self._experts[:, layer_now]).tolist()
                for layer_now in moe[:-1]
            }
        start = 0
        for step in steps:
            stop = start + len(step.rows)
            place = slice(start, stop)
            for layer in range(trace.layers):
                if layer not in ids:
                    yield Event(step, layer, None, None, (), place)
                    continue
                requested = widths[layer][place] if self._at_once else None
                guessed: list[int] = []
                if layer in ahead:
                    guessed = [expert for row in ahead[layer][place] for expert in row]
                yield Event(step, layer, ids[layer][place], requested, guessed, place)
            start = stop

    def _widths(self, layer: int, place: slice, resident: Sequence[int] | None) -> list[list[int]]:
        ids = self._experts[place, layer]
        weights: npt.NDArray[np.floating[Any]] | None
        weights = None if self._weights is None else self._weights[place, layer]
        if self._asks and weights is not None:
            assert self._magnitudes is not None
            weights = weighed(weights, self._magnitudes[place, layer])
        widths = self._policy.widths(layer, ids, weights, resident)
        self.skipped += int(((widths == 0) & (ids >= 0)).sum())
        rows: list[list[int]] = widths.tolist()
        return rows


def union(experts: Sequence[Sequence[int]], widths: Sequence[Sequence[int]]) -> list[Task]:
    """Return an event's tasks: each distinct expert once, by first appearance (row, then rank).

    >>> [(t.expert, t.width, t.widths) for t in union([[3, 1], [1, 3]], [[8, 4], [8, 0]])]
    [(3, 8, [8]), (1, 8, [4, 8])]
    """
    if len(experts) == 1:
        return [Task(e, (w,)) for e, w in zip(experts[0], widths[0], strict=True) if w]
    widths_of: dict[int, list[int]] = {}
    for row, row_widths in zip(experts, widths, strict=True):
        for expert, width in zip(row, row_widths, strict=True):
            if width:
                widths_of.setdefault(expert, []).append(width)
    return [Task(expert, requested) for expert, requested in widths_of.items()]
