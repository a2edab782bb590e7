"""docs/policies.md says what docs/policies.json holds, and readings are what they say."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest

pytest.importorskip("torch")
pytest.importorskip("transformers")

from benchmarks.policies.page import CONTENT, LEAST, MOST, PAGE, best, gains, render, wins
from benchmarks.policies.prefetching import BOUND, MACHINES, PREFETCHERS
from benchmarks.policies.prefetching_page import prefetching_cells
from benchmarks.policies.reading import Reading, behind, over
from benchmarks.policies.sections import kept
from crisp.model.spec import ModelSpec
from crisp.profile import Profile
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
        told = f"At {len(won)} of {len(own)} budgets a policy of ours"
        assert told in (ROOT / PAGE).read_text(encoding="utf-8")


def test_parts_of_the_gain_add_up(content: dict[str, Any]) -> None:
    shares = [gains(at) for model in content["models"] for at in model["budgets"]]
    assert any(shares)
    for found in filter(None, shares):
        assert sum(share for _, share in found) == pytest.approx(1)


def test_every_prefetcher_was_simulated_in_every_cell(content: dict[str, Any]) -> None:
    """And whoever knows what comes brings nothing in vain that is worth loading."""
    cells = prefetching_cells(content["models"])
    assert len(cells) == len(MACHINES) * 2 * 4
    for cell in cells.values():
        assert tuple(cell) == PREFETCHERS
        assert cell[BOUND]["prefetch_wasted_bytes"] == 0
        assert len({row["tokens"] for row in cell.values()}) == 1


def test_promises_are_counted(content: dict[str, Any]) -> None:
    """One text of three within 2 %, two of three within 4 %."""
    heldout = {
        kind: {"value": value} for kind, value in zip("abc", (0.01, 0.03, 0.05), strict=True)
    }
    promises = [{"asked": asked, "heldout": heldout} for asked in ("2%", "4%")]
    models = [{"budgets": [{"promises": promises}]}]
    assert kept(models) == (3, 6)
    assert kept(models, "4%") == (2, 3)


def test_blocks_behind_one_that_is_not_worth_it_are_counted() -> None:
    """Of the one expert that is used; half of its eight blocks are to be worth loading."""
    spec = ModelSpec.named("mixtral-8x7b").first_layers(1)
    counts = np.zeros((1, 8), np.int64)
    counts[0, 3] = 10
    blocks = np.zeros((1, 8, 8), np.float32)
    blocks[0, 3] = [4, 1, 4, 4, 4, 0, 0, 0]
    profile = Profile(
        counts,
        np.zeros((1, 8, 8), np.int64),
        True,
        router_weights=np.ones((1, 8, 32), np.float16),
        contributions=blocks,
        sensitivities=np.ones(1, np.float32),
    )
    # A threshold counts a block as the least of those up to it: 4 1 1 1 1; half of the blocks are
    # worth loading at 1, so five are, and none of them lies behind one that is not.
    assert behind(profile, spec) == 0
    blocks[0, 3] = [4, 4, 4, 1, 4, 0, 0, 0]  # 4 4 4 1 1: the fourth block decides again
    assert behind(profile, spec) == 0
    blocks[0, 3] = [4, 4, 4, 3, 1, 4, 0, 0]  # 4 4 4 3: worth it are those of 3 and 4
    assert behind(profile, spec) == pytest.approx(1 / 5)


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
