"""A thread that does not end: nobody waits for it for ever, and what it uses stays."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Iterator
from pathlib import Path

import pytest

from crisp.hw.devices.worker import Worker
from crisp.hw.errors import DeviceError
from crisp.hw.store.packing import pack_synthetic
from crisp.model.spec import ModelSpec

ROOT = Path(__file__).parents[3]
SAID = "the reading thread does not end, and is left behind"


@pytest.fixture
def stuck(monkeypatch: pytest.MonkeyPatch) -> Iterator[Worker]:
    """A thread in the middle of an operation, until the test is over."""
    monkeypatch.setattr("crisp.hw.devices.worker._JOIN_SECONDS", 0.05)
    begun, over = threading.Event(), threading.Event()
    worker = Worker("reading", time.monotonic_ns)
    worker.submit(lambda: (begun.set(), over.wait(60)), lambda end, failure: None)  # type: ignore[func-returns-value]
    assert begun.wait(10)
    yield worker
    over.set()
    worker._thread.join(10)


def test_closing_gives_up(stuck: Worker) -> None:
    with pytest.raises(DeviceError, match=f"^{SAID}$"):
        stuck.close()


def test_what_failed_before_is_told_first(stuck: Worker) -> None:
    with pytest.raises(KeyboardInterrupt) as caught:
        try:
            raise KeyboardInterrupt
        finally:
            stuck.close()
    assert caught.value.__notes__ == [SAID]


def test_ctrl_c_ends_a_run_whose_disk_is_gone(tmp_path: Path) -> None:
    """Reading is a system call that never returns: from a pipe that nobody writes to."""
    pytest.importorskip("torch")
    pytest.importorskip("xxhash")
    spec = ModelSpec.from_config(ROOT / "traces" / "tiny-mixtral")
    store = pack_synthetic(spec, tmp_path / "store").path
    os.mkfifo(tmp_path / "pipe")
    line = [
        "replay", str(ROOT / "traces" / "tiny-mixtral-docs.trace.safetensors"), "--store",
        str(store), "--policy", "lru", "--budget", "10%", "--timeline", str(tmp_path / "t.parquet"),
    ]  # fmt: skip
    process = subprocess.Popen(
        [sys.executable, "-c",
         "import os, crisp.hw.devices.worker\n"
         "from crisp.hw.store.block_io import StoreFiles\n"
         "from crisp.cli.main import main\n"
         "crisp.hw.devices.worker._JOIN_SECONDS = 0.2\n"
         f"pipe = os.open({str(tmp_path / 'pipe')!r}, os.O_RDWR)\n"
         "def read(*arguments):\n"
         "    print('reading', flush=True)\n"
         "    os.read(pipe, 1)\n"
         "StoreFiles.begin = lambda *arguments: read\n"
         f"main({line!r})\n"],
        cwd=ROOT, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True,
    )  # fmt: skip
    try:
        assert process.stdout is not None
        assert process.stdout.readline() == "reading\n"
        process.send_signal(signal.SIGINT)
        _, err = process.communicate(timeout=60)
    finally:
        process.kill()
    assert process.returncode == 130
    assert err.splitlines()[-1] == f"interrupted; {SAID}"
    assert not list(tmp_path.glob("*.p*"))
