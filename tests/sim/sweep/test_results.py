"""Rows and columns of results."""

from __future__ import annotations

from pathlib import Path

import pandas as pd
import pyarrow.parquet as pq
import pytest

from crisp.errors import CrispError
from crisp.model.spec import ModelSpec
from crisp.policy import Budget, named
from crisp.profile import Profile
from crisp.run.case import Case, Conditions
from crisp.run.result import Run
from crisp.sim.hardware import hardware_profile
from crisp.sim.simulate import simulate
from crisp.sim.sweep import results
from crisp.trace.fitting import fit_to_trace
from tests.crisp.cli.toy import CONFIG, toy_trace


def run() -> tuple[Run, ModelSpec]:
    trace = toy_trace()
    spec = fit_to_trace(ModelSpec.from_config(CONFIG, "toy"), trace)
    case = Case(
        trace, spec, named("crisp"), Budget.parse("30%"), Profile.from_trace(trace),
        Conditions(phase="all"),
    )  # fmt: skip
    return simulate(case, hardware_profile("rtx4090-pcie4")), spec


def test_a_row_has_every_setting_and_metric() -> None:
    done, _ = run()
    row = results.run_row(done)
    assert row["policy.width"] == "tiered(alpha=0.6,beta=0.9,warm=0.5,cold=0)"
    assert row["budget.asked"] == "30%"
    assert row["model.moe_layers"] == "[0, 1, 2]"
    assert {name: row[name] for name in done.metrics} == done.metrics
    assert row["hardware.numbers.link.bandwidth_gb_s.value"] == 25.63
    assert all(value is None or isinstance(value, str | int | float) for value in row.values())


def test_sequences_add_up_to_the_run() -> None:
    done, _ = run()
    own = results.sequences_of(done)
    assert own["sequence"] == [0, 1, 2, 3]
    assert own["tokens"] == [10, 10, 10, 10]
    assert sum(own["ns"]) == done.metrics["total_ns"]
    assert sum(own["bytes"]) == done.metrics["bytes_loaded"]
    assert min(own["ns"]) > 0


def test_columns_take_the_type_that_holds_all(tmp_path: Path) -> None:
    rows: list[results.Row] = [
        {"cell": "a", "n": 1, "x": 1, "mixed": 1, "none": None, "big": 1, "flag": True},
        {
            "cell": "b",
            "n": 2,
            "x": 0.5,
            "mixed": "10%",
            "none": None,
            "big": 1 << 70,
            "flag": False,
        },
        {"cell": "c", "later": 7},
    ]
    path = tmp_path / "r.parquet"
    results.save_rows(path, lambda: rows, {"complete": True})
    assert list(results.load_rows(path)) == [
        {"cell": "a", "n": 1, "x": 1.0, "mixed": "1", "none": None, "big": "1", "flag": True,
         "later": None},
        {"cell": "b", "n": 2, "x": 0.5, "mixed": "10%", "none": None, "big": str(1 << 70),
         "flag": False, "later": None},
        {"cell": "c", "n": None, "x": None, "mixed": None, "none": None, "big": None, "flag": None,
         "later": 7},
    ]  # fmt: skip
    kinds = [str(field.type) for field in pq.read_schema(path)]
    assert kinds == ["string", "int64", "double", "string", "string", "string", "bool", "int64"]
    before = path.read_bytes()
    results.save_rows(path, lambda: results.load_rows(path), {"complete": True})
    assert path.read_bytes() == before


def test_sequences_come_back(tmp_path: Path) -> None:
    path = tmp_path / "s.parquet"
    own = {"sequence": [3, 5], "tokens": [1, 2], "bytes": [10, 0], "ns": [7, 8]}
    other = {"sequence": [3], "tokens": [4], "bytes": [1], "ns": [2]}
    results.save_sequences(path, [("a", own), ("b", other)])
    assert results.load_sequences(path) == {"a": own, "b": other}
    assert pd.read_parquet(path).groupby("cell")["ns"].sum().to_dict() == {"a": 15, "b": 2}


def test_another_file_is_not_taken_for_results(tmp_path: Path) -> None:
    path = tmp_path / "x"
    path.write_text("text")
    with pytest.raises(CrispError, match="x: is not a parquet file"):
        list(results.load_rows(path))
    pd.DataFrame({"a": [1]}).to_parquet(path)
    with pytest.raises(CrispError, match="x: was not written by crisp sweep"):
        list(results.load_rows(path))
