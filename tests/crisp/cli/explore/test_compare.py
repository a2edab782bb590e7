"""crisp compare: two runs of one case, here of two simulated machines, one of which is said to be
measured."""

from __future__ import annotations

import json
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

import pytest

from crisp.run.result import Run, load_runs, save_runs
from tests.crisp.run.runs import sealed

RUN = ("--policy", "lru", "--budget", "30%")


@pytest.fixture
def runs(crisp: Callable, trace: Path, tmp_path: Path) -> tuple[Path, Path]:
    """(simulated, measured): JSON files with their timelines beside them."""
    files = tmp_path / "sim.json", tmp_path / "meas.json"
    for file, hardware in zip(files, ("rtx4090-pcie4", "jetson-agx-orin-32gb"), strict=True):
        timeline = file.with_suffix(".parquet")
        done = crisp(
            "simulate", trace, *RUN, "--hardware", hardware, "--json", file, "--timeline", timeline
        )
        assert done.code == 0, done.err
    save_runs(as_measured(load_runs(files[1])[0]), files[1])
    return files


def as_measured(run: Run) -> Run:
    return sealed(replace(run, settings=run.settings | {"engine": "hw"}))


def test_the_figures_stand_side_by_side(crisp: Callable, runs: tuple[Path, Path]) -> None:
    done = crisp("compare", *runs)
    assert done.code == 0, done.err
    lines = done.out.splitlines()
    assert lines[0].startswith("lru at 30%: simulated on rtx4090-pcie4, measured on")
    cells = {line.split()[0]: line.split()[1:] for line in lines if line.startswith(("hits", "ms"))}
    simulated, measured = (load_runs(file)[0].metrics for file in runs)
    assert cells["hits"] == [str(simulated["hits"]), str(measured["hits"]), "+0.0", "%"]
    error = 100 * (simulated["ms_per_token_p50"] / measured["ms_per_token_p50"] - 1)
    assert float(cells["ms_per_token_p50"][2]) == pytest.approx(error, abs=0.05)
    assert lines[-3:] == [
        "load order: identical",
        "computed blocks: identical",
        "resident blocks after each event: identical",
    ]
    assert lines[-4].startswith("error of the time of an event, percentiles 5, 50, 95: ")


def test_lists_of_runs_are_compared_one_by_one(
    crisp: Callable, trace: Path, tmp_path: Path
) -> None:
    files = tmp_path / "sim.json", tmp_path / "meas.json"
    many = ("--policy", "fo,lru", "--budget", "30%", "--json")
    assert crisp("simulate", trace, *many, files[0]).code == 0
    save_runs([*map(as_measured, load_runs(files[0]))], files[1])
    for number, policy in ((1, "fo"), (2, "lru")):
        done = crisp("compare", *files, "--run", number)
        assert done.out.startswith(f"{policy} at 30%: ")
        assert "no timelines were given" in done.out
    refused = crisp("compare", *files)
    assert refused.err == f"error: {files[0]}: holds 2 runs, expected one; --run says which\n"
    refused = crisp("compare", *files, "--run", 3)
    assert refused.err == f"error: --run 3: {files[0]} holds 2 runs, counted from 1\n"


def test_where_blocks_are_prefetched_a_difference_is_explained(
    crisp: Callable, trace: Path, runs: tuple[Path, Path]
) -> None:
    """The first machine's link is the slower one, and prefetches less."""
    for file, link in zip(runs, ("paper-table1", "rtx4090-pcie4"), strict=True):
        timeline = file.with_suffix(".parquet")
        asked = ("--policy", "mo", "--budget", "30%", "--hardware", link, "--model", "mixtral-8x7b")
        done = crisp("simulate", trace, *asked, "--json", file, "--timeline", timeline)
        assert done.code == 0, done.err
    save_runs(as_measured(load_runs(runs[1])[0]), runs[1])
    lines = crisp("compare", *runs).out.splitlines()
    assert lines[-4].startswith("load order: differ: ")
    assert lines[-1] == (
        "where blocks are prefetched, decisions depend on when things end: they may"
    )


def test_a_calibrated_profile_says_how_sure_it_is(crisp: Callable, runs: tuple[Path, Path]) -> None:
    """And what a layer's time is of: a replay has no attention."""
    run = load_runs(runs[0])[0]
    tables = {
        "load": {"spread": 0.084}, "compute": {"spread": 0.1}, "busy": {},
        "layer": {"source": "measured: of a replay"},
    }  # fmt: skip
    hardware = run.settings["hardware"] | {"tables": tables}
    save_runs(sealed(replace(run, settings=run.settings | {"hardware": hardware})), runs[0])
    out = crisp("compare", *runs).out
    assert "calibrated with interquartile ranges: load 8 %, compute 10 %\n" in out
    assert "a layer without its experts is measured: of a replay\n" in out


def test_without_timelines_events_are_not_compared(
    crisp: Callable, runs: tuple[Path, Path]
) -> None:
    moved = runs[1].parent / "elsewhere.parquet"
    runs[1].with_suffix(".parquet").rename(moved)
    assert "no timelines were given" in crisp("compare", *runs).out
    named = crisp("compare", *runs, "--timelines", runs[0].with_suffix(".parquet"), moved)
    assert "load order: identical" in named.out
    refused = crisp("compare", *runs, "--perfetto", moved.with_suffix(".json"))
    assert (refused.code, refused.err) == (
        2,
        "error: --perfetto: needs timelines; name them after --timelines\n",
    )


def test_a_timeline_that_another_run_left_beside_is_left_out(
    crisp: Callable, trace: Path, runs: tuple[Path, Path]
) -> None:
    stale = runs[0].with_suffix(".parquet")
    again = ("--policy", "fo", "--budget", "30%", "--timeline", stale)
    assert crisp("simulate", trace, *again).code == 0
    done = crisp("compare", *runs)
    told = f"{stale}: is of another run than {runs[0]}, or was changed"
    assert (done.code, done.err) == (0, f"{told}; timelines are left out\n")
    assert "no timelines were given" in done.out
    drawn = crisp("compare", *runs, "--perfetto", "-")
    assert (drawn.code, drawn.out, drawn.err) == (2, "", f"error: {told}\n")
    stale.write_text("something else")
    assert crisp("compare", *runs).err == (
        f"{stale}: is not a parquet file; timelines are left out\n"
    )


def test_both_timelines_are_drawn(crisp: Callable, runs: tuple[Path, Path], tmp_path: Path) -> None:
    file = tmp_path / "both.json"
    assert crisp("compare", *runs, "--perfetto", file).code == 0
    events = json.loads(file.read_text())["traceEvents"]
    begins = [event["pid"] for event in events if event["ph"] == "B"]
    assert begins.count(1) == begins.count(2) > 0
    to_stdout = crisp("compare", *runs, "--perfetto", "-")
    assert to_stdout.out == file.read_text()
    assert "load order: identical" in to_stdout.err


def test_mistakes_are_told_in_a_line(
    crisp: Callable, trace: Path, runs: tuple[Path, Path], tmp_path: Path
) -> None:
    other = tmp_path / "other.json"
    assert crisp("simulate", trace, *RUN, "--batch", "2", "--json", other).code == 0
    simulated = tmp_path / "simulated.json"
    simulated.write_text(other.read_text())
    save_runs(as_measured(load_runs(other)[0]), other)
    save_runs(load_runs(runs[0]) * 2, tmp_path / "two.json")
    timelines = [file.with_suffix(".parquet") for file in runs]
    for arguments, line in [
        ((runs[0], other), "error: the runs are not of the same case: batch is 1 and 2"),
        ((runs[0], tmp_path / "two.json"), f"error: {tmp_path / 'two.json'}: holds 2 runs"),
        ((runs[0], tmp_path / "no.json"), f"error: {tmp_path / 'no.json'}: cannot be read"),
        ((*runs, "--timelines", runs[0], runs[1]), f"error: {runs[0]}: is not a parquet file"),
        ((*runs, "--perfetto", runs[0]), "error: --perfetto"),
        ((*reversed(runs),), f"error: {runs[1]}: is a measured run, expected a simulated one"),
        ((runs[0], simulated), f"error: {simulated}: is a simulated run, expected a measured one"),
        ((*runs, "--timelines", *reversed(timelines)), f"error: {timelines[1]}: is of another run"),
    ]:
        done = crisp("compare", *arguments)
        assert (done.code, done.out) == (2, "")
        assert done.err.startswith(line)
        assert done.err.count("\n") == 1
