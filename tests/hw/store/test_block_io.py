"""Reading a store's blocks, whatever the system makes of it; and an emulated slower link."""

from __future__ import annotations

import errno
import mmap
import os
import random
import shutil
import threading
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from crisp.hw.errors import DeviceError
from crisp.hw.store import block_io as reading
from crisp.hw.store.aio import AsynchronousRead
from crisp.hw.store.block_io import RateLimit, StoreFiles, _requests
from crisp.hw.store.packing import pack_synthetic
from crisp.hw.store.reader import Store
from crisp.model.spec import ModelSpec

pytest.importorskip("xxhash")

TINY = Path(__file__).parents[3] / "traces" / "tiny-mixtral"
SPEC = ModelSpec.from_config(TINY, "tiny").first_layers(2)  # 8 experts of 7 blocks of 36,864 bytes
STRIDE = SPEC.block_bytes
SECOND = 10**9


@pytest.fixture(scope="module")
def store(tmp_path_factory: pytest.TempPathFactory) -> Store:
    return pack_synthetic(SPEC, tmp_path_factory.mktemp("made") / "store")


@pytest.fixture
def own(tmp_path: Path) -> Store:
    """A store to be changed."""
    return pack_synthetic(SPEC, tmp_path / "store")


@pytest.fixture
def places() -> list[memoryview]:
    """Places of a block each, all of 0xEE, in no order."""
    memory = mmap.mmap(-1, 16 * STRIDE)
    memory.write(b"\xee" * len(memory))
    whole = memoryview(memory)
    made = [whole[i * STRIDE : (i + 1) * STRIDE] for i in range(16)]
    random.Random(0).shuffle(made)
    return made


def content(store: Store, row: int, expert: int, first: int, last: int) -> bytes:
    begin, end = store.offset(row, expert, first), store.offset(row, expert, last)
    return store.files[row].read_bytes()[begin:end]


def open_several(store: Store, read_bytes: int | None = None) -> StoreFiles:
    files = StoreFiles(store)
    files.read_bytes = read_bytes or files.read_bytes
    return files


def read(files: StoreFiles, places: list[memoryview], *which: int) -> bytes:
    row, expert, first, last = which
    files.read(row, expert, first, places[: last - first])
    return b"".join(bytes(place) for place in places[: last - first])


def refuse_direct(monkeypatch: pytest.MonkeyPatch) -> None:
    real = os.open

    def without(path: Any, flags: int, *more: Any, **named: Any) -> int:
        if flags & os.O_DIRECT:
            raise OSError(errno.EINVAL, os.strerror(errno.EINVAL), path)
        return real(path, flags, *more, **named)

    monkeypatch.setattr(os, "open", without)


@pytest.mark.parametrize("read_bytes", [4096, 8192, 1 << 18, 1 << 24])
@pytest.mark.parametrize("direct", [True, False])
def test_every_block_comes_to_its_place(
    store: Store, places: list[memoryview], monkeypatch: pytest.MonkeyPatch,
    read_bytes: int, direct: bool,
) -> None:  # fmt: skip
    if not direct:
        refuse_direct(monkeypatch)
    files = open_several(store, read_bytes)
    for which in [(0, 0, 0, 7), (1, 7, 6, 7), (0, 3, 2, 5)]:
        assert read(files, places, *which) == content(store, *which)
    assert bytes(places[7]) == b"\xee" * STRIDE  # what was not asked for is as it was
    files.close()
    files.close()


@pytest.mark.parametrize("direct", [True, False])
def test_short_reads_are_gone_on_with(
    store: Store, places: list[memoryview], monkeypatch: pytest.MonkeyPatch, direct: bool
) -> None:
    """However odd: past the page cache one can only go on from a whole page."""
    if not direct:
        refuse_direct(monkeypatch)
    files, real, draw = open_several(store), os.preadv, random.Random(1)

    def short(file: int, into: list[memoryview], offset: int) -> int:
        assert not direct or offset % 4096 == 0
        count = real(file, into, offset)
        return max(draw.randint(1, count), min(count, 4097 if direct else 1))

    monkeypatch.setattr(os, "preadv", short)
    assert read(files, places, 1, 2, 0, 7) == content(store, 1, 2, 0, 7)
    files.close()


def begun_here_ended_there(files: StoreFiles, places: list[memoryview], *which: int) -> bytes:
    row, expert, first, last = which
    end = files.begin(row, expert, first, places[: last - first])
    failures = list[BaseException]()

    def ending() -> None:
        try:
            end()
        except DeviceError as error:
            failures.append(error)

    other = threading.Thread(target=ending)
    other.start()
    other.join()
    if failures:
        raise failures[0]
    return b"".join(bytes(place) for place in places[: last - first])


@pytest.mark.parametrize("read_bytes", [4096, STRIDE, 3 * STRIDE, 1 << 24])
@pytest.mark.parametrize("where", ["asynchronous", "page cache", "no such calls", "refused"])
def test_a_read_begins_here_and_ends_there(
    store: Store, places: list[memoryview], monkeypatch: pytest.MonkeyPatch,
    read_bytes: int, where: str,
) -> None:  # fmt: skip
    """Whatever of it the system does by itself: of all requests it is the first at the most."""
    if where == "page cache":
        refuse_direct(monkeypatch)
    if where == "no such calls":
        monkeypatch.setattr("crisp.hw.store.aio._CALLS", {})
    files = open_several(store, read_bytes)
    assert not files.asynchronous or where in ("asynchronous", "refused")
    if where == "refused" and files.asynchronous:
        for early in files._async_reads:
            monkeypatch.setattr(early, "_submit", -1)
    for which in [(0, 0, 0, 7), (1, 7, 6, 7), (0, 3, 2, 5)]:
        assert begun_here_ended_there(files, places, *which) == content(store, *which)
    assert bytes(places[7]) == b"\xee" * STRIDE
    files.close()
    files.close()


def test_one_begins_while_another_is_on_its_way(store: Store, places: list[memoryview]) -> None:
    """And they may end in either order."""
    files = open_several(store)
    for turn in (1, -1):
        ends = [files.begin(1, 2, block, [places[block]]) for block in (3, 4)]
        for end in ends[::turn]:
            end()
        assert b"".join(map(bytes, places[3:5])) == content(store, 1, 2, 3, 5)
        places[3][:] = places[4][:] = bytes(STRIDE)
    files.close()


def test_all_that_were_asked_for_or_none(store: Store, monkeypatch: pytest.MonkeyPatch) -> None:
    """The system's limit may lie between."""
    made, real = list[AsynchronousRead](), AsynchronousRead.__init__

    def limited(self: AsynchronousRead) -> None:
        if made:
            raise OSError(errno.EAGAIN, os.strerror(errno.EAGAIN))
        real(self)
        made.append(self)

    monkeypatch.setattr(AsynchronousRead, "__init__", limited)
    assert not StoreFiles(store).asynchronous
    assert all(not one._context.value for one in made)


@pytest.fixture
def early(store: Store) -> Iterator[AsynchronousRead]:
    try:
        file = os.open(store.files[0], os.O_RDONLY | os.O_DIRECT)
    except OSError:
        pytest.skip("this file system refuses O_DIRECT")
    made = AsynchronousRead.open_several(1, file)
    os.close(file)
    if not made:
        pytest.skip("this system reads nothing asynchronously")
    yield made[0]
    made[0].close()


@pytest.mark.usefixtures("early")
def test_where_the_system_has_them_reads_begin_early(
    store: Store, places: list[memoryview], monkeypatch: pytest.MonkeyPatch
) -> None:
    """The reading thread asks for nothing then: it waits for what has begun."""
    files = StoreFiles(store)
    assert files.asynchronous
    monkeypatch.setattr(os, "preadv", lambda *_: pytest.fail("read by the thread"))
    assert begun_here_ended_there(files, places, 1, 2, 0, 7) == content(store, 1, 2, 0, 7)
    files.close()


def test_as_many_places_as_a_request_may_have(store: Store, early: AsynchronousRead) -> None:
    """1,024 places, all that the system takes."""
    unit = 512  # of a disk
    with mmap.mmap(-1, 1024 * unit) as memory, memoryview(memory) as whole:
        places = [whole[at : at + unit] for at in range(0, len(memory), unit)]
        file = os.open(store.files[0], os.O_RDONLY)
        assert early.begin(file, places, 0)
        assert early.end() == len(memory)
        assert whole[:] == store.files[0].read_bytes()[: len(memory)]
        os.close(file)
        for place in places:
            place.release()


@pytest.mark.parametrize("refused", ["setup", "submit", "read"])
def test_what_the_system_refuses_is_not_asked_for(
    store: Store, places: list[memoryview], monkeypatch: pytest.MonkeyPatch, refused: str
) -> None:
    """Known from the first page of a file on; everything is read all the same."""
    if refused == "setup":
        monkeypatch.setattr("crisp.hw.store.aio._CALLS", {})
    elif refused == "submit":
        monkeypatch.setattr(AsynchronousRead, "begin", lambda *_: False)
    else:
        monkeypatch.setattr(AsynchronousRead, "end", fails)
    files = StoreFiles(store)
    assert not files.asynchronous
    assert begun_here_ended_there(files, places, 1, 7, 0, 3) == content(store, 1, 7, 0, 3)
    files.close()


def fails(_: AsynchronousRead) -> int:
    raise OSError(errno.EIO, os.strerror(errno.EIO))


@pytest.mark.parametrize("how", ["longer", "shorter", "the same size"])
def test_files_that_are_written_to_while_they_are_read_are_named(own: Store, how: str) -> None:
    files = StoreFiles(own)
    files.check()
    size = own.files[1].stat().st_size
    with own.files[1].open("r+b") as file:
        if how == "the same size":
            file.seek(size - 1)
            file.write(b"x")
        else:
            file.truncate(size + (4096 if how == "longer" else -4096))
    with pytest.raises(DeviceError, match=r"layer-001\.\w+: was written to while it was read$"):
        files.check()
    files.close()


def test_closing_waits_for_what_is_on_its_way(
    store: Store, places: list[memoryview], early: AsynchronousRead
) -> None:
    """When it has returned nothing is written to memory any more."""
    file = os.open(store.files[0], os.O_RDONLY | os.O_DIRECT)
    assert early.begin(file, places, 0)
    early.close()
    os.close(file)
    before = [bytes(place) for place in places]
    time.sleep(0.05)
    assert before == [bytes(place) for place in places]


def test_a_begun_read_that_falls_short_is_gone_on_with(
    store: Store, places: list[memoryview], monkeypatch: pytest.MonkeyPatch
) -> None:
    """From the last whole page: nothing behind it counts, whatever lies there."""
    files = open_several(store, 1 << 24)
    if not files.asynchronous:
        pytest.skip("this system reads nothing asynchronously")
    real = AsynchronousRead.end

    def short(self: AsynchronousRead) -> int:
        assert real(self) == 7 * STRIDE
        places[2][5000:] = bytes(STRIDE - 5000)
        for place in places[3:7]:
            place[:] = bytes(STRIDE)
        return 2 * STRIDE + 5000

    monkeypatch.setattr(AsynchronousRead, "end", short)
    assert begun_here_ended_there(files, places, 1, 2, 0, 7) == content(store, 1, 2, 0, 7)
    files.close()


def test_a_begun_read_that_fails_is_told_of_where_it_ends(
    own: Store, places: list[memoryview], monkeypatch: pytest.MonkeyPatch
) -> None:
    files = open_several(own)
    os.truncate(own.files[1], own.offset(1, 4, 3) + 100)
    with pytest.raises(DeviceError, match=r"layer-001\.\w+: is \d+ bytes, too few for"):
        begun_here_ended_there(files, places, 1, 4, 0, 4)
    if files.asynchronous:
        for early in files._async_reads:
            monkeypatch.setattr(early, "_ended", type(early._ended)(result=-errno.EIO))
            monkeypatch.setattr(early, "_call", lambda *_: None)
        with pytest.raises(DeviceError, match=r"-001\.\w+: cannot be read: Input/output error$"):
            begun_here_ended_there(files, places, 1, 4, 0, 1)
        monkeypatch.undo()
    files.close()


def test_what_the_system_says_is_said(
    store: Store, places: list[memoryview], monkeypatch: pytest.MonkeyPatch
) -> None:
    files = open_several(store)

    def broken(*_: Any) -> int:
        raise OSError(errno.EIO, os.strerror(errno.EIO))

    monkeypatch.setattr(os, "preadv", broken)
    with pytest.raises(DeviceError, match=r"layer-000\.\w+: cannot be read: Input/output error$"):
        files.read(0, 0, 0, places[:1])
    files.close()


@pytest.mark.parametrize("direct", [True, False])
@pytest.mark.parametrize("odd", [0, 100])
def test_a_file_cut_off_under_the_run(
    own: Store, places: list[memoryview], monkeypatch: pytest.MonkeyPatch, direct: bool, odd: int
) -> None:
    if not direct:
        refuse_direct(monkeypatch)
    files = open_several(own)
    os.truncate(own.files[1], own.offset(1, 4, 3) + odd)
    files.read(1, 4, 0, places[:3])
    with pytest.raises(DeviceError, match=r"layer-001\.\w+: is \d+ bytes, too few for"):
        files.read(1, 4, 0, places[:4])
    files.close()


def test_another_file_in_its_place(own: Store, tmp_path: Path) -> None:
    """Between the store's opening and the device's; later the file that was opened is read on."""
    other = pack_synthetic(SPEC, tmp_path / "other", seed=1)
    before = own.files[0].read_bytes()
    with pytest.raises(DeviceError, match=r"layer-000\.\w+: is another file than it was"):
        shutil.copy(other.files[0], own.files[0])
        StoreFiles(own)
    own.files[0].write_bytes(before)
    os.truncate(own.files[1], 4096)
    with pytest.raises(DeviceError, match=r"layer-001\.\w+: is 4096 bytes, and was \d+$"):
        StoreFiles(own)
    own.files[1].unlink()
    with pytest.raises(DeviceError, match=r"layer-001\.\w+: cannot be read: No such file"):
        StoreFiles(own)


def test_a_run_reads_what_it_opened(own: Store, places: list[memoryview], tmp_path: Path) -> None:
    files, expected = open_several(own), content(own, 0, 0, 0, 7)
    other = pack_synthetic(SPEC, tmp_path / "other", seed=1)
    other.files[0].replace(own.files[0])
    assert read(files, places, 0, 0, 0, 7) == expected
    files.close()


def test_no_file_stays_open_when_one_cannot_be(own: Store) -> None:
    own.files[1].unlink()
    before = len(list(Path("/proc/self/fd").iterdir()))
    for _ in range(3):
        with pytest.raises(DeviceError):
            StoreFiles(own)
    assert len(list(Path("/proc/self/fd").iterdir())) == before


def test_where_direct_reading_is_refused_it_says_why(
    store: Store, monkeypatch: pytest.MonkeyPatch
) -> None:
    refuse_direct(monkeypatch)
    files = StoreFiles(store)
    assert not files.direct
    assert files.why_not_direct == f"{store.path}: O_DIRECT is refused: Invalid argument"
    files.close()


def test_where_only_one_file_refuses_when_it_is_read_none_is_read_directly(
    store: Store, places: list[memoryview], monkeypatch: pytest.MonkeyPatch
) -> None:
    real_open, real_read, refusing = os.open, os.preadv, set[int]()

    def opens(path: Any, flags: int, *more: Any, **named: Any) -> int:
        file = real_open(path, flags, *more, **named)
        refusing.discard(file)
        if flags & os.O_DIRECT and path == store.files[1]:
            refusing.add(file)
        return file

    def reads(file: int, *more: Any) -> int:
        if file in refusing:
            raise OSError(errno.EINVAL, os.strerror(errno.EINVAL))
        return real_read(file, *more)

    monkeypatch.setattr(os, "open", opens)
    monkeypatch.setattr(os, "preadv", reads)
    files = StoreFiles(store)
    assert not files.direct
    assert files.why_not_direct == f"{store.path}: O_DIRECT is refused: Invalid argument"
    for which in [(0, 0, 0, 7), (1, 7, 6, 7)]:
        assert read(files, places, *which) == content(store, *which)
    files.close()


def test_what_goes_through_the_page_cache_is_dropped_at_once(
    store: Store, places: list[memoryview], monkeypatch: pytest.MonkeyPatch
) -> None:
    refuse_direct(monkeypatch)
    files, asked = StoreFiles(store), list[tuple[int, ...]]()
    monkeypatch.setattr(os, "posix_fadvise", lambda file, *what: asked.append(what))
    files.read(1, 2, 3, places[:2])
    assert asked == [(store.offset(1, 2, 3), 2 * STRIDE, os.POSIX_FADV_DONTNEED)]
    files.close()


class Times:
    """A clock that goes on by what a system call of so many bytes is said to take."""

    def __init__(self, takes: Callable[[int], int]) -> None:
        self.now, self.calls, self._takes = 0, list[int](), takes

    def preadv(self, file: int, into: list[memoryview], offset: int) -> int:
        count = sum(map(len, into))
        self.calls.append(count)
        self.now += self._takes(count)
        return count


@pytest.mark.parametrize(
    ("best", "others", "taken"),
    [
        (1 << 18, 20, 1 << 18), (1 << 20, 20, 1 << 20), (1 << 22, 20, 1 << 22),
        (1 << 24, 20, reading.WHOLE),
        (1 << 20, 11, reading.WHOLE), (1 << 20, 12, 1 << 20),  # a tenth slower is close enough
    ],
)  # fmt: skip
def test_the_largest_size_that_reads_about_as_fast_as_the_fastest_is_taken(
    store: Store, monkeypatch: pytest.MonkeyPatch, best: int, others: int, taken: int
) -> None:
    """Of a store and a pool of more than 16 MiB; what takes all of it at once is not cut."""
    files, times = StoreFiles(store), Times(lambda n: 10 * n if n == best else others * n)
    monkeypatch.setattr(os, "preadv", times.preadv)
    monkeypatch.setattr(os, "fstat", lambda _: os.stat_result([1 << 30] * 10))
    monkeypatch.setattr(reading, "_read_sizes", {})
    times.now = 0
    for _ in range(2):  # the second is told what the first has found
        files.read_bytes = 0
        files.choose_size(memoryview(bytearray(1 << 24)), lambda: times.now)
        assert files.read_bytes == taken
        assert sum(times.calls) == 2 * 4 * (1 << 24)
    files.close()


def test_a_tiny_pool_leaves_nothing_to_choose(store: Store) -> None:
    files = StoreFiles(store)
    files.choose_size(memoryview(mmap.mmap(-1, STRIDE)), lambda: 0)
    assert files.read_bytes == reading.WHOLE
    files.close()


@given(st.lists(st.integers(1, 9), min_size=1, max_size=20), st.integers(1, 8))
def test_requests_are_cut_rightly(sizes: list[int], most: int) -> None:
    """Together they are all places in order; each is full but the last."""
    unit = 16
    whole = bytes(i % 251 for i in range(unit * sum(sizes)))
    rest, places = memoryview(whole), []
    for size in sizes:
        places.append(rest[: unit * size])
        rest = rest[unit * size :]
    runs = list(_requests(places, unit * most))
    lengths = [sum(map(len, run)) for run in runs]
    assert b"".join(bytes(piece) for run in runs for piece in run) == whole
    assert all(length == unit * most for length in lengths[:-1])
    assert 0 < lengths[-1] <= unit * most
    assert all(len(piece) for run in runs for piece in run)


def test_no_request_has_more_places_than_the_system_takes() -> None:
    places = [memoryview(b"12")] * 2500
    assert [len(run) for run in _requests(places, 1 << 30)] == [1024, 1024, 452]


class Clock:
    """Sleeping takes as long as asked, and something more."""

    def __init__(self, late: Callable[[], int] = lambda: 0) -> None:
        self.now, self._late = 5 * SECOND, late

    def __call__(self) -> int:
        return self.now

    def sleep(self, seconds: float) -> bool:
        self.now += round(seconds * 1e9) + self._late()
        return False


def test_back_to_back_the_average_is_the_limit() -> None:
    """A thousand requests of 333 bytes at 7 bytes a second, each woken up a little late."""
    draw = random.Random(0)
    clock = Clock(lambda: draw.randrange(10**6))
    pace, begin = RateLimit(7, clock, clock.sleep), clock.now
    for _ in range(1000):
        pace.wait(clock.now, 333)
    assert 0 <= clock.now - begin - 333_000 * SECOND / 7 <= 10**6


@given(st.lists(st.tuples(st.integers(0, 20), st.integers(1, 50), st.integers(0, 30)), max_size=30))
def test_never_faster_than_the_limit(requests: list[tuple[int, int, int]]) -> None:
    """(pause ms, kB, reading ms) at 1 MB/s: over any window, but for the slack of 3 ms."""
    clock = Clock()
    pace, windows = RateLimit(10**6, clock, clock.sleep), []
    for pause, size, reading_ms in requests:
        clock.now += pause * 10**6
        begin = clock.now
        clock.now += reading_ms * 10**6
        pace.wait(begin, 1000 * size)
        windows.append((begin, clock.now, size * 10**6))  # ns that its bytes need
    for i, (begin, _, _) in enumerate(windows):
        for j in range(i, len(windows)):
            needed = sum(ns for _, _, ns in windows[i : j + 1])
            assert windows[j][1] - begin >= needed - RateLimit.SLACK


def test_a_link_that_was_idle_has_saved_up_nothing() -> None:
    clock = Clock()
    pace = RateLimit(1000, clock, clock.sleep)
    clock.now += SECOND // 100
    begin = clock.now
    pace.wait(begin, 500)
    assert clock.now - begin == SECOND // 2


def test_nobody_waits_for_a_pace_that_was_stopped() -> None:
    pace, over = RateLimit(1, lambda: 0), threading.Event()
    pace.stop()
    waiting = threading.Thread(target=lambda: (pace.wait(0, 1 << 40), over.set()), daemon=True)
    waiting.start()
    assert over.wait(10)
