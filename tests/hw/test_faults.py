"""What goes wrong with the cpu device: it is said, nothing hangs, threads and memory are let go."""

from __future__ import annotations

import errno
import faulthandler
import mmap
import os
import random
import re
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import closing
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from crisp.cli.main import main
from crisp.errors import CrispError
from crisp.hw.devices.batch import ExpertBatch
from crisp.hw.devices.cpu.device import CpuDevice
from crisp.hw.devices.protocol import Copy
from crisp.hw.devices.slots import Slots, slots_needed
from crisp.hw.devices.worker import Worker
from crisp.hw.errors import DeviceError
from crisp.hw.executor import Executor
from crisp.hw.store.aio import AsynchronousRead
from crisp.hw.store.packing import pack, pack_synthetic
from crisp.hw.store.reader import Store
from crisp.model.spec import ModelSpec
from crisp.policy import named
from crisp.run.timeline import Recorder
from crisp.scheduler.residency import StartingState
from crisp.scheduler.scheduler import EventScheduler
from crisp.scheduler.tasks import Task

torch = pytest.importorskip("torch")
pytest.importorskip("xxhash")

ROOT = Path(__file__).parents[2]
TINY = ROOT / "traces" / "tiny-mixtral"
TRACE = ROOT / "traces" / "tiny-mixtral-docs.trace.safetensors"
SPEC = ModelSpec.from_config(TINY, "tiny").first_layers(2)


@pytest.fixture(autouse=True)
def watchdog() -> Iterator[None]:
    """Whatever hangs ends the tests, and says where; no thread of a device is left behind."""
    before = set(threading.enumerate())
    faulthandler.dump_traceback_later(120, exit=True)
    yield
    faulthandler.cancel_dump_traceback_later()
    left = [thread.name for thread in set(threading.enumerate()) - before]
    assert not [name for name in left if name.startswith("crisp-")]


@pytest.fixture(scope="module")
def store(tmp_path_factory: pytest.TempPathFactory) -> Store:
    return pack_synthetic(SPEC, tmp_path_factory.mktemp("made") / "store")


@pytest.fixture
def own(tmp_path: Path) -> Store:
    """The whole model's, to be changed."""
    return pack(TINY, tmp_path / "store")


def copied(device: CpuDevice, request: Copy) -> BaseException | None:
    """What a copy failed with."""
    failures, over = list[BaseException | None](), threading.Event()

    def done(_: int, failure: BaseException | None) -> None:
        failures.append(failure)
        over.set()

    device.copy(request, done)
    assert over.wait(30)
    return failures[0]


# -- streams -------------------------------------------------------------------------------------


def test_a_stream_does_one_thing_after_the_other_and_tells_of_failures() -> None:
    stream, order, told = Worker("test", time.monotonic_ns), list[int](), list[Any]()
    for i in range(50):
        stream.submit(lambda i=i: order.append(i), lambda end, failure: told.append((end, failure)))
    stream.run(lambda: None)
    assert order == list(range(50))
    assert [failure for _, failure in told] == [None] * 50
    assert sorted(end for end, _ in told) == [end for end, _ in told]
    with pytest.raises(ZeroDivisionError):
        stream.run(lambda: 1 // 0)  # type: ignore[arg-type,return-value]
    stream.run(lambda: None)  # it goes on
    stream.close()
    stream.close()
    with pytest.raises(DeviceError, match=r"^the test thread has ended$"):
        stream.check()


def test_a_stream_may_be_closed_from_its_own_callback() -> None:
    stream, over = Worker("test", time.monotonic_ns), threading.Event()
    stream.submit(lambda: None, lambda end, failure: (stream.close(), over.set()))  # type: ignore[func-returns-value]
    assert over.wait(10)
    stream.close()


def killed(device: CpuDevice) -> None:
    """Its reading thread ends, for a callback raises."""

    def done(_: int, failure: BaseException | None) -> None:
        raise ValueError("boom")

    device._link.submit(lambda: None, done)
    device._link._thread.join(10)


def test_a_dead_thread_is_found(store: Store) -> None:
    with closing(CpuDevice(store, 8)) as device:
        device.check()
        killed(device)
        said = r"^the reading thread has ended: ValueError\('boom'\)$"
        with pytest.raises(DeviceError, match=said):
            device.check()
        with pytest.raises(DeviceError, match=said):
            device.synchronize()


def test_who_waits_for_an_event_hears_of_a_dead_thread(store: Store) -> None:
    scheduler = EventScheduler(
        store.spec, named("fo"), StartingState([0, 0]), granularity="expert", cost=None
    )
    needed = slots_needed(store.spec, [0, 0], False)
    with closing(CpuDevice(store, needed)) as device:
        slots = Slots(store.spec, needed)
        executor = Executor(store.spec, scheduler, device, slots, Recorder([]))
        killed(device)
        row = np.zeros(1, np.int64)
        work = ExpertBatch(
            0, row, row + 7, np.ones(1, np.float32), torch.zeros(1, store.spec.d_model)
        )
        with pytest.raises(DeviceError, match=r"thread has ended: ValueError"):
            executor.event(0, [Task(0, [7])], (), None, lambda: {0: work}, 1)()


def test_closing_in_the_middle_of_an_operation(store: Store) -> None:
    """It ends what it is at, and is not done with what was asked after that."""
    device, begun, go = CpuDevice(store, 8), threading.Event(), threading.Event()
    ends = list[int]()

    def operation() -> None:
        begun.set()
        go.wait(30)

    device._link.submit(operation, lambda end, failure: ends.append(end))
    begun.wait(30)
    threading.Timer(0.2, go.set).start()
    device.close()
    assert len(ends) == 1
    device.copy(Copy(0, 0, 0, [0]), lambda end, failure: ends.append(end))
    assert len(ends) == 1
    with pytest.raises(DeviceError):
        device.check()


def test_closing_does_not_wait_for_a_slow_link(store: Store) -> None:
    """7 blocks at a byte a second are 3 days."""
    device, over = CpuDevice(store, 8, link_limit=1), threading.Event()
    device.copy(Copy(0, 0, 0, range(7)), lambda end, failure: over.set())
    time.sleep(0.1)
    assert not over.is_set()
    device.close()
    assert over.is_set()


# -- opening -------------------------------------------------------------------------------------


def test_no_memory_for_the_pool(store: Store, monkeypatch: pytest.MonkeyPatch) -> None:
    files = len(list(Path("/proc/self/fd").iterdir()))
    with monkeypatch.context() as patch:
        patch.setattr("crisp.hw.memory.available_bytes", lambda: 10**6)
        with pytest.raises(CrispError, match=r"^a pool of 1,000 blocks needs .* can be had$"):
            CpuDevice(store, 1000)

    real = mmap.mmap

    def refused(file: int, size: int, *more: Any) -> mmap.mmap:
        if size == 8 * store.spec.block_bytes:
            raise OSError(errno.ENOMEM, os.strerror(errno.ENOMEM))
        return real(file, size, *more)

    monkeypatch.setattr(mmap, "mmap", refused)
    with pytest.raises(CrispError, match=r"^a pool of 8 blocks: Cannot allocate memory$"):
        CpuDevice(store, 8)
    assert len(list(Path("/proc/self/fd").iterdir())) == files


@pytest.mark.parametrize(("threads", "started"), [(1, 0), (2, 1)])
def test_no_threads(
    store: Store, monkeypatch: pytest.MonkeyPatch, threads: int, started: int
) -> None:
    real, count = threading.Thread.start, [0]

    def start(self: threading.Thread) -> None:
        count[0] += 1
        if count[0] > started:
            raise RuntimeError("can't start new thread")
        real(self)

    monkeypatch.setattr(threading.Thread, "start", start)
    files = len(list(Path("/proc/self/fd").iterdir()))
    with pytest.raises(CrispError, match=rf"^{threads + 1} threads: the system starts no more$"):
        CpuDevice(store, 8, threads=threads)
    assert len(list(Path("/proc/self/fd").iterdir())) == files


@pytest.mark.parametrize("error", [OSError(28, "No space left on device"), EOFError("the end")])
def test_compiled_code_cannot_be_kept_or_is_damaged(
    store: Store, monkeypatch: pytest.MonkeyPatch, error: Exception
) -> None:
    def compile_or_fetch(self: Any, sig: Any) -> None:
        raise error

    with monkeypatch.context() as patch:
        patch.setattr("numba.core.dispatcher.Dispatcher.compile", compile_or_fetch)
        patch.setattr("crisp.hw.devices.cpu.arithmetic.run", fresh())
        said = f"^/.*: {re.escape(str(error))}; room for compiled code"
        with pytest.raises(DeviceError, match=said):
            CpuDevice(store, 8)


def fresh() -> Any:
    """A kernel as it is before its first call."""
    from numba import njit

    from crisp.hw.devices.cpu.kernels import run

    return njit(run.py_func, cache=True)


def test_huge_pages_are_not_asked_of_every_kernel(
    store: Store, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(mmap, "MADV_HUGEPAGE", 12345)
    device = CpuDevice(store, 8)
    assert device.pool.shape == (8, store.spec.block_bytes)
    device.close()


# -- checksums -----------------------------------------------------------------------------------


@pytest.mark.parametrize("seed", range(4))
def test_one_wrong_bit_is_found(own: Store, seed: int) -> None:
    """Wherever it is, and in no other block."""
    draw = random.Random(seed)
    row, expert, block = draw.randrange(6), draw.randrange(8), draw.randrange(7)
    at = own.offset(row, expert, block) + draw.randrange(own.spec.block_bytes)
    with own.files[row].open("r+b") as file:
        file.seek(at)
        byte = file.read(1)[0]
        file.seek(at)
        file.write(bytes([byte ^ 1 << draw.randrange(8)]))
    with closing(CpuDevice(own, 8)) as device:
        assert copied(device, Copy(row, expert, 0, range(7))) is None
    with closing(CpuDevice(own, 8, verify=True)) as device:
        failure = copied(device, Copy(row, expert, 0, range(7)))
        layer = own.spec.moe_layers[row]
        assert isinstance(failure, DeviceError)
        assert re.search(
            rf"/layer-{layer:03}\.safetensors: block {block} of expert {expert}, layer {layer}, is "
            r"not what was written",
            str(failure),
        )
        assert copied(device, Copy(row, (expert + 1) % 8, 0, range(7))) is None
        if block:
            assert copied(device, Copy(row, expert, 0, range(block))) is None


# -- the command line ----------------------------------------------------------------------------


def said(capsys: pytest.CaptureFixture[str], store: Store, *more: str) -> str:
    """The one line of `crisp replay`, which ends with code 2."""
    with pytest.raises(SystemExit) as end:
        main(["replay", str(TRACE), "--store", str(store.path), "--policy", "lru", "--budget",
              "10%", "--limit", "20", *more])  # fmt: skip
    captured = capsys.readouterr()
    assert end.value.code == 2
    assert not captured.out
    lines = [line for line in captured.err.splitlines() if "error: " in line]
    assert len(lines) == 1
    assert "Traceback" not in captured.err
    return lines[0]


def before_reads(patch: pytest.MonkeyPatch, act: Callable[[], None]) -> None:
    """Of both kinds."""
    real, end = os.preadv, AsynchronousRead.end

    def preadv(*arguments: Any) -> int:
        act()
        return real(*arguments)

    def begun(self: AsynchronousRead) -> int:
        act()
        return end(self)

    patch.setattr(os, "preadv", preadv)
    patch.setattr(AsynchronousRead, "end", begun)


def test_faults_are_one_line(
    own: Store, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    count = [0]

    def broken() -> None:
        count[0] += 1
        if count[0] > 30:
            raise OSError(errno.EIO, os.strerror(errno.EIO))

    def shrinking() -> None:
        count[0] += 1
        if count[0] == 30:
            for path in own.files:
                os.truncate(path, 8192)

    def dying(*_: Any) -> None:
        raise ValueError("boom")

    with monkeypatch.context() as patch:
        before_reads(patch, broken)
        assert "cannot be read: Input/output error" in said(capsys, own)
    with monkeypatch.context() as patch:
        patch.setattr("crisp.hw.memory.available_bytes", lambda: 1000)
        assert "of memory, 1 kB can be had" in said(capsys, own)
    with monkeypatch.context() as patch:
        patch.setattr("crisp.hw.devices.slots.Slots.landed", dying)  # in a callback
        assert "the reading thread has ended: ValueError('boom')" in said(capsys, own)
    with own.files[2].open("r+b") as file:
        file.seek(own.offset(2, 0, 0))
        file.write(b"12345678" * (own.spec.expert_bytes * 8 // 8))
    assert "layer 2, is not what was written" in said(capsys, own, "--verify")
    with monkeypatch.context() as patch:
        count[0] = 0
        before_reads(patch, shrinking)
        assert re.search(r"layer-\d+\.safetensors: is \d+ bytes, too few", said(capsys, own))


def test_ctrl_c_in_the_middle_of_a_run(own: Store) -> None:
    """Even while a load at 20 kB/s would take a quarter of a minute."""
    done = subprocess.Popen(
        [sys.executable, "-c",
         "import threading, time\n"
         "from crisp.cli.main import main\n"
         "import crisp.hw.devices.cpu.device\n"
         "real = crisp.hw.devices.cpu.device.CpuDevice.copy\n"
         "def copy(*arguments):\n"
         "    print('copy', flush=True)\n"
         "    real(*arguments)\n"
         "crisp.hw.devices.cpu.device.CpuDevice.copy = copy\n"
         "try:\n"
         f"    main(['replay', {str(TRACE)!r}, '--store', {str(own.path)!r}, '--policy', 'lru',\n"
         "          '--budget', '10%', '--link-limit', '20kB/s'])\n"
         "finally:\n"
         "    print([thread.name for thread in threading.enumerate()], flush=True)\n"],
        cwd=ROOT, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True,
    )  # fmt: skip
    try:
        assert done.stdout is not None
        assert done.stdout.readline() == "copy\n"
        time.sleep(0.2)
        done.send_signal(signal.SIGINT)
        out, err = done.communicate(timeout=60)
    finally:
        done.kill()
    assert done.returncode == 130
    assert err.splitlines()[-1] == "interrupted"
    assert "Traceback" not in err
    assert "crisp-" not in out
