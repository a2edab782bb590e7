"""Widths by measured losses, against trying all of them."""

from __future__ import annotations

from dataclasses import replace
from fractions import Fraction
from itertools import product
from math import log

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from crisp.errors import CrispError
from crisp.model.spec import ModelSpec
from crisp.policy import named
from crisp.policy.widths.solver import Solver, solve
from crisp.profile import Profile

FOUR = ModelSpec.named("mixtral-8x7b").first_layers(1).with_(block=3584)  # 4 blocks an expert


def every(losses: np.ndarray, frequency: np.ndarray) -> list[tuple[int, int]]:
    """(loss, price) of every choice of widths."""
    found = []
    for widths in product(range(losses.shape[1]), repeat=len(losses)):
        loss = sum(int(losses[item, width]) for item, width in enumerate(widths))
        price = sum(int(often) * width for often, width in zip(frequency, widths, strict=True))
        found.append((loss, price))
    return found


def corners(points: list[tuple[int, int]]) -> set[tuple[int, int]]:
    """Those that alone are best at some worth of a loss: (loss, price) on the convex hull."""
    slopes = {Fraction(a[1] - b[1], b[0] - a[0]) for a in points for b in points if a[0] < b[0]}
    worths = sorted(slope for slope in slopes if slope > 0)
    tried = [(low + high) / 2 for low, high in zip([0, *worths], [*worths, 10**6], strict=True)]
    best = set()
    for worth in tried:
        least = min(price + worth * loss for loss, price in points)
        best |= {(loss, price) for loss, price in points if price + worth * loss == least}
    return best


@pytest.mark.seconds
@settings(max_examples=40)
@given(st.data())
def test_it_equals_trying_all_where_the_best_lies_on_the_hull(data: st.DataObject) -> None:
    """And elsewhere it allows no more loss, and costs no more than the hull's next point."""
    items = data.draw(st.integers(1, 3))
    falls = st.lists(st.integers(0, 9), min_size=3, max_size=3)
    drawn = data.draw(st.lists(falls, min_size=items, max_size=items))
    losses = np.array([[sum(fall[width:]) for width in range(4)] for fall in drawn])
    frequency = np.array(data.draw(st.lists(st.integers(1, 5), min_size=items, max_size=items)))
    points = every(losses, frequency)
    hull = corners(points)
    for most in range(int(losses[:, 0].sum()) + 2):
        widths = solve(losses / 8, frequency, 4096, most / 8)  # eighths are exact
        loss = losses[np.arange(items), widths].sum()
        price = int((frequency * widths).sum())
        assert loss <= most
        best = min((price, loss) for loss, price in points if loss <= most)[0]
        on_hull = min(price for loss, price in hull if loss <= most)
        assert best <= price <= on_hull
        if best == on_hull:
            assert price == best


@settings(max_examples=40)
@given(st.data())
def test_whatever_was_measured_no_more_is_lost(data: st.DataObject) -> None:
    """Also by what was measured at wider widths, which may be more by chance."""
    drawn = st.lists(st.integers(-9, 9), min_size=4, max_size=4)
    losses = np.array(data.draw(st.lists(drawn, min_size=1, max_size=4)), float)
    losses[:, -1] = 0
    most = data.draw(st.integers(0, 30))
    widths = solve(losses, np.ones(len(losses), np.int64), 1, most)
    charged = [max(row[width:]) for row, width in zip(losses.tolist(), widths, strict=True)]
    assert sum(charged) <= most
    for item, width in enumerate(widths):  # nothing more would fit
        for narrower in range(width):
            more = max(losses[item, narrower:]) - charged[item]
            assert sum(charged) + more > most


def test_by_hand() -> None:
    """Item 1 is used twice as often: a block of it saves 2."""
    losses = np.array([[6.0, 5, 1, 0], [9, 9, 2, 0]])
    often = np.array([1, 2])

    def widths(most: float) -> list[int]:
        return solve(losses, often, 1, most).tolist()

    assert widths(0) == [3, 3]
    assert widths(1) == [2, 3]  # a loss of 1 for 1 saved, as item 1's first block
    assert widths(3) == [2, 2]
    assert widths(7) == [
        1,
        2,
    ]  # item 0's next corner, two blocks for 5, does not fit; one for 4 does
    assert widths(8) == [0, 2]
    assert widths(10) == [2, 0]  # item 1's two blocks for 7 save 4, and are worth more
    assert widths(14) == [1, 0]
    assert widths(15) == [0, 0]


def test_what_is_unknown_or_never_occurs_stays_full() -> None:
    losses = np.array([[0.0, 0, 0], [np.nan] * 3, [1, np.nan, 0], [0, 0, 0]])
    assert solve(losses, np.array([5, 5, 5, 0]), 1, 9).tolist() == [0, 2, 2, 2]


def measured() -> Profile:
    """A layer of 8 experts that cost nothing at half their 4 blocks; 3 % each at none.

    Expert 0 is free beside another, expert 1 as the anchor; of expert 2 nothing is known.
    """
    losses = np.zeros((1, 8, 2, 5), np.float32)
    losses[..., :2] = 0.03
    losses[0, 0, 1] = losses[0, 1, 0] = 0
    losses[0, 2] = np.nan
    blank = Profile.empty(FOUR)
    roles = np.full((1, 8, 8), 0, np.int16)  # measured ones, which are not looked at
    return replace(
        blank, dominant=roles, width_losses=losses, role_counts=np.ones((1, 8, 2), np.int64)
    )


def test_an_experts_width_is_its_roles() -> None:
    policy = named("crisp", width="solver(loss=.02)")
    assert policy.width_name == "solver" and policy.width == Solver(Fraction(2, 100))
    bound = policy.width.bind(FOUR, measured(), True)
    pairs = np.array([[3, 0], [0, 3], [1, 0], [0, 1], [2, 4], [4, 2], [5, -1]], np.int16)
    assert bound.widths(0, pairs, None, None).tolist() == [
        [2, 0], [2, 2], [0, 0], [2, 2], [4, 2], [2, 4], [2, 0],
    ]  # fmt: skip
    table = bound.table()
    assert table is not None and table[0, 3].tolist() == [0, 2, 4, 2, 2, 2, 2, 2]
    assert table[0].diagonal().tolist() == [2, 0, 4, 2, 2, 2, 2, 2]


def test_the_loss_is_of_perplexity_and_goes_to_what_occurs_most() -> None:
    given = measured()
    assert given.role_counts is not None
    given.role_counts[0, 6, 1] = 10
    for loss, left in (("0.030", 2), ("0.0305", 0)):  # log(1.0305) = 0.03004
        assert (log(1 + float(loss)) > 0.03) == (left == 0)
        bound = named("crisp", width=f"solver({loss})").width.bind(FOUR, given, True)
        table = bound.table()
        assert table is not None
        assert table[0, 3].tolist() == [0, 2, 4, 2, 2, 2, left, 2]


@pytest.mark.parametrize(
    ("blocks", "given", "words"),
    [
        (3584, Profile.empty(FOUR), "give the --metadata of crisp prepare --width-losses"),
        (1792, measured(), "has 8 blocks an expert, but losses were measured for 4"),
    ],
)
def test_what_it_cannot_do_without(blocks: int, given: Profile, words: str) -> None:
    with pytest.raises(CrispError, match=words):
        Solver().bind(FOUR.with_(block=blocks), given, True)


def test_losses_are_part_of_what_decides() -> None:
    given = measured()
    other = replace(given, width_losses=given.width_losses * 2)
    assert len({one.digest() for one in (given, other, Profile.empty(FOUR))}) == 3
    two = replace(given, width_losses=np.zeros((2, 8, 2, 5)), role_counts=np.ones((2, 8, 2)))
    first = two.first_layers(1)
    assert first.width_losses.shape[0] == first.role_counts.shape[0] == 1


def test_more_than_all_is_no_share() -> None:
    with pytest.raises(CrispError, match="loss: 2 is not between 0 and 1"):
        named("crisp", width="solver(2)")
