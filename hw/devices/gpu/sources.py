"""Block sources: where a gpu device's blocks come from, and how they get into its slots.

A source begins a copy on the link stream, which is current then, and returns a function with which
a thread waits for its end. A slot is copied into only when the scheduler has freed it, that is when
every computation that used it has been seen to end; so a copy waits for nothing on the device.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any, Protocol

import numpy as np

from crisp.hw.devices.gpu.arena import Arena, block_index
from crisp.hw.devices.gpu.streams import DeviceStreams, StreamEvent
from crisp.hw.devices.protocol import Copy
from crisp.hw.store.block_io import StoreFiles
from crisp.hw.store.reader import Store


class BlockSource(Protocol):
    """A place that blocks come from."""

    def begin(self, request: Copy) -> Callable[[], None]:
        """Begin a copy into slots of the pool; return a function that waits for its end."""

    def resolve(self, slots: Sequence[int]) -> Sequence[int]:
        """Return the rows of the kernels' pool in which the blocks of these slots are."""


class FromArena:
    """Copies from host memory, by the device's copy engine."""

    def __init__(self, streams: DeviceStreams, store: Store, arena: Arena, pool: Any) -> None:
        self._streams, self._store, self._arena, self._pool = streams, store, arena, pool

    def begin(self, request: Copy) -> Callable[[], None]:
        """Launch a copy of each block, without waiting for the one before.

        A copy from memory that is not page-locked keeps its caller until it has ended, so there
        the waiting thread launches them.
        """
        row, expert, first, slots, _ = request
        begin = block_index(self._store, row, expert, first)
        pairs = [(self._pool[slot], self._arena.block(begin + i)) for i, slot in enumerate(slots)]
        if self._arena.pageable is None:
            return self._launch_copies(pairs).synchronize
        stream = self._streams.current()
        return lambda: self._copy_and_wait(stream, pairs)

    def resolve(self, slots: Sequence[int]) -> Sequence[int]:
        """Return the slots themselves."""
        return slots

    def _copy_and_wait(self, stream: Any, pairs: list[tuple[Any, Any]]) -> None:
        with self._streams.on(stream):
            self._launch_copies(pairs).synchronize()

    def _launch_copies(self, pairs: list[tuple[Any, Any]]) -> StreamEvent:
        """Launch copies of (slot, block) pairs; return the event of their end."""
        for into, source in pairs:
            self._streams.launch(_copy, into, source)
        return self._streams.record()


class FromDisk:
    """Copies from the store's files through two page-locked buffers: while one is copied to the
    device, the disk fills the other.
    """

    def __init__(
        self, streams: DeviceStreams, files: StoreFiles, staging: Arena, pool: Any
    ) -> None:
        """staging: an arena of two blocks, which are the buffers."""
        self._streams, self._files, self._staging, self._pool = streams, files, staging, pool
        self._copied: list[StreamEvent | None] = [
            None,
            None,
        ]  # when what is in a buffer is on the device
        self._turn = 0

    def begin(self, request: Copy) -> Callable[[], None]:
        """Leave it all to the waiting thread, because a read keeps its caller until its end."""
        stream = self._streams.current()
        return lambda: self._copy_through_buffers(stream, request)

    def resolve(self, slots: Sequence[int]) -> Sequence[int]:
        """Return the slots themselves."""
        return slots

    def _copy_through_buffers(self, stream: Any, request: Copy) -> None:
        """Read and copy all blocks, a buffer's size at a time, and wait for the last copy."""
        size = self._staging.block(0).nbytes
        with self._streams.on(stream):
            for block, slot in enumerate(request.slots, request.first):
                into = self._pool[slot]
                for low in range(0, into.nbytes, size):
                    part = into[low : low + size]
                    turn, self._turn = self._turn, 1 - self._turn
                    copied = self._copied[turn]
                    if copied is not None:
                        copied.synchronize()  # the buffer's last content must have left it
                    buffer = self._staging.block(turn)[: part.nbytes]
                    place = memoryview(buffer.numpy())
                    self._files.read(request.row, request.expert, block, [place], low)
                    self._streams.launch(_copy, part, buffer)
                    self._copied[turn] = self._streams.record()
            self._streams.record().synchronize()


class DirectToPool:
    """Reads from the disk into a pool that processor and GPU share: nothing is copied twice.

    A kernel that is launched when the read has ended sees what was read.
    """

    def __init__(self, files: StoreFiles, pool: Any) -> None:
        """pool: uint8 host tensor [slots, stride] that the device reaches."""
        self._files, self._pool = files, pool

    def begin(self, request: Copy) -> Callable[[], None]:
        """Begin to read, where the system has asynchronous reads; else the waiting thread reads."""
        row, expert, first, slots, _ = request
        places = [memoryview(self._pool[slot].numpy()) for slot in slots]
        return self._files.begin(row, expert, first, places)

    def resolve(self, slots: Sequence[int]) -> Sequence[int]:
        """Return the slots themselves."""
        return slots


class MappedBlocks:
    """Uses the weights where they are: nothing is loaded, and the kernels' pool is the arena."""

    def __init__(self, store: Store, slots: int) -> None:
        self._store = store
        self._rows = np.zeros(slots, np.int64)  # by slot: the arena's row of its block

    def begin(self, request: Copy) -> Callable[[], None]:
        """Note which block each slot stands for; nothing is copied."""
        first = block_index(self._store, request.row, request.expert, request.first)
        self._rows[list(request.slots)] = np.arange(first, first + len(request.slots))
        return lambda: None

    def resolve(self, slots: Sequence[int]) -> Sequence[int]:
        """Return the rows of the arena that the slots stand for."""
        rows: list[int] = self._rows[list(slots)].tolist()
        return rows


def _copy(into: Any, source: Any) -> None:
    into.copy_(source, non_blocking=True)
