"""How much memory there is to have, so that too much is refused instead of killing the process."""

from __future__ import annotations

import contextlib
import mmap
from collections.abc import Iterator
from pathlib import Path

from crisp.errors import CrispError
from crisp.units import show_bytes

_MEMINFO = Path("/proc/meminfo")
_OWN_GROUP = Path("/proc/self/cgroup")
_GROUPS = Path("/sys/fs/cgroup")
_NO_LIMIT = 1 << 62  # version 1 writes a number near 2^63 where there is none


def available() -> int | None:
    """Bytes that can be had now, by the machine and by the memory group; None: nobody says."""
    known = [found for found in (_machine(), _group()) if found is not None]
    return min(known) if known else None


def group_limit() -> int | None:
    """Bytes that the process's memory group (cgroup) may have; None: as many as there are."""
    limits = [limit for limit in (_number(folder / name) for folder, name, _ in _groups()) if limit]
    return min((limit for limit in limits if limit < _NO_LIMIT), default=None)


def anonymous(n_bytes: int, what: str) -> mmap.mmap:
    """So much memory of the process's own, in huge pages where the kernel has them: a disk is told
    of fewer pages then, and reads twice as fast.

    Raises CrispError, naming ``what``, if the system refuses it.
    """
    try:
        memory = mmap.mmap(-1, n_bytes, mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS)
    except OSError as error:
        raise CrispError(f"{what}: {error.strerror}") from error
    if hasattr(mmap, "MADV_HUGEPAGE"):
        with contextlib.suppress(OSError):  # not every kernel has them
            memory.madvise(mmap.MADV_HUGEPAGE)
    return memory


def check_available(n_bytes: int, what: str) -> None:
    """Raise CrispError if so many bytes for ``what`` cannot be had."""
    free = available()
    if free is not None and n_bytes > free:
        raise CrispError(
            f"{what} needs {show_bytes(n_bytes)} of memory, {show_bytes(max(0, free))} can be had"
        )


def _machine() -> int | None:
    try:
        for line in _MEMINFO.read_text(encoding="utf-8").splitlines():
            if line.startswith("MemAvailable:"):
                return 1024 * int(line.split()[1])
    except (OSError, ValueError):
        pass
    return None


def _group() -> int | None:
    """What the process's memory groups (cgroup version 1 or 2) still allow, file cache excepted."""
    rooms = []
    for folder, *names in _groups():
        limit, usage = (_number(folder / name) for name in names)
        if limit is not None and usage is not None:
            rooms.append(limit - usage + _cache(folder))
    return min(rooms, default=None)


def _groups() -> Iterator[tuple[Path, str, str]]:
    """What may limit the process's memory: its group and those around it, each as folder, name of
    the limit, name of the usage.
    """
    try:
        entries = [line.split(":", 2) for line in _OWN_GROUP.read_text("utf-8").splitlines()]
    except OSError:
        return
    for _, controllers, path in entries:
        if controllers == "memory":
            names = "memory.limit_in_bytes", "memory.usage_in_bytes"
        elif not controllers:
            names = "memory.max", "memory.current"
        else:
            continue
        top = _GROUPS / controllers
        own = top / path.lstrip("/")
        for folder in (own, *own.parents):
            if folder.is_relative_to(top):
                yield folder, *names


def _cache(folder: Path) -> int:
    """Bytes of files in memory, which give way."""
    try:
        lines = (folder / "memory.stat").read_text("utf-8").splitlines()
    except OSError:
        return 0
    found = dict(line.split()[:2] for line in lines if len(line.split()) == 2)
    lists = ("active_file", "inactive_file")  # not what lies in a tmpfs, which must stay
    return sum(int(found.get(f"total_{name}", found.get(name, 0))) for name in lists)


def _number(path: Path) -> int | None:
    try:
        return int(path.read_text("utf-8"))
    except (OSError, ValueError):  # absent, or "max"
        return None
