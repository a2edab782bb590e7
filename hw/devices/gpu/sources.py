"""Where a gpu device's blocks come from, and how they get into its slots.

Each way begins a copy on the link stream, which is current then, and returns what a thread has to
do so as to see it end. A slot is copied into only when the scheduler has freed it, that is when
every computation that used it has been seen to end; so a copy waits for nothing on the device.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any, Protocol

import numpy as np

from crisp.hw.devices.gpu.arena import Arena, index
from crisp.hw.devices.gpu.streams import Event, Streams
from crisp.hw.devices.protocol import Copy
from crisp.hw.store.block_io import Files
from crisp.hw.store.reader import Store


class Source(Protocol):
    """One way."""

    def begin(self, request: Copy) -> Callable[[], None]:
        """Begin a copy into slots of the pool; what waits for its end."""

    def resolve(self, slots: Sequence[int]) -> Sequence[int]:
        """The rows of the pool in which what was copied into these slots lies."""


class FromArena:
    """From host memory, by the device's copy engine."""

    def __init__(self, streams: Streams, store: Store, arena: Arena, pool: Any) -> None:
        self._streams, self._store, self._arena, self._pool = streams, store, arena, pool

    def begin(self, request: Copy) -> Callable[[], None]:
        """A copy of each block, one after the other, all in flight at once.

        From memory that is not page-locked each of them would keep the caller until it has ended,
        so there the thread does it.
        """
        row, expert, first, slots, _ = request
        begin = index(self._store, row, expert, first)
        pairs = [(self._pool[slot], self._arena.block(begin + i)) for i, slot in enumerate(slots)]
        if self._arena.pageable is None:
            return self._copies(pairs).synchronize
        stream = self._streams.current()
        return lambda: self._later(stream, pairs)

    def resolve(self, slots: Sequence[int]) -> Sequence[int]:
        """They lie where they were copied to."""
        return slots

    def _later(self, stream: Any, pairs: list[tuple[Any, Any]]) -> None:
        with self._streams.on(stream):
            self._copies(pairs).synchronize()

    def _copies(self, pairs: list[tuple[Any, Any]]) -> Event:
        for into, source in pairs:
            self._streams.launch(_copy, into, source)
        return self._streams.record()


class FromDisk:
    """From the store's files through two page-locked buffers: while one is copied to the device,
    the disk fills the other.
    """

    def __init__(self, streams: Streams, files: Files, staging: Arena, pool: Any) -> None:
        """staging: of two blocks, the buffers."""
        self._streams, self._files, self._staging, self._pool = streams, files, staging, pool
        self._copied: list[Event | None] = [None, None]  # when what is in a buffer is on the device
        self._turn = 0

    def begin(self, request: Copy) -> Callable[[], None]:
        """All of it is the thread's, for a disk keeps who reads from it."""
        stream = self._streams.current()
        return lambda: self._through(stream, request)

    def resolve(self, slots: Sequence[int]) -> Sequence[int]:
        """They lie where they were copied to."""
        return slots

    def _through(self, stream: Any, request: Copy) -> None:
        size = self._staging.block(0).nbytes
        with self._streams.on(stream):
            for block, slot in enumerate(request.slots, request.first):
                into = self._pool[slot]
                for low in range(0, into.nbytes, size):
                    part = into[low : low + size]
                    turn, self._turn = self._turn, 1 - self._turn
                    copied = self._copied[turn]
                    if copied is not None:
                        copied.synchronize()  # else the disk would overwrite what is on its way
                    buffer = self._staging.block(turn)[: part.nbytes]
                    place = memoryview(buffer.numpy())
                    self._files.read(request.row, request.expert, block, [place], low)
                    self._streams.launch(_copy, part, buffer)
                    self._copied[turn] = self._streams.record()
            self._streams.record().synchronize()


class Straight:
    """From the disk into a pool that the processor and the device share: nothing is copied twice.

    A kernel that is launched when the reading has ended sees what was read.
    """

    def __init__(self, files: Files, pool: Any) -> None:
        """pool: uint8 host tensor [slots, stride] that the device reaches."""
        self._files, self._pool = files, pool

    def begin(self, request: Copy) -> Callable[[], None]:
        """The disk is at it, where the system can; else the thread reads."""
        row, expert, first, slots, _ = request
        places = [memoryview(self._pool[slot].numpy()) for slot in slots]
        return self._files.begin(row, expert, first, places)

    def resolve(self, slots: Sequence[int]) -> Sequence[int]:
        """They lie where they were read to."""
        return slots


class Mapped:
    """From where the weights are already: there is nothing to load, and the pool is all of them."""

    def __init__(self, store: Store, slots: int) -> None:
        self._store = store
        self._rows = np.zeros(slots, np.int64)  # where the block is that a slot stands for

    def begin(self, request: Copy) -> Callable[[], None]:
        """Nothing moves."""
        first = index(self._store, request.row, request.expert, request.first)
        self._rows[list(request.slots)] = np.arange(first, first + len(request.slots))
        return lambda: None

    def resolve(self, slots: Sequence[int]) -> Sequence[int]:
        """They lie in the arena."""
        found: list[int] = self._rows[list(slots)].tolist()
        return found


def _copy(into: Any, source: Any) -> None:
    into.copy_(source, non_blocking=True)
