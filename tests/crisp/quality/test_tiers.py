from __future__ import annotations

import numpy as np
import pytest

from crisp.profile import COLD, HOT, WARM
from crisp.quality import Scores, TierCounts, quality_by_tier
from crisp.text_windows import TokenWindows

# Of experts 0, 1, 2 and 3; pairs with 3 are cold, but for (2, 3), which is warm.
LAYER = np.full((4, 4), HOT, np.uint8)
LAYER[3] = LAYER[:, 3] = COLD
LAYER[2, 3] = LAYER[3, 2] = WARM
# Layers 1 and 3 are MoE. In layer 3 everything is warm.
TIERS = np.stack([np.full((4, 4), 99), LAYER, np.full((4, 4), 99), np.full((4, 4), WARM)])


def windows(lengths: list[int], scored: list[int]) -> TokenWindows:
    tokens = [np.zeros(n, np.int64) for n in lengths]
    return TokenWindows(tokens, scored, [0] * len(lengths), ["a sha256:0"], 3, 2)


def feed(counts: TierCounts, which: int, rows: list[list[int]]) -> None:
    ids = np.array(rows, np.int16)
    counts(which, ids, np.ones(ids.shape, np.float16), np.ones(ids.shape, np.int16))


def test_a_tokens_events_are_those_of_the_pass_that_predicts_it() -> None:
    counts = TierCounts(TIERS.astype(np.uint8), (1, 3), windows([3, 3], [2, 1]))
    # two windows side by side; tokens 1 and 2 of the first and 2 of the second are scored
    feed(counts, 0, [[0, 1], [3, 0], [3, 3], [3, 3], [3, 2], [3, 3]])
    feed(counts, 1, [[0, 1]] * 6)
    assert counts.scored().tolist() == [[1, 1, 0], [0, 1, 1], [0, 2, 0]]


def test_layers_may_take_turns_token_by_token() -> None:
    counts = TierCounts(TIERS.astype(np.uint8), (1, 3), windows([3], [2]))
    for row in ([0, 1], [3, 0], [3, 2]):
        feed(counts, 0, [row])
        feed(counts, 1, [row])
    assert counts.scored().tolist() == [[1, 1, 0], [0, 1, 1]]


def test_of_many_experts_the_pairs_with_the_first_count() -> None:
    counts = TierCounts(TIERS.astype(np.uint8), (1,), windows([3], [2]))
    feed(counts, 0, [[3, 2, 0], [0, 1, -1], [0, 1, 2]])
    assert counts.scored().tolist() == [[0, 1, 1], [1, 0, 0]]


def test_by_tier_by_hand() -> None:
    def scores(nll: list[float], top: list[int]) -> Scores:
        window = np.array([0, 0, 1], np.int32)
        return Scores(np.array(nll, np.float32), np.array(top, np.int32), window, window * 0)

    events = np.array([[2, 0, 0], [1, 1, 0], [0, 2, 0]])
    rows = quality_by_tier(events, scores([1.5, 2, 5], [4, 4, 9]), scores([1, 2, 4], [4, 4, 4]))
    hot, warm, cold = rows
    assert [row.tier for row in rows] == ["hot", "warm", "cold"]
    assert [row.events for row in rows] == [3, 3, 0]
    assert [row.share for row in rows] == [1 / 2, 1 / 2, 0]
    assert hot.retention is not None
    assert hot.nll_increase is not None
    assert warm.retention is not None
    assert warm.nll_increase is not None
    # hot: twice the first token (+ 0.5, kept) and once the second (+ 0, kept)
    assert (hot.retention.value, hot.nll_increase.value) == (1, pytest.approx(1 / 3))
    # warm: once the second and twice the third (+ 1, lost)
    assert warm.retention.value == pytest.approx(1 / 3)
    assert warm.nll_increase.value == pytest.approx(2 / 3)
    # both windows or the one with any: resamples without one of a tier's are left out
    assert warm.retention.interval == (0, 1)
    assert (cold.retention, cold.nll_increase) == (None, None)
    assert cold.to_dict()["retention"] is None
