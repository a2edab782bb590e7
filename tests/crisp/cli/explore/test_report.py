"""crisp report: as text, as a page, and what it refuses."""

from __future__ import annotations

import json
import re
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

import pytest

from crisp.run.result import load_runs, save_runs
from crisp.sim.sweep.results import run_row
from crisp.sim.sweep.results import save_rows as save_sweep
from tests.crisp.run.runs import sealed, whole
from tests.sim.tuning.test_losses import losses, measured

RUN = ("--policy", "lru", "--budget", "30%")


@pytest.fixture
def run(crisp: Callable, trace: Path, tmp_path: Path) -> Path:
    """A run's file, with its timeline beside it."""
    file = tmp_path / "run.json"
    done = crisp(
        "simulate", trace, *RUN, "--json", file, "--timeline", file.with_suffix(".parquet")
    )
    assert done.code == 0, done.err
    return file


def test_without_a_page_the_tables_are_printed(crisp: Callable, tmp_path: Path) -> None:
    runs = [whole({"batch": batch}, tokens_per_second=float(batch)) for batch in (1, 2)]
    file = tmp_path / "runs.json"
    save_runs(runs, file)
    done = crisp("report", file)
    assert (done.code, done.err) == (0, "")
    lines = done.out.splitlines()
    assert lines[:2] == ["lru: moe on box", "2 runs, simulated: 1 policy at 1 budget"]
    assert "machine          box" in lines
    table = [line.split() for line in lines if line.startswith(("policy", "lru  "))]
    assert table == [
        ["policy", "budget", "batch", "speed", "tokens/s", "skipped", "pairs"],
        ["lru", "10%", "1", "1.00", "1"],
        ["lru", "10%", "2", "2.00", "1"],
    ]


def test_a_long_table_is_cut_and_says_so(crisp: Callable, tmp_path: Path) -> None:
    file = tmp_path / "runs.json"
    save_runs([whole({"seed": seed}) for seed in range(250)], file)
    out = crisp("report", file).out
    assert out.count("\nlru ") == 200
    assert "… 200 of 250 runs; --html FILE has all" in out


def test_a_page_is_written_once_and_again_the_same(
    crisp: Callable, run: Path, tmp_path: Path
) -> None:
    page, timeline = tmp_path / "page.html", run.with_suffix(".parquet")
    done = crisp("report", run, "--html", page, "--timeline", timeline)
    assert (done.code, done.err) == (0, "")
    assert done.out == f"{page}: 1 run, simulated: 1 policy at 1 budget\n"
    first = page.read_bytes()
    assert crisp("report", run, "--html", page, "--timeline", timeline).code == 0
    assert page.read_bytes() == first
    printed = crisp("report", run, "--html", "-", "--timeline", timeline)
    assert printed.out.encode() == first
    data = re.search(r'id="data">(.*?)</script>', first.decode(), re.DOTALL)
    assert data
    shown = json.loads(data[1])["timelines"]
    assert shown["names"] == ["lru at 30%, simulated on rtx4090-pcie4"]
    assert len(shown["steps"]) == 2


def test_run_files_and_sweeps_stand_together(crisp: Callable, run: Path, tmp_path: Path) -> None:
    (known,) = load_runs(run)
    other = sealed(replace(known, settings=known.settings | {"seed": 5}))
    results = tmp_path / "results.parquet"
    save_sweep(results, lambda: iter([run_row(known), run_row(other)]), {})
    out = crisp("report", run, results).out
    assert out.splitlines()[1] == "2 runs, simulated: 1 policy at 1 budget"  # one of them is both
    assert [line.split()[2] for line in out.splitlines() if line.startswith("lru  ")] == ["0", "5"]


def test_mistakes_are_told_in_a_line(
    crisp: Callable, trace: Path, run: Path, tmp_path: Path
) -> None:
    timeline, page = run.with_suffix(".parquet"), tmp_path / "page.html"
    other = tmp_path / "other.json"
    assert crisp("simulate", trace, *RUN, "--batch", "2", "--json", other).code == 0
    text = tmp_path / "text.json"
    text.write_text("text")
    for arguments, line in [
        ((run, "--timeline", timeline), "--timeline: is drawn; say where with --html FILE"),
        ((run, "--html", run), f"--html {run}: would replace RUNS {run}, which is read"),
        (
            (run, "--timeline", timeline, "--html", timeline),
            f"--html {timeline}: would replace --timeline {timeline}, which is read",
        ),
        (
            (other, "--timeline", timeline, "--html", page),
            f"{timeline}: is of none of the runs, or was changed",
        ),
        ((run, "--timeline", run, "--html", page), f"{run}: is not a parquet file"),
        ((text,), f"{text}: is not a run file"),
        ((tmp_path,), f"RUNS {tmp_path}: is a folder; a file was expected"),
        ((timeline,), f"{timeline}: is not what a sweep wrote: it has no column engine"),
    ]:
        done = crisp("report", *arguments)
        assert (done.code, done.out, done.err) == (2, "", f"error: {line}\n")
    assert not page.exists()


def test_losses_are_called_by_their_name(crisp: Callable, tmp_path: Path) -> None:
    file = tmp_path / "loss.json"
    file.write_text(json.dumps(losses(measured("single", 1.03))))
    done = crisp("report", file)
    assert (done.code, done.err) == (
        2,
        f"error: {file}: is what crisp eval wrote; report takes runs of simulate, replay, generate "
        "and sweeps\n",
    )
