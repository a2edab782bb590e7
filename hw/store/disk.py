"""Probe a folder's disk: whether O_DIRECT and asynchronous reads work there, and how fast it is."""

from __future__ import annotations

import os
import tempfile
import time
from collections.abc import Callable, Iterator
from contextlib import closing, contextmanager
from dataclasses import dataclass
from pathlib import Path

from crisp.hw.memory import map_anonymous
from crisp.hw.store.aio import AsynchronousRead
from crisp.hw.store.block_io import SIZES, direct_refused
from crisp.hw.store.file_system import memory_file_system
from crisp.model.spec import PAGE

FILE_BYTES = 1 << 28  # of a temporary file
SECONDS = 1.5  # that reading takes
_PIECE = 1 << 24  # bytes written at once


@dataclass(frozen=True)
class ReadSpeed:
    """The speed at which a file was read."""

    bytes_per_second: float
    read_bytes: int  # of one system call
    direct: bool  # past the page cache


def why_not_direct(folder: Path) -> str | None:
    """Return why files of a folder cannot be read from a disk with O_DIRECT; None: they can.

    Raises OSError where no file can be created.
    """
    memory = memory_file_system(folder)
    if memory is not None:
        return f"lies in memory ({memory}), not on a disk"
    with temporary_file(folder, PAGE) as path:
        refused = direct_refused(path)
    return refused and f"refused: {refused}"


def supports_async_reads(folder: Path) -> bool:
    """Return whether files of a folder can be read asynchronously (io_submit).

    Raises OSError where no file can be created.
    """
    with temporary_file(folder, PAGE) as path:
        if direct_refused(path) is not None:
            return False
        file = os.open(path, os.O_RDONLY | os.O_DIRECT)
        try:
            contexts = AsynchronousRead.open_several(2, file)
        finally:
            os.close(file)
    for context in contexts:
        context.close()
    return bool(contexts)


@contextmanager
def temporary_file(
    folder: Path, n_bytes: int, progress: Callable[[float], None] | None = None
) -> Iterator[Path]:
    """Create a file of random bytes, without a name in its folder; yield a path to it.

    Whatever ends the block, even a kill, no file is left. Raises OSError where none can be created.
    """
    with tempfile.TemporaryFile(dir=folder, buffering=0) as file:
        piece = memoryview(os.urandom(min(n_bytes, _PIECE)))
        done = 0
        while done < n_bytes:
            done += file.write(piece[: n_bytes - done])
            if progress is not None:
                progress(done / n_bytes)
        os.fsync(file)  # or it would be read from memory
        yield Path(f"/proc/self/fd/{file.fileno()}")


def read_speed(
    path: Path, seconds: float = SECONDS, progress: Callable[[float], None] | None = None
) -> ReadSpeed:
    """Read a file repeatedly, with requests of several sizes; return the speed of the fastest.

    Each size has an equal part of the time. Without O_DIRECT the file is dropped from the page
    cache before every pass. Raises OSError for a file that cannot be read or is smaller than a
    page.
    """
    direct = True
    try:
        file = os.open(path, os.O_RDONLY | os.O_DIRECT)
    except OSError:
        direct, file = False, os.open(path, os.O_RDONLY)
    try:
        length = os.fstat(file).st_size // PAGE * PAGE
        if not length:
            raise OSError(0, "is smaller than a page", str(path))
        fitting = [size for size in SIZES if size <= length] or [PAGE]
        speeds = []
        for turn, size in enumerate(fitting):
            if progress is not None:
                progress(turn / len(fitting))
            rate = _rate(file, length, size, seconds / len(fitting), direct)
            speeds.append(ReadSpeed(rate, size, direct))
        return max(speeds, key=lambda speed: speed.bytes_per_second)
    finally:
        os.close(file)


def _rate(file: int, length: int, size: int, seconds: float, direct: bool) -> float:
    """Return the bytes a second of requests of one size."""
    done, offset = 0, 0
    with closing(map_anonymous(size, "a buffer")) as buffer:
        buffer[:] = bytes(size)  # touched, so that every page is there from now on
        begin = time.monotonic()
        while (took := time.monotonic() - begin) < seconds or not done:
            if not offset and not direct:
                os.posix_fadvise(file, 0, length, os.POSIX_FADV_DONTNEED)
            done += os.preadv(file, [buffer], offset)
            offset = (offset + size) % length
            if offset + size > length:
                offset = 0
    return done / max(took, 1e-9)
