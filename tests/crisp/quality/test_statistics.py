from __future__ import annotations

import math

import numpy as np
import pytest

from crisp.quality import Scores, perplexity, perplexity_ratio, retention
from crisp.statistics import Estimate, resample


def scores(nll: list[list[float]], top: list[list[int]] | None = None) -> Scores:
    """Windows of tokens, all of one text."""
    window = [number for number, own in enumerate(nll) for _ in own]
    flat = [token for own in (top or [[0] * len(own) for own in nll]) for token in own]
    return Scores(
        nll=np.array([value for own in nll for value in own], np.float32),
        top=np.array(flat, np.int32),
        window=np.array(window, np.int32),
        text=np.zeros(len(window), np.int32),
    )


def test_perplexity_is_over_tokens_not_over_windows() -> None:
    # (1 + 2 + 3 + 6) / 4 = 3, though the windows' means are 2 and 6
    assert perplexity(scores([[1, 2, 3], [6]])).value == pytest.approx(math.exp(3))


def test_windows_that_are_all_alike_leave_no_doubt() -> None:
    estimate = perplexity(scores([[1, 2]] * 20))
    assert estimate.interval is not None
    assert estimate.interval == pytest.approx((estimate.value, estimate.value), rel=1e-12)


def test_a_single_window_says_nothing_of_others() -> None:
    assert perplexity(scores([[1, 2]])) == Estimate(pytest.approx(math.exp(1.5)), None)


def test_the_interval_is_that_of_a_plain_bootstrap() -> None:
    draw = np.random.default_rng(1)
    lengths = draw.integers(3, 9, 40)
    windows = [(2 + draw.normal() + draw.normal(size=n)).tolist() for n in lengths]
    plain = []
    for _ in range(4000):
        chosen = draw.integers(0, len(windows), len(windows))
        plain.append(np.exp(np.mean(np.concatenate([windows[i] for i in chosen]))))
    estimate = perplexity(scores(windows))
    assert estimate.interval == pytest.approx(np.percentile(plain, [2.5, 97.5]), rel=0.03)


def test_resamples_are_of_whole_windows() -> None:
    # Each of three windows counts for one digit: every resample has three of them.
    sums = resample(np.array([[1.0, 1.0], [1.0, 10.0], [1.0, 100.0]]), seed=0)
    assert sums.shape == (1000, 2)
    assert set(sums[:, 0]) == {3.0}
    assert {sum(map(int, str(int(total)))) for total in sums[:, 1]} == {3}
    assert len(set(sums[:, 1])) == 10  # 3 of 3 with repetition: all that there are
    assert (resample(np.eye(3), 0) == resample(np.eye(3), 0)).all()
    assert (resample(np.eye(3), 0) != resample(np.eye(3), 1)).any()


def test_a_ratio_is_paired_window_by_window() -> None:
    reference = scores([[0.5, 1.0], [4.0, 4.0], [9.0, 2.0]])
    worse = scores([[0.75, 1.25], [4.25, 4.25], [9.25, 2.25]])
    estimate = perplexity_ratio(worse, reference)
    # Perplexities differ from window to window by orders of magnitude; their ratio never does.
    assert estimate.value == pytest.approx(math.exp(0.25))
    assert estimate.interval == pytest.approx((estimate.value, estimate.value))
    assert estimate.value == pytest.approx(perplexity(worse).value / perplexity(reference).value)
    low, high = perplexity(worse).interval or (0, 0)
    assert high > 2 * low


def test_retention_is_the_share_of_predictions_that_stay() -> None:
    reference = scores([[1, 1, 1], [1]], [[5, 6, 7], [8]])
    other = scores([[2, 2, 2], [2]], [[5, 6, 0], [0]])
    estimate = retention(other, reference)
    assert estimate.value == 2 / 4
    assert estimate.interval == (
        0,
        pytest.approx(2 / 3),
    )  # the second window alone; the first alone
