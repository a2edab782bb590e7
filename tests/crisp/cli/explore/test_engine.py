"""``crisp simulate --engine``: fast gives the same figures, and says what it cannot do."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from crisp.run.result import load_runs

LINE = ("--policy", "lru,crisp,mo", "--budget", "30%,50%", "--hardware", "rtx4090-pcie4")


def test_both_engines_give_the_same_figures(
    crisp: Callable[..., Any], trace: Path, tmp_path: Path
) -> None:
    out, runs = {}, {}
    for engine in ("simpy", "fast"):
        file = tmp_path / f"{engine}.json"
        done = crisp("simulate", trace, *LINE, "--engine", engine, "--json", file)
        assert done.code == 0, done.err
        out[engine], runs[engine] = done.out, load_runs(file)
        assert {run.settings["engine"] for run in runs[engine]} == {engine}
    assert out["fast"] == out["simpy"]
    assert [run.metrics for run in runs["fast"]] == [run.metrics for run in runs["simpy"]]


@pytest.mark.parametrize(
    ("arguments", "line"),
    [
        (("--engine", "fats"), "unknown engine 'fats'; did you mean 'fast'? known: simpy, fast"),
        (("--engine", "fast", "--timeline", "x.parquet"), "--timeline: engine fast keeps no time"),
        (("--engine", "fast", "--perfetto", "x.json"), "--perfetto: engine fast keeps no timeline"),
        (("--engine", "fast", "--plot", "x.png"), "--plot: engine fast keeps no timeline; use"),
        (
            ("--engine", "fast", "--hardware", "jetson-agx-orin-32gb"),
            "engine fast: does not know unified memory, which jetson-agx-orin-32gb has; use --engi",
        ),
    ],
)
def test_what_it_cannot_do_is_one_line(
    crisp: Callable[..., Any], trace: Path, arguments: tuple[str, ...], line: str
) -> None:
    done = crisp("simulate", trace, "--policy", "lru", "--budget", "30%", *arguments)
    assert done.code == 2
    assert line in done.err
    assert len(done.err.strip().splitlines()) == 1
