"""The page that compares CRISP with others: caps, verdicts, and cells of runs that were killed."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from benchmarks.peers.caps import SMALLEST, STEP, caps, crisp_budget, least_cap, resident_layers
from benchmarks.peers.figures import Cell, cells, marks, ratios, same_tokens
from benchmarks.peers.measure import CAPPED, RESIDENT, instruction_sets, turns, why
from benchmarks.peers.page import SHOWN, cell, page, write
from crisp.errors import CrispError

KILLED = {"failed": "killed: out of memory"}


def _run(contestant: str, cap: int | None, rate: float, turn: int = 0) -> dict[str, Any]:
    return {"contestant": contestant, "cap": cap, "turn": turn, "tokens": 10, "seconds": 10 / rate}


def _record() -> dict[str, Any]:
    """Caps of 1, 2 and 3 GB: llama.cpp is killed at the first, and faster at the third."""
    runs = [
        _run("crisp", 10**9, 2.0),
        {"contestant": "llama.cpp", "cap": 10**9, "turn": 0, **KILLED},
        *(_run("crisp", 2 * 10**9, rate, turn) for turn, rate in enumerate((6.0, 5.0, 4.0))),
        _run("llama.cpp", 2 * 10**9, 2.0),
        _run("accelerate", 2 * 10**9, 2.5) | {"resident": 3},
        _run("crisp", 3 * 10**9, 8.0),
        _run("llama.cpp", 3 * 10**9, 10.0),
        _run("crisp", None, 9.0) | {"ids": [7, 5, 3]},
        _run("llama.cpp", None, 10.0) | {"ids": [7, 5, 4]},
        _run("transformers", None, 20.0),
    ]
    return {
        "expert_bytes": 2 * 10**9, "bases": {"crisp": 10**9}, "least": 10**9, "shares": [0, 0.5, 1],
        "caps": [10**9, 2 * 10**9, 3 * 10**9], "runs": runs,
    }  # fmt: skip


def _content() -> dict[str, Any]:
    conditions = {
        "date": "2026-12-01", "processor": "a processor", "cores": 2, "kernel": "6", "threads": 2,
        "layers": 4, "tokens": 10, "seconds": 4, "repeats": 3, "cgroup": 1, "built_for": "AVX2",
        "versions": {"torch": "2"},
    }  # fmt: skip
    return {"conditions": conditions, "formats": {"bf16": _record(), "int4": _record()}}


def test_caps_are_the_least_and_shares_of_the_experts_above_it() -> None:
    assert caps(700, 1000) == [700, 950, 1200, 1450, 1700]
    # under the last cap the budget is all experts, and under the first nothing is kept
    assert [crisp_budget(cap, 700) - SMALLEST for cap in caps(700, 1000)] == [
        0, 250, 500, 750, 1000,
    ]  # fmt: skip


def test_the_least_cap_is_the_first_that_crisp_runs_in() -> None:
    tried = list[int]()

    def runs_in(cap: int) -> bool:
        tried.append(cap)
        return cap >= 5 + 2 * STEP

    assert least_cap(5, runs_in) == 5 + 2 * STEP
    assert tried == [5, 5 + STEP, 5 + 2 * STEP]
    with pytest.raises(CrispError, match="CRISP does not run in"):
        least_cap(5, lambda cap: False)


def test_accelerate_keeps_as_many_layers_as_fit() -> None:
    assert [resident_layers(cap + STEP, 100, 10) for cap in (50, 109, 110, 139)] == [0, 0, 1, 3]


def test_a_cell_is_median_and_range_or_why_there_is_none() -> None:
    found = cells(_record())
    assert found["crisp", 2 * 10**9].rates == (4.0, 5.0, 6.0)
    assert cell(found["crisp", 2 * 10**9]) == "**5.00** (4.00-6.00)"
    assert cell(found["llama.cpp", 10**9]) == "killed: out of memory"
    assert cell(None) == ""


def test_a_contestant_that_is_killed_in_any_turn_has_no_figure() -> None:
    killed = {"contestant": "a", "cap": 1, "turn": 1, **KILLED}
    runs = [_run("a", 1, 2.0), killed, _run("a", 1, 3.0)]
    assert cells({"runs": runs})["a", 1] == Cell((), "killed: out of memory")
    assert cells({"runs": runs[:2]})["a", 1] == Cell((), "killed: out of memory")


def test_ratios_are_to_the_best_of_the_others_where_both_run() -> None:
    assert ratios(_record()) == {2 * 10**9: (2.0, "accelerate"), 3 * 10**9: (0.8, "llama.cpp")}


def test_the_verdicts() -> None:
    tightest, never, resident = marks(_record(), SHOWN)
    assert tightest.verdict == "met" and tightest.found.startswith("2.00 times transformers")
    assert never.verdict == "missed" and never.found == "slower at 3,000 MB (0.80)"
    assert resident.verdict == "met" and resident.found == "0.90 of it"
    slow = _record() | {"runs": [_run("crisp", None, 8.9), _run("llama.cpp", None, 10.0)]}
    assert [mark.verdict for mark in marks(slow, SHOWN)] == [
        "nothing to compare", "nothing to compare", "missed",
    ]  # fmt: skip


def test_same_tokens() -> None:
    assert same_tokens(_record(), "llama.cpp") == (2, 3)
    assert same_tokens(_record(), "transformers") == (0, 0)


def test_every_turn_runs_every_contestant_under_every_cap_and_begins_with_another() -> None:
    order = list(turns("bf16", [1, 2], 3))
    assert len(order) == len(set(order)) == 3 * (2 * len(CAPPED["bf16"]) + len(RESIDENT["bf16"]))
    first = [next(name for turn, name, cap in order if (turn, cap) == (n, 1)) for n in range(3)]
    assert sorted(first) == sorted(CAPPED["bf16"])


def test_why_there_is_no_result() -> None:
    assert why(-9, "anything") == "killed: out of memory"
    assert why(2, "a\nerror: too little\n") == "refuses: error: too little"
    assert why(-4, "") == "dies: SIGILL"


def test_instruction_sets_are_those_that_llama_cpp_names() -> None:
    line = "CPU : SSE3 = 1 | AVX2 = 1 | AVX512 = 0 | REPACK = 1 | "
    assert instruction_sets(line) == "SSE3, AVX2, REPACK"


@pytest.mark.seconds
def test_the_page_has_every_cell_and_verdict(tmp_path: Path) -> None:
    text = page(_content())
    assert "| CRISP | **2.00** (2.00-2.00) | **5.00** (4.00-6.00) | **8.00** (8.00-8.00) |" in text
    assert "| llama.cpp, mmap | killed: out of memory | **2.00**" in text
    assert text.count("| slower at 3,000 MB (0.80) | missed |") == 2
    assert "CRISP and llama.cpp write the same first 2 of 3 tokens." in text
    (tmp_path / "docs" / "images").mkdir(parents=True)
    write(tmp_path, _content())
    assert (tmp_path / "docs" / "peers.md").read_text(encoding="utf-8") == text
    assert (tmp_path / "docs" / "images" / "peers.png").read_bytes().startswith(b"\x89PNG")
