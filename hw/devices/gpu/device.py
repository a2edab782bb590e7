"""What cuda and unified devices have in common: a pool in memory that the GPU reaches, two streams.

Operations are launched by whoever hands them over, a load from the link's own callback for
instance; a thread for each stream sees them end, and calls back. So between the end of a load and
the beginning of the next stands one wake-up of the host, and none between the last piece of an
event and what the model does next: that is launched behind it.

Why no stream overtakes another:
- a piece begins when the scheduler has been told that its blocks are there, which is when the
  link's thread has seen the copies end; so compute never waits for the link on the device;
- a slot is copied into when the scheduler has freed it, which is when the compute stream's thread
  has seen the last piece end that used it;
- the caller's rows are made on the caller's stream: `place` records an event behind them, and each
  task waits for it before it gathers its own; their memory is the caller's until `combine`;
- the sums of an event are in memory of the compute stream and are only used there; its output is
  in memory of the caller's stream: compute waits for what the caller did before, since that may
  have used the memory, and the caller for compute.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from contextlib import ExitStack, suppress
from functools import partial
from typing import Any, NamedTuple

import numpy as np
import numpy.typing as npt

from crisp.hw.devices.batch import Work
from crisp.hw.devices.gpu.kernels.layout import Layout
from crisp.hw.devices.gpu.sources import Source
from crisp.hw.devices.gpu.streams import Event, Streams
from crisp.hw.devices.protocol import Copy, Done, Piece
from crisp.hw.devices.worker import Worker
from crisp.hw.errors import DeviceError
from crisp.hw.store.block_io import Files
from crisp.hw.store.reader import Store


class Rows(NamedTuple):
    """A caller's rows [n, d_model] on the device, and when they are there."""

    tensor: Any
    made: Event


class GpuDevice:
    """See `crisp.hw.devices.protocol.Device`."""

    def __init__(self, name: str, streams: Streams, store: Store) -> None:
        """name: cuda or unified."""
        from crisp.hw.devices.gpu.kernels import add_blocks

        self.name, self._streams = name, streams
        self._add_blocks, self._layout = add_blocks, Layout.of(store)
        spec = store.spec
        self._neurons = [spec.neurons(block, block + 1) for block in range(spec.n_blocks)]
        self._source: Source | None = None
        self._pool: Any = None
        self._how: dict[str, Any] = {}
        self._files: Files | None = None
        self._link, self._compute = streams.stream(), streams.stream()
        self.resources = ExitStack()  # closed when nothing runs any more
        self._threads = [Worker(own, self.clock) for own in ("link", "compute")]

    def load_from(
        self, source: Source, pool: Any, how: dict[str, Any], files: Files | None = None
    ) -> None:
        """Where blocks come from, and the uint8 rows [..., stride] where kernels find them; while
        nothing runs. how: what the device says of it. files: that the source reads.
        """
        self._source, self._pool, self._how, self._files = source, pool, how, files

    def describe(self) -> dict[str, Any]:
        """How it works here, safe for JSON."""
        return {"name": self.name, "gpu": self._streams.name, **self._how}

    def clock(self) -> int:
        """Nanoseconds, monotonic: the host's."""
        return time.monotonic_ns()

    def place(self, hidden: Any) -> Rows:
        """See `crisp.hw.devices.protocol.Device`."""
        there = self._streams.upload(hidden)
        return Rows(there, self._streams.record())

    def upload(self, tensor: Any) -> Any:
        """On the caller's stream."""
        return self._streams.upload(tensor)

    def fetch(self, tensor: Any) -> npt.NDArray[Any]:
        """By way of page-locked memory; it waits for that copy alone."""
        found, there = self._streams.download(tensor)
        there.synchronize()
        numbers: npt.NDArray[Any] = found.numpy()
        return numbers

    def copy(self, request: Copy, done: Done) -> None:
        """Begin it on the link stream."""
        assert self._source is not None
        with self._streams.on(self._link):
            self._begin(0, partial(self._source.begin, request), done)

    def compute(self, piece: Piece, done: Done) -> None:
        """Launch it on the compute stream."""
        with self._streams.on(self._compute):
            self._begin(1, partial(self._launch, piece), done)

    def combine(self, works: Sequence[Work], rows: int) -> Callable[[], Any]:
        """Launched behind the pieces; what the caller does next waits for it on the device."""
        streams = self._streams
        out = streams.empty(rows, self._layout.d_model, dtype="float32")
        before = streams.record()
        with streams.on(self._compute):
            streams.wait(before)
            streams.launch(out.zero_)
            for work in sorted(works, key=lambda work: work.expert):
                index = None if rows == 1 else streams.upload(work.rows)
                streams.launch(_weigh, out, work.sums, streams.upload(work.weights), index)
            after = streams.record()
        streams.wait(after)
        return lambda: out

    def check(self) -> None:
        """Raise DeviceError if a thread is dead."""
        for thread in self._threads:
            thread.check()

    def synchronise(self) -> None:
        """See `Device`: when all that was launched has been seen to end."""
        for thread in self._threads:
            thread.run(lambda: None)
        if self._files is not None:
            self._files.check()

    def close(self) -> None:
        """Let what runs end; then let go of all memory."""
        for thread in self._threads:
            thread.close()
        for stream in (self._link, self._compute):
            with suppress(DeviceError), self._streams.on(stream):  # a broken device runs nothing
                self._streams.record().synchronize()
        self._source = self._pool = None
        self.resources.close()

    def _begin(self, which: int, launch: Callable[[], Callable[[], None]], done: Done) -> None:
        """Launch now; the stream's thread sees the end, and hears of what cannot be launched."""
        try:
            ended = launch()
        except Exception as error:
            ended = _failing(error)
        self._threads[which].submit(ended, done)

    def _launch(self, piece: Piece) -> Callable[[], None]:
        work, streams, n = piece.work, self._streams, len(piece.slots)
        assert self._source is not None
        if work.inputs is None:
            self._start(work)
        first, last = piece.first, piece.first + n
        counts = work.counts[first:last]
        table = streams.upload(
            np.array(
                [self._source.resolve(piece.slots), counts, self._neurons[first:last]], np.int32
            )
        )
        streams.launch(
            self._add_blocks, self._layout, self._pool, table[0], table[1], table[2],
            work.inputs, work.sums,
        )  # fmt: skip
        return streams.record().synchronize

    def _start(self, work: Work) -> None:
        """A task's inputs and its sums, in memory of the compute stream."""
        streams, rows = self._streams, work.hidden
        hidden, n = rows.tensor, len(work.rows)
        streams.wait(rows.made)
        kind = str(hidden.dtype).removeprefix("torch.")
        work.inputs = streams.empty(n, self._layout.d_model, dtype=kind)
        work.sums = streams.empty(n, self._layout.d_model, dtype="float32")
        streams.launch(work.sums.zero_)
        if len(hidden) == 1:
            streams.launch(work.inputs.copy_, hidden)
        else:
            streams.launch(_gather, hidden, streams.upload(work.rows), work.inputs)


def _gather(hidden: Any, rows: Any, into: Any) -> None:
    into.copy_(hidden.index_select(0, rows))


def _weigh(out: Any, sums: Any, weights: Any, rows: Any) -> None:
    """Add a task's sums times its weights; each row of ``out`` once, so in a fixed order."""
    weighed = sums * weights[:, None]
    if rows is None:
        out.add_(weighed)
    else:
        out.index_add_(0, rows, weighed)


def _failing(error: Exception) -> Callable[[], None]:
    def fail() -> None:
        raise error

    return fail
