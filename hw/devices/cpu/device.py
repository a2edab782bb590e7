"""The cpu device: experts on disk, cached in memory, computed by the processor.

The disk fills the slots, begun by whoever hands a load over (`crisp.hw.store.aio`); one thread sees
it end, another computes. Both leave Python's lock alone while they work, and hand over to each
other without a third.
"""

from __future__ import annotations

import mmap
import time
from collections.abc import Callable, Sequence
from functools import partial
from typing import Any

import numpy as np
import numpy.typing as npt

from crisp.errors import CrispError
from crisp.extras import need
from crisp.hw.devices.batch import Work
from crisp.hw.devices.cpu.arithmetic import Arithmetic
from crisp.hw.devices.protocol import Copy, Done, Piece
from crisp.hw.devices.worker import Worker
from crisp.hw.errors import DeviceError
from crisp.hw.memory import anonymous, check_available
from crisp.hw.store.block_io import Files, Pace
from crisp.hw.store.reader import Store


class CpuDevice:
    """See `crisp.hw.devices.protocol.Device`."""

    name = "cpu"

    def __init__(
        self,
        store: Store,
        slots: int,
        *,
        threads: int = 1,
        link_limit: int | None = None,
        verify: bool = False,
    ) -> None:
        """threads: that compute. link_limit: bytes a second; None: as fast as it goes. verify:
        every block that is read against its hash.

        Raises CrispError if memory or threads are too few, or a file cannot be read.
        """
        self._store, self._threads, self._limit, self._verify = store, threads, link_limit, verify
        self._stride = store.spec.block_bytes
        self._hashes: dict[int, Any] = {}
        size = slots * self._stride
        check_available(size, f"a pool of {slots:,} blocks")
        self._files = Files(store)
        try:
            memory = anonymous(size, f"a pool of {slots:,} blocks")
            self.pool: Any = np.frombuffer(memory, np.uint8).reshape(slots, self._stride)
            self.pool[:, :: mmap.PAGESIZE] = 0  # all of it is there from now on
            places = memoryview(memory)
            self._files.choose_size(places)
            self._slots = [places[at : at + self._stride] for at in range(0, size, self._stride)]
            self._arithmetic = Arithmetic(store, self.pool, threads)
        except BaseException:
            self._files.close()
            raise
        self._pace = None if link_limit is None else Pace(link_limit, self.clock)
        # What has begun and nobody has asked for yet, and what ends it.
        self._ahead: tuple[tuple[int, int, int, list[int]], Callable[[], None]] | None = None
        self._streams: list[Worker] = []
        try:
            for stream in ("reading", "compute"):
                self._streams.append(Worker(stream, self.clock))
            self._link, self._compute = self._streams
            self._compute.run(self._arithmetic.prepare)
        except BaseException as error:
            self.close()
            if isinstance(error, RuntimeError) and "new thread" in str(error):
                raise CrispError(f"{threads + 1} threads: the system starts no more") from error
            raise

    def describe(self) -> dict[str, Any]:
        """How it works here, safe for JSON."""
        return {
            "name": self.name,
            "threads": self._threads,
            "read_bytes": self._files.read_bytes,
            "direct": self._files.direct,
            "asynchronous": self._files.asynchronous,
            "why_not_direct": self._files.why_not_direct,
            "link_limit": self._limit,
            "verify": self._verify,
        }

    def clock(self) -> int:
        """Nanoseconds, monotonic."""
        return time.monotonic_ns()

    def place(self, hidden: Any) -> Any:
        """Their numbers as float32, which is what is computed with."""
        return self._arithmetic.inputs(hidden)

    def upload(self, tensor: Any) -> Any:
        """It is there."""
        return tensor

    def fetch(self, tensor: Any) -> npt.NDArray[Any]:
        """It is there."""
        found: npt.NDArray[Any] = tensor.numpy()
        return found

    def copy(self, request: Copy, done: Done) -> None:
        """Read blocks from the disk: begun by the caller, where the system can, as is what follows.

        So a disk has its next request while this one ends. What was promised to follow and does
        not is waited for.
        """
        if self.pool is None:  # closed
            return
        start, ended = self.clock(), None
        if self._ahead is not None:
            promised, ended = self._ahead
            self._ahead = None
            if promised != (request.row, request.expert, request.first, list(request.slots)):
                ended()
                ended = None
        row, expert, first, slots, then = request
        if ended is None:
            ended = self._begin(row, expert, first, slots)
        if then >= 0:
            following = row, expert, first + len(slots), [then]
            self._ahead = following, self._begin(*following)
        self._link.submit(partial(self._end, request, ended, start), done)

    def compute(self, piece: Piece, done: Done) -> None:
        """Compute blocks of a task."""
        self._compute.submit(lambda: self._arithmetic.add(piece), done)

    def combine(self, works: Sequence[Work], rows: int) -> Callable[[], Any]:
        """The experts' outputs summed, behind the pieces."""
        return self._compute.begin(lambda: self._arithmetic.combine(works, rows))

    def check(self) -> None:
        """Raise DeviceError if a thread is dead."""
        for stream in self._streams:
            stream.check()

    def synchronise(self) -> None:
        """See `crisp.hw.devices.protocol.Device`."""
        for stream in self._streams:
            stream.run(lambda: None)
        self._files.check()

    def close(self) -> None:
        """End both threads after what they are at, close the files, let go of the pool."""
        if self._pace is not None:
            self._pace.stop()
        for stream in self._streams:
            stream.close()
        self._files.close()
        self._arithmetic.close()
        self.pool = None
        self._slots = []

    def _begin(self, row: int, expert: int, first: int, slots: Sequence[int]) -> Callable[[], None]:
        return self._files.begin(row, expert, first, [self._slots[slot] for slot in slots])

    def _end(self, request: Copy, ended: Callable[[], None], start: int) -> None:
        ended()
        if self._verify:
            self._check_blocks(request)
        if self._pace is not None:
            self._pace.wait(start, len(request.slots) * self._stride)

    def _check_blocks(self, request: Copy) -> None:
        row, expert, first, slots, _ = request
        if row not in self._hashes:
            self._hashes[row] = self._store.hashes(row)
        digest = need("xxhash").xxh3_64_intdigest
        for block, slot in enumerate(slots, first):
            if digest(self._slots[slot]) != int(self._hashes[row][expert, block]):
                layer = self._store.spec.moe_layers[row]
                raise DeviceError(
                    f"{self._store.files[row]}: block {block} of expert {expert}, layer {layer}, "
                    "is not what was written (its hash differs)"
                )
