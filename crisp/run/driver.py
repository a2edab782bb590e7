"""Driver: asks an EventScheduler at the moments that the contract names, for streams that are real.

After the start of an event and after every completion the link chooses if it is free, then compute
does. So the order of starts and completions determines every decision, and a timeline that has kept
it can be lived through again, in a scheduler that has seen nothing.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence

from crisp.run.timeline import COMPUTE, EVENT, KIND, LAYER, LAYER_ID, Rows
from crisp.scheduler.retention import Routed
from crisp.scheduler.scheduler import EventScheduler
from crisp.scheduler.tasks import Load, Task


class Driver:
    """The state of both streams: one load and one piece of a task in flight, at the most."""

    def __init__(self, scheduler: EventScheduler) -> None:
        self.scheduler = scheduler
        self.load: Load | None = None
        self.task: Task | None = None  # whose piece is being computed

    def next_load(self) -> Load | None:
        """Return the request that begins now, for `crisp.hw.executor` to hand to the device; None:
        the link is busy, or there is none.
        """
        if self.load is not None or not self.scheduler.wants_link:
            return None
        self.load = self.scheduler.next_load()
        return self.load

    def next_task(self) -> Task | None:
        """Return the task whose next piece begins now; None: compute is busy, or there is none."""
        if self.task is not None:
            return None
        self.task = self.scheduler.next_compute()
        return self.task

    def loaded(self) -> Load:
        """Report to the scheduler that the load has arrived."""
        load, self.load = self.load, None
        assert load is not None
        self.scheduler.loaded(load)
        return load

    def computed(self) -> Task:
        """Report to the scheduler that the piece has been computed."""
        task, self.task = self.task, None
        assert task is not None
        self.scheduler.computed(task)
        return task


def replay_timeline(
    scheduler: EventScheduler,
    events: Iterator[tuple[int, list[Task], Sequence[int], Routed | None]],
    timeline: Rows,
    watch: Callable[[EventScheduler], None],
) -> Iterator[tuple[Load | None, Task | None]]:
    """Feed a timeline's starts and completions, in its order, to a fresh scheduler.

    events: (layer, tasks, guess, routed) of one event after the other, made only when it starts,
    for widths may depend on what is resident then. watch: shown the scheduler whenever an event is
    over.
    Yields what begins after each start and completion.
    """
    driver = Driver(scheduler)
    for row in timeline:
        kind = row[KIND]
        if kind == LAYER:
            if row[EVENT] < 0:
                continue
            layer, tasks, guess, routed = next(events)
            assert layer == row[LAYER_ID]
            scheduler.start(layer, tasks, guess, routed)
        elif kind == COMPUTE:
            driver.computed()
        else:
            driver.loaded()
        if scheduler.done and kind in (LAYER, COMPUTE):
            watch(scheduler)
        yield driver.next_load(), driver.next_task()
