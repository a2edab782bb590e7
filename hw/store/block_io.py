"""Reading blocks from a store's files into given places, past the page cache where that goes."""

from __future__ import annotations

import errno
import mmap
import os
import threading
import time
from collections.abc import Callable, Iterable, Iterator, Sequence
from functools import partial
from itertools import chain
from pathlib import Path

from crisp.hw.errors import DeviceError
from crisp.hw.store.aio import MOST_PLACES, AsynchronousRead
from crisp.hw.store.format import header
from crisp.hw.store.reader import Store
from crisp.model.spec import PAGE

SIZES = (1 << 18, 1 << 20, 1 << 22, 1 << 24)  # bytes of one system call that are tried
WHOLE = 1 << 30  # bytes of one that leave a request as it is
_TRIAL = 1 << 24  # bytes that are read to try one
_chosen: dict[tuple[Path, int], int] = {}  # by store and room: all runs of a command read alike
_CLOSE = 1.1  # so much slower is no reason to cut requests up: trials are noisy, and cuts add up

Begun = Callable[[], int]
"""a read that has begun: waits for it, and gives its bytes as preadv does"""


class Files:
    """A store's files, open for reading at any place; `close` when done."""

    def __init__(self, store: Store) -> None:
        """Raises DeviceError for a file that cannot be read, or is not the one it was."""
        self._store = store
        refused = next(filter(None, map(direct_refused, store.files)), None)  # all of them, or none
        self.why_not_direct = refused and f"{store.path}: O_DIRECT is refused: {refused}"
        self.direct = refused is None
        self._files: list[int] = []
        self._early: list[AsynchronousRead] = []
        self.read_bytes = WHOLE
        try:
            for row, path in enumerate(store.files):
                self._files.append(self._open(path))
                self._check(row)
            if self.direct:  # two, so that one begins while the other ends
                self._early = AsynchronousRead.opened(2, self._files[0])
            self._opened = [*map(_state, self._files)]
        except BaseException:
            self.close()
            raise

    @property
    def asynchronous(self) -> bool:
        """Whether `begin` begins anything."""
        return bool(self._early)

    def check(self) -> None:
        """Raise DeviceError if a file has been written to since it was opened."""
        for path, file, state in zip(self._store.files, self._files, self._opened, strict=True):
            if _state(file) != state:
                raise DeviceError(f"{path}: was written to while it was read")

    def close(self) -> None:
        """Close all files, when nothing is read from them; more than once is fine."""
        for early in self._early:
            early.close()
        while self._files:
            file = self._files.pop()
            os.posix_fadvise(file, 0, 0, os.POSIX_FADV_DONTNEED)
            os.close(file)

    def read(
        self, row: int, expert: int, first: int, places: Sequence[memoryview], at: int = 0
    ) -> None:
        """An expert's bytes from byte ``at`` of block ``first`` on, into places one after the
        other: all page-aligned, for instance a place for every block.

        Raises DeviceError, naming the file, for whatever the system says, and for a file that has
        become shorter.
        """
        start = self._store.offset(row, expert, first) + at
        self._read(row, start, _requests(places, self.read_bytes))

    def begin(
        self, row: int, expert: int, first: int, places: Sequence[memoryview]
    ) -> Callable[[], None]:
        """Begin what `read` does. What is returned ends it, in any thread, and must be called
        before the next but one begins; it raises what `read` does.
        """
        start, requests = self._store.offset(row, expert, first), _requests(places, self.read_bytes)
        own = next(requests)
        begun = None
        if self._early:
            self._early.reverse()
            early = self._early[0]
            begun = early.end if early.begin(self._files[row], own, start) else None
        return partial(self._read, row, start, chain((own,), requests), begun)

    def _read(
        self, row: int, start: int, requests: Iterable[list[memoryview]], begun: Begun | None = None
    ) -> None:
        """All requests, of which the first may have begun."""
        path, file, offset = self._store.files[row], self._files[row], start
        for pieces in requests:
            offset = self._fill(path, file, offset, pieces, begun)
            begun = None
        self._forget(file, start, offset - start)

    def choose_size(self, buffer: memoryview, clock: Callable[[], int] = time.monotonic_ns) -> None:
        """Set `read_bytes` to what reads fast here, by reading the first file into ``buffer``: to
        the largest size that is close to the fastest. 44 MB (a block of Mixtral's) took a fifth
        longer in pieces of 4 MiB than at once. A process asks once for each store.
        """
        most = min(len(buffer), _TRIAL, os.fstat(self._files[0]).st_size - PAGE)
        most -= most % PAGE
        key = self._store.path, most
        if key not in _chosen:
            _chosen[key] = self._fastest(buffer, most, clock)
        self.read_bytes = _chosen[key]

    def _fastest(self, buffer: memoryview, most: int, clock: Callable[[], int]) -> int:
        taken: dict[int, int] = {}
        for size in 2 * [*(size for size in SIZES if size < most), most]:  # the first starts cold
            begin, offset = clock(), PAGE
            for pieces in _requests([buffer[:most]], size):
                offset = self._fill(self._store.files[0], self._files[0], offset, pieces)
            taken[size] = min(clock() - begin, taken.get(size, 1 << 62))
            self._forget(self._files[0], PAGE, most)
        best = max(size for size in taken if taken[size] <= _CLOSE * min(taken.values()))
        return WHOLE if best == most else best

    def _open(self, path: Path) -> int:
        try:
            file = os.open(path, os.O_RDONLY | (os.O_DIRECT if self.direct else 0))
        except OSError as error:
            raise DeviceError(f"{path}: cannot be read: {error.strerror}") from error
        os.posix_fadvise(file, 0, 0, os.POSIX_FADV_RANDOM)  # reading ahead is of no use
        return file

    def _check(self, row: int) -> None:
        """Raise DeviceError unless a file is as long as it was, and has its header."""
        path, file, store = self._store.files[row], self._files[row], self._store
        expected = store.offset(row, store.spec.n_experts - 1, store.spec.n_blocks)
        found = os.fstat(file).st_size
        if found != expected:
            raise DeviceError(f"{path}: is {found} bytes, and was {expected}")
        layer, table = store.spec.moe_layers[row], store.tables[row]
        known = header(store.spec, layer, table, store.dtype, store.activation)
        with mmap.mmap(-1, len(known)) as begin:
            with memoryview(begin) as place:
                self._fill(path, file, 0, [place])
            if begin[:] != known:
                raise DeviceError(f"{path}: is another file than it was (its header differs)")
        os.posix_fadvise(file, 0, 0, os.POSIX_FADV_DONTNEED)  # what opening the store has left

    def _forget(self, file: int, start: int, length: int) -> None:
        """Leave nothing in the page cache, where reading goes by it."""
        if not self.direct:
            os.posix_fadvise(file, start, length, os.POSIX_FADV_DONTNEED)

    def _fill(
        self,
        path: Path,
        file: int,
        offset: int,
        places: list[memoryview],
        begun: Begun | None = None,
    ) -> int:
        """Fill the places with the file's bytes from ``offset`` on; returns where they end."""
        while places:
            try:
                count = begun() if begun else os.preadv(file, places, offset)
            except OSError as error:
                raise DeviceError(f"{path}: cannot be read: {error.strerror or error}") from error
            begun = None
            if self.direct:
                count -= count % PAGE  # one cannot go on from the middle of a page
            if not count:
                size = os.fstat(file).st_size
                raise DeviceError(f"{path}: is {size} bytes, too few for what was in it")
            offset += count
            while places and count >= len(places[0]):
                count -= len(places.pop(0))
            if count:
                places[0] = places[0][count:]
        return offset


def _state(file: int) -> tuple[int, int]:
    """What a write to a file changes: its size, its time of modification in ns."""
    found = os.fstat(file)
    return found.st_size, found.st_mtime_ns


def direct_refused(path: Path) -> str | None:
    """Why a file cannot be read with O_DIRECT, at once or when it is tried; None: it can, or has
    another fault, which opening it will tell.
    """
    try:
        file = os.open(path, os.O_RDONLY | os.O_DIRECT)
    except (FileNotFoundError, PermissionError):
        return None
    except OSError as error:
        return error.strerror
    try:
        with mmap.mmap(-1, PAGE) as page:
            os.preadv(file, [page], 0)
    except OSError as error:
        return error.strerror if error.errno == errno.EINVAL else None
    finally:
        os.close(file)
    return None


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
            if not room or len(run) == MOST_PLACES:
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
        sleep: Callable[[float], bool] | None = None,
    ) -> None:
        """sleep: for so many seconds; returns whether there is nothing more to wait for."""
        self._rate, self._clock, self._end = bytes_per_second, clock, threading.Event()
        self._sleep = sleep or self._end.wait
        self._since, self._bytes = clock(), 0  # without a pause, and how much since then

    def stop(self) -> None:
        """Whoever waits, waits no longer."""
        self._end.set()

    def wait(self, start: int, n_bytes: int) -> None:
        """Return when a request of ``n_bytes`` that began at ``start`` is due, or is late."""
        if start - self._due() > self.SLACK:
            self._since, self._bytes = start, 0
        self._bytes += n_bytes
        due = self._due()
        while (left := due - self._clock()) > 0 and not self._sleep(left / 1e9):
            pass

    def _due(self) -> int:
        return self._since - (-self._bytes * 10**9 // self._rate)
