"""Finished cells, kept as they come: whatever ends a sweep, it goes on where it was.

One line of JSON a cell. A line that was cut short, as by a kill or a full disk, is dropped, and so
is one that is damaged; those behind it are kept.
"""

from __future__ import annotations

import errno
import fcntl
import json
import os
import stat
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

from crisp.errors import CrispError
from crisp.version import TOOL

Record = dict[str, Any]  # "cell": its key; "row": a line of the results; "sequences": or None

_HEADER = json.dumps({"tool": TOOL}).encode() + b"\n"
_LONGEST = 200  # bytes of any version's header
_SYNC = 1.0  # seconds: what a power cut may take


class Journal:
    """A file of finished cells, which no other process may write at the same time."""

    def __init__(self, path: Path, fits: Callable[[Record], bool] = lambda record: True) -> None:
        """Open or make the file; CrispError if that cannot be done, or another has it open.

        It is no link, and nothing but a journal: what else is there is left as it is. Cells of
        another version of the program are forgotten: they may differ. fits: whether a record that
        was read can be used; one that cannot is not there.
        """
        self.path, self._fits = path, fits
        self._places: dict[str, tuple[int, int]] = {}  # of each cell's line: begin, length
        self._file = _opened(path)
        try:
            try:
                fcntl.flock(self._file, fcntl.LOCK_EX | fcntl.LOCK_NB)
            except OSError as error:
                raise CrispError(f"{path}: another sweep is writing it") from error
            self._end, self._synced = self._read(), time.monotonic()
        except CrispError:
            os.close(self._file)
            raise
        if not self._end:
            self._append(_HEADER)

    def __contains__(self, cell: str) -> bool:
        return cell in self._places

    def __len__(self) -> int:
        return len(self._places)

    def __iter__(self) -> Iterator[str]:
        """Yield the keys, in the order in which they were kept."""
        return iter(self._places)

    def add(self, record: Record) -> None:
        """Keep a cell; CrispError, and nothing of it, where the disk is full."""
        line = json.dumps(record, allow_nan=False).encode() + b"\n"
        begin = self._end
        self._append(line)
        self._places[record["cell"]] = begin, len(line)
        if time.monotonic() - self._synced > _SYNC:
            os.fsync(self._file)
            self._synced = time.monotonic()

    def record(self, cell: str) -> Record:
        """Return the record of a cell that is here."""
        begin, length = self._places[cell]
        record: Record = json.loads(os.pread(self._file, length, begin))
        return record

    def remove(self) -> None:
        """Delete the file; it is still to be closed."""
        self.path.unlink(missing_ok=True)

    def close(self) -> None:
        """Close the file and let other processes open it."""
        os.close(self._file)

    def _read(self) -> int:
        """Find the lines and cut off all behind the last good one; return where it ends."""
        with os.fdopen(os.dup(self._file), "rb") as file:
            header = file.readline(_LONGEST)
            if header != _HEADER:
                if not (_HEADER.startswith(header) or _is_header(header)):
                    raise CrispError(f"{self.path}: is not what an unfinished sweep left")
                return self._cut(0)
            end = place = len(_HEADER)
            for line in file:
                cell = self._cell(line)
                begin, place = place, place + len(line)
                if cell is not None:
                    self._places[cell] = begin, len(line)
                    end = place
        return self._cut(end)

    def _cell(self, line: bytes) -> str | None:
        """Return the key in a line, or None if the line is not whole."""
        record = _json(line)
        if not line.endswith(b"\n") or not isinstance(record, dict) or not self._fits(record):
            return None
        cell = record.get("cell")
        return cell if isinstance(cell, str) else None

    def _cut(self, end: int) -> int:
        os.ftruncate(self._file, end)
        return end

    def _append(self, line: bytes) -> None:
        done = 0
        try:
            while done < len(line):
                done += os.pwrite(self._file, line[done:], self._end + done)
        except OSError as error:
            self._cut(self._end)
            raise CrispError(
                f"{self.path}: cannot be written: {error.strerror or error}"
            ) from error
        self._end += len(line)


def _opened(path: Path) -> int:
    """Open the file, but no link: who can put one there must not choose what is overwritten."""
    flags = os.O_RDWR | os.O_CREAT | os.O_CLOEXEC | os.O_NOFOLLOW | os.O_NONBLOCK
    try:
        file = os.open(path, flags, 0o666)
    except OSError as error:
        if error.errno in (errno.ELOOP, errno.ENXIO):
            raise CrispError(f"{path}: is a link, or not an ordinary file") from error
        raise CrispError(f"{path}: cannot be written: {error.strerror or error}") from error
    if not stat.S_ISREG(os.fstat(file).st_mode):
        os.close(file)
        raise CrispError(f"{path}: is a link, or not an ordinary file")
    return file


def _is_header(line: bytes) -> bool:
    """Return whether a journal of any version begins so."""
    content = _json(line)
    is_header = isinstance(content, dict) and list(content) == ["tool"]
    return is_header and str(content["tool"]).startswith("crisp")


def _json(line: bytes) -> Any:
    """Return what a line of JSON holds; None if it is none."""
    try:
        return json.loads(line)
    except (ValueError, RecursionError):
        return None
