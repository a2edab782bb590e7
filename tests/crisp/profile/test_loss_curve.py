"""Loss curves: which threshold keeps a loss, by hand."""

from __future__ import annotations

from fractions import Fraction

import numpy as np
import pytest

from crisp.errors import CrispError
from crisp.profile.loss_curve import LossCurve, parse_loss, read_budgets

TENTH, HALF = Fraction(1, 10), Fraction(1, 2)


def curve(highs: list[float]) -> LossCurve:
    """Shares .2, .4, .6 in one budget; losses are half of their intervals' ends."""
    shares = (Fraction(1, 5), Fraction(2, 5), Fraction(3, 5))
    values = np.array([highs])
    return LossCurve(1000, (TENTH,), shares, values / 2, values)


def test_the_share_is_where_the_line_between_two_ends_meets_three_quarters_of_the_loss() -> None:
    # 4 % at .2, 2 % at .4, 1 % at .6. Of 2 % three quarters are 1.5 %: halfway from .4 to .6.
    promise = curve([0.04, 0.02, 0.01]).promise(TENTH, Fraction(2, 100))
    assert promise.share == HALF
    assert promise.high == pytest.approx(0.015)
    assert promise.loss == pytest.approx(0.0075)


def test_a_measured_share_that_just_fits_is_taken() -> None:
    assert curve([0.04, 0.015, 0.01]).promise(TENTH, Fraction(2, 100)).share == Fraction(2, 5)


def test_whatever_loses_little_enough_at_the_least_share_has_that_share() -> None:
    assert curve([0.01, 0.005, 0.001]).promise(TENTH, Fraction(2, 100)).share == Fraction(1, 5)


def test_between_the_largest_measured_share_and_all_blocks_losses_fall_to_nothing() -> None:
    # 2 % at .6 and 0 at 1: three quarters of 2 % are a quarter of the way.
    assert curve([0.08, 0.04, 0.02]).promise(TENTH, Fraction(2, 100)).share == Fraction(7, 10)


def test_a_narrower_width_never_counts_as_losing_less() -> None:
    """At .2 luck: what .4 loses is the least that it may be taken to lose."""
    assert curve([0.001, 0.03, 0.0]).promise(TENTH, Fraction(2, 100)).share == HALF


def test_curves_come_back_from_their_text() -> None:
    made = curve([0.04, 0.02, 0.01])
    read = LossCurve.from_dict(made.to_dict(), "f")
    assert (read.tokens, read.budgets, read.shares) == (made.tokens, made.budgets, made.shares)
    np.testing.assert_array_equal(read.highs, made.highs)
    np.testing.assert_array_equal(read.losses, made.losses)


@pytest.mark.parametrize(
    "change",
    [
        {"shares": ["1/5"]},
        {"shares": ["3/5", "2/5", "1/5"]},
        {"budgets": ["0"]},
        {"highs": [[1.0, float("nan"), 1.0]]},
        {"losses": "none"},
        {"tokens": None},
        {"tokens": 0},
        {"tokens": float("inf")},
        {"budgets": ["1/0"]},
        {"losses": [[-1.0, 0.0, 0.0]]},
    ],
)
def test_damaged_curves_are_refused(change: dict[str, object]) -> None:
    with pytest.raises(CrispError, match=r"^file: its loss curve is damaged: "):
        LossCurve.from_dict(curve([0.1, 0.1, 0.1]).to_dict() | change, "file")


def test_what_is_no_curve_is_refused() -> None:
    with pytest.raises(CrispError, match=r"^file: its loss curve is damaged: it is no dict$"):
        LossCurve.from_dict([], "file")  # type: ignore[arg-type]
    with pytest.raises(CrispError, match=r"^file: its loss curve is damaged: it lacks 'tokens'$"):
        LossCurve.from_dict({}, "file")


def test_losses_and_budgets_are_read() -> None:
    assert parse_loss("2%") == parse_loss(".02") == Fraction(2, 100)
    assert read_budgets("50%, 10%,10%") == [TENTH, HALF]
    for text in ("0", "25%", "-1%", "many"):
        with pytest.raises(CrispError, match="--loss"):
            parse_loss(text)
    for text in ("0%", "100%", "4GB", ""):
        with pytest.raises(CrispError, match="--loss-curve"):
            read_budgets(text)
