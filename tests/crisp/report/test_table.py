"""Runs as columns, from run files and from what a sweep writes."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Any

import pandas as pd
import pytest

from crisp.errors import CrispError
from crisp.report.table import RunTable, from_parquet, from_runs, join_tables
from crisp.run.result import Run
from crisp.sim.sweep.results import run_row, save_rows
from tests.crisp.run.runs import whole


def at(asked: str, share: float | None = None) -> Run:
    budget = {"asked": asked} if share is None else {"asked": asked, "share": share}
    return whole({"budget": budget})


def test_a_setting_is_called_by_its_path() -> None:
    table = from_runs([whole({"batch": 4, "device": None})])
    assert table.setting("policy.cache") == ["lru"]
    assert table.setting("batch") == ["4"]
    assert table.setting("model.moe_layers") == ["[0, 1, 2, 3, 4, 5]"]
    assert "device" not in table.settings
    assert table.setting("nothing of this name") == [None]
    assert table.machines() == ["box"]


def test_a_budget_stands_where_it_was_asked() -> None:
    runs = [at("10%", 0.083), at(".1", 0.083), at("4GB", 0.25), at("4GB"), at("4GB", 7)]
    table = from_runs(runs)
    assert table.shares() == [0.1, 0.1, 0.25, None, None]
    assert table.floored_shares() == [0.083, 0.083, 0.25, None, None]


def test_where_joules_come_from_is_told_without_the_watts_at_rest() -> None:
    run = whole(energy_j_per_token=2.0)
    energy = {"method": "measured: counter; idle: 10 W over 2 s before", "source": "a meter"}
    table = from_runs([replace(run, provenance={"energy": energy, "tool": "crisp-moe 1"})])
    assert table.setting("joules from") == ["measured, from a meter"]
    assert table.setting("made by") == ["crisp-moe 1"]


def test_a_long_value_is_its_begin_and_a_hash() -> None:
    tables = [from_runs([whole({"notes": [0] * 100 + [last]})]) for last in (0, 1)]
    shown = [table.setting("notes")[0] for table in tables]
    assert all(text is not None and text.startswith("[0, 0,") for text in shown)
    assert all(len(text or "") < 60 for text in shown)
    assert shown[0] != shown[1]


def sweep(folder: Path, runs: list[Run]) -> Path:
    path = folder / "results.parquet"
    save_rows(path, lambda: iter([run_row(run) | {"cell": "0"} for run in runs]), {})
    return path


def test_a_sweep_of_the_same_runs_is_the_same_table(tmp_path: Path) -> None:
    energy = {"method": "modelled: states", "source": "box"}
    first = whole({"limit": None}, tokens_per_second=12.5)
    first = replace(first, provenance={"tool": "crisp-moe 1", "energy": energy})
    second = replace(
        whole({"limit": 7, "batch": 2}, energy_j_per_token=3.0),
        unavailable={"ttft_ms": "no prompt was run to its end"},
        provenance={"tool": "crisp-moe 1", "energy": energy},
    )
    expected = from_runs([first, second])
    found = from_parquet(sweep(tmp_path, [first, second]))
    assert found.settings == expected.settings
    for name, values in expected.metrics.items():
        assert found.metric(name) == values, name
    assert found.reasons_for("ttft_ms") == [None, "no prompt was run to its end"]


def test_a_column_that_a_sweep_adds_is_kept(tmp_path: Path) -> None:
    path = tmp_path / "more.parquet"
    pd.DataFrame([run_row(whole()) | {"loss": 0.036, "note": "tried"}]).to_parquet(path)
    table = from_parquet(path)
    assert table.metric("loss") == [0.036]
    assert table.setting("note") == ["tried"]


def test_what_is_no_number_is_not_known(tmp_path: Path) -> None:
    path = tmp_path / "odd.parquet"
    rows = [run_row(whole(tokens_per_second=value)) for value in (float("nan"), float("inf"), 2.0)]
    pd.DataFrame(rows).to_parquet(path)
    assert from_parquet(path).metric("tokens_per_second") == [None, None, 2.0]


@pytest.mark.parametrize(
    ("change", "line"),
    [
        ({"policy.name": ...}, "is not what a sweep wrote: it has no column policy.name"),
        ({"policy.name": None}, "row 1 has no policy.name"),
        ({"tokens_per_second": "fast"}, "column tokens_per_second: expected numbers, found "),
    ],
)
def test_another_table_is_refused(tmp_path: Path, change: dict[str, Any], line: str) -> None:
    row = {name: value for name, value in (run_row(whole()) | change).items() if value is not ...}
    path = tmp_path / "other.parquet"
    pd.DataFrame([row]).to_parquet(path)
    with pytest.raises(CrispError) as error:
        from_parquet(path)
    assert str(error.value).startswith(f"{path}: {line}")


def test_what_is_no_table_is_refused(tmp_path: Path) -> None:
    path = tmp_path / "x.parquet"
    for write, line in (
        (lambda: None, "cannot be read: No such file or directory"),
        (lambda: path.write_text("text"), "is not a parquet file"),
        (lambda: pd.DataFrame([run_row(whole())]).iloc[:0].to_parquet(path), "holds no run"),
    ):
        write()
        with pytest.raises(CrispError, match=f"^{path}: {line}$"):
            from_parquet(path)


def test_a_run_that_is_given_twice_is_there_once() -> None:
    one, other = whole(), whole({"batch": 2})
    table = join_tables(
        [from_runs([one, other]), from_runs([other]), from_runs([whole({"more": 1})])]
    )
    assert table.setting("batch") == ["1", "2", "1"]
    assert table.setting("more") == [None, None, "1"]
    again = join_tables([from_runs([whole(hit_rate=0.1)]), from_runs([whole(hit_rate=0.2)])])
    assert again.metric("hit_rate") == [0.1, 0.2]
    assert isinstance(again, RunTable)


def test_what_a_sweep_refused_is_left_out(tmp_path: Path) -> None:
    path = tmp_path / "results.parquet"
    first = {"cell": "0", "refused": None} | run_row(whole())
    refused = {"cell": "1", "refused": "alpha must not be above beta"}
    save_rows(path, lambda: iter([refused, first]), {})
    table = from_parquet(path)
    assert table.rows == 1
    assert "refused" not in (*table.settings, *table.metrics)
    save_rows(path, lambda: iter([refused | {"refused": "no"}, {**first, "refused": "no"}]), {})
    with pytest.raises(CrispError, match=r"holds no run, every cell is refused$"):
        from_parquet(path)
