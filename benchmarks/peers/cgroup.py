"""A memory cgroup with a cap, of version 1 or 2, which counts the page cache."""

from __future__ import annotations

import os
import subprocess
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path

_ROOT = Path("/sys/fs/cgroup")
_ENTER = 'echo $$ > "$0"/cgroup.procs && exec "$@"'


class NoGroup(Exception):
    """There can be no group; the message says why."""


@dataclass(frozen=True)
class Group:
    """A memory cgroup; a process in it is charged for all memory that it touches first."""

    folder: Path
    version: int

    def limit(self, cap: int | None) -> None:
        """Set the cap, in bytes; None: no cap."""
        name, none = (("memory.max", "max"), ("memory.limit_in_bytes", "-1"))[self.version == 1]
        (self.folder / name).write_text(none if cap is None else str(cap))

    def run(
        self, command: Sequence[str], seconds: float, cwd: Path
    ) -> subprocess.CompletedProcess[str]:
        """Run a command in the group, from cold caches; TimeoutExpired after ``seconds``."""
        drop_caches()
        return subprocess.run(
            ["sh", "-c", _ENTER, str(self.folder), *command],
            capture_output=True, text=True, timeout=seconds, check=False, cwd=cwd,
        )  # fmt: skip


def drop_caches() -> None:
    """Drop all clean pages of the machine's page cache."""
    os.sync()
    Path("/proc/sys/vm/drop_caches").write_text("3")


@contextmanager
def group() -> Iterator[Group]:
    """Create a group and remove it after the block. Raises NoGroup where that is impossible."""
    version = 2 if (_ROOT / "cgroup.controllers").exists() else 1
    folder = _ROOT / ("" if version == 2 else "memory") / f"crisp-peers-{os.getpid()}"
    try:
        if version == 2:
            (_ROOT / "cgroup.subtree_control").write_text("+memory")
        folder.mkdir()
    except OSError as error:
        raise NoGroup(f"{folder}: {error.strerror}; memory cgroups need root") from error
    try:
        if version == 2 and (folder / "memory.swap.max").exists():
            (folder / "memory.swap.max").write_text("0")
        drop_caches()
        yield Group(folder, version)
    except PermissionError as error:
        raise NoGroup(f"{error.filename}: {error.strerror}; memory cgroups need root") from error
    finally:
        folder.rmdir()
