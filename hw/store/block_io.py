"""Read blocks of a store's files into given memory, past the page cache where the system allows it,
or through it where that is asked for.

A read of an expert's blocks is one contiguous range of a file. It is cut into requests of at most
``read_bytes`` bytes; the first is begun asynchronously (`crisp.hw.store.aio`), the others are read
with preadv by whoever waits for the end.
"""

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
from crisp.hw.store.file_system import memory_file_system
from crisp.hw.store.format import header
from crisp.hw.store.reader import Store
from crisp.model.spec import PAGE

DIRECT, UNCACHED, BUFFERED = READS = ("direct", "uncached", "buffered")
"""Ways of reading: past the page cache; through it, which keeps nothing; through it, which does."""
SIZES = (1 << 18, 1 << 20, 1 << 22, 1 << 24)  # bytes of one system call that are tried
IN_FLIGHT = 8  # reads at most that have begun and not ended; docs/device.md has the measurement
WHOLE = 1 << 30  # bytes: a request of this size is never cut up
_TRIAL = 1 << 24  # bytes that are read to try one size
# The size chosen, by store and buffer's bytes, so that all runs of a command read alike.
_read_sizes: dict[tuple[Path, int], int] = {}
_CLOSE = 1.1  # so much slower is no reason to cut requests up: trials are noisy, and cuts add up

PendingRead = Callable[[], int]
"""A read that has begun: waits for its end and returns the bytes read, as preadv does."""


class StoreFiles:
    """The open files of a store, for reads at any place; `close` when done."""

    def __init__(self, store: Store, way: str = DIRECT) -> None:
        """way: of READS; direct is uncached where the system has no O_DIRECT.

        Raises DeviceError for a file that cannot be read, or has been replaced.
        """
        self._store = store
        self.why_not_direct = why_not_direct(store) if way == DIRECT else None
        self.way = UNCACHED if self.why_not_direct else way
        self._files: list[int] = []
        self._async_reads: list[AsynchronousRead] = []
        self.read_bytes = WHOLE
        try:
            for row, path in enumerate(store.files):
                self._files.append(self._open(path))
                self._check(row)
            if self.direct:
                self._async_reads = AsynchronousRead.open_several(IN_FLIGHT, self._files[0])
            self._opened = [*map(_state, self._files)]
        except BaseException:
            self.close()
            raise

    @property
    def direct(self) -> bool:
        """Whether reads go past the page cache."""
        return self.way == DIRECT

    @property
    def asynchronous(self) -> bool:
        """Whether `begin` begins the read before it is waited for."""
        return bool(self._async_reads)

    def check(self) -> None:
        """Raise DeviceError if a file has been written to since it was opened."""
        for path, file, state in zip(self._store.files, self._files, self._opened, strict=True):
            if _state(file) != state:
                raise DeviceError(f"{path}: was written to while it was read")

    def close(self) -> None:
        """Close all files, when nothing is read from them any more; idempotent."""
        for async_read in self._async_reads:
            async_read.close()
        while self._files:
            file = self._files.pop()
            self._forget(file, 0, 0)
            os.close(file)

    def read(
        self, row: int, expert: int, first: int, places: Sequence[memoryview], at: int = 0
    ) -> None:
        """Read an expert's bytes, from byte ``at`` of block ``first`` on, into places in turn.

        places: page-aligned memory, for instance of a slot for each block. Raises DeviceError,
        naming the file, for errors of the system and for a file that has become shorter.
        """
        start = self._store.offset(row, expert, first) + at
        self._read(row, start, _requests(places, self.read_bytes))

    def begin(
        self, row: int, expert: int, first: int, places: Sequence[memoryview]
    ) -> Callable[[], None]:
        """Begin to read an expert's blocks into places, by ``AsynchronousRead.begin``.

        Returns a function that reads the rest and waits for the end. It may be called in any
        thread, must be called before IN_FLIGHT more reads begin, and raises what `read` does.
        """
        start, requests = self._store.offset(row, expert, first), _requests(places, self.read_bytes)
        request = next(requests)
        begun = None
        if self._async_reads:
            async_read = self._async_reads.pop(0)  # by turns
            self._async_reads.append(async_read)
            begun = async_read.end if async_read.begin(self._files[row], request, start) else None
        return partial(self._read, row, start, chain((request,), requests), begun)

    def _read(
        self,
        row: int,
        start: int,
        requests: Iterable[list[memoryview]],
        begun: PendingRead | None = None,
    ) -> None:
        """Read all requests in turn, of which the first may have begun."""
        path, file, offset = self._store.files[row], self._files[row], start
        for pieces in requests:
            offset = self._fill(path, file, offset, pieces, begun)
            begun = None
        self._forget(file, start, offset - start)

    def choose_size(self, buffer: memoryview, clock: Callable[[], int] = time.monotonic_ns) -> None:
        """Set `read_bytes` to the largest size that reads nearly as fast as the fastest one.

        Sizes are tried by reading the first file into ``buffer``, once for each store in a process.
        (44 MB, a block of Mixtral's, took a fifth longer in requests of 4 MiB than in one.) None is
        tried where the page cache keeps what is read: later reads would find it there.
        """
        if self.way == BUFFERED:
            return
        most = min(len(buffer), _TRIAL, os.fstat(self._files[0]).st_size - PAGE)
        most -= most % PAGE
        key = self._store.path, most
        if key not in _read_sizes:
            _read_sizes[key] = self._fastest(buffer, most, clock)
        self.read_bytes = _read_sizes[key]

    def _fastest(self, buffer: memoryview, most: int, clock: Callable[[], int]) -> int:
        """Time reads of ``most`` bytes in requests of several sizes; return the size to use."""
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
        """Return a file's descriptor, with O_DIRECT where that is possible."""
        try:
            file = os.open(path, os.O_RDONLY | (os.O_DIRECT if self.direct else 0))
        except OSError as error:
            raise DeviceError(f"{path}: cannot be read: {error.strerror}") from error
        os.posix_fadvise(file, 0, 0, os.POSIX_FADV_RANDOM)  # reading ahead is of no use
        return file

    def _check(self, row: int) -> None:
        """Raise DeviceError unless a file still has its length and its header."""
        path, file, store = self._store.files[row], self._files[row], self._store
        expected = store.offset(row, store.spec.n_experts - 1, store.spec.n_blocks)
        size = os.fstat(file).st_size
        if size != expected:
            raise DeviceError(f"{path}: is {size} bytes, and was {expected}")
        layer, table = store.spec.moe_layers[row], store.tables[row]
        first_bytes = header(store.spec, layer, table, store.dtype, store.activation)
        with mmap.mmap(-1, len(first_bytes)) as begin:
            with memoryview(begin) as place:
                self._fill(path, file, 0, [place])
            if begin[:] != first_bytes:
                raise DeviceError(f"{path}: is another file than it was (its header differs)")
        self._forget(file, 0, 0)  # what opening the store has left

    def _forget(self, file: int, start: int, length: int) -> None:
        """Drop a range of a file, or with length 0 all, from a page cache that is to keep nothing.

        Past it nothing comes there, but for what opening the store has read.
        """
        if self.way == UNCACHED or (self.direct and not length):
            os.posix_fadvise(file, start, length, os.POSIX_FADV_DONTNEED)

    def _fill(
        self,
        path: Path,
        file: int,
        offset: int,
        places: list[memoryview],
        begun: PendingRead | None = None,
    ) -> int:
        """Fill the places with the file's bytes from ``offset`` on; return the offset behind them.

        begun: the read of these places that has begun already, if one has.
        """
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
    """Return what a write to a file changes: its size, and its time of modification in ns."""
    status = os.fstat(file)
    return status.st_size, status.st_mtime_ns


def why_not_direct(store: Store) -> str | None:
    """Return why a store's files are not read with O_DIRECT; None: they are.

    It is used for all of them, or for none.
    """
    refused = next(filter(None, map(direct_refused, store.files)), None)
    if refused is not None:
        return f"{store.path}: O_DIRECT is refused: {refused}"
    memory = memory_file_system(store.path)
    if memory is not None:  # which takes O_DIRECT, and yet is no disk
        return f"{store.path}: lies in memory ({memory}), not on a disk"
    return None


def direct_refused(path: Path) -> str | None:
    """Return why a file cannot be read with O_DIRECT; None: it can, or it has another fault, which
    opening it will report.
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
    """Yield requests of at most ``most`` bytes and MOST_PLACES places; places are cut if needed."""
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


class RateLimit:
    """A token bucket that slows reads down to so many bytes a second.

    A request that follows at once counts from when the one before was due, so that waking up too
    late is made good by the next; an idle link saves up nothing.
    """

    SLACK = 3_000_000  # ns between two requests that follow each other at once

    def __init__(
        self,
        bytes_per_second: int,
        clock: Callable[[], int],
        sleep: Callable[[float], bool] | None = None,
    ) -> None:
        """sleep: waits for so many seconds; returns whether waiting has been stopped."""
        self._rate, self._clock, self._end = bytes_per_second, clock, threading.Event()
        self._sleep = sleep or self._end.wait
        self._since, self._bytes = clock(), 0  # without a pause, and how much since then

    def stop(self) -> None:
        """End all waiting."""
        self._end.set()

    def wait(self, start: int, n_bytes: int) -> None:
        """Wait until a request of ``n_bytes`` that began at ``start`` (ns) is due."""
        if start - self._due() > self.SLACK:
            self._since, self._bytes = start, 0
        self._bytes += n_bytes
        due = self._due()
        while (left := due - self._clock()) > 0 and not self._sleep(left / 1e9):
            pass

    def _due(self) -> int:
        return self._since - (-self._bytes * 10**9 // self._rate)
