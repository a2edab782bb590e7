"""docs/caches.md says what docs/caches.json holds, and its replays are what they are called."""

from __future__ import annotations

import doctest
import json
from pathlib import Path

import numpy as np
import pytest

from benchmarks.caches import cells as cell_runs
from benchmarks.caches import figures
from benchmarks.caches.cells import (
    EXCHANGED,
    REAL,
    Cell,
    by_access,
    case_of,
    cells,
    forced,
    hardware,
    run,
)
from benchmarks.caches.figures import Runs
from benchmarks.caches.page import CONTENT, PAGE, PICTURE, render, write
from crisp.policy import Budget, named
from crisp.run.case import Case, Conditions
from crisp.sim.simulate import simulate

ROOT = Path(__file__).resolve().parents[2]
TRACE = "tiny-mixtral-code"


@pytest.fixture(scope="module")
def content() -> figures.Record:
    """What the page is made of."""
    read: figures.Record = json.loads((ROOT / CONTENT).read_text(encoding="utf-8"))
    return read


def test_the_page_is_what_its_figures_say(content: figures.Record) -> None:
    assert render(content) == (ROOT / PAGE).read_text(encoding="utf-8")
    assert len(content["runs"]) == len(list(cells(real=REAL in content["traces"])))


def test_no_cache_loads_less_than_belady_and_libcachesim_agrees(content: figures.Record) -> None:
    text = render(content)
    runs = Runs(content["runs"]).of(section="caches")
    compared = sum(one.get("libcachesim") is not None for one in runs.records)
    assert f"Of {len(runs.records)} runs, 0 load less than `belady`." in text
    assert f"in {compared} of {compared} runs" in text.replace("\n", " ")
    assert compared == len(set(runs.values("trace"))) * 5 * 4


def test_where_suffixes_and_the_forced_oracle_are_worse_is_named(content: figures.Record) -> None:
    text = " ".join(render(content).split())
    assert "their own plain rule (`suffix-lru` at 20%, by 0.031 %)" in text
    assert "on gpt-oss-20b at 10% (63.4, not 60.8), tiny-mixtral at 10%" in text


@pytest.mark.seconds
def test_it_is_written_whole(content: figures.Record, tmp_path: Path) -> None:
    write(tmp_path, content)
    assert (tmp_path / PICTURE).stat().st_size > 10_000
    assert json.loads((tmp_path / CONTENT).read_text()) == content


def limited(cell: Cell, rows: int) -> Case:
    """A cell's case, cut short."""
    case = case_of(cell, None)
    conditions = Conditions(limit=rows)
    return Case(
        case.trace, case.spec, case.policy, case.budget, case.profile, conditions,
        counted=case.counted,
    )  # fmt: skip


@pytest.mark.parametrize("single", [False, True])
def test_forced_belady_is_the_oracles(single: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    """Event after event, it loads what the scheduler does; not compiled, which takes long."""
    monkeypatch.setattr(cell_runs, "_forced", cell_runs._forced.py_func)
    monkeypatch.setattr(cell_runs, "_soonest", cell_runs.soonest)
    for budget in ("10%", "30%"):
        parts = {"cache": "belady-forced"}
        case = limited(Cell("caches", TRACE, ("lru", parts), budget, by_access=single), 60)
        found = simulate(case, hardware("rtx4090-pcie4")).metrics["blocks_loaded"]
        assert forced(case, case.future()) == found


def test_one_access_at_a_time() -> None:
    rest = case_of(Cell("caches", TRACE, ("lru", {}), "10%"), None).trace
    split = by_access(rest)
    assert split.experts.shape == (2 * rest.rows, rest.layers, 1)
    assert split.experts[:4, 3, 0].tolist() == rest.experts[:2, 3].ravel().tolist()
    assert (split.sequence[::2] == rest.sequence).all()


def test_a_cells_record_is_its_run() -> None:
    cell = Cell("prefetchers", TRACE, ("lru", {"prefetch": "frequent"}), "30%")
    record, case = run(cell, None), case_of(cell, None)
    assert case.budget == Budget.parse("30%") and case.policy == named("lru", prefetch="frequent")
    assert record["tokens"] == len(case.rows()) and record["prefetch"] == "frequent"
    runs = Runs([record])
    assert np.isclose(runs.loads, record["blocks_loaded"] / 8 / record["tokens"])
    assert runs.fewest < runs.loads and runs.speed > 0


def test_the_exchanged_machine_takes_longer_to_compute() -> None:
    numbers = hardware(EXCHANGED).numbers
    assert float(numbers["table.expert_load_ms"]) == 1.3
    assert float(numbers["table.expert_compute_ms"]) == 5.6


def test_figures_by_hand() -> None:
    assert doctest.testmod(figures).failed == 0
