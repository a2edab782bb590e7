"""Executor: drives the EventScheduler with the real streams of a device.

Whichever stream has finished something tells the scheduler, asks it what comes next, and begins
that, all under one lock and from the stream's own thread: no third thread stands between the end of
a load and the beginning of the next, and prefetching goes on while a model computes its attention.
The caller only hands over an event and waits until it is done.

Intervals begin when an operation is handed to its stream and end when it has ended there, so the
time that the handing over takes is in them.
"""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterable, Mapping
from functools import partial
from time import perf_counter_ns
from typing import Any, TypeVar

from crisp.hardware.energy import Energy, States
from crisp.hardware.profile import HardwareProfile
from crisp.hw.devices.batch import Work
from crisp.hw.devices.protocol import Copy, Device, Piece
from crisp.hw.devices.slots import Slots
from crisp.model.spec import ModelSpec
from crisp.run.case import Case
from crisp.run.driver import Driver
from crisp.run.result import HostTimes, Run, finish
from crisp.run.timeline import COMPUTE, LAYER, LOAD, PREFETCH, Recorder, StepLog
from crisp.scheduler.scheduler import EventScheduler
from crisp.scheduler.tasks import Task
from crisp.scheduler.workload import Step

Answer = TypeVar("Answer")
_UNKNOWN = -1  # a timeline's alone_ns: what it would have taken alone was not measured
_PATIENCE = 1.0  # seconds between looks at whether the streams are alive


class Executor:
    """A device at work on one event after the other."""

    def __init__(
        self,
        spec: ModelSpec,
        scheduler: EventScheduler,
        device: Device,
        slots: Slots,
        recorder: Recorder,
        watch: Callable[[EventScheduler], None] | None = None,
    ) -> None:
        """slots: as many as the device's pool has. watch: shown the scheduler whenever an event is
        over, before anything else begins.
        """
        self._driver, self.scheduler = Driver(scheduler), scheduler
        self.device, self._slots, self._watch = device, slots, watch
        self.recorder, self.log = recorder, StepLog()
        self._layers, self._experts = spec.moe_layers, spec.n_experts
        self._works: Mapping[int, Work] = {}
        self._lock = threading.Lock()
        self._over = threading.Event()  # nothing of an event, or of preloading, is left to end
        self._over.set()
        self._begun = threading.Event()  # every piece of the event is with the compute stream
        self._blocks = 0  # of the event that are not
        self._sum: Callable[[], Callable[[], Any]] = _nothing  # begins it, of the last event
        self._total: Callable[[], Any] = _nothing()
        self._failure: BaseException | None = None
        self._load_since = self._piece_since = 0
        self._step = -1
        self._free_since = 0
        self._zero = device.clock()
        self._queue_ns = self._held_ns = 0  # in the scheduler; with the lock held, that included

    def preload(self) -> None:
        """Load what is resident from the start, before the clock starts."""
        for entry, blocks in enumerate(self.scheduler.store.resident):
            if blocks:
                row, expert = divmod(entry, self._experts)
                taken = self._slots.preload(entry, blocks)
                self._over.clear()
                self.device.copy(Copy(row, expert, 0, taken), self._preloaded)
                self._settle()
        self._zero = self.device.clock()

    def residents(self, layer: int) -> list[int]:
        """Blocks of each expert of a layer that are resident between two events."""
        self._settle()
        start = self._layers.index(layer) * self._experts
        return self.scheduler.store.resident[start : start + self._experts]

    def end_step(self, step: Step | None) -> None:
        """A forward pass has ended and the next one begins; None: it is the first."""
        self._settle()
        with self._lock:
            self._step += 1
            if step is not None:
                now = self._now()
                self.log.add(step, now)
                self._flush(now, always=False)

    def event(
        self,
        layer: int,
        tasks: list[Task],
        guess: Iterable[int],
        works: Callable[[], Mapping[int, Work]],
        n: int,
    ) -> Callable[[], Any]:
        """Begin an event whose layer's attention and router are done, when the last one is over.

        works: makes what each task computes, by expert; asked while the last event ends, or when
        the first load is on its way.
        Returns what gives the outputs of its ``n`` rows, summed with the router's weights:
        [n, d_model] float32, when the last piece has begun, computed when the device says so. It
        is called before the next event, or never. Both raise what a stream failed with.
        """
        made = None if self._over.is_set() else works()
        self._settle()
        with self._lock:
            if self._failure is not None:  # a prefetch failed just now
                raise self._failure
            self._over.clear()
            self._begun.clear()
            self._blocks = sum(task.width for task in tasks)
            started, begin = self._now(), perf_counter_ns()
            self._ask(self.scheduler.start, layer, tasks, guess)
            self._slots.begin(tasks, self._driver.load)
            self._add(self.scheduler.event, layer, LAYER, -1, 0, 0, self._free_since, started,
                      self.scheduler.store.landed)  # fmt: skip
            if self.scheduler.done:  # every width is 0: nothing to do
                self._begun.set()
                self._end_event(started)
            self._begin_load()
            self._works = made = works() if made is None else made
            self._begin_piece()
            self._held_ns += perf_counter_ns() - begin
        self._total()  # of the event before the last: it is there
        self._total = self._sum()  # of the last one, if nobody has asked
        self._sum = partial(self._combine, made, n)
        return self._outputs

    def _outputs(self) -> Any:
        """Of the last event."""
        self._wait(self._begun)
        found = self._sum()()
        self._sum = _nothing
        if self._failure is not None:  # a piece that was begun: nothing of it may be used
            raise self._failure
        return found

    def _combine(self, works: Mapping[int, Work], n: int) -> Callable[[], Any]:
        """Launch the sum of an event whose last piece has begun."""
        return self.device.combine(list(works.values()), n)

    def host_times(self, lookup_ns: int) -> HostTimes:
        """What deciding took until now; ``lookup_ns`` of the caller's."""
        return HostTimes(lookup_ns, self._queue_ns, self._held_ns - self._queue_ns)

    def finish(self) -> int:
        """Wait for what is in flight, hand on the last rows; the run's time in ns."""
        self._settle()
        with self._lock:
            now = self._now()
            self._flush(now, always=True)
            self._failure = _Finished()  # a prefetch that still arrives starts nothing
        self._total()
        self._sum()()
        self.device.synchronise()
        return now

    def _settle(self) -> None:
        """Return when the last event is over; raise what a stream has failed with."""
        self._wait(self._over)

    def _wait(self, what: threading.Event) -> None:
        while not what.wait(_PATIENCE):
            self.device.check()
        if self._failure is not None:
            raise self._failure

    def _begin_load(self) -> None:
        """Let the link begin what comes next, if it is free; the lock is held."""
        load = self._ask(self._driver.next_load)
        if load is not None:
            slots = self._slots.take(load)
            self._load_since = self._now()
            copy = Copy(load.row, load.expert, load.first, slots, self._slots.ahead(load))
            self.device.copy(copy, self._loaded)

    def _begin_piece(self) -> None:
        """And then compute."""
        task = self._ask(self._driver.next_task)
        if task is not None:
            slots = self._slots.of(task, task.ended, task.started)
            self._piece_since = self._now()
            piece = Piece(self._works[task.expert], task.ended, slots)
            self.device.compute(piece, self._computed)
            self._blocks -= len(slots)
            if not self._blocks:
                self._begun.set()

    def _loaded(self, end: int, failure: BaseException | None) -> None:
        """The link's callback."""
        with self._lock:
            if self._fails(failure):
                return
            begin = perf_counter_ns()
            load = self._ask(self._driver.loaded)
            self._slots.landed(load)
            since, landed = self._load_since, self.scheduler.store.landed
            self._begin_load()  # the rest is done meanwhile
            event, kind = (-1, PREFETCH) if load.prefetch else (self.scheduler.event, LOAD)
            self._add(event, self._layers[load.row], kind, load.expert, load.first, load.blocks,
                      since, end - self._zero, landed)  # fmt: skip
            self._begin_piece()
            self._held_ns += perf_counter_ns() - begin

    def _computed(self, end: int, failure: BaseException | None) -> None:
        """The compute stream's callback."""
        with self._lock:
            if self._fails(failure):
                return
            begin, task = perf_counter_ns(), self._driver.task
            assert task is not None
            first, last = task.ended, task.started
            self._slots.used(task, first, last)
            self._ask(self._driver.computed)
            scheduler = self.scheduler
            end -= self._zero
            self._add(scheduler.event, self._layers[task.entry // self._experts], COMPUTE,
                      task.expert, first, last - first, self._piece_since, end,
                      scheduler.store.landed)  # fmt: skip
            if scheduler.done:
                self._end_event(end)
            self._begin_load()
            self._begin_piece()
            self._held_ns += perf_counter_ns() - begin

    def _end_event(self, now: int) -> None:
        if self._watch is not None:
            self._watch(self.scheduler)
        self._free_since = now
        self._over.set()

    def _preloaded(self, end: int, failure: BaseException | None) -> None:
        self._failure = failure
        self._over.set()

    def _fails(self, failure: BaseException | None) -> bool:
        """Whether there is nothing to go on with; the caller is told why."""
        self._failure = self._failure or failure
        if self._failure is not None:
            self._over.set()
            self._begun.set()
        return self._failure is not None

    def _add(
        self, event: int, layer: int, kind: int, expert: int, first: int, blocks: int,
        start: int, end: int, landed: int,
    ) -> None:  # fmt: skip
        self.recorder.add((self._step, event, layer, kind, expert, first, blocks,
                            start, end, _UNKNOWN, landed))  # fmt: skip

    def _flush(self, now: int, always: bool) -> None:
        since = self._load_since if self._driver.load is not None else None
        self.recorder.flush(now, since, always)

    def _ask(self, decide: Callable[..., Answer], *args: Any) -> Answer:
        begin = perf_counter_ns()
        answer = decide(*args)
        self._queue_ns += perf_counter_ns() - begin
        return answer

    def _now(self) -> int:
        return self.device.clock() - self._zero


def measured_run(
    case: Case,
    device: Mapping[str, Any],
    store: Mapping[str, Any],
    hardware: HardwareProfile | None,
    executor: Executor,
    total_ns: int,
    skipped: int,
    energy: Callable[[States], Energy | str],
    lookup_ns: int,
) -> Run:
    """The run that an executor has finished.

    lookup_ns: from what routers answered to widths.
    device, store: as they describe themselves; hardware: the profile that was asked for anything.
    """
    settings = case.settings("hw", None if hardware is None else hardware.to_dict())
    return finish(
        settings | {"device": dict(device), "store": dict(store)},
        case.spec,
        cost=None,
        scheduler=executor.scheduler,
        sums=executor.recorder.sums,
        log=executor.log,
        total_ns=total_ns,
        skipped=skipped,
        initial=case.initial(),
        energy=energy,
        host=executor.host_times(lookup_ns),
    )


def _nothing() -> Callable[[], None]:
    return lambda: None


class _Finished(Exception):
    """The run is over; not an error."""
