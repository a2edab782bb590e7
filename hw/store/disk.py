"""What a folder's disk gives: whether O_DIRECT works there, and how fast it is read."""

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
from crisp.model.spec import PAGE

FILE_BYTES = 1 << 28  # of a temporary file
SECONDS = 1.5  # of reading
_PIECE = 1 << 24  # bytes written at once

Progress = Callable[[float], None]
"""told the share that is done"""


@dataclass(frozen=True)
class Speed:
    """How fast a file was read."""

    bytes_per_second: float
    read_bytes: int  # of one system call
    direct: bool  # past the page cache


def why_not_direct(folder: Path) -> str | None:
    """Why files of a folder cannot be read by O_DIRECT; None: they can.

    Raises OSError where no file can be made.
    """
    with temporary(folder, PAGE) as path:
        refused = direct_refused(path)
    return refused and f"refused: {refused}"


def asynchronous(folder: Path) -> bool:
    """Whether reads of a folder's files may begin in one thread and end in another.

    Raises OSError where no file can be made.
    """
    with temporary(folder, PAGE) as path:
        if direct_refused(path) is not None:
            return False
        file = os.open(path, os.O_RDONLY | os.O_DIRECT)
        try:
            made = AsynchronousRead.opened(2, file)
        finally:
            os.close(file)
    for one in made:
        one.close()
    return bool(made)


@contextmanager
def temporary(folder: Path, n_bytes: int, progress: Progress | None = None) -> Iterator[Path]:
    """A file of random bytes on the disk, which has no name in its folder: whatever ends the block,
    even a kill, nothing is left.

    Raises OSError where it cannot be made.
    """
    with tempfile.TemporaryFile(dir=folder, buffering=0) as file:
        piece = memoryview(os.urandom(min(n_bytes, _PIECE)))
        done = 0
        while done < n_bytes:
            done += file.write(piece[: n_bytes - done])
            if progress is not None:
                progress(done / n_bytes)
        os.fsync(file)  # what is not on the disk yet is read from memory
        yield Path(f"/proc/self/fd/{file.fileno()}")


def read_speed(path: Path, seconds: float = SECONDS, progress: Progress | None = None) -> Speed:
    """Read a file from its start, again and again, with requests of several sizes: the fastest.

    Each size has its part of the time. Without O_DIRECT the page cache is emptied of the file
    before every pass. Raises OSError for a file that cannot be read or is smaller than a page.
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
            speeds.append(Speed(rate, size, direct))
        return max(speeds, key=lambda speed: speed.bytes_per_second)
    finally:
        os.close(file)


def _rate(file: int, length: int, size: int, seconds: float, direct: bool) -> float:
    """Bytes a second of requests of one size."""
    done, offset = 0, 0
    with closing(map_anonymous(size, "a buffer")) as buffer:
        buffer[:] = bytes(size)  # all of it is there
        begin = time.monotonic()
        while (took := time.monotonic() - begin) < seconds or not done:
            if not offset and not direct:
                os.posix_fadvise(file, 0, length, os.POSIX_FADV_DONTNEED)
            done += os.preadv(file, [buffer], offset)
            offset = (offset + size) % length
            if offset + size > length:
                offset = 0
    return done / max(took, 1e-9)
