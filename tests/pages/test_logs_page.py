"""docs/logs.md says what docs/logs.json holds, and that is what the logs give."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from benchmarks.logs.page import CONTENT, PAGE, render

ROOT = Path(__file__).resolve().parents[2]


@pytest.fixture(scope="module")
def content() -> dict[str, Any]:
    """What the page is made of."""
    read: dict[str, Any] = json.loads((ROOT / CONTENT).read_text(encoding="utf-8"))
    return read


def test_the_page_is_what_its_figures_say(content: dict[str, Any]) -> None:
    assert render(content) == (ROOT / PAGE).read_text(encoding="utf-8")


def test_the_figures_are_the_published_ones(content: dict[str, Any]) -> None:
    text = render(content)
    assert "| hit %: recomputed | 32.408 | 74.880 | 76.784 |" in text
    assert "| MiB a token: engine | 501.186 | 156.437 | 123.322 |" in text
    assert "| MiB a token: recomputed | 501.192 | 156.437 | 123.326 |" in text
    assert "all 165 of 165 cells equal the published ones" in text
    for name, values in (
        ("of a prompt only its last token", "44.68 | 79.05 | 80.00"),
        ("prompt token by token", "42.40 | 76.68 | 79.79"),
        ("one mean expert size", "32.41 | 75.09 | 76.79"),
    ):
        assert f"| {name} | {values} |" in text


def test_every_fixture_is_equal_to_the_truth(content: dict[str, Any]) -> None:
    fixtures = [log for log in content["imports"] if log["name"].startswith("fixtures/")]
    assert len(fixtures) == 9 and all(log["equal"] for log in fixtures)
    assert all(log["recognised"] == log["engine"] for log in content["imports"])


@pytest.mark.slow
def test_the_logs_give_these_figures(content: dict[str, Any], shared: Path) -> None:
    from benchmarks.logs.__main__ import content_of

    fresh = json.loads(json.dumps(content_of(shared)))
    for new, old in zip(fresh["models"], content["models"], strict=True):
        for fits in (new.pop("times"), old.pop("times")):  # rounding differs by processor
            assert fits.keys() == {"waiting", "computing", "all"}
        assert new == old
    assert fresh["diagnoses"] == content["diagnoses"]
    assert fresh["imports"] == content["imports"]
