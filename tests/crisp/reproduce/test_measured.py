"""What comes along was made by its generators, from what they say."""

from __future__ import annotations

import json
from pathlib import Path

from benchmarks.quality.page.extract import EXTRACT, extract
from benchmarks.quality.page.page import CONTENT, as_json
from benchmarks.reproduction import statistics
from crisp.reproduce.claims import claims
from crisp.reproduce.findings.small import WEIGHTED, format_figures, format_outcomes, worst_move
from crisp.reproduce.measured import host_figures, quality_figures, routing_statistics

ROOT = Path(__file__).resolve().parents[3]


def test_quality_is_of_the_measured_page() -> None:
    held = json.loads((ROOT / CONTENT).read_text(encoding="utf-8"))
    assert (ROOT / EXTRACT).read_text(encoding="utf-8") == as_json(extract(held))


def test_routing_is_of_the_statistics(shared: Path) -> None:
    assert statistics(shared / "traces") == routing_statistics()


def test_routing_adds_up() -> None:
    known = routing_statistics()
    assert len(known["pair_shares"]) == 8 * 7 // 2
    assert known["pair_shares"] == sorted(known["pair_shares"], reverse=True)
    assert abs(sum(known["pair_shares"]) - 1) < 1e-3
    assert abs(sum(known["in_common"]) - 1) < 1e-3


def test_the_host_is_timed_for_both_models() -> None:
    assert host_figures()["us_a_token"].keys() == {"mixtral-8x7b", "deepseek-moe-16b"}
    assert all(us > 0 for own in host_figures()["us_a_token"].values() for us in own)


def test_small_models_stand_beside_claims_on_quality() -> None:
    held = claims()
    for own in held.values():
        lines = [*format_figures(own), *format_outcomes(own)]
        assert bool(lines) == (own.by == "model"), own.id
        assert all("tiny-mixtral" in line for line in lines)
    (line,) = format_figures(held["F7.crisp"])
    model = quality_figures()["tiny-mixtral"]["policies"]
    tiered, half = (100 * model[name]["increase"][0] for name in ("tiered", "uniform 50 %"))
    by_weight = 100 * model[WEIGHTED]["increase"][0]
    assert f"tiny-mixtral +{tiered:.1f} % / +{half:.1f} % / +{by_weight:.1f} %" in line


def test_the_worst_move() -> None:
    moves = [
        {"matched": {"kept": 0.9}, "transferred": {"kept": kept}, "refreshed": {"kept": 0.95}}
        for kept in (0.8, 0.65, 0.85)
    ]
    assert round(worst_move({"shift": moves}, "transferred"), 6) == 25
    assert round(worst_move({"shift": moves}, "refreshed"), 6) == -5
