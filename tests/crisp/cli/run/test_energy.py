"""crisp energy: any command under a meter that counts what the test says, or under none."""

from __future__ import annotations

import fcntl
import json
import os
import shlex
import signal
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

import pytest

from crisp.hw import telemetry
from crisp.hw.telemetry import metering
from tests.crisp.cli.test_interrupt import DEADLINE, ROOT, wait_for
from tests.hw.telemetry.test_metering import FakeMeter


@pytest.fixture
def meter(monkeypatch: pytest.MonkeyPatch) -> Callable[..., FakeMeter]:
    """Makes a fake one that every device has; windows last a second."""

    def make(*joules: float, reason: str | None = None, off: float | None = None) -> FakeMeter:
        fake = FakeMeter(*joules, reason=reason, off=off)
        monkeypatch.setattr(telemetry, "meters", lambda: (fake,))
        monkeypatch.setattr(telemetry, "meter_for", lambda device: fake)
        return fake

    monkeypatch.setattr(metering.time, "sleep", lambda seconds: None)
    return make


def test_what_a_command_took(crisp: Callable, meter: Callable, tmp_path: Path) -> None:
    """12 J in a second, of which the machine at rest draws 5."""
    meter(5, 12, off=0.25)
    file = tmp_path / "x.json"
    done = crisp("energy", "--tokens", 4, "--json", file, "--", "sh", "-c", "exit 3")
    assert (done.code, done.out) == (3, "")
    lines = done.err.splitlines()
    assert lines[0] == "command  sh -c 'exit 3'"
    assert lines[1].startswith("time     ") and lines[1].endswith(" s, exit code 3")
    assert lines[2:] == [
        "energy   12.0 J, of it 7.00 above rest",
        "tokens   4: 3.00 J/token, of it 1.75 above rest",
        "power    12.0 W on average",
        "meter    fake, 2 samples, ± 0.250 J",
        "         measured: made up; idle: 5 W over 1 s before",
    ]
    told = json.loads(file.read_text())
    assert told["command"] == ["sh", "-c", "exit 3"]
    assert (told["joules"], told["net_joules"], told["watts"]) == (12, 7, 12)
    assert (told["joules_per_token"], told["net_joules_per_token"]) == (3, 1.75)
    assert (told["half_width_j"], told["exit_code"], told["unavailable"]) == (None, 3, {})
    (run,) = told["runs"]
    assert (run["joules"], run["source"], run["samples"]) == (12, "fake", 2)
    assert run["uncertainty_j"] == 0.25
    assert 0 < run["seconds"] < DEADLINE


def test_without_a_meter_the_command_runs_and_has_no_joules(
    crisp: Callable, meter: Callable, tmp_path: Path
) -> None:
    fake = meter(reason="locked away")
    file = tmp_path / "x.json"
    asked = ("--within", "5%", "--tokens", 3, "--json", file)
    done = crisp("energy", *asked, "--", "sh", "-c", f"echo >> {tmp_path}/ran; exit 4")
    assert done.code == 4
    assert (tmp_path / "ran").read_text() == "\n"
    reason = "no meter can be read (fake: locked away); crisp doctor says what can be done"
    assert done.err.splitlines()[2:] == [f"energy   – J: {reason}"]
    told = json.loads(file.read_text())
    for name in ("joules", "net_joules"):
        assert told[name] is told[f"{name}_per_token"] is None
        assert told["unavailable"][name] == reason
    assert told["runs"][0]["unavailable"] == reason
    assert fake.calls == []
    named = crisp("energy", "--meter", "FAKE", "true")
    assert named.err.splitlines()[2:] == ["energy   – J: locked away"]


def test_it_is_repeated_until_the_interval_is_narrow(
    crisp: Callable, meter: Callable, tmp_path: Path
) -> None:
    """10, 12 and 11 J: 11 ± 4.303 / sqrt(3), above 5 J at rest each time."""
    meter(5, 10, 5, 12, 5, 11, 5, 11)
    file = tmp_path / "x.json"
    line = ("energy", "--within", "23%", "--json", file, "--tokens", 11, "--")
    done = crisp(*line, "sh", "-c", f"echo >> {tmp_path}/ran")
    assert done.code == 0
    assert (tmp_path / "ran").read_text() == "\n" * 3
    lines = done.err.splitlines()
    assert lines[2:4] == [
        "energy   11.0 ± 2.5 J, of it 6.0 ± 2.5 above rest",
        "tokens   11: 1.00 ± 0.23 J/token, of it 0.55 ± 0.23 above rest",
    ]
    assert lines[-2:] == [
        "runs     means of 3 runs and their 95 % intervals: within 23 %",
        "         10.0 12.0 11.0 J",
    ]
    told = json.loads(file.read_text())
    assert told["half_width_j"] == pytest.approx(2.48414, rel=1e-5)
    assert (told["reached"], told["ended"]) == (True, "within 23 %")
    assert [run["joules"] for run in told["runs"]] == [10, 12, 11]


def test_a_failure_ends_the_repeats_and_does_not_count(
    crisp: Callable, meter: Callable, tmp_path: Path
) -> None:
    meter(5, 10, 5, 12, 5, 99)
    fails = f"echo >> {tmp_path}/ran; test $(wc -l < {tmp_path}/ran) -lt 3"
    done = crisp("energy", "--repeats", 9, "sh", "-c", fails)
    assert done.code == 1
    assert done.err.splitlines()[-2:] == [
        "runs     means of 2 runs and their 95 % intervals: run 3 ended with exit code 1",
        "         10.0 12.0 J",
    ]
    meter(5, 10)
    done = crisp("energy", "--repeats", 9, "false")
    assert done.code == 1
    assert "runs     one run: it ended with exit code 1" in done.err


def test_ctrl_c_between_two_runs(
    crisp: Callable, meter: Callable, monkeypatch: pytest.MonkeyPatch
) -> None:
    pauses = []

    def rest(seconds: float) -> None:
        pauses.append(seconds)
        if len(pauses) > 2:
            raise KeyboardInterrupt

    meter(5, 10, 5, 12, 5)
    monkeypatch.setattr(metering.time, "sleep", rest)
    done = crisp("energy", "--repeats", 9, "true")
    assert done.code == 130
    assert done.err.splitlines()[-3:] == [
        "runs     means of 2 runs and their 95 % intervals: interrupted",
        "         10.0 12.0 J",
        "interrupted",
    ]


def test_no_rest_and_short_windows(crisp: Callable, meter: Callable) -> None:
    meter(12, off=1.2)
    done = crisp("energy", "--idle", 0, "true")
    lines = done.err.splitlines()
    assert lines[2] == (
        "energy   12.0 J, of it – above rest (what the machine draws at rest was not measured)"
    )
    assert lines[-1] == (
        "note     a window of 1 s is short for this meter, which leaves 10 % of its joules open: a "
        "longer run says more"
    )


def test_the_first_meter_that_can_be_read_is_taken(
    crisp: Callable, meter: Callable, monkeypatch: pytest.MonkeyPatch
) -> None:
    locked, fake = FakeMeter(reason="locked"), meter(5, 12)
    locked.name = "other"
    of = {"unified": locked, "cuda": locked, "cpu": fake}
    monkeypatch.setattr(telemetry, "meter_for", of.__getitem__)
    monkeypatch.setattr(telemetry, "meters", lambda: (locked, fake))
    assert "energy   12.0 J" in crisp("energy", "true").err
    assert "energy   – J: locked" in crisp("energy", "--meter", "OTH", "true").err
    fake.name = "other one"
    done = crisp("energy", "--meter", "oth", "true")
    assert (done.code, done.out) == (2, "")
    assert done.err == "error: --meter oth: could be other, other one; name one of them\n"


def test_mistakes_are_one_line(crisp: Callable, meter: Callable, tmp_path: Path) -> None:
    meter()
    for line, told in (
        ("energy", "missing argument 'COMMAND'; see 'crisp energy --help'"),
        ("energy -- no-such-command x", "no-such-command: there is no such command"),
        ("energy --meter fakes -- true", "unknown meter 'fakes'; did you mean 'fake'? known: fake"),
        ("energy --idle -1 -- true", "--idle -1: expected seconds, 0 or more"),
        ("energy --idle nan -- true", "--idle nan: expected seconds, 0 or more"),
        ("energy --tokens 0 -- true", "--tokens 0: expected 1 or more"),
        ("energy --within 7 -- true", "--within 7: expected a share of the mean, such as 5%"),
        ("energy --repeats 0 -- true", "--repeats 0: expected 1 or more"),
        ("energy --json - -- true", "--json -: a file name was expected"),
        ("energy --json '' -- true", "--json '': is empty; a file name was expected"),
        ("energy --jsn x -- true", "unknown option '--jsn'; did you mean '--json'? see 'crisp "
         "energy --help'"),
    ):  # fmt: skip
        done = crisp(*shlex.split(line))
        assert (done.code, done.out, done.err) == (2, "", f"error: {told}\n"), line
    broken = tmp_path / "broken"
    broken.write_bytes(b"\x7fELF")
    broken.chmod(0o755)
    meter(reason="locked away")
    assert crisp("energy", "--idle", 0, broken).err == f"error: {broken}: Exec format error\n"


# In a process of its own: streams, signals and a terminal are the command's.

_DRIVER = """
import sys
sys.path.insert(0, {root!r})
import crisp.hw.telemetry
from tests.hw.telemetry.test_metering import FakeMeter
fake = FakeMeter(*[12] * 9)
crisp.hw.telemetry.meter_for = lambda device: fake
from crisp.cli.main import main
main(["energy", "--idle", "0", *sys.argv[1:]])
"""
_COUNTS = """
import signal, sys, time
got = []
for number in (signal.SIGINT, signal.SIGTERM, signal.SIGUSR1):
    signal.signal(number, lambda number, frame: got.append(number))
open("ready", "w").close()
stop = time.monotonic() + 30
while not got and time.monotonic() < stop:
    time.sleep(0.01)
time.sleep(0.5)  # for another one
open("got", "w").write(" ".join(signal.Signals(number).name for number in got))
sys.exit(7)
"""
_LATE = """
import subprocess, time
passed_on = subprocess.Popen.send_signal
def late(process, number):
    time.sleep(0.2)  # else the second of two may be lost in the first
    passed_on(process, number)
subprocess.Popen.send_signal = late
"""


def driven(arguments: list[str], cwd: Path, **streams: int | None) -> subprocess.Popen[bytes]:
    return subprocess.Popen(
        [sys.executable, "-c", _DRIVER.format(root=str(ROOT)), *arguments],
        cwd=cwd, start_new_session=True, **streams,
    )  # fmt: skip


def ended(process: subprocess.Popen[bytes], given: bytes | None = None) -> tuple[int, bytes, str]:
    try:
        out, err = process.communicate(given, timeout=DEADLINE)
    finally:
        if process.poll() is None:
            os.killpg(process.pid, signal.SIGKILL)
    return process.returncode, out, (err or b"").decode()


PIPES = {"stdin": subprocess.PIPE, "stdout": subprocess.PIPE, "stderr": subprocess.PIPE}


def test_the_streams_are_the_commands(tmp_path: Path) -> None:
    """Also bytes that are no text, empty arguments, options and open files."""
    script = 'cat; printf "[%s]" "$@"; cat <&3; echo told >&2; exit 5'
    with (tmp_path / "third").open("w+b") as third:
        third.write(b"third")
        third.seek(0)
        inner = ["sh", "-c", script, "sh", "", "--json=", "--", "a b"]
        process = subprocess.Popen(
            ["bash", "-c", f'exec 3<&{third.fileno()}; exec "$@"', "bash", sys.executable, "-c",
             _DRIVER.format(root=str(ROOT)), "--", *inner],
            pass_fds=[third.fileno()], cwd=tmp_path, **PIPES,
        )  # fmt: skip
        code, out, err = ended(process, b"\xff\x00in")
    assert (code, out) == (5, b"\xff\x00in[][--json=][--][a b]third")
    assert err.startswith("told\ncommand  sh -c ")
    assert "\nenergy   12.0 J" in err


@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM, signal.SIGUSR1])
def test_signals_are_passed_on(tmp_path: Path, number: signal.Signals) -> None:
    """And the report comes all the same, of the one run; repeats end with one that ends things."""
    asked = ["--repeats", "1" if number is signal.SIGUSR1 else "9"]
    process = driven([*asked, sys.executable, "-c", _COUNTS], tmp_path, **PIPES)
    wait_for((tmp_path / "ready").exists)
    os.kill(process.pid, number)
    code, _, err = ended(process)
    assert (tmp_path / "got").read_text() == number.name
    assert code == 7
    assert "energy   12.0 J" in err
    assert ("one run: interrupted" in err) == (number is not signal.SIGUSR1)


def test_a_command_that_a_signal_ends_is_told_as_a_shell_does(tmp_path: Path) -> None:
    process = driven(["--", "sh", "-c", "touch ready; exec sleep 60"], tmp_path, **PIPES)
    wait_for((tmp_path / "ready").exists)
    os.kill(process.pid, signal.SIGTERM)
    code, _, err = ended(process)
    assert code == 128 + signal.SIGTERM
    assert "s, exit code 143\nenergy   12.0 J" in err


def test_ctrl_c_of_a_terminal_reaches_the_command_once(tmp_path: Path) -> None:
    import termios

    master, slave = os.openpty()
    first = (
        f"import fcntl, os; fcntl.ioctl(0, {termios.TIOCSCTTY}, 0); "
        "import sys; os.execv(sys.executable, [sys.executable, *sys.argv[1:]])"
    )
    process = subprocess.Popen(
        [sys.executable, "-c", first, "-c", _LATE + _DRIVER.format(root=str(ROOT)), "--",
         sys.executable, "-c", _COUNTS],
        cwd=tmp_path, start_new_session=True, stdin=slave, stdout=slave, stderr=slave,
    )  # fmt: skip
    os.close(slave)
    try:
        wait_for((tmp_path / "ready").exists)
        os.write(master, b"\x03")
        assert process.wait(DEADLINE) == 7
        fcntl.fcntl(master, fcntl.F_SETFL, os.O_NONBLOCK)
        told = os.read(master, 1 << 16).decode()
    finally:
        os.close(master)
        if process.poll() is None:
            os.killpg(process.pid, signal.SIGKILL)
    assert (tmp_path / "got").read_text() == "SIGINT"
    assert "energy   12.0 J" in told
