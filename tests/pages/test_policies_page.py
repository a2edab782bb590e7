"""docs/policies.md says what docs/policies.json holds, and readings are what they say."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest

pytest.importorskip("torch")
pytest.importorskip("transformers")

from benchmarks.policies.page import CONTENT, LEAST, MOST, PAGE, best, render, wins
from benchmarks.policies.reading import Reading, over
from crisp.quality import Scores

ROOT = Path(__file__).parents[2]


@pytest.fixture(scope="module")
def content() -> dict[str, Any]:
    found: dict[str, Any] = json.loads((ROOT / CONTENT).read_text(encoding="utf-8"))
    return found


def test_the_page_is_made_of_the_readings(content: dict[str, Any]) -> None:
    assert (ROOT / PAGE).read_text(encoding="utf-8") == render(content)


def test_what_is_reported_was_chosen_on_the_other_text(content: dict[str, Any]) -> None:
    """Of each family the fewest bytes among those that lose no more, and nothing else."""
    allowed = {MOST: 0.036, LEAST: 0.018}
    for at in (at for model in content["models"] for at in model["budgets"]):
        tuned = {(row["family"], row["value"]): row for row in at["tuning"]}
        for why, rows in at["heldout"].items():
            own = tuned["crisp", "tiered(.6,.9)"]["loss"]["value"]
            most = 0.75 * allowed.get(why, own)
            found = {row["family"]: tuned[row["family"], row["value"]] for row in rows}
            for (family, _), row in tuned.items():
                if row["loss"]["interval"][1] <= most:
                    assert found[family]["bytes"] <= row["bytes"], (at["budget"], family)
            del found["crisp"]  # is always there, to be compared with
            assert all(row["loss"]["interval"][1] <= most for row in found.values())


def test_ours_beats_the_papers_where_the_page_says_so(content: dict[str, Any]) -> None:
    for model in content["models"]:
        own = [best(at["heldout"]["at crisp's loss"]) for at in model["budgets"]]
        won = [row for row in own if row is not None and wins(row)]
        assert all(row["over_crisp"]["interval"][1] < 1 for row in won)
        told = f"{model['facts']['name']}: at {len(won)} of {len(own)} budgets"
        assert told in (ROOT / PAGE).read_text(encoding="utf-8")


def reading(nll: list[float], blocks: list[int]) -> Reading:
    """Six windows of two tokens, two of each kind of text."""
    window = np.repeat(np.arange(6, dtype=np.int32), 2)
    text = np.repeat(np.arange(3, dtype=np.int32), 4)
    values = np.repeat(np.array(nll, np.float32), 4)
    top = np.zeros(12, np.int32)
    return Reading(Scores(values, top, window, text), np.array(blocks), 12, 1000)


def test_bytes_and_losses_by_hand() -> None:
    full = reading([1, 2, 3], [10, 20, 30, 10, 20, 30])
    half = reading([1 + np.log(1.01), 2 + np.log(1.03), 3 + np.log(1.05)], [5, 10, 15, 5, 10, 15])
    assert full.bytes == 120 * 1000 / 12
    assert over(half, full) == {"value": 0.5, "interval": [0.5, 0.5]}
    loss = half.loss(full)  # the same in every window, so whatever is drawn
    assert loss["value"] == pytest.approx(0.03, abs=1e-6)
    assert loss["interval"] == pytest.approx([0.03, 0.03], abs=1e-6)
