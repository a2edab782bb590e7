from __future__ import annotations

import os
import shlex
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

import pytest

import crisp as package
from crisp.errors import InvariantError

ROOT = Path(__file__).resolve().parents[3]


def python(*arguments: str) -> subprocess.CompletedProcess[str]:
    environment = {**os.environ, "PYTHONPATH": str(ROOT)}
    command = [sys.executable, *arguments]
    return subprocess.run(command, env=environment, capture_output=True, text=True, check=False)


def test_starting_imports_nothing_slow() -> None:
    program = (
        "import sys, crisp.cli.app\n"
        "print({'pandas', 'matplotlib', 'simpy', 'numba', 'joblib', 'torch'} & set(sys.modules))"
    )
    assert python("-c", program).stdout == "set()\n"


def test_the_version(crisp: Callable) -> None:
    done = crisp("--version")
    assert (done.code, done.out) == (0, f"crisp-moe {package.__version__}\n")


def test_the_module_is_the_command() -> None:
    done = python("-m", "crisp", "nonsense")
    assert (done.returncode, done.stdout) == (2, "")
    assert done.stderr.startswith("error: unknown command 'nonsense'")


def test_without_arguments_it_says_what_it_can_do(crisp: Callable) -> None:
    done = crisp()
    assert done.code == 0
    for command in ("demo", "simulate", "explain", "trace"):
        assert f"\n  {command} " in done.out
    assert "capture" in crisp("trace", "--help").out


@pytest.mark.parametrize(
    ("line", "message"),
    [
        (
            "simulat x",
            "unknown command 'simulat'; did you mean 'simulate'? known: demo, simulate, ",
        ),
        ("trace inf x", "unknown command 'inf'; did you mean 'info'? known: info, "),
        ("trace", "missing command; see 'crisp trace --help'"),
        ("simulate", "missing argument 'TRACE'; see 'crisp simulate --help'"),
        ("simulate x --budget 1", "missing option '--policy'; see 'crisp simulate --help'"),
        ("simulate x --polcy fo", "unknown option '--polcy'; did you mean '--policy'? see 'crisp "),
        ("simulate x --zzz fo", "unknown option '--zzz'; see 'crisp simulate --help'"),
        ("simulate x --limit y", "invalid value for '--limit': "),
        ("simulate x --policy", "option '--policy' requires an argument"),
        ("simulate x y --policy fo --budget 1", "got unexpected extra argument"),
        ("--zzz", "unknown option '--zzz'; see 'crisp --help'"),
        ("simulate x --cache=", "an empty value was given after '--cache=', expected a name"),
        ("demo --out '' --quick", "an empty value was given after '--out', expected a name"),
        ("eval ''", "an empty value was given after 'eval', expected a name"),
        ("''", "an empty value was given after 'crisp', expected a name"),
        ("explain \udcff", "'\\udcff': is not UTF-8"),
    ],
)
def test_a_wrong_command_line_is_one_line(crisp: Callable, line: str, message: str) -> None:
    done = crisp(*shlex.split(line))
    assert (done.code, done.out) == (2, "")
    assert done.err.startswith(f"error: {message}")
    assert done.err.count("\n") == 1


def test_a_terminal_obeys_no_name_in_a_message(crisp: Callable) -> None:
    done = crisp("explain", "\x1b[2J\u202eno")
    assert (done.code, done.out) == (2, "")
    assert done.err.startswith("error: \ufffd[2J\ufffdno: ")


def test_a_fault_of_ours_says_so(
    crisp: Callable, trace: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def broken(*arguments: object, **options: object) -> None:
        raise InvariantError("two intervals overlap")

    monkeypatch.setattr("crisp.sim.experiment.simulate", broken)
    done = crisp("simulate", trace, "--policy", "fo", "--budget", "10 %")
    assert done.code == 70
    assert done.err == (
        "error: a fault of crisp, not of your input: two intervals overlap; please report it, with "
        f"the command: crisp simulate {trace} --policy fo --budget '10 %'\n"
    )


def test_an_error_that_nobody_expected_is_one_line(
    crisp: Callable, trace: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """With the file that was at hand, which is then likely at fault."""

    def broken(path: object) -> None:
        raise KeyError("first line\nsecond line")

    monkeypatch.setattr("crisp.trace.tensor_file.read", broken)
    done = crisp("trace", "info", trace)
    assert (done.code, done.out) == (2, "")
    assert done.err == (
        f"error: {trace}: KeyError: 'first line\\nsecond line'; crisp did not expect this: please "
        f"report it, with what this prints: crisp --debug trace info {trace}\n"
    )


def test_without_a_file_it_is_a_fault_of_ours(
    crisp: Callable, monkeypatch: pytest.MonkeyPatch
) -> None:
    def broken(*arguments: object) -> None:
        raise ZeroDivisionError

    monkeypatch.setattr("crisp.hw.telemetry.meters", broken)
    done = crisp("doctor")
    assert (done.code, done.out) == (70, "")
    assert done.err == (
        "error: ZeroDivisionError; crisp did not expect this: please report it, with what this "
        "prints: crisp --debug doctor\n"
    )


def test_the_traceback_on_demand(crisp: Callable, tmp_path: Path) -> None:
    done = crisp("--debug", "trace", "info", tmp_path / "none.trace.safetensors")
    assert done.code == 2
    first, *_, last = done.err.splitlines()
    assert first == "Traceback (most recent call last):"
    assert last.startswith(f"error: {tmp_path}/none.trace.safetensors: ")
    assert crisp("--debug", "--version").code == 0


def test_a_closed_pipe_is_no_error(trace: Path, tmp_path: Path) -> None:
    """As in ``crisp ... | head -0``: nobody reads."""
    command = f"{sys.executable} -m crisp simulate {trace} --policy fo --budget 10% --json -"
    environment = {**os.environ, "PYTHONPATH": str(ROOT)}
    done = subprocess.run(
        ["bash", "-c", f"{command} | true; exit ${{PIPESTATUS[0]}}"],
        env=environment,
        capture_output=True,
        text=True,
        check=False,
    )
    assert done.returncode == 141
    assert "Error" not in done.stderr
    assert "error" not in done.stderr


@pytest.mark.parametrize(
    ("redirected", "code", "message"),
    [
        ("--version > /dev/full", 2, "error: No space left on device\n"),
        ("simulate {} {} > /dev/full", 2, "error: standard output: No space left on device\n"),
        ("--version >&-", 2, "error: standard output is closed\n"),
        ("--version <&- >&-", 2, "error: standard output is closed\n"),
        ("xyzzy > /dev/full", 2, "error: unknown command 'xyzzy'; known: "),
        ("nonsense 2> /dev/full", 2, ""),
        ("nonsense 2>&-", 2, ""),
        ("nonsense <&- >&- 2>&-", 2, ""),
        ("simulate {} {} --json - > /dev/null 2> /dev/full", 2, ""),
        ("simulate {} {} > /dev/null 2>&-", 0, ""),
    ],
)
def test_streams_that_take_nothing(trace: Path, redirected: str, code: int, message: str) -> None:
    command = redirected.format(trace, "--policy fo --budget 10%")
    environment = {**os.environ, "PYTHONPATH": str(ROOT)}
    environment.pop("PYTHONUNBUFFERED", None)  # so that the end of the program has to write
    done = subprocess.run(
        ["bash", "-c", f"{sys.executable} -m crisp {command}"],
        env=environment,
        capture_output=True,
        text=True,
        check=False,
    )
    assert (done.returncode, done.stdout) == (code, "")
    assert done.stderr.startswith(message)
    assert done.stderr.count("\n") == bool(message)


def test_what_a_terminal_cannot_show_is_a_question_mark(trace: Path) -> None:
    environment = {**os.environ, "PYTHONPATH": str(ROOT), "PYTHONIOENCODING": "latin-1"}
    options = ("--policy", "fo", "--budget", "10%", "--hardware", "paper-table1")
    done = subprocess.run(
        [sys.executable, "-m", "crisp", "simulate", str(trace), *options],
        env=environment,
        capture_output=True,
        text=True,
        check=False,
    )
    assert (done.returncode, done.stderr) == (0, "")
    assert "J/token ?: " in done.stdout


@pytest.mark.parametrize(
    ("options", "notes"),
    [
        (("--policy=worth",), 1),
        (("--policy", "lru, worth"), 1),
        (("--policy", "worth,worth"), 1),
        (("--policy", "lru", "--cache", "worth"), 0),
        (("--policy", "contribution-resident"), 0),
    ],
)
def test_a_former_name_is_noted_where_it_is_one(
    crisp: Callable, trace: Path, options: tuple[str, ...], notes: int
) -> None:
    done = crisp("simulate", trace, "--model", "mixtral-8x7b", *options, "--budget", "40%")
    assert done.err.count("note: ") == notes
    assert done.err.count("note: policy worth is called contribution-resident now\n") == notes


def test_a_former_name_in_a_file_is_noted_once(
    crisp: Callable, trace: Path, tmp_path: Path
) -> None:
    spec = tmp_path / "s.toml"
    spec.write_text(
        f"trace = '{trace}'\nmodel = 'mixtral-8x7b'\n"
        "policy = ['lru', 'worth']\nbudget = ['20%', '40%']\n"
    )
    done = crisp("sweep", spec, "--width", "full", "--out", tmp_path / "o.parquet")
    assert done.err.count("note: policy worth is called contribution-resident now\n") == 1


@pytest.mark.seconds
def test_names_in_utf8_work_where_the_locale_has_no_such_letters(tmp_path: Path) -> None:
    file = tmp_path / "é.trace.safetensors"
    file.write_bytes((ROOT / "traces" / "tiny-mixtral-docs.trace.safetensors").read_bytes())
    ascii_only = {"LC_ALL": "C", "PYTHONUTF8": "0", "PYTHONCOERCECLOCALE": "0"}
    environment = {**os.environ, "PYTHONPATH": str(ROOT), **ascii_only}
    command = [sys.executable, "-m", "crisp", "trace", "info", str(file)]
    done = subprocess.run(command, env=environment, capture_output=True, check=False)
    assert (done.returncode, done.stderr) == (0, b"")
    assert "é.trace.safetensors".encode() in done.stdout
    command[-1:] = [os.fsencode(tmp_path) + b"/\xff.trace.safetensors"]  # is not UTF-8
    done = subprocess.run(command, env=environment, capture_output=True, check=False)
    assert done.returncode == 2
    assert b"is not UTF-8" in done.stderr
