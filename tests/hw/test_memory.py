"""How much memory can be had, by what the system writes of it."""

from __future__ import annotations

from pathlib import Path

import pytest

from crisp.errors import CrispError
from crisp.hw import memory
from crisp.hw.memory import MemoryLimit

MIB = 1 << 20


@pytest.fixture
def system(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A folder of the system's files: 1000 MiB can be had of the machine, and no groups."""
    for name in ("_MEMINFO", "_OWN_GROUP", "_GROUPS"):
        monkeypatch.setattr(memory, name, tmp_path / name)
    (tmp_path / "_MEMINFO").write_text(f"MemTotal: 9 kB\nMemAvailable: {1000 * 1024} kB\n")
    return tmp_path


def group(folder: Path, files: dict[str, object]) -> None:
    folder.mkdir(parents=True, exist_ok=True)
    for name, content in files.items():
        (folder / name).write_text(f"{content}\n")


def test_without_groups_it_is_the_machines(system: Path) -> None:
    assert memory.available_bytes() == 1000 * MIB
    (system / "_MEMINFO").unlink()
    assert memory.available_bytes() is None
    memory.check_available(1 << 60, "a pool")  # nobody says that there is no room
    (system / "_MEMINFO").write_text("nonsense\nMemAvailable: much\n")
    assert memory.available_bytes() is None


def test_a_group_of_version_2_and_those_around_it(system: Path) -> None:
    """Its cache of files gives way, a tmpfs in it does not; the tightest group decides."""
    (system / "_OWN_GROUP").write_text("0::/all/own\n")
    stat = f"anon 5\nfile {300 * MIB}\nshmem {250 * MIB}\nactive_file {20 * MIB}\n"
    stat += f"inactive_file {30 * MIB}"
    own = system / "_GROUPS" / "all" / "own"
    group(own, {"memory.max": 500 * MIB, "memory.current": 400 * MIB, "memory.stat": stat})
    assert memory.available_bytes() == 150 * MIB
    assert memory.group_limit() == 500 * MIB
    group(own.parent, {"memory.max": 450 * MIB, "memory.current": 440 * MIB, "memory.stat": ""})
    assert memory.available_bytes() == 10 * MIB
    assert memory.group_limit() == 450 * MIB
    group(own, {"memory.max": "max"})
    group(own.parent, {"memory.max": "max"})
    assert memory.available_bytes() == 1000 * MIB
    assert memory.group_limit() is None


def test_a_group_of_version_1_whose_folder_is_not_seen_from_inside(system: Path) -> None:
    (system / "_OWN_GROUP").write_text("5:cpu,cpuacct:/docker/1\n4:memory:/docker/1\n0::/x\n")
    files = {
        "memory.limit_in_bytes": 100 * MIB,
        "memory.usage_in_bytes": 90 * MIB,
        "memory.stat": f"inactive_file 1\ntotal_inactive_file {5 * MIB}",
    }
    group(system / "_GROUPS" / "memory", files)
    assert memory.available_bytes() == 15 * MIB
    group(system / "_GROUPS" / "memory", {"memory.limit_in_bytes": (1 << 63) - 4096})
    assert memory.available_bytes() == 1000 * MIB
    assert memory.group_limit() is None


def test_too_much_is_refused_in_one_line(system: Path) -> None:
    memory.check_available(1000 * MIB, "a pool")
    with pytest.raises(CrispError, match=r"^a pool needs 1\.05 GB of memory, 1\.05 GB can be had$"):
        memory.check_available(1000 * MIB + 1, "a pool")


@pytest.fixture
def own(system: Path, monkeypatch: pytest.MonkeyPatch) -> dict[int, int]:
    """A process of 100 MiB, 70 of them anonymous, of 400 MiB of addresses; what ulimit gives it."""
    monkeypatch.setattr(memory, "_STATUS", system / "_STATUS")
    sizes = {"VmSize": 400, "VmData": 90, "RssAnon": 70, "RssFile": 30}
    lines = [f"{name}:\t{size * 1024} kB" for name, size in sizes.items()]
    (system / "_STATUS").write_text("Name:\tcrisp\n" + "\n".join(lines))
    soft: dict[int, int] = {}
    unlimited = memory.resource.RLIM_INFINITY
    monkeypatch.setattr(
        memory.resource, "getrlimit", lambda which: (soft.get(which, unlimited),) * 2
    )
    return soft


def test_a_limit_is_what_the_process_has_and_what_is_left_to_it(
    system: Path, own: dict[int, int]
) -> None:
    assert memory.memory_limits() == [MemoryLimit("the machine", 1070 * MIB, 70 * MIB)]
    (system / "_OWN_GROUP").write_text("0::/a\n")
    files = {"memory.max": 300 * MIB, "memory.current": 250 * MIB, "memory.stat": ""}
    group(system / "_GROUPS" / "a", files)
    assert memory.memory_limits()[1] == MemoryLimit("its memory group", 120 * MIB, 70 * MIB)
    group(system / "_GROUPS" / "a", {"memory.current": 320 * MIB})  # it is above its limit already
    assert memory.memory_limits()[1].n_bytes == 70 * MIB


def test_ulimit_counts_addresses_or_what_is_written(own: dict[int, int]) -> None:
    own[memory.resource.RLIMIT_AS] = 2000 * MIB
    own[memory.resource.RLIMIT_DATA] = 300 * MIB
    assert memory.memory_limits()[1:] == [
        MemoryLimit("ulimit -v", 2000 * MIB, 400 * MIB, memory.ADDRESSES),
        MemoryLimit("ulimit -d", 300 * MIB, 90 * MIB, memory.DATA),
    ]
