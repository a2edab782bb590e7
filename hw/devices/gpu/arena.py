"""A copy of a whole store in host memory, page-locked so that a device can copy from it by itself.

Torch's own pinned allocations are rounded up to powers of two; these are of the exact size. Memory
is taken in chunks of whole blocks, aligned to pages, so that no block lies in two of them.
"""

from __future__ import annotations

from bisect import bisect_right
from collections.abc import Callable
from typing import Any

from crisp.extras import need
from crisp.hw.devices.gpu.streams import Streams
from crisp.hw.memory import anonymous, check_available
from crisp.hw.store.block_io import Files
from crisp.hw.store.reader import Store

CHUNK = 1 << 30  # bytes at most, of whole blocks: what is page-locked at a time


class Arena:
    """Host memory in chunks, each a uint8 tensor [blocks, stride]."""

    def __init__(self, streams: Streams, stride: int, blocks: int, chunk: int = CHUNK) -> None:
        """Raises CrispError if memory is too little. What cannot be page-locked is ``pageable``."""
        check_available(stride * blocks, f"a copy of {blocks:,} blocks in host memory")
        self._streams = streams
        each = max(1, min(blocks, chunk // stride))
        self._starts = list(range(0, blocks, each))
        self.chunks: list[Any] = []
        self._registered: list[Any] = []
        self.pageable: str | None = None  # why it is, if it is
        for start in self._starts:
            rows = min(each, blocks - start)
            self.chunks.append(self._chunk(rows * stride).view(rows, stride))

    def block(self, index: int) -> Any:
        """One block: uint8 [stride]."""
        place = bisect_right(self._starts, index) - 1
        return self.chunks[place][index - self._starts[place]]

    def close(self) -> None:
        """Let go of it, when nothing uses it any more; more than once is fine."""
        while self._registered:
            self._streams.unregister(self._registered.pop())
        self.chunks = []

    def _chunk(self, size: int) -> Any:
        memory = anonymous(size, f"{size} bytes of host memory")
        chunk = need("torch").frombuffer(memory, dtype=need("torch").uint8)  # keeps the memory
        if self.pageable is None:
            self.pageable = self._streams.register(chunk)
            if self.pageable is None:
                self._registered.append(chunk)
        return chunk


def filled(
    streams: Streams,
    store: Store,
    chunk: int = CHUNK,
    progress: Callable[[float], None] | None = None,
) -> Arena:
    """All blocks of a store, expert by expert: see `index`. progress: told the share that is read.

    Raises CrispError if memory is too little, and DeviceError for a file that cannot be read.
    """
    spec = store.spec
    arena = Arena(streams, spec.block_bytes, spec.n_routed * spec.n_blocks, chunk)
    try:
        files = Files(store)
        try:
            for entry in range(spec.n_routed):
                row, expert = divmod(entry, spec.n_experts)
                first = index(store, row, expert, 0)
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


def index(store: Store, row: int, expert: int, block: int) -> int:
    """Where a block of a store is in its arena."""
    return (row * store.spec.n_experts + expert) * store.spec.n_blocks + block
