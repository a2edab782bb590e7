"""Writing files so that nobody ever sees half of one."""

from __future__ import annotations

import os
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path

from crisp.errors import CrispError


@contextmanager
def atomic(path: str | Path) -> Iterator[Path]:
    """A temporary path beside ``path``: renamed to it on success, removed on any failure.

    A link is followed. Raises CrispError when the folder does not exist or cannot be written, the
    disk is full, or ``path`` is a folder, a device or a pipe; errors about other files pass.
    """
    target = Path(os.path.realpath(path))
    temporary = target.parent / f".{target.name}.{os.getpid()}.part"
    try:
        if target.is_dir():
            raise CrispError(f"{path}: is a folder; a file name was expected")
        if not target.parent.is_dir():
            raise CrispError(f"{path}: the folder {target.parent} does not exist")
        if target.exists() and not target.is_file():  # renaming over /dev/null would remove it
            raise CrispError(f"{path}: is not an ordinary file")
        temporary.touch()
        mode = temporary.stat().st_mode  # what anybody's new file gets here; some writers differ
        yield temporary
        temporary.chmod(mode)
        temporary.replace(target)
    except OSError as error:
        if error.filename and str(error.filename) not in (str(temporary), str(target)):
            raise
        raise CrispError(f"{path}: cannot be written: {error.strerror or error}") from error
    finally:
        with suppress(OSError):  # nothing there, or no place where it could be
            temporary.unlink()
