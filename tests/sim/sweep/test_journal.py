"""Finished cells outlive whatever ends a sweep."""

from __future__ import annotations

import resource
from pathlib import Path

import pytest

from crisp.errors import CrispError
from crisp.sim.sweep.journal import Journal


def test_what_was_kept_is_there_again(tmp_path: Path) -> None:
    path = tmp_path / "j"
    first = Journal(path)
    first.add({"cell": "a", "row": {"x": 1}})
    first.add({"cell": "b", "row": {"x": 2}})
    first.add({"cell": "a", "row": {"x": 3}})
    first.close()
    again = Journal(path)
    assert ("a" in again, "b" in again, "c" in again, len(again)) == (True, True, False, 2)
    assert [again.record(cell)["row"]["x"] for cell in "ab"] == [3, 2]
    again.remove()
    again.close()
    assert not path.exists()


@pytest.mark.parametrize(
    "rest", [b'{"cell": "c", "ro', b'{"cell": "c"', b"\x00\n", b'{"row": 1}\n']
)
def test_a_line_that_was_cut_short_is_dropped(tmp_path: Path, rest: bytes) -> None:
    """As by a kill in the middle of a write."""
    path = tmp_path / "j"
    first = Journal(path)
    first.add({"cell": "a"})
    first.close()
    whole = path.read_bytes()
    path.write_bytes(whole + rest)
    again = Journal(path)
    assert len(again) == 1
    again.add({"cell": "b"})
    again.close()
    assert path.read_bytes() == whole + b'{"cell": "b"}\n'


def test_cells_of_another_version_are_forgotten(tmp_path: Path) -> None:
    path = tmp_path / "j"
    path.write_text('{"tool": "crisp 0.0.0"}\n{"cell": "a"}\n')
    journal = Journal(path)
    assert len(journal) == 0
    journal.add({"cell": "b"})
    journal.close()
    assert b"0.0.0" not in path.read_bytes()
    again = Journal(path)
    assert "b" in again
    again.close()


def test_two_sweeps_do_not_write_one_file(tmp_path: Path) -> None:
    path = tmp_path / "j"
    first = Journal(path)
    with pytest.raises(CrispError, match="another sweep is writing it"):
        Journal(path)
    first.close()
    Journal(path).close()


def test_a_full_disk_keeps_what_was_whole(tmp_path: Path) -> None:
    path = tmp_path / "j"
    journal = Journal(path)
    journal.add({"cell": "a"})
    whole = path.read_bytes()
    soft, hard = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (len(whole) + 20, hard))
    try:
        with pytest.raises(CrispError, match=rf"^{path}: cannot be written: File too large$"):
            journal.add({"cell": "b", "row": "long" * 20})
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, (soft, hard))
    assert path.read_bytes() == whole
    assert "b" not in journal
    journal.add({"cell": "c"})
    journal.close()
    again = Journal(path)
    assert ("a" in again, "c" in again, len(again)) == (True, True, 2)
    again.close()


def test_where_nothing_can_be_written_is_said(tmp_path: Path) -> None:
    with pytest.raises(CrispError, match="cannot be written: Is a directory"):
        Journal(tmp_path)
