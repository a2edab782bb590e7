"""Check that a run on hardware decided what the execution contract says, event by event."""

from __future__ import annotations

from collections.abc import Iterator, Sequence

from crisp.run.case import Case
from crisp.run.driver import replay_timeline
from crisp.run.sinks import FullTimeline
from crisp.run.timeline import BLOCKS, EVENT, EXPERT, FIRST, KIND, LAYER_ID, LOAD, PREFETCH, Rows
from crisp.scheduler.retention import Routed
from crisp.scheduler.scheduler import EventScheduler
from crisp.scheduler.tasks import Task


class DecisionLog:
    """The decisions of one run; pass its ``sink`` and its ``watch`` to `simulate` or `replay`."""

    def __init__(self) -> None:
        self.sink = FullTimeline()
        self.states: list[list[int]] = []  # by event: the resident blocks of every expert

    def watch(self, scheduler: EventScheduler) -> None:
        """Record what is resident at the end of an event."""
        self.states.append(list(scheduler.residency.resident))


def same_decisions(measured: DecisionLog, simulated: DecisionLog) -> bool:
    """Return whether two runs without prefetch issued the same loads in the same order, and had the
    same blocks resident after every event.
    """
    loads, expected = _loads(measured.sink.rows), _loads(simulated.sink.rows)
    return loads == expected and measured.states == simulated.states


def replay_decisions(case: Case, log: DecisionLog) -> bool:
    """Feed a run's starts and completions to a fresh scheduler; return whether it decides the same.

    This holds with prefetching too, where decisions depend on when loads end.
    """
    scheduler, workload, repeated = case.scheduler(None), case.workload(), DecisionLog()
    layers, n = case.spec.moe_layers, case.spec.n_experts

    def residents(layer: int) -> Sequence[int]:
        start = layers.index(layer) * n
        return scheduler.residency.resident[start : start + n]

    def events() -> Iterator[tuple[int, list[Task], Sequence[int], Routed | None]]:
        for event in workload.events(case.steps()):
            if event.experts is not None:
                event = workload.choose(event, residents)
                routed = workload.routed(event) if scheduler.weighs else None
                yield event.layer, workload.tasks(event, residents), event.guess, routed

    rows = log.sink.rows
    issued = [
        (layers[load.row], load.expert, load.first, load.blocks)
        for load, _ in replay_timeline(scheduler, events(), rows, repeated.watch)
        if load is not None
    ]
    on_link = rows[(rows[:, KIND] == LOAD) | (rows[:, KIND] == PREFETCH)]
    landed = [tuple(row) for row in on_link[:, [LAYER_ID, EXPERT, FIRST, BLOCKS]].tolist()]
    return issued[: len(landed)] == landed and repeated.states == log.states


def _loads(rows: Rows) -> list[list[int]]:
    """Return [event, layer, expert, first block, blocks] of each load, in the order of issue."""
    columns = [EVENT, LAYER_ID, EXPERT, FIRST, BLOCKS]
    loads: list[list[int]] = rows[rows[:, KIND] == LOAD][:, columns].tolist()
    return loads
