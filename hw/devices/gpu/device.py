"""The device behind cuda and unified: a pool in memory that the GPU reaches, and two streams.

Operations are launched in the thread that hands them over, a load for instance in the link's own
callback; a thread for each stream waits for their ends, and calls back. So one wake-up of the host
stands between the end of a load and the beginning of the next, and none between the last
computation of an event and what the model does next, which is launched behind it.

Why no stream overtakes another:
- a computation begins when the scheduler knows that its blocks have arrived, which is when the
  link's thread has seen the copies end; so compute never waits for the link on the device;
- a slot is copied into when the scheduler has freed it, which is when the compute stream's thread
  has seen the last computation end that used it;
- the caller's rows are made on the caller's stream: `place` records an event behind them, and each
  task waits for it before it gathers its own rows; their memory is the caller's until `combine`;
- the sums of an event are in memory of the compute stream and are only used there; its output is
  in memory of the caller's stream: compute waits for what the caller did before, since that may
  have used the memory, and the caller waits for compute.
"""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Sequence
from contextlib import ExitStack, suppress
from functools import partial
from typing import Any, NamedTuple

import numpy as np
import numpy.typing as npt

from crisp.hw.devices.batch import ExpertBatch
from crisp.hw.devices.gpu.kernels.layout import BlockLayout
from crisp.hw.devices.gpu.sources import BlockSource
from crisp.hw.devices.gpu.streams import DeviceStreams, StreamEvent
from crisp.hw.devices.protocol import BlockRange, Copy, Done
from crisp.hw.devices.worker import Worker
from crisp.hw.errors import DeviceError
from crisp.hw.store.block_io import StoreFiles
from crisp.hw.store.reader import Store


class DeviceRows(NamedTuple):
    """A caller's rows on the device."""

    tensor: Any  # [n, d_model]
    ready: StreamEvent  # they have been computed


class GpuDevice:
    """A `crisp.hw.devices.protocol.Device` on a GPU; `load_from` gives it a source of blocks."""

    host_memory = False

    def __init__(self, name: str, streams: DeviceStreams, store: Store) -> None:
        """name: cuda or unified."""
        from crisp.hw.devices.gpu.kernels import add_blocks

        self.name, self._streams = name, streams
        self._add_blocks, self._layout = add_blocks, BlockLayout.of(store)
        spec = store.spec
        self._neurons = [spec.neurons(block, block + 1) for block in range(spec.n_blocks)]
        self._source: BlockSource | None = None
        self._pool: Any = None
        self._settings: dict[str, Any] = {}
        self._files: StoreFiles | None = None
        self._link, self._compute = streams.stream(), streams.stream()
        self.resources = ExitStack()  # closed when no operation runs any more
        self._threads = [Worker(name, self.clock) for name in ("link", "compute")]

    def load_from(
        self,
        source: BlockSource,
        pool: Any,
        settings: dict[str, Any],
        files: StoreFiles | None = None,
    ) -> None:
        """Set where blocks come from, and the pool in which kernels find them: uint8 [.., stride].

        Only while nothing runs. settings: of the source, for `describe`. files: that it reads.
        """
        self._source, self._pool, self._settings, self._files = source, pool, settings, files

    def describe(self) -> dict[str, Any]:
        """Return the device's settings on this machine, safe for JSON."""
        return {"name": self.name, "gpu": self._streams.name, **self._settings}

    def clock(self) -> int:
        """Return the nanoseconds of the host's monotonic clock."""
        return time.monotonic_ns()

    def place(self, hidden: Any) -> DeviceRows:
        """Upload a caller's rows [n, d_model] on the caller's stream, and record an event there."""
        rows = self._streams.upload(hidden)
        return DeviceRows(rows, self._streams.record())

    def upload(self, tensor: Any) -> Any:
        """Copy a host tensor to the device, on the caller's stream."""
        return self._streams.upload(tensor)

    def fetch(self, tensor: Any) -> npt.NDArray[Any]:
        """Copy a tensor through page-locked memory to the host; waits for that copy alone."""
        host, copied = self._streams.download(tensor)
        copied.synchronize()
        numbers: npt.NDArray[Any] = host.numpy()
        return numbers

    def copy(self, request: Copy, done: Done) -> None:
        """Launch a copy from the source into slots, on the link stream."""
        assert self._source is not None
        with self._streams.on(self._link):
            self._begin(0, partial(self._source.begin, request), done)

    def compute(self, blocks: BlockRange, done: Done) -> None:
        """Launch a computation on the compute stream."""
        with self._streams.on(self._compute):
            self._begin(1, partial(self._launch, blocks), done)

    def combine(self, batches: Sequence[ExpertBatch], rows: int) -> Callable[[], Any]:
        """Launch the sum behind all computations; what the caller launches next waits for it on the
        device.
        """
        streams = self._streams
        out = streams.empty(rows, self._layout.d_model, dtype="float32")  # [rows, d_model]
        before = streams.record()
        with streams.on(self._compute):
            streams.wait(before)
            streams.launch(out.zero_)
            for batch in sorted(batches, key=lambda batch: batch.expert):
                index = None if rows == 1 else streams.upload(batch.rows)
                streams.launch(_weigh, out, batch.sums, streams.upload(batch.weights), index)
            after = streams.record()
        streams.wait(after)
        return lambda: out

    def wait(self, condition: threading.Event, seconds: float) -> bool:
        """Wait until a callback has set the condition; the streams have threads of their own."""
        return condition.wait(seconds)

    def check(self) -> None:
        """Raise DeviceError if a thread is dead."""
        for thread in self._threads:
            thread.check()

    def synchronize(self) -> None:
        """Wait until all that was launched has ended; DeviceError if a file was written to."""
        for thread in self._threads:
            thread.run(lambda: None)
        if self._files is not None:
            self._files.check()

    def close(self) -> None:
        """Wait for what runs, end the threads, and free all memory."""
        for thread in self._threads:
            thread.close()
        for stream in (self._link, self._compute):
            with suppress(DeviceError), self._streams.on(stream):  # a broken device runs nothing
                self._streams.record().synchronize()
        self._source = self._pool = None
        self.resources.close()

    def _begin(self, stream: int, launch: Callable[[], Callable[[], None]], done: Done) -> None:
        """Launch now; the stream's thread waits for the end, and calls back.

        An error of the launch reaches the callback in the same way.
        """
        try:
            wait = launch()
        except Exception as error:
            wait = _failing(error)
        self._threads[stream].submit(wait, done)

    def _launch(self, blocks: BlockRange) -> Callable[[], None]:
        """Launch the kernels of some blocks; return a function that waits for their end."""
        batch, streams, n = blocks.batch, self._streams, len(blocks.slots)
        assert self._source is not None
        if batch.inputs is None:
            self._start(batch)
        first, last = blocks.first, blocks.first + n
        counts = batch.counts[first:last]
        rows = self._source.resolve(blocks.slots)
        # [3, blocks]: the row of the pool, how many rows of x use it, its neurons
        table = streams.upload(np.array([rows, counts, self._neurons[first:last]], np.int32))
        streams.launch(
            self._add_blocks, self._layout, self._pool, table[0], table[1], table[2],
            batch.inputs, batch.sums,
        )  # fmt: skip
        return streams.record().synchronize

    def _start(self, batch: ExpertBatch) -> None:
        """Make a task's inputs and its sums, in memory of the compute stream: [r, d_model] both."""
        streams, rows = self._streams, batch.hidden
        hidden, n = rows.tensor, len(batch.rows)
        streams.wait(rows.ready)
        kind = str(hidden.dtype).removeprefix("torch.")
        batch.inputs = streams.empty(n, self._layout.d_model, dtype=kind)
        batch.sums = streams.empty(n, self._layout.d_model, dtype="float32")
        streams.launch(batch.sums.zero_)
        if len(hidden) == 1:
            streams.launch(batch.inputs.copy_, hidden)
        else:
            streams.launch(_gather, hidden, streams.upload(batch.rows), batch.inputs)


def _gather(hidden: Any, rows: Any, into: Any) -> None:
    """Copy some rows of hidden [n, d_model] into [r, d_model]."""
    into.copy_(hidden.index_select(0, rows))


def _weigh(out: Any, sums: Any, weights: Any, rows: Any) -> None:
    """Add a task's sums [r, d_model] times its weights [r] to rows of out [n, d_model].

    The rows are distinct, so the order of additions is fixed.
    """
    weighed = sums * weights[:, None]
    if rows is None:
        out.add_(weighed)
    else:
        out.index_add_(0, rows, weighed)


def _failing(error: Exception) -> Callable[[], None]:
    """Return a function that raises an error."""

    def fail() -> None:
        raise error

    return fail
