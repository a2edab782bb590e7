"""Page-locked host memory for blocks, from which a GPU copies by itself: a whole store, or buffers.

Torch's own pinned allocations are rounded up to powers of two; these are of the exact size. Memory
is allocated in chunks of whole blocks, aligned to pages, so that no block lies in two chunks.
"""

from __future__ import annotations

from bisect import bisect_right
from collections.abc import Callable
from typing import Any

from crisp.extras import import_extra
from crisp.hw.devices.gpu.streams import DeviceStreams
from crisp.hw.memory import check_available, map_anonymous
from crisp.hw.store.block_io import StoreFiles
from crisp.hw.store.reader import Store

CHUNK = 1 << 30  # bytes at most of one chunk, which is page-locked at once


class Arena:
    """Host memory in chunks, each a uint8 tensor [blocks, stride]."""

    def __init__(
        self, streams: DeviceStreams, stride: int, blocks: int, chunk: int = CHUNK
    ) -> None:
        """chunk: bytes of one chunk at most. Raises CrispError if memory is too little.

        Where memory cannot be page-locked, ``pageable`` says why.
        """
        check_available(stride * blocks, f"a copy of {blocks:,} blocks in host memory")
        self._streams = streams
        each = max(1, min(blocks, chunk // stride))
        self._starts = list(range(0, blocks, each))
        self.chunks: list[Any] = []
        self._registered: list[Any] = []
        self.pageable: str | None = None  # why memory is not page-locked; None: it is
        for start in self._starts:
            rows = min(each, blocks - start)
            self.chunks.append(self._chunk(rows * stride).view(rows, stride))

    def block(self, index: int) -> Any:
        """Return a block's memory: uint8 [stride]."""
        chunk = bisect_right(self._starts, index) - 1
        return self.chunks[chunk][index - self._starts[chunk]]

    def close(self) -> None:
        """Free the memory, when nothing uses it any more; idempotent."""
        while self._registered:
            self._streams.unregister(self._registered.pop())
        self.chunks = []

    def _chunk(self, size: int) -> Any:
        """Return a page-locked chunk, if the system allows it: uint8 [size]."""
        memory = map_anonymous(size, f"{size} bytes of host memory")
        chunk = import_extra("torch").frombuffer(
            memory, dtype=import_extra("torch").uint8
        )  # keeps the memory
        if self.pageable is None:
            self.pageable = self._streams.register(chunk)
            if self.pageable is None:
                self._registered.append(chunk)
        return chunk


def load_arena(
    streams: DeviceStreams,
    store: Store,
    chunk: int = CHUNK,
    progress: Callable[[float], None] | None = None,
) -> Arena:
    """Read a whole store into a new arena, expert by expert, in the order of `block_index`.

    progress: called with the share that is read. Raises CrispError if memory is too little, and
    DeviceError for a file that cannot be read.
    """
    spec = store.spec
    arena = Arena(streams, spec.block_bytes, spec.n_routed * spec.n_blocks, chunk)
    try:
        files = StoreFiles(store)
        try:
            for entry in range(spec.n_routed):
                row, expert = divmod(entry, spec.n_experts)
                first = block_index(store, row, expert, 0)
                places = [
                    memoryview(arena.block(first + block).numpy()) for block in range(spec.n_blocks)
                ]
                files.read(row, expert, 0, places)
                if progress is not None:
                    progress((entry + 1) / spec.n_routed)
            files.check()
        finally:
            files.close()
    except BaseException:
        arena.close()
        raise
    return arena


def block_index(store: Store, row: int, expert: int, block: int) -> int:
    """Return the place of a store's block in its arena."""
    return (row * store.spec.n_experts + expert) * store.spec.n_blocks + block
