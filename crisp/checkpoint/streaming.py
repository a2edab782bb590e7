"""Streaming of large files in tiles small enough to stay in a core's cache.

Hashing takes about as long as everything else together, so tensors are worked on in parallel:
reading, hashing and writing all let other threads run.
"""

from __future__ import annotations

import os
from collections.abc import Callable, Generator, Iterable, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from pathlib import Path
from typing import Any, Self, TypeVar

import numpy as np
from numpy.typing import NDArray

from crisp.errors import CrispError
from crisp.extras import import_extra

TILE = 1 << 18  # bytes; a tile that is read, reordered, hashed and written stays in a cache
WORKERS = 4  # at most: each may hold one matrix

Item = TypeVar("Item")
Result = TypeVar("Result")
Tiles = Iterator[NDArray[Any]]
"""Consecutive pieces of a file; each is valid until the next is requested."""


class ByteSource:
    """A file open for reading at any offset, by several threads at once."""

    def __init__(self, path: Path) -> None:
        self._path = path
        self._file = -1

    def __enter__(self) -> Self:
        try:
            self._file = os.open(self._path, os.O_RDONLY)
        except OSError as error:
            raise CrispError(f"{self._path}: cannot be read: {error.strerror}") from error
        return self

    def __exit__(self, *_: object) -> None:
        os.close(self._file)

    def read(self, into: NDArray[Any], offset: int) -> None:
        """Fill ``into`` (contiguous, not empty) with the file's bytes from ``offset`` on."""
        view = into.data.cast("B")
        while view:
            try:
                count = os.preadv(self._file, [view], offset)
            except OSError as error:
                raise CrispError(f"{self._path}: cannot be read: {error.strerror}") from error
            if not count:
                raise CrispError(f"{self._path}: became shorter while it was read")
            view, offset = view[count:], offset + count


def read_tiles(source: ByteSource, offset: int, nbytes: int) -> Tiles:
    """Yield ``nbytes`` bytes of the file from ``offset`` on, as they are."""
    buffer = np.empty(min(TILE, nbytes), np.uint8)
    for begin in range(0, nbytes, TILE):
        tile = buffer[: min(TILE, nbytes - begin)]
        source.read(tile, offset + begin)
        yield tile


def hash_tiles(tiles: Tiles, file: int | None = None, offset: int = 0) -> str:
    """Return the XXH3 (128 bits) of the tiles' bytes, in hex.

    file: a descriptor that the bytes are written to, from ``offset`` on; None: they are only
    hashed. Against accidental changes XXH3 protects as well as SHA-256, in a tenth of the time;
    SHA-256 would take most of the time of a copy.
    """
    digest = import_extra("xxhash").xxh3_128()
    for tile in tiles:
        digest.update(tile.data)
        if file is not None:
            _write(file, tile, offset)
            offset += tile.nbytes
    hexdigest: str = digest.hexdigest()
    return hexdigest


def _write(file: int, data: NDArray[Any], offset: int) -> None:
    """Write all of ``data`` at ``offset``; OSError if the disk is full."""
    view = data.data.cast("B")
    while view:
        count = os.pwrite(file, view, offset)
        view, offset = view[count:], offset + count


@contextmanager
def open_new_file(path: Path) -> Iterator[int]:
    """Open a new file as a descriptor that several threads may write to at once."""
    file = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_TRUNC, 0o666)
    try:
        yield file
    finally:
        os.close(file)


def map_in_threads(work: Callable[[Item], Result], items: Iterable[Item]) -> Generator[Result]:
    """Yield ``work(item)`` in the order of ``items``, computed by up to four threads.

    The first error cancels everything that has not begun.
    """
    pool = ThreadPoolExecutor(min(WORKERS, len(os.sched_getaffinity(0))))
    try:
        yield from pool.map(work, items)
    finally:
        pool.shutdown(cancel_futures=True)
