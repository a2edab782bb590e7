"""Whether a run on hardware decided what the contract says, event by event."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence

from crisp.run.case import Case
from crisp.run.driver import relive
from crisp.run.sinks import Everything
from crisp.run.timeline import BLOCKS, EVENT, EXPERT, FIRST, KIND, LAYER_ID, LOAD, PREFETCH, Rows
from crisp.scheduler.scheduler import EventScheduler
from crisp.scheduler.tasks import Task


class Seen:
    """What a run did: give its ``sink`` and its ``watch`` to `simulate` or `replay`."""

    def __init__(self) -> None:
        self.sink = Everything()
        self.states: list[list[int]] = []  # blocks of every expert that are resident, by event

    def watch(self, scheduler: EventScheduler) -> None:
        """An event is over."""
        self.states.append(list(scheduler.store.resident))


def same_decisions(measured: Seen, simulated: Seen) -> bool:
    """Whether two runs without prefetch loaded the same in the same order, and held the same after
    every event.
    """
    loads, expected = _loads(measured.sink.rows), _loads(simulated.sink.rows)
    return loads == expected and measured.states == simulated.states


def relived(case: Case, seen: Seen) -> bool:
    """Whether a fresh scheduler, told of a run's starts and completions, decides the same again."""
    scheduler, workload, again = case.scheduler(None), case.workload(), Seen()
    layers, n = case.spec.moe_layers, case.spec.n_experts

    def residents(layer: int) -> Sequence[int]:
        start = layers.index(layer) * n
        return scheduler.store.resident[start : start + n]

    def events() -> Iterator[tuple[int, list[Task], Iterable[int]]]:
        for event in workload.events(case.steps()):
            if event.experts is not None:
                yield event.layer, workload.tasks(event, residents), event.guess

    rows = seen.sink.rows
    issued = [
        (layers[load.row], load.expert, load.first, load.blocks)
        for load, _ in relive(scheduler, events(), rows, again.watch)
        if load is not None
    ]
    on_link = rows[(rows[:, KIND] == LOAD) | (rows[:, KIND] == PREFETCH)]
    landed = [tuple(row) for row in on_link[:, [LAYER_ID, EXPERT, FIRST, BLOCKS]].tolist()]
    return issued[: len(landed)] == landed and again.states == seen.states


def _loads(rows: Rows) -> list[list[int]]:
    own: list[list[int]] = rows[rows[:, KIND] == LOAD][
        :, [EVENT, LAYER_ID, EXPERT, FIRST, BLOCKS]
    ].tolist()
    return own
