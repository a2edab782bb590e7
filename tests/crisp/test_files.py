"""Nobody ever sees half a file."""

from __future__ import annotations

import errno
import os
import signal
import subprocess
import sys
from pathlib import Path

import pytest

from crisp.errors import CrispError
from crisp.files import atomic, check_readable, check_writable


def names(folder: Path) -> list[str]:
    return sorted(path.name for path in folder.iterdir())


def child(program: str, path: Path) -> subprocess.Popen[str]:
    """A Python process that runs ``program`` with ``path`` as its argument."""
    return subprocess.Popen(
        [sys.executable, "-c", program, str(path)],
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
    )


def test_the_file_appears_whole_and_replaces_the_old_one(tmp_path: Path) -> None:
    path = tmp_path / "run.json"
    path.write_text("old")
    with atomic(path) as temporary:
        assert temporary.parent == tmp_path  # so that renaming never crosses a file system
        temporary.write_text("new")
        assert path.read_text() == "old"
    assert path.read_text() == "new"
    assert names(tmp_path) == ["run.json"]


@pytest.mark.parametrize("failure", [ValueError("x"), CrispError("x"), KeyboardInterrupt()])
def test_a_failure_leaves_what_was_there(tmp_path: Path, failure: BaseException) -> None:
    path = tmp_path / "run.json"
    path.write_text("old")
    with pytest.raises(type(failure)), atomic(path) as temporary:
        temporary.write_text("half")
        raise failure
    assert path.read_text() == "old"
    assert names(tmp_path) == ["run.json"]


def test_ctrl_c_leaves_nothing(tmp_path: Path) -> None:
    program = """
import sys, time
from crisp.files import atomic
with atomic(sys.argv[1]) as temporary:
    temporary.write_text("half")
    print("writing", flush=True)
    time.sleep(60)
"""
    process = child(program, tmp_path / "run.json")
    assert process.stdout is not None
    assert process.stdout.readline() == "writing\n"
    assert len(names(tmp_path)) == 1
    process.send_signal(signal.SIGINT)
    process.communicate(timeout=60)
    assert process.returncode != 0
    assert names(tmp_path) == []


def test_a_file_system_that_takes_no_more_is_one_line(tmp_path: Path) -> None:
    # A limit on the size of files fails a write half-way, just as a full disk does.
    program = """
import resource, sys
from crisp.errors import CrispError
from crisp.files import atomic
resource.setrlimit(resource.RLIMIT_FSIZE, (1000, 1000))
try:
    with atomic(sys.argv[1]) as temporary, open(temporary, "wb") as file:
        for _ in range(10):
            file.write(bytes(500))
            file.flush()
except CrispError as error:
    print(error)
"""
    path = tmp_path / "run.json"
    output, errors = child(program, path).communicate(timeout=60)
    assert output == f"{path}: cannot be written: File too large\n", errors
    assert names(tmp_path) == []


def test_paths_that_cannot_be_written(tmp_path: Path) -> None:
    file = tmp_path / "file"
    file.touch()
    cases = {
        tmp_path: "is a folder",
        tmp_path / "missing" / "run.json": "does not exist",
        file / "run.json": "does not exist",
        tmp_path / ("x" * 300): "cannot be written: File name too long",
        tmp_path / ("x" * 250): "cannot be written: File name too long",  # with its ending
        Path(): "is a folder",
        Path("/"): "is a folder",
        "": "is empty",
        f"{tmp_path}/run.json/": "is spelled like a folder",
        f"{tmp_path}/run.json/.": "is spelled like a folder",
        f"{tmp_path}/no/run.json/..": "is spelled like a folder",
        tmp_path / "\udcff": "is not UTF-8",  # as Python reads the byte ff
        Path("/proc/run.json"): "cannot be written",  # nobody can, not even root
        Path("/dev/null"): "not an ordinary file",
    }
    for path, complaint in cases.items():
        with pytest.raises(CrispError, match=complaint) as caught, atomic(path) as temporary:
            temporary.write_text("text")
        with pytest.raises(CrispError, match=complaint) as told_before:
            check_writable(path)
        assert str(told_before.value) == str(caught.value)
        assert "\n" not in str(caught.value)
    assert names(tmp_path) == ["file"]


def test_checking_changes_nothing(tmp_path: Path) -> None:
    path = tmp_path / "run.json"
    path.write_text("old")
    check_writable(path)
    check_writable(tmp_path / "new.json")
    assert path.read_text() == "old"
    assert names(tmp_path) == ["run.json"]


def test_an_input_that_is_missing_is_not_blamed_on_the_output(tmp_path: Path) -> None:
    missing = tmp_path / "input"
    with pytest.raises(FileNotFoundError, match="input"), atomic(tmp_path / "output"):
        missing.read_text()
    assert names(tmp_path) == []


def test_what_is_no_ordinary_file_is_never_replaced(tmp_path: Path) -> None:
    # Renaming over /dev/null or /dev/stdout would, for root, take it away from everyone.
    pipe = tmp_path / "pipe"
    os.mkfifo(pipe)
    with pytest.raises(CrispError, match="not an ordinary file"), atomic(pipe) as temporary:
        temporary.write_text("text")
    assert pipe.is_fifo()
    assert names(tmp_path) == ["pipe"]


def test_a_link_is_followed(tmp_path: Path) -> None:
    (tmp_path / "target").write_text("old")
    (tmp_path / "link").symlink_to("target")
    with atomic(tmp_path / "link") as temporary:
        temporary.write_text("new")
    assert (tmp_path / "link").is_symlink()
    assert (tmp_path / "target").read_text() == "new"
    assert names(tmp_path) == ["link", "target"]


def test_a_file_has_the_mode_of_any_new_file_whoever_wrote_it(tmp_path: Path) -> None:
    with atomic(tmp_path / "made") as temporary:
        temporary.unlink(missing_ok=True)
        os.close(os.open(temporary, os.O_CREAT | os.O_WRONLY, 0o600))
    (tmp_path / "plain").touch()
    assert (tmp_path / "made").stat().st_mode == (tmp_path / "plain").stat().st_mode


def test_what_can_be_read(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    file = tmp_path / "x"
    with pytest.raises(CrispError, match=r"x: cannot be read: No such file or directory$"):
        check_readable(file)
    file.touch()
    check_readable(file)
    os.mkfifo(tmp_path / "pipe")
    for other in (tmp_path, tmp_path / "pipe", "/dev/null"):
        with pytest.raises(CrispError, match=f"^{other}: is not an ordinary file$"):
            check_readable(other)

    def denied(path: Path, *how: str) -> None:
        raise PermissionError(errno.EACCES, os.strerror(errno.EACCES), str(path))

    monkeypatch.setattr(Path, "open", denied)
    with pytest.raises(CrispError, match=r"x: cannot be read: Permission denied$"):
        check_readable(file)
