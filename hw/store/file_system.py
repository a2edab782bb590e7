"""Tell file systems that keep their files in memory from those on a disk."""

from __future__ import annotations

import os
from pathlib import Path

MOUNTS = Path("/proc/self/mountinfo")
IN_MEMORY = ("tmpfs", "ramfs", "devtmpfs", "hugetlbfs")


def memory_file_system(path: Path, mounts: Path = MOUNTS) -> str | None:
    """Return the type of a path's file system if it lies in memory, such as tmpfs.

    None: it lies on a disk, or nobody says where. mounts: a file like /proc/self/mountinfo, whose
    lines name the device third and the type first behind a lone dash (proc_pid_mountinfo(5)).
    """
    try:
        device = path.stat().st_dev
        lines = mounts.read_text(encoding="utf-8", errors="replace").splitlines()
    except OSError:
        return None
    number = f"{os.major(device)}:{os.minor(device)}"
    for line in lines:
        place, _, kind = line.partition(" - ")
        if place.split()[2:3] == [number]:
            name = kind.split()[0] if kind.split() else ""
            return name if name in IN_MEMORY else None
    return None
