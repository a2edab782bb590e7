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
        assert process.returncode == 130
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


@pytest.mark.parametrize("command", ["one run", "a table", "pack"])
def test_sigterm_ends_it_as_ctrl_c_does(long: Path, tmp_path: Path, command: str) -> None:
    """Unlike a terminal's Ctrl-C it comes to the command alone."""
    line = ["simulate", str(long), "--policy", "lru", "--budget", "30%", "--json", "r.json"]
    line += ["--timeline", "t.parquet"]
    if command == "a table":
        line = ["simulate", str(long), "--policy", "lru,crisp", "--budget", "10%,30%"]
    if command == "pack":
        pytest.importorskip("xxhash")
        line = ["pack", "--synthetic", "olmoe-1b-7b", "--out", "store"]
    process = started(line, tmp_path)
    begun = (lambda: workers(process.pid)) if command == "a table" else (
        lambda: [path for path in tmp_path.rglob("*") if path.is_file() and path.stat().st_size]
    )  # fmt: skip
    try:
        wait_for(lambda: bool(begun()))
        process.terminate()
        out, err = process.communicate(timeout=DEADLINE)
    finally:
        if process.poll() is None:
            os.killpg(process.pid, signal.SIGKILL)
    assert (process.returncode, out, err) == (143, "", "terminated\n")
    wait_for(lambda: not members(process.pid))
    assert list(tmp_path.iterdir()) == []


def test_a_parents_wish_that_sigterm_be_ignored_is_kept(tmp_path: Path) -> None:
    program = (
        "import os, signal, crisp.cli.main as own\n"
        "signal.signal(signal.SIGTERM, signal.SIG_IGN)\n"
        "own._run = lambda given: os.kill(os.getpid(), signal.SIGTERM) or 0\n"
        "own.main([])"
    )
    environment = {**os.environ, "PYTHONPATH": str(ROOT)}
    done = subprocess.run([sys.executable, "-c", program], env=environment, check=False)
    assert done.returncode == 0


@pytest.mark.parametrize(
    "run",
    [
        "exec('strike()', {'strike': strike})",  # as a dataclass is made
        "type('Made', (), {'part': type('Part', (), {'__set_name__': strike})()})",
    ],
)
def test_ctrl_c_at_odd_moments_has_the_same_exit_code(tmp_path: Path, run: str) -> None:
    """Python itself would end by the signal, or (3.11) make another error of it."""
    (tmp_path / "own.py").write_text(
        "import os, signal, time, crisp.cli.main as main\n"
        "def strike(*arguments):\n"
        "    os.kill(os.getpid(), signal.SIGINT)\n"
        "    time.sleep(9)\n"
        f"main._run = lambda given: {run}\n"
        "main.main([])"
    )
    environment = {**os.environ, "PYTHONPATH": f"{ROOT}:{tmp_path}"}
    done = subprocess.run(
        [sys.executable, "-m", "own"], env=environment, capture_output=True, text=True, check=False
    )
    assert (done.returncode, done.stderr) == (130, "interrupted\n")


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
