"""Ctrl-C: one word, exit code 130, and nothing left: no half-written file, no process."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path

import pytest

from tests.crisp.cli.toy import toy_trace

ROOT = Path(__file__).resolve().parents[3]
DEADLINE = 60  # seconds until something must have happened


@pytest.fixture(scope="module")
def long(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A trace that takes far longer to simulate than a test may take."""
    path = tmp_path_factory.mktemp("traces") / "long.trace.safetensors"
    toy_trace(rows=400_000).save(path)
    return path


def started(arguments: list[str], cwd: Path) -> subprocess.Popen[str]:
    """The command, in a session of its own."""
    return subprocess.Popen(
        [sys.executable, "-m", "crisp", *arguments],
        cwd=cwd,
        env={**os.environ, "PYTHONPATH": str(ROOT)},
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
        start_new_session=True,
    )


def interrupted(arguments: list[str], cwd: Path, begun: Callable[[int], bool]) -> str:
    """The error output of a command that gets Ctrl-C once it has begun.

    As a terminal does it: the signal goes to the command and to all its children.
    """
    process = started(arguments, cwd)
    try:
        wait_for(lambda: begun(process.pid))
        assert process.poll() is None, process.communicate()
        os.killpg(process.pid, signal.SIGINT)
        out, err = process.communicate(timeout=DEADLINE)
        assert out == ""
        # Python ends by the signal itself if it came while a string was being executed
        assert process.returncode in (130, -signal.SIGINT)
        return str(err)
    finally:
        if process.poll() is None:
            os.killpg(process.pid, signal.SIGKILL)


def wait_for(condition: Callable[[], bool]) -> None:
    stop = time.monotonic() + DEADLINE
    while not condition():
        assert time.monotonic() < stop, "nothing happened"
        time.sleep(0.02)


def members(session: int) -> list[int]:
    """Processes of a session that are still running."""
    found = []
    for entry in Path("/proc").iterdir():
        if entry.name.isdigit():
            try:
                fields = (entry / "stat").read_text().rpartition(")")[2].split()
            except OSError:  # it has just ended
                continue
            if int(fields[3]) == session and fields[0] != "Z":
                found.append(int(entry.name))
    return found


def workers(session: int) -> list[int]:
    """Those of a session that are there to simulate and have begun to import what they need."""
    found = []
    for member in members(session):
        folder = Path(f"/proc/{member}")
        loky = b"popen_loky" in (folder / "cmdline").read_bytes()
        if loky and b"multiarray" in (folder / "maps").read_bytes():
            found.append(member)
    return found


def test_one_run_leaves_no_file(long: Path, tmp_path: Path) -> None:
    line = ["simulate", str(long), "--policy", "lru", "--budget", "30%", "--json", "r.json"]
    files = ["--timeline", "t.parquet", "--perfetto", "p.json", "--plot", "g.png"]

    def writing(process: int) -> bool:
        return sum(path.stat().st_size for path in tmp_path.iterdir()) > 1_000_000

    assert interrupted([*line, *files], tmp_path, writing) == "interrupted\n"
    assert list(tmp_path.iterdir()) == []


def test_a_table_stops_its_workers(long: Path, tmp_path: Path) -> None:
    if len(os.sched_getaffinity(0)) < 2:
        pytest.skip("needs two cores: on one there are no workers")
    line = ["simulate", str(long), "--policy", "lru,crisp", "--budget", "10%,30%"]
    session = 0

    def starting(process: int) -> bool:
        nonlocal session
        session = process
        return bool(workers(process))

    told = interrupted([*line, "--json", "r.json"], tmp_path, starting)
    assert told == "interrupted\n"
    wait_for(lambda: not members(session))
    assert list(tmp_path.iterdir()) == []


def test_a_worker_that_is_killed_is_told_of(long: Path, tmp_path: Path) -> None:
    """As it happens when memory runs out."""
    if len(os.sched_getaffinity(0)) < 2:
        pytest.skip("needs two cores: on one there are no workers")

    line = ["simulate", str(long), "--policy", "lru,crisp", "--budget", "10%,30%"]
    process = started([*line, "--json", "r.json"], tmp_path)
    try:
        wait_for(lambda: bool(workers(process.pid)))
        os.kill(workers(process.pid)[0], signal.SIGKILL)
        out, err = process.communicate(timeout=DEADLINE)
    finally:
        if process.poll() is None:
            os.killpg(process.pid, signal.SIGKILL)
    assert (process.returncode, out) == (2, "")
    assert err == "error: a worker process was killed; was there memory enough?\n"
    assert list(tmp_path.iterdir()) == []
