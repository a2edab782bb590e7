"""How much memory is available, so that a request for too much is refused and kills no process."""

from __future__ import annotations

import contextlib
import ctypes
import mmap
import resource
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

from crisp.errors import CrispError
from crisp.units import format_bytes

_MEMINFO = Path("/proc/meminfo")
_STATUS = Path("/proc/self/status")
_OWN_GROUP = Path("/proc/self/cgroup")
_GROUPS = Path("/sys/fs/cgroup")
_NO_LIMIT = 1 << 62  # version 1 writes a number near 2^63 where there is none
PAGES, ADDRESSES, DATA = "pages", "addresses", "data"


@dataclass(frozen=True)
class MemoryLimit:
    """A limit of a process's memory, in bytes."""

    what: str  # sets it
    n_bytes: int  # all that the process may have: what it has and what is left
    used: int  # what it has already
    counts: str = PAGES
    """PAGES: memory in use, and pages of files, which give way; ADDRESSES: all that is mapped, as
    ``ulimit -v`` counts; DATA: what is mapped to be written, as ``ulimit -d`` counts."""


def memory_limits() -> list[MemoryLimit]:
    """Return all limits of this process: the machine's, of its memory cgroups, and ulimit's."""
    own, size, data = (_status(name) for name in ("RssAnon", "VmSize", "VmData"))
    limits = []
    for what, free in (("the machine", _machine()), ("its memory group", _group())):
        if free is not None:
            limits.append(MemoryLimit(what, max(0, free) + own, own))
    for flag, number, used, counts in (
        ("-v", resource.RLIMIT_AS, size, ADDRESSES),
        ("-d", resource.RLIMIT_DATA, data, DATA),
    ):
        soft, _ = resource.getrlimit(number)
        if soft != resource.RLIM_INFINITY:
            limits.append(MemoryLimit(f"ulimit {flag}", soft, used, counts))
    return limits


def available_bytes() -> int | None:
    """Return the bytes of memory that machine and cgroup still allow; None where neither says."""
    limits = [limit for limit in (_machine(), _group()) if limit is not None]
    return min(limits) if limits else None


def group_limit() -> int | None:
    """Return the limit of the process's memory cgroup in bytes; None: it has none."""
    limits = [limit for limit in (_number(folder / name) for folder, name, _ in _groups()) if limit]
    return min((limit for limit in limits if limit < _NO_LIMIT), default=None)


def map_anonymous(n_bytes: int, what: str) -> mmap.mmap:
    """Map ``n_bytes`` of private zeroed memory, in huge pages where the kernel offers them.

    A read into huge pages names fewer pages to the disk, and is twice as fast. Raises CrispError,
    naming ``what``, if the system refuses.
    """
    try:
        memory = mmap.mmap(-1, n_bytes, mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS)
    except OSError as error:
        raise CrispError(f"{what}: {error.strerror}") from error
    if hasattr(mmap, "MADV_HUGEPAGE"):
        with contextlib.suppress(OSError):  # not every kernel has them
            memory.madvise(mmap.MADV_HUGEPAGE)
    return memory


def return_freed_memory() -> None:
    """Give the system back what has been freed; where the C library is not glibc, nothing happens.

    It keeps holes between what is in use, of up to 32 MB each, and numbers that are loaded and
    packed for a check leave many.
    """
    with contextlib.suppress(OSError, AttributeError):
        ctypes.CDLL(None).malloc_trim(0)


def check_available(n_bytes: int, what: str) -> None:
    """Raise CrispError, naming ``what``, unless ``n_bytes`` of memory are available."""
    free = available_bytes()
    if free is not None and n_bytes > free:
        rest = format_bytes(max(0, free))
        raise CrispError(f"{what} needs {format_bytes(n_bytes)} of memory, {rest} can be had")


def _machine() -> int | None:
    """Return the machine's available bytes, as /proc/meminfo says."""
    return _line(_MEMINFO, "MemAvailable")


def _status(name: str) -> int:
    """Return a number of bytes that the process's status has; 0: it is not there."""
    return _line(_STATUS, name) or 0


def _line(path: Path, name: str) -> int | None:
    """Return the bytes on the line ``name: N kB`` of a file; None: it is not there."""
    try:
        for line in path.read_text(encoding="utf-8").splitlines():
            if line.startswith(f"{name}:"):
                return 1024 * int(line.split()[1])
    except (OSError, ValueError):
        pass
    return None


def _group() -> int | None:
    """Return the bytes that the process's cgroups (version 1 or 2) still allow; file cache counts
    as free.
    """
    rooms = []
    for folder, *names in _groups():
        limit, usage = (_number(folder / name) for name in names)
        if limit is not None and usage is not None:
            rooms.append(limit - usage + _cache(folder))
    return min(rooms, default=None)


def _groups() -> Iterator[tuple[Path, str, str]]:
    """Yield (folder, limit's file, usage's file) of the process's cgroup and of its parents."""
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
        group = top / path.lstrip("/")
        for folder in (group, *group.parents):
            if folder.is_relative_to(top):
                yield folder, *names


def _cache(folder: Path) -> int:
    """Return the bytes of cached files, which the kernel drops when memory is short."""
    try:
        lines = (folder / "memory.stat").read_text("utf-8").splitlines()
    except OSError:
        return 0
    counts = dict(line.split()[:2] for line in lines if len(line.split()) == 2)
    lists = ("active_file", "inactive_file")  # not what lies in a tmpfs, which must stay
    return sum(int(counts.get(f"total_{name}", counts.get(name, 0))) for name in lists)


def _number(path: Path) -> int | None:
    """Return the number in a file; None where there is none."""
    try:
        return int(path.read_text("utf-8"))
    except (OSError, ValueError):  # absent, or "max"
        return None
