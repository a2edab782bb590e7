from __future__ import annotations

import shlex
from collections.abc import Callable
from pathlib import Path

import numpy as np
import pytest

from crisp.cli.commands.explore.demo import MACHINES, POLICIES, format_speeds, typical_step
from crisp.run.result import Run, load_runs
from crisp.run.timeline import COMPUTE, LOAD

WHOLE = "10, 50 % of 48 experts: 4, 24 whole ones; at 10 % two layers hold none."


@pytest.mark.seconds
def test_the_demonstration_and_what_it_says_to_do_next(
    crisp: Callable, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr("sys.argv", ["crisp"])
    done = crisp("demo", "--quick")
    assert done.code == 0, done.err
    assert sorted(path.name for path in (tmp_path / "out").iterdir()) == [
        "runs.json",
        "throughput.png",
        "token.png",
    ]
    runs = load_runs("out/runs.json")
    asked = [(m, p, b) for m in MACHINES for p in POLICIES for b in ("10%", "50%")]
    assert asked == [
        (
            run.settings["hardware"]["name"],
            run.settings["policy"]["name"],
            run.settings["budget"]["asked"],
        )
        for run in runs
    ]
    for words in ("mixtral-8x7b, 6 of 32 layers", "4.25 bits", "Quality is not simulated", WHOLE):
        assert words in done.out
    assert max(map(len, done.out.splitlines())) <= 100

    commands = [
        line for line in done.out.splitlines() if line.startswith("  crisp ") and "/" in line
    ]
    commands = [line.strip() for line in done.out.split("to go on:\n")[1].splitlines()]
    assert len(commands) == 3
    for command in commands:
        again = crisp(*shlex.split(command)[1:])
        assert again.code == 0, f"{command}: {again.err}"


def test_a_folder_that_cannot_be_made(crisp: Callable, tmp_path: Path) -> None:
    (tmp_path / "file").touch()
    done = crisp("demo", "--quick", "--out", tmp_path / "file")
    assert (done.code, done.out) == (2, "")
    assert done.err == f"error: --out {tmp_path / 'file'}: cannot be made: File exists\n"


def test_speeds_stand_beside_bytes() -> None:
    def run(policy: str, budget: str, speed: float, n_bytes: float) -> Run:
        settings = {"policy": {"name": policy}, "budget": {"asked": budget}}
        return Run(
            settings, {"tokens_per_second": speed, "decode_bytes_per_token": n_bytes}, {}, {}
        )

    runs = [
        run("fo", "10%", 2.17, 9e9),
        run("fo", "50%", 2.17, 9e9),
        run("lru", "10%", 3.0, 8e9),
        run("lru", "50%", 150.4, 5e5),
    ]
    assert [line.split() for line in format_speeds(runs, ["10%", "50%"])] == [
        ["tokens/s", "at", "a", "budget", "of", "MB", "loaded", "a", "token"],
        ["policy", "10%", "50%", "10%", "50%"],
        ["fo", "2.2", "2.2", "9000", "9000"],
        ["lru", "3.0", "150", "8000", "0.5"],
    ]


def test_a_typical_step_is_near_the_median_of_both() -> None:
    def timeline(ends: list[int], partial: list[int]) -> np.ndarray:
        """Each step: a load of 2 of 8 blocks or of 8, then a computation that ends it."""
        rows, start = [], 0
        for step, end in enumerate(ends):
            blocks = 2 if step in partial else 8
            rows.append([step, step, 0, LOAD, 0, 0, blocks, start, start, 0, 0])
            rows.append([step, step, 0, COMPUTE, 0, 0, 8, start, end, 0, 0])
            start = end
        return np.array(rows)

    one = timeline([100, 200, 250, 350, 900], [])  # 100, 100, 50, 100, 550: median 100
    two = timeline([70, 130, 200, 261, 322], [])  # 70, 60, 70, 61, 61: median 61
    assert typical_step([one, two], 0, 8) == 3
    assert typical_step([one, two], 4, 8) == 4, "only what comes after the cache has settled"
    assert typical_step([one, timeline([70, 130, 200, 261, 322], [1, 2])], 0, 8) == 1
