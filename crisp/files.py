"""Atomic writing of files, and checks of paths before long work."""

from __future__ import annotations

import os
import stat
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path

from crisp.errors import CrispError, shorten, wrong_type


@contextmanager
def atomic(path: str | Path) -> Iterator[Path]:
    """Yield a temporary path beside ``path``: renamed to it on success, removed on any failure.

    A link is followed. Raises CrispError when the folder does not exist or cannot be written, the
    disk is full, or ``path`` is a folder, a device or a pipe, or spelled like a folder (``x/``);
    errors about other files pass.
    """
    with _beside(path) as (temporary, target):
        mode = temporary.stat().st_mode  # the umask's; some libraries write with another
        yield temporary
        temporary.chmod(mode)
        temporary.replace(target)


def check_writable(path: str | Path) -> None:
    """Raise CrispError now for whatever `atomic` would refuse after long work; change nothing."""
    with _beside(path):
        pass


def check_readable(path: str | Path) -> None:
    """Raise CrispError, with the system's reason, unless ``path`` is a regular, readable file.

    Libraries give the same message for every reason, and wait for ever at a pipe without a writer.
    """
    try:
        if not stat.S_ISREG(Path(path).stat().st_mode):
            raise CrispError(f"{path}: is not an ordinary file")
        Path(path).open("rb").close()
    except OSError as error:
        raise CrispError(f"{path}: cannot be read: {error.strerror or error}") from error


def check_new_folder(out: Path) -> None:
    """Raise CrispError if ``out`` (of the option --out) exists and is not an empty folder."""
    if out.is_dir() and any(out.iterdir()):
        raise CrispError(f"--out {out}: is not empty; a new folder was expected")
    if out.exists() and not out.is_dir():
        raise CrispError(f"--out {out}: is a file; a new folder was expected")


def check_outside(out: Path, folder: Path) -> None:
    """Raise CrispError if ``out`` (of the option --out) lies in the model's ``folder``, or is it.

    What reads, copies or hashes the model later would find the result among its files.
    """
    if out.resolve().is_relative_to(folder.resolve()):
        raise CrispError(f"--out {out}: is inside the model {folder}; another place was expected")


@contextmanager
def _beside(path: str | Path) -> Iterator[tuple[Path, Path]]:
    """Yield (a new temporary file, removed at the end; the final path, with links followed)."""
    name = os.fspath(path)
    try:
        name.encode()
    except UnicodeEncodeError as error:  # Linux has such names, but they cannot be printed
        raise CrispError(f"{name!a}: is not UTF-8; another file name was expected") from error
    target = Path(os.path.realpath(name))
    temporary = target.parent / f".{target.name}.{os.getpid()}.part"
    try:
        if not name:
            raise CrispError("'': is empty; a file name was expected")
        if target.is_dir():
            raise CrispError(f"{path}: is a folder; a file name was expected")
        if os.path.split(name)[1] in ("", ".", ".."):
            raise CrispError(f"{path}: is spelled like a folder; a file name was expected")
        if not target.parent.is_dir():
            spelled = Path(path).parent
            missing = target.parent if spelled.is_dir() else spelled  # the former behind a link
            raise CrispError(f"{path}: the folder {missing} does not exist")
        if target.exists() and not target.is_file():  # renaming over /dev/null would remove it
            raise CrispError(f"{path}: is not an ordinary file")
        temporary.touch()
        yield temporary, target
    except OSError as error:
        if error.filename and str(error.filename) not in (str(temporary), str(target)):
            raise
        raise CrispError(f"{path}: cannot be written: {error.strerror or error}") from error
    finally:
        with suppress(OSError):  # nothing there, or no place where it could be
            temporary.unlink()


def check_path(value: object, what: str) -> Path:
    """Return a path, or a name as one; CrispError for what no file can be called."""
    if not isinstance(value, str | os.PathLike) or str(value) == "" or "\0" in str(value):
        raise wrong_type(value, what, "a name or a path")
    path = Path(value)
    try:
        path.exists()
    except OSError as error:
        raise CrispError(f"{what} {shorten(str(path))}: {error.strerror or error}") from error
    return path
