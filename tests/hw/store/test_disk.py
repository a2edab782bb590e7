from __future__ import annotations

from pathlib import Path

from crisp.hw.store.disk import read_speed, temporary_file


def test_the_file_that_is_read_has_no_name(tmp_path: Path) -> None:
    """So a process that is killed leaves none."""
    with temporary_file(tmp_path, 1 << 20) as path:
        assert list(tmp_path.iterdir()) == []
        assert path.stat().st_size == 1 << 20
        assert path.stat().st_dev == tmp_path.stat().st_dev
        assert read_speed(path, 0.05).bytes_per_second > 0
        descriptors = len([*Path("/proc/self/fd").iterdir()])
    assert len([*Path("/proc/self/fd").iterdir()]) == descriptors - 1
