from __future__ import annotations

import os
from pathlib import Path

import pytest

from crisp.hw.store.file_system import memory_file_system


@pytest.mark.parametrize(
    ("kind", "expected"),
    [("tmpfs", "tmpfs"), ("ramfs", "ramfs"), ("ext4", None), ("overlay", None)],
)
def test_the_type_of_the_mount_that_has_the_files_device(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, kind: str, expected: str | None
) -> None:
    """The lines are those of proc_pid_mountinfo(5), with any number of optional fields."""
    monkeypatch.setattr("crisp.hw.store.file_system.IN_MEMORY", ("tmpfs", "ramfs"))
    device = tmp_path.stat().st_dev
    number = f"{os.major(device)}:{os.minor(device)}"
    mounts = tmp_path / "mountinfo"
    mounts.write_text(
        "22 1 999:1 / /other rw,noatime - tmpfs tmpfs rw\n"
        "nonsense\n\n"
        f"36 35 {number} / /mnt rw,noatime shared:1 master:2 - {kind} /dev/root rw\n"
    )
    assert memory_file_system(tmp_path, mounts) == expected
    assert memory_file_system(tmp_path / "none", mounts) is None
    assert memory_file_system(tmp_path, tmp_path / "none") is None


def test_shared_memory_lies_in_memory(monkeypatch: pytest.MonkeyPatch) -> None:
    shared, mounts = Path("/dev/shm"), Path("/proc/mounts")
    if not mounts.exists() or " /dev/shm tmpfs " not in mounts.read_text():
        pytest.skip("this system has no tmpfs at /dev/shm")
    monkeypatch.setattr("crisp.hw.store.file_system.IN_MEMORY", ("tmpfs",))
    assert memory_file_system(shared) == "tmpfs"
