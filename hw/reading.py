"""Reading blocks from a store's files into given places, past the page cache where that goes."""

from __future__ import annotations

import os
import time
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path

from crisp.model import PAGE
from hw.errors import DeviceError
from hw.store import Store

SIZES = (1 << 18, 1 << 20, 1 << 22, 1 << 24)  # bytes of one system call that are tried
_TRIAL = 1 << 24  # bytes that are read to try one
_MOST_PLACES = 1024  # of one system call (IOV_MAX)


class Files:
    """A store's files, open for reading at any place; `close` when done."""

    def __init__(self, store: Store) -> None:
        """Raises DeviceError for a file that cannot be read, or is not as long as it was."""
        self._store = store
        self.why_not_direct: str | None = None
        self.direct = True
        self._files: list[int] = []
        self.read_bytes = SIZES[-1]
        try:
            for row, path in enumerate(store.files):
                self._files.append(self._open(path))
                expected = store.offset(row, store.spec.n_experts - 1, store.spec.n_blocks)
                found = os.fstat(self._files[-1]).st_size
                if found != expected:
                    raise DeviceError(f"{path}: is {found} bytes, and was {expected}")
        except BaseException:
            self.close()
            raise

    def close(self) -> None:
        """Close all files; more than once is fine."""
        while self._files:
            os.close(self._files.pop())

    def read(self, row: int, expert: int, first: int, places: Sequence[memoryview]) -> None:
        """Blocks [first, first + len(places)) of an expert, each into its place, page-aligned.

        Raises DeviceError, naming the file, for whatever the system says, and for a file that has
        become shorter.
        """
        path, file = self._store.files[row], self._files[row]
        offset = self._store.offset(row, expert, first)
        for pieces in _requests(places, self.read_bytes):
            offset = self._fill(path, file, offset, pieces)
        if not self.direct:
            start = self._store.offset(row, expert, first)
            os.posix_fadvise(file, start, offset - start, os.POSIX_FADV_DONTNEED)

    def choose_size(self, buffer: memoryview, clock: Callable[[], int] = time.monotonic_ns) -> None:
        """Set `read_bytes` to what reads fastest here, by reading the first file into ``buffer``.

        Requests of one block or less leave nothing to choose.
        """
        most = min(len(buffer), _TRIAL, os.fstat(self._files[0]).st_size - PAGE)
        most -= most % PAGE
        sizes = [size for size in SIZES if 2 * size <= most]
        taken: dict[int, int] = {}
        for size in sizes:
            begin, offset = clock(), PAGE
            for pieces in _requests([buffer[:most]], size):
                offset = self._fill(self._store.files[0], self._files[0], offset, pieces)
            taken[size] = clock() - begin
        if taken:
            self.read_bytes = min(taken, key=taken.__getitem__)

    def _open(self, path: Path) -> int:
        try:
            if self.direct:
                try:
                    return os.open(path, os.O_RDONLY | os.O_DIRECT)
                except OSError as error:
                    if isinstance(error, FileNotFoundError | PermissionError):
                        raise
                    self.direct = False
                    self.why_not_direct = f"{path.parent}: O_DIRECT is refused: {error.strerror}"
            return os.open(path, os.O_RDONLY)
        except OSError as error:
            raise DeviceError(f"{path}: cannot be read: {error.strerror}") from error

    def _fill(self, path: Path, file: int, offset: int, places: list[memoryview]) -> int:
        """Fill the places with the file's bytes from ``offset`` on; returns where they end."""
        while places:
            try:
                count = os.preadv(file, places, offset)
            except OSError as error:
                raise DeviceError(f"{path}: cannot be read: {error.strerror or error}") from error
            if not count:
                raise DeviceError(f"{path}: became shorter while it was read")
            offset += count
            while places and count >= len(places[0]):
                count -= len(places.pop(0))
            if count:
                places[0] = places[0][count:]
        return offset


def _requests(places: Sequence[memoryview], most: int) -> Iterator[list[memoryview]]:
    """The places, cut where needed, in runs of at most so many bytes."""
    run: list[memoryview] = []
    room = most
    for place in places:
        rest = place
        while rest:
            run.append(rest[:room])
            room -= len(run[-1])
            rest = rest[len(run[-1]) :]
            if not room or len(run) == _MOST_PLACES:
                yield run
                run, room = [], most
    if run:
        yield run


class Pace:
    """A token bucket: a link of so many bytes a second.

    A request that follows at once begins when the one before was due, so that waking up too late is
    made good by the next; a link that was idle has saved up nothing.
    """

    SLACK = 3_000_000  # ns: a request that follows within so much follows at once

    def __init__(
        self,
        bytes_per_second: int,
        clock: Callable[[], int],
        sleep: Callable[[float], None] = time.sleep,
    ) -> None:
        self._rate, self._clock, self._sleep = bytes_per_second, clock, sleep
        self._due = clock()

    def wait(self, start: int, n_bytes: int) -> None:
        """Return when a request of ``n_bytes`` that began at ``start`` is due, or is late."""
        if start - self._due > self.SLACK:
            self._due = start
        self._due += n_bytes * 10**9 // self._rate
        while (left := self._due - self._clock()) > 0:
            self._sleep(left / 1e9)
