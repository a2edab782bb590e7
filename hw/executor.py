"""The executor: drives the EventScheduler with the real streams of a device.

How a load becomes a read of the disk:

1. ``EventScheduler.next_load`` chooses the blocks, and what they evict, when the link is free;
   `crisp.run.driver.Driver.next_load` asks it.
2. `Executor._begin_load` takes a slot of the pool for each block, and calls ``Device.copy``.
3. `crisp.hw.devices.cpu.device.CpuDevice.copy` passes the slots' memory to ``StoreFiles.begin``,
   and has its reading thread wait for the end.
4. `crisp.hw.store.block_io.StoreFiles.begin` cuts the bytes into requests, and submits the first.
5. `crisp.hw.store.aio.AsynchronousRead.begin` makes the system call, ``io_submit``.
6. When the reading thread has seen the end it calls `Executor._loaded`, which tells the scheduler
   and begins the next load.

The stream that has finished an operation tells the scheduler, asks it what comes next and begins
that, under one lock and in the stream's own thread: no third thread stands between the end of a
load and the beginning of the next, and prefetching goes on while a model computes its attention.
The caller only hands over an event and waits until it is done.

An interval begins when an operation is handed to its stream and ends when it has ended there, so
it includes the handing over.
"""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from functools import partial
from time import perf_counter_ns
from typing import Any, TypeVar

from crisp.hw.devices.batch import ExpertBatch
from crisp.hw.devices.protocol import BlockRange, Copy, Device
from crisp.hw.devices.slots import Slots
from crisp.model.spec import ModelSpec
from crisp.run.driver import Driver
from crisp.run.finish import HostTimes
from crisp.run.timeline import COMPUTE, LAYER, LOAD, PREFETCH, Recorder, StepLog
from crisp.scheduler.retention import Routed
from crisp.scheduler.scheduler import EventScheduler
from crisp.scheduler.tasks import Task
from crisp.scheduler.workload import Step

Answer = TypeVar("Answer")
_UNKNOWN = -1  # a timeline's alone_ns: how long it would have taken alone was not measured
_CHECK_SECONDS = 1.0  # seconds between looks at whether the streams are alive


class Executor:
    """Runs one event after the other on a device."""

    def __init__(
        self,
        spec: ModelSpec,
        scheduler: EventScheduler,
        device: Device,
        slots: Slots,
        recorder: Recorder,
        watch: Callable[[EventScheduler], None] | None = None,
    ) -> None:
        """slots: the block tables of the device's pool. watch: called with the scheduler when an
        event is over, before anything else begins.
        """
        self._driver, self.scheduler = Driver(scheduler), scheduler
        self.device, self._slots, self._watch = device, slots, watch
        self.recorder, self.log = recorder, StepLog()
        self._layers, self._experts = spec.moe_layers, spec.n_experts
        self._batches: Mapping[int, ExpertBatch] = {}
        self._lock = threading.RLock()  # a caller may hold it while an event begins: see `at_rest`
        self._event_over = threading.Event()  # set while no event and no preload is running
        self._event_over.set()
        self._all_launched = threading.Event()  # set when compute has every block of the event
        self._blocks_left = 0  # of the event: those that compute has not been given
        # of the last event: launches the sum of its outputs; of the one before: waits for that sum
        self._launch_sum: Callable[[], Callable[[], Any]] = _nothing
        self._await_sum: Callable[[], Any] = _nothing()
        self._failure: BaseException | None = None
        self._load_since = self._compute_since = 0
        self._step = -1
        self._free_since = 0
        self.zero = device.clock()  # when the run's clock began
        self._queue_ns = 0  # spent in the scheduler
        self._locked_ns = 0  # spent with the lock held, the scheduler included

    def preload(self) -> None:
        """Load the blocks that are resident from the start, before the run's clock starts."""
        for entry, blocks in enumerate(self.scheduler.residency.resident):
            if blocks:
                row, expert = divmod(entry, self._experts)
                taken = self._slots.preload(entry, blocks)
                self._event_over.clear()
                self.device.copy(Copy(row, expert, 0, taken), self._preloaded)
                self._wait_for_event()
        self.zero = self.device.clock()

    def residents(self, layer: int) -> list[int]:
        """Return the resident blocks of each expert of a layer: [n_experts], between two events."""
        self._wait_for_event()
        start = self._layers.index(layer) * self._experts
        return self.scheduler.residency.resident[start : start + self._experts]

    @contextmanager
    def at_rest(self) -> Iterator[None]:
        """Between two events, let no load begin or end within the block.

        For what is decided by residency, and the event that begins with it: so the residency is
        that of the event's start, whatever is being prefetched.
        """
        self._wait_for_event()
        with self._lock:
            yield

    def end_step(self, step: Step | None) -> None:
        """Log the forward pass that has ended; None: the first one begins."""
        self._wait_for_event()
        with self._lock:
            self._step += 1
            if step is not None:
                now = self._now()
                self.log.add(step, now, self.scheduler.bytes_loaded)
                self._flush(now, always=False)

    def event(
        self,
        layer: int,
        tasks: list[Task],
        guess: Sequence[int],
        routed: Routed | None,
        make_batches: Callable[[], Mapping[int, ExpertBatch]],
        n: int,
    ) -> Callable[[], Any]:
        """Begin an event whose layer's attention and router are done, when the last one is over.

        tasks, guess, routed: as `EventScheduler.start` takes them.
        make_batches: returns the rows of each task, by expert; called while the last event ends, or
        when the first load is on its way.
        Returns a function that gives the outputs of the ``n`` rows, [n, d_model] float32, summed
        with the router's weights. It returns when the last computation has begun; the device
        orders what uses the result. Call it before the next event, or never. Both raise what a
        stream failed with.
        """
        batches = None if self._event_over.is_set() else make_batches()
        self._wait_for_event()
        with self._lock:
            if self._failure is not None:  # a prefetch failed just now
                raise self._failure
            self._event_over.clear()
            self._all_launched.clear()
            self._blocks_left = sum(task.width for task in tasks)
            started, begin = self._now(), perf_counter_ns()
            self._ask(self.scheduler.start, layer, tasks, guess, routed)
            self._slots.begin(tasks, self._driver.load, self.scheduler.evicted)
            self._record(self.scheduler.event, layer, LAYER, -1, 0, 0, self._free_since, started,
                      self.scheduler.residency.landed)  # fmt: skip
            if self.scheduler.done:  # every width is 0: nothing to do
                self._all_launched.set()
                self._end_event(started)
            self._begin_load()
            self._batches = batches = make_batches() if batches is None else batches
            self._begin_compute()
            self._locked_ns += perf_counter_ns() - begin
        self._await_sum()  # of the event before the last: returns at once
        self._await_sum = self._launch_sum()  # of the last one, if nobody has asked for it
        self._launch_sum = partial(self._combine, batches, n)
        return self._last_outputs

    def _last_outputs(self) -> Any:
        """Return the outputs of the last event: [n, d_model] float32."""
        self._wait(self._all_launched)
        outputs = self._launch_sum()()
        self._launch_sum = _nothing
        if self._failure is not None:  # a computation that had begun: its outputs are not valid
            raise self._failure
        return outputs

    def _combine(self, batches: Mapping[int, ExpertBatch], n: int) -> Callable[[], Any]:
        """Launch the sum of the outputs of an event whose last computation has begun."""
        return self.device.combine(list(batches.values()), n)

    def host_times(self, lookup_ns: int) -> HostTimes:
        """Return the time spent on deciding so far; ``lookup_ns`` is the caller's share."""
        return HostTimes(lookup_ns, self._queue_ns, self._locked_ns - self._queue_ns)

    def finish(self) -> int:
        """Wait for all operations, flush the timeline, and return the run's time in ns."""
        self._wait_for_event()
        with self._lock:
            now = self._now()
            self._flush(now, always=True)
            self._failure = _Finished()  # a prefetch that still arrives starts nothing
        self._await_sum()
        self._launch_sum()()
        self.device.synchronize()
        return now

    def _wait_for_event(self) -> None:
        """Return when the last event is over; raise what a stream failed with."""
        self._wait(self._event_over)

    def _wait(self, condition: threading.Event) -> None:
        """Wait for a condition as long as the streams are alive; raise what one failed with."""
        while not self.device.wait(condition, _CHECK_SECONDS):
            self.device.check()
        if self._failure is not None:
            raise self._failure

    def _begin_load(self) -> None:
        """If the link is free, begin the next load: take its slots and call ``Device.copy``.

        The lock is held.
        """
        load = self._ask(self._driver.next_load)
        if load is not None:
            slots = self._slots.take(load)
            self._load_since = self._now()
            copy = Copy(load.row, load.expert, load.first, slots, self._slots.ahead(load))
            self.device.copy(copy, self._loaded)

    def _begin_compute(self) -> None:
        """If compute is free, begin the next computation: all blocks of a task that have arrived.

        The lock is held.
        """
        task = self._ask(self._driver.next_task)
        if task is not None:
            slots = self._slots.of(task, task.ended, task.started)
            self._compute_since = self._now()
            blocks = BlockRange(self._batches[task.expert], task.ended, slots)
            self.device.compute(blocks, self._computed)
            self._blocks_left -= len(slots)
            if not self._blocks_left:
                self._all_launched.set()

    def _loaded(self, end: int, failure: BaseException | None) -> None:
        """Tell the scheduler that the load has arrived, and begin the next one: the link's
        callback, in its thread.
        """
        with self._lock:
            if self._has_failed(failure):
                return
            begin = perf_counter_ns()
            load = self._ask(self._driver.loaded)
            self._slots.landed(load)
            since, landed = self._load_since, self.scheduler.residency.landed
            self._begin_load()  # first, so that the link works while the rest is recorded
            event, kind = (-1, PREFETCH) if load.prefetch else (self.scheduler.event, LOAD)
            self._record(event, self._layers[load.row], kind, load.expert, load.first, load.blocks,
                      since, end - self.zero, landed)  # fmt: skip
            self._begin_compute()
            self._locked_ns += perf_counter_ns() - begin

    def _computed(self, end: int, failure: BaseException | None) -> None:
        """Tell the scheduler that a computation has ended, and begin the next one: the compute
        stream's callback, in its thread.
        """
        with self._lock:
            if self._has_failed(failure):
                return
            begin, task = perf_counter_ns(), self._driver.task
            assert task is not None
            first, last = task.ended, task.started
            self._slots.used(task, first, last)
            self._ask(self._driver.computed)
            scheduler = self.scheduler
            end -= self.zero
            self._record(scheduler.event, self._layers[task.entry // self._experts], COMPUTE,
                      task.expert, first, last - first, self._compute_since, end,
                      scheduler.residency.landed)  # fmt: skip
            if scheduler.done:
                self._end_event(end)
            self._begin_load()
            self._begin_compute()
            self._locked_ns += perf_counter_ns() - begin

    def _end_event(self, now: int) -> None:
        """Show the scheduler to ``watch``, and let the caller go on."""
        if self._watch is not None:
            self._watch(self.scheduler)
        self._free_since = now
        self._event_over.set()

    def _preloaded(self, end: int, failure: BaseException | None) -> None:
        """End one load of `preload`: the link's callback."""
        self._failure = failure
        self._event_over.set()

    def _has_failed(self, failure: BaseException | None) -> bool:
        """Keep the first failure, if there is one, and let the caller see it; return whether."""
        self._failure = self._failure or failure
        if self._failure is not None:
            self._event_over.set()
            self._all_launched.set()
        return self._failure is not None

    def _record(
        self, event: int, layer: int, kind: int, expert: int, first: int, blocks: int,
        start: int, end: int, landed: int,
    ) -> None:  # fmt: skip
        """Add a row to the timeline; times in ns since the run's start."""
        self.recorder.add((self._step, event, layer, kind, expert, first, blocks,
                            start, end, _UNKNOWN, landed))  # fmt: skip

    def _flush(self, now: int, always: bool) -> None:
        """Hand the timeline's finished rows to the sinks."""
        since = self._load_since if self._driver.load is not None else None
        self.recorder.flush(now, since, always)

    def _ask(self, decide: Callable[..., Answer], *args: Any) -> Answer:
        """Call the scheduler, and count the time that it takes."""
        begin = perf_counter_ns()
        answer = decide(*args)
        self._queue_ns += perf_counter_ns() - begin
        return answer

    def _now(self) -> int:
        return self.device.clock() - self.zero


def _nothing() -> Callable[[], None]:
    return lambda: None


class _Finished(Exception):
    """The run is over: ends the callbacks of a prefetch that still arrives; no error."""
