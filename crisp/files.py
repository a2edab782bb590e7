"""Writing files so that nobody ever sees half of one."""

from __future__ import annotations

import os
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from crisp.errors import CrispError


@contextmanager
def atomic(path: str | Path) -> Iterator[Path]:
    """A temporary path beside ``path``: renamed to it on success, removed on any failure.

    Raises CrispError when the folder does not exist or cannot be written, or the disk is full.
    """
    path = Path(path)
    temporary = path.with_name(f".{path.name}.{os.getpid()}.part")
    try:
        if path.is_dir():
            raise CrispError(f"{path}: is a folder; a file name was expected")
        if not path.parent.is_dir():
            raise CrispError(f"{path}: the folder {path.parent} does not exist")
        yield temporary
        temporary.replace(path)
    except OSError as error:
        raise CrispError(f"{path}: cannot be written: {error.strerror or error}") from error
    finally:
        temporary.unlink(missing_ok=True)
