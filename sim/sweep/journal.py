"""Finished cells, kept as they come: whatever ends a sweep, it goes on where it was.

One line of JSON a cell. A line that was cut short, as by a kill or a full disk, is dropped.
"""

from __future__ import annotations

import fcntl
import json
import os
import time
from pathlib import Path
from typing import Any

from crisp import TOOL
from crisp.errors import CrispError

Record = dict[str, Any]  # "cell": its key; "row": a line of the results; "sequences": or None

_HEADER = json.dumps({"tool": TOOL}).encode() + b"\n"
_SYNC = 1.0  # seconds: what a power cut may take


class Journal:
    """The finished cells in a file, which no other process may write at the same time."""

    def __init__(self, path: Path) -> None:
        """Open or make the file; CrispError if that cannot be done, or another has it open.

        Cells of another version of the program are forgotten: they may differ.
        """
        self.path = path
        self._places: dict[str, tuple[int, int]] = {}  # of each cell's line: begin, length
        try:
            self._file = os.open(path, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o666)
        except OSError as error:
            raise CrispError(f"{path}: cannot be written: {error.strerror or error}") from error
        try:
            fcntl.flock(self._file, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except OSError as error:
            os.close(self._file)
            raise CrispError(f"{path}: another sweep is writing it") from error
        self._end, self._synced = self._read(), time.monotonic()
        if not self._end:
            self._append(_HEADER)

    def __contains__(self, cell: str) -> bool:
        return cell in self._places

    def __len__(self) -> int:
        return len(self._places)

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
        """A cell that is here."""
        begin, length = self._places[cell]
        found: Record = json.loads(os.pread(self._file, length, begin))
        return found

    def remove(self) -> None:
        """Nobody needs it any more; it is still to be closed."""
        self.path.unlink(missing_ok=True)

    def close(self) -> None:
        """Let others have it."""
        os.close(self._file)

    def _read(self) -> int:
        """Find the lines; the end of the last whole one."""
        with os.fdopen(os.dup(self._file), "rb") as file:
            end = len(_HEADER)
            if file.readline() != _HEADER:
                return self._cut(0)
            for line in file:
                cell = _cell(line)
                if cell is None:
                    break
                self._places[cell] = end, len(line)
                end += len(line)
        return self._cut(end)

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


def _cell(line: bytes) -> str | None:
    """The key in a line, or None if it is not whole."""
    if not line.endswith(b"\n"):
        return None
    try:
        cell = json.loads(line)["cell"]
    except (ValueError, TypeError, KeyError):
        return None
    return cell if isinstance(cell, str) else None
