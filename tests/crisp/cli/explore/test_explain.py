from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from crisp.cli.commands.explore.explain import explain_run
from crisp.run.account import time_account
from crisp.run.result import Run, load_runs, save_runs
from tests.crisp.run.runs import whole


def run(kind: str = "discrete", **metrics: float) -> Run:
    """A run of 1000 tokens that take 10 ms each: 6 of waiting, 3 of experts, 1 of the rest."""
    values: dict[str, Any] = {
        "total_ns": 10_000_000_000,
        "tokens": 1000,
        "stall_ns": 6_000_000_000,
        "compute_ns": 3_000_000_000,
        "layer_ns": 1_000_000_000,
        "io_bound_ms_per_token": 5.0,
        "order_bound_ms_per_token": 7.0,
        "belady_bound_ms_per_token": 4.5,
        "compute_bound_ms_per_token": 4.0,
        "memory_bound_ms_per_token": None,
        "bytes_loaded": 80_000_000_000,
        "belady_bytes_per_token": 72e6,
        "link_busy": 0.5,
        "compute_busy": 0.4,
    }
    return whole({"hardware": {"name": "box", "kind": kind}}, **values | metrics)


@pytest.mark.parametrize(
    ("metrics", "near"),
    [
        ({}, "none"),
        ({"order_bound_ms_per_token": 9.0}, "order"),
        ({"order_bound_ms_per_token": 9.9, "io_bound_ms_per_token": 9.0}, "bytes"),
        ({"order_bound_ms_per_token": 9.9, "io_bound_ms_per_token": 8.9}, "order"),
        (
            {
                "stall_ns": 500_000_000,
                "compute_ns": 8_000_000_000,
                "layer_ns": 1_500_000_000,
                "compute_bound_ms_per_token": 9.5,
            },
            "compute",
        ),
        ({"memory_bound_ms_per_token": 9.5, "order_bound_ms_per_token": 9.9}, "memory"),
    ],
)
def test_the_near_bound_explains_nine_tenths_of_the_time(
    metrics: dict[str, float], near: str
) -> None:
    assert time_account(run(**metrics)).near == near


def test_a_slowed_computation_is_no_bound() -> None:
    """Where the memory is shared, computing beside loads takes longer than alone."""
    slowed = {"stall_ns": 0, "compute_ns": 9_000_000_000}
    assert time_account(run("unified", **slowed, compute_bound_ms_per_token=9.9)).near == "compute"
    assert time_account(run("unified", **slowed, compute_bound_ms_per_token=6.0)).near == "none"


def test_no_overlap_is_promised_where_the_memory_is_shared() -> None:
    assert "no stream is busy all the time: overlap would help" in explain_run(run(), "one")
    lines = explain_run(run("unified"), "one")
    assert lines[-1].startswith("link and compute share one memory and slow each other down")


def test_a_run_in_a_few_lines() -> None:
    lines = explain_run(run(), "run 1 of 1")
    assert " ".join(line.strip() for line in lines[:2]) == (
        "run 1 of 1: lru at 10% on box; moe, 6 layers in 4.25 bits; 1,000 rows, phase decode, "
        "batch 1, granularity expert; width full, fifo, cache lru per layer by expert"
    )
    lines = lines[1:]
    assert lines[1] == "10.000 ms a token:"
    assert [line.split("  ")[-1] for line in lines[2:5]] == [
        "compute waits for loads",
        "computing experts",
        "router, attention and all else",
    ]
    assert [line.split()[2] for line in lines[2:5]] == ["60", "30", "10"]
    assert [line.strip() for line in lines[6:10]] == [
        "5.000 ms   50 %  bytes: 80 MB a token at the link's bandwidth",
        "7.000 ms   70 %  order: each event's tasks in their best order",
        "4.500 ms   45 %  Belady: 72 MB a token, what the best cache would load",
        "4.000 ms   40 %  compute: all experts at hand",
    ]
    assert "link busy 50 %, compute 40 %" in lines
    assert (
        "near bound: none (there is none of compute, bytes, memory and order that makes up 90 % of "
        "the time)"
    ) in lines
    assert " ".join(lines[-2:]) == (
        "at most: a better order gains 30 %, perfect overlap between layers 50 %, and with a cache "
        "that knows what will come 55 %, loading nothing 60 %"
    )
    assert max(map(len, lines)) <= 100


def test_a_list_has_a_line_for_each_run(crisp: Callable, tmp_path: Path) -> None:
    save_runs([run(), run(io_bound_ms_per_token=9.5)], tmp_path / "runs.json")
    lines = crisp("explain", tmp_path / "runs.json").out.splitlines()
    assert [line.split() for line in lines[1:3]] == [
        ["1", "lru", "10%", "box", "10.0", "60", "30", "10", "none"],
        ["2", "lru", "10%", "box", "10.0", "60", "30", "10", "bytes"],
    ]
    chosen = crisp("explain", tmp_path / "runs.json", "--run", "2").out
    assert chosen.startswith("run 2 of 2: ")
    assert (
        "near bound: bytes (the first of compute, bytes, memory and order that makes up" in chosen
    )


@pytest.mark.parametrize("number", [0, 3])
def test_a_run_that_is_not_there(crisp: Callable, tmp_path: Path, number: int) -> None:
    save_runs([run(), run()], tmp_path / "runs.json")
    done = crisp("explain", tmp_path / "runs.json", "--run", number)
    assert done.code == 2
    assert done.err == (
        f"error: --run {number}: {tmp_path / 'runs.json'} holds 2 runs, counted from 1\n"
    )


@pytest.mark.parametrize("text", ["", "{}", "[]", "[1]", '{"version": NaN}', "\0", "[" * 10**5])
def test_what_is_no_run(crisp: Callable, tmp_path: Path, text: str) -> None:
    (tmp_path / "no.json").write_text(text)
    done = crisp("explain", tmp_path / "no.json")
    assert (done.code, done.err) == (2, f"error: {tmp_path / 'no.json'}: is not a run file\n")


def test_the_parts_of_a_simulated_run_add_up(crisp: Callable, trace: Path, tmp_path: Path) -> None:
    file = tmp_path / "run.json"
    crisp("simulate", trace, "--policy", "mo", "--budget", "30%", "--json", file)
    parts = time_account(load_runs(file)[0])
    assert parts.waits + parts.experts + parts.layers == pytest.approx(parts.total)
    out = crisp("explain", file).out
    assert out.startswith("run 1 of 1: mo at 30% on rtx4090-pcie4; toy, 3 layers")
