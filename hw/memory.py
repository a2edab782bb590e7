"""How much memory there is to have, so that too much is refused instead of killing the process."""

from __future__ import annotations

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
    return next((limit for limit in limits if limit < _NO_LIMIT), None)


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
    """What the process's memory group (cgroup version 1 or 2) still allows, file cache excepted."""
    for folder, *names in _groups():
        limit, usage = (_number(folder / name) for name in names)
        if limit is not None and usage is not None:
            return limit - usage + _cache(folder)
    return None


def _groups() -> Iterator[tuple[Path, str, str]]:
    """The process's groups that may limit memory: folder, names of the limit and of the usage."""
    try:
        entries = [line.split(":", 2) for line in _OWN_GROUP.read_text("utf-8").splitlines()]
    except OSError:
        return
    for _, controllers, path in entries:
        own = path.lstrip("/")
        if controllers == "memory":
            yield _GROUPS / "memory" / own, "memory.limit_in_bytes", "memory.usage_in_bytes"
        elif not controllers:
            yield _GROUPS / own, "memory.max", "memory.current"


def _cache(folder: Path) -> int:
    """Bytes of files in memory, which give way."""
    try:
        lines = (folder / "memory.stat").read_text("utf-8").splitlines()
    except OSError:
        return 0
    found = dict(line.split()[:2] for line in lines if len(line.split()) == 2)
    return int(found.get("total_cache", found.get("file", 0)))


def _number(path: Path) -> int | None:
    try:
        return int(path.read_text("utf-8"))
    except (OSError, ValueError):  # absent, or "max"
        return None
