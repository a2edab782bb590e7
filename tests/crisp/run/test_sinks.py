from __future__ import annotations

from pathlib import Path

import numpy as np
import pyarrow.parquet as pq
import pytest

from crisp.run.sinks import FullTimeline, TimelineWindow, parquet
from crisp.run.timeline import COLUMNS, KINDS, STEP, Rows


def some_rows(steps: list[int]) -> Rows:
    """One row for each entry: its step, and other numbers that tell rows and columns apart."""
    rows = np.arange(len(steps) * len(COLUMNS), dtype=np.int64).reshape(-1, len(COLUMNS))
    rows[:, STEP] = steps
    rows[:, COLUMNS.index("kind")] = np.arange(len(steps)) % len(KINDS)
    return rows


def test_a_parquet_file_holds_the_rows_of_all_blocks_in_order(tmp_path: Path) -> None:
    rows = some_rows([0, 0, 1, 2, 2])
    with parquet(tmp_path / "timeline.parquet") as sink:
        for block in (rows[:2], rows[2:2], rows[2:]):
            sink.write(block)
    file = pq.ParquetFile(tmp_path / "timeline.parquet")
    read = file.read().to_pandas()
    assert file.num_row_groups == 2, "every block is written when it comes, none is kept"
    assert read.columns.tolist() == list(COLUMNS)
    assert read["kind"].tolist() == ["layer", "compute", "load", "prefetch", "layer"]
    for column, name in enumerate(COLUMNS):
        if name != "kind":
            assert read[name].tolist() == rows[:, column].tolist()


@pytest.mark.parametrize("error", [KeyboardInterrupt, ValueError])
def test_a_failure_leaves_no_parquet_file(tmp_path: Path, error: type[BaseException]) -> None:
    with pytest.raises(error), parquet(tmp_path / "timeline.parquet") as sink:
        sink.write(some_rows([0]))
        raise error
    assert list(tmp_path.iterdir()) == []


@pytest.mark.parametrize(("wanted", "step"), [(0, 0), (3, 3), (4, 3), (99, 7)])
@pytest.mark.parametrize("size", [1, 2, 100])
def test_a_window_keeps_the_wanted_step_or_the_last_before_it(
    wanted: int, step: int, size: int
) -> None:
    rows = some_rows([0, 0, 1, 3, 3, 3, 7])
    window = TimelineWindow(wanted)
    for start in range(0, len(rows), size):
        window.write(rows[start : start + size])
    assert window.rows.tolist() == rows[rows[:, STEP] == step].tolist()


def test_everything_keeps_everything() -> None:
    rows, sink = some_rows([0, 1, 2]), FullTimeline()
    assert sink.rows.shape == (0, len(COLUMNS))
    sink.write(rows[:1])
    sink.write(rows[1:])
    assert sink.rows.tolist() == rows.tolist()
