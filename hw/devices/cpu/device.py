"""The cpu device: experts on disk, cached in memory, computed by the processor.

A load is a read of the disk into slots, begun in the thread that hands it over
(`crisp.hw.store.aio`). A thread of its own waits for its end; who waits for an event's experts
computes them. Both release the GIL while they work.
"""

from __future__ import annotations

import mmap
import threading
import time
from collections.abc import Callable, Sequence
from functools import partial
from typing import Any

import numpy as np
import numpy.typing as npt

from crisp.errors import CrispError
from crisp.extras import import_extra
from crisp.hw.devices.batch import ExpertBatch
from crisp.hw.devices.cpu.arithmetic import Arithmetic
from crisp.hw.devices.protocol import BlockRange, Copy, Done
from crisp.hw.devices.pump import Pump
from crisp.hw.devices.worker import Worker
from crisp.hw.errors import DeviceError
from crisp.hw.memory import check_available, map_anonymous
from crisp.hw.store.block_io import DIRECT, IN_FLIGHT, RateLimit, StoreFiles
from crisp.hw.store.reader import Store


class CpuDevice:
    """A `crisp.hw.devices.protocol.Device` that reads a disk and computes on the processor."""

    name = "cpu"
    host_memory = True

    def __init__(
        self,
        store: Store,
        slots: int,
        *,
        threads: int = 1,
        link_limit: int | None = None,
        verify: bool = False,
        read: str = DIRECT,
    ) -> None:
        """threads: how many compute. link_limit: of reads, in bytes a second; None: no limit.
        verify: compare every block that is read with its hash. read: the way, of READS.

        Raises CrispError if memory or threads are too few, or a file cannot be read.
        """
        self._store, self._threads, self._limit, self._verify = store, threads, link_limit, verify
        self._stride = store.spec.block_bytes
        self._hashes: dict[int, Any] = {}
        size = slots * self._stride
        check_available(size, f"a pool of {slots:,} blocks")
        self._files = StoreFiles(store, read)
        try:
            memory = map_anonymous(size, f"a pool of {slots:,} blocks")
            self.pool: Any = np.frombuffer(memory, np.uint8).reshape(slots, self._stride)
            self.pool[:, :: mmap.PAGESIZE] = 0  # touched, so that every page is there from now on
            places = memoryview(memory)
            self._files.choose_size(places)
            self._slots = [places[at : at + self._stride] for at in range(0, size, self._stride)]
            self._arithmetic = Arithmetic(store, self.pool, threads)
        except BaseException:
            self._files.close()
            raise
        self._pace = None if link_limit is None else RateLimit(link_limit, self.clock)
        # Reads that have begun before their requests: (row, expert, first, slots), what waits.
        self._ahead: list[tuple[tuple[int, int, int, list[int]], Callable[[], None]]] = []
        self._compute = Pump(self.clock)
        try:
            self._link = Worker("reading", self.clock)
        except RuntimeError as error:
            self._free()
            raise CrispError(f"{threads + 1} threads: the system starts no more") from error
        try:
            self._arithmetic.prepare()
        except BaseException as error:
            self.close()
            if isinstance(error, RuntimeError) and "new thread" in str(error):
                raise CrispError(f"{threads + 1} threads: the system starts no more") from error
            raise

    def describe(self) -> dict[str, Any]:
        """Return the device's settings on this machine, safe for JSON."""
        return {
            "name": self.name,
            "threads": self._threads,
            "read_bytes": self._files.read_bytes,
            "read": self._files.way,
            "direct": self._files.direct,
            "asynchronous": self._files.asynchronous,
            "reads_in_flight": IN_FLIGHT if self._files.asynchronous else 1,
            "why_not_direct": self._files.why_not_direct,
            "link_limit": self._limit,
            "verify": self._verify,
        }

    def clock(self) -> int:
        """Return the nanoseconds of the machine's monotonic clock."""
        return time.monotonic_ns()

    def place(self, hidden: Any) -> Any:
        """Return rows [n, d_model] as a float32 array, the type that is computed with."""
        return self._arithmetic.inputs(hidden)

    def upload(self, tensor: Any) -> Any:
        """No-op: host memory is device memory."""
        return tensor

    def fetch(self, tensor: Any) -> npt.NDArray[Any]:
        """Return the tensor's own memory as an array: host memory is device memory."""
        array: npt.NDArray[Any] = tensor.numpy()
        return array

    def copy(self, request: Copy, done: Done) -> None:
        """Begin to read blocks into slots by ``StoreFiles.begin``; the reading thread sees the end.

        The blocks that are known to come next are begun as well, so that the disk has its next
        requests while this one ends. If another copy comes instead, they are waited for first.
        """
        if self.pool is None:  # closed
            return
        start = self.clock()
        row, expert, first, slots, then = request
        after = first + len(slots)
        wanted = [(row, expert, first, list(slots))]
        wanted += [(row, expert, block, [slot]) for block, slot in enumerate(then, after)]
        if [key for key, _ in self._ahead] != wanted[: len(self._ahead)]:
            for _, wait in self._ahead:
                wait()
            self._ahead = []
        self._ahead += [(key, self._begin(*key)) for key in wanted[len(self._ahead) :]]
        wait = self._ahead.pop(0)[1]
        self._link.submit(partial(self._end, request, wait, start), partial(self._landed, done))

    def compute(self, blocks: BlockRange, done: Done) -> None:
        """Compute blocks of a task, in the thread that waits for them."""
        self._compute.submit(lambda: self._arithmetic.add(blocks), done)

    def combine(self, batches: Sequence[ExpertBatch], rows: int) -> Callable[[], Any]:
        """Sum the experts' outputs, behind what was submitted before."""
        return self._compute.begin(lambda: self._arithmetic.combine(batches, rows))

    def wait(self, condition: threading.Event, seconds: float) -> bool:
        """Compute until the condition is set; False: nothing came for that many seconds."""
        return self._compute.wait(condition, seconds)

    def check(self) -> None:
        """Raise DeviceError if the reading thread is dead."""
        self._link.check()

    def synchronize(self) -> None:
        """Wait until both streams are idle; DeviceError if a file of the store was written to."""
        self._link.run(lambda: None)
        self._compute.begin(lambda: None)()
        self._files.check()

    def close(self) -> None:
        """End both streams after their current operations, close the files, free the pool."""
        if self._pace is not None:
            self._pace.stop()
        self._link.close()
        self._free()

    def _free(self) -> None:
        self._files.close()
        self._arithmetic.close()
        self.pool = None
        self._slots = []

    def _begin(self, row: int, expert: int, first: int, slots: Sequence[int]) -> Callable[[], None]:
        """Begin a read into slots; returns a function that waits for its end."""
        return self._files.begin(row, expert, first, [self._slots[slot] for slot in slots])

    def _landed(self, done: Done, end: int, failure: BaseException | None) -> None:
        """Call back, and let whoever waits see what that has changed."""
        done(end, failure)
        self._compute.wake()

    def _end(self, request: Copy, wait: Callable[[], None], start: int) -> None:
        """Wait for a read; then check its hashes and keep to the link's limit, where asked to."""
        wait()
        if self._verify:
            self._check_blocks(request)
        if self._pace is not None:
            self._pace.wait(start, len(request.slots) * self._stride)

    def _check_blocks(self, request: Copy) -> None:
        """Raise DeviceError for a block whose hash is not that of the store."""
        row, expert, first, slots, _ = request
        if row not in self._hashes:
            self._hashes[row] = self._store.hashes(row)
        digest = import_extra("xxhash").xxh3_64_intdigest
        for block, slot in enumerate(slots, first):
            if digest(self._slots[slot]) != int(self._hashes[row][expert, block]):
                layer = self._store.spec.moe_layers[row]
                raise DeviceError(
                    f"{self._store.files[row]}: block {block} of expert {expert}, layer {layer}, "
                    "is not what was written (its hash differs)"
                )
