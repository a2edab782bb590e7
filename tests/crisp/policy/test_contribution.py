"""Widths by what a block is worth, and widths of others that look at weights or at what is here."""

from __future__ import annotations

from fractions import Fraction
from typing import Any

import numba
import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from crisp.errors import CrispError
from crisp.model.spec import ModelSpec
from crisp.policy import named
from crisp.policy.spelling import build
from crisp.policy.widths.contribution import (
    Contribution,
    ContributionResident,
    contributions,
    thresholds,
    width_on,
)
from crisp.policy.widths.names import WIDTHS
from crisp.policy.widths.skipping import Drop, ResidentFloor, Skip, SkipContribution
from crisp.profile import Profile
from crisp.profile.router_weights import BINS, QUANTILES, histogram, quantiles
from crisp.trace import RoutingTrace
from crisp.trace.bundled import bundled_traces

MIXTRAL = ModelSpec.named("mixtral-8x7b").first_layers(1)  # 8 blocks an expert
FOUR = MIXTRAL.with_(block=3584)  # 4 blocks
TWO = np.array([[0, 1]], np.int16)


def profile(counts: Any, sizes: Any = None, weights: Any = None) -> Profile:
    """Of one layer. weights: the router's only one of each expert."""
    n = len(counts)
    found = np.full((1, n, QUANTILES), 0.5, np.float16)
    if weights is not None:
        found[:] = np.array(weights, np.float16)[None, :, None]
    own = None if sizes is None else np.array(sizes, np.float32)[None]
    return Profile(np.array([counts]), np.zeros((1, n, n), np.int64), True, None, found, own)


def widths(policy: Any, given: Profile, experts: Any, weights: Any, resident: Any = None,
           spec: ModelSpec = FOUR) -> Any:  # fmt: skip
    own = None if weights is None else np.array(weights, np.float16)
    bound = policy.bind(spec, given, True)
    return bound.widths(0, np.array(experts, np.int16), own, resident).tolist()


def sized(rows: int = 8) -> list[list[float]]:
    """Expert e's blocks contribute 8, 4, 2, 1 times e + 1."""
    return [[8.0 * (e + 1), 4.0 * (e + 1), 2.0 * (e + 1), 1.0 * (e + 1)] for e in range(rows)]


def test_threshold_leaves_the_share() -> None:
    """Two experts as frequent, weight 1/2: worths 4 2 1 .5 and 8 4 2 1. Half are 8 4 4 2 (2)."""
    given = profile([10, 10, 0, 0, 0, 0, 0, 0], sized())
    own = contributions(FOUR, given, "x")
    found = [float(thresholds(given, own, Fraction(share, 8))[0]) for share in (1, 2, 3, 4, 5, 8)]
    assert found == [8, 4, 4, 2, 2, 0.5]
    assert thresholds(given, own, Fraction(0))[0] == np.inf


def test_frequent_experts_count_for_more() -> None:
    """9 of 10 tokens are expert 0's: 8 is reached once in 40, 4 ten times more, and so on."""
    given = profile([9, 1, 0, 0, 0, 0, 0, 0], sized())
    own = contributions(FOUR, given, "x")
    assert float(thresholds(given, own, Fraction(10, 40))[0]) == 4  # 8 (1), 4 (1 and 9)
    assert float(thresholds(given, own, Fraction(11, 40))[0]) == 4
    assert float(thresholds(given, own, Fraction(12, 40))[0]) == 2


def test_a_block_runs_where_its_weight_makes_it_worth() -> None:
    """The threshold is 2 (above): 8 w >= 2 and so on, of each row's own weights."""
    given = profile([10, 10, 0, 0, 0, 0, 0, 0], sized())
    policy = Contribution(Fraction(1, 2))
    assert widths(policy, given, [[0, 1], [0, 1]], [[0.5, 0.5], [0.25, 0.0625]]) == [[2, 3], [1, 0]]
    assert widths(policy, given, [[1, -1]], [[1, 0]]) == [[4, 0]]


def test_what_follows_a_block_that_is_not_worth_it_does_not_run() -> None:
    sizes = [[8.0, 1.0, 8.0, 8.0]] * 8
    given = profile([1] * 8, sizes, [1] * 8)
    # as leading blocks go, the third and fourth are worth no more than the second
    assert widths(Contribution(Fraction(1, 4)), given, TWO, [[1, 0.5]]) == [[1, 0]]


def test_on_resident_blocks_only_loading_must_be_worth_it() -> None:
    given = profile([10, 10, 0, 0, 0, 0, 0, 0], sized())
    policy = ContributionResident(Fraction(1, 2))
    weights = [[0.25, 0.0625]]  # worths 2 1 .5 .25 and 1 .5 .25 .125, against 2
    assert widths(policy, given, TWO, weights, [0] * 8) == [[1, 0]]
    assert widths(policy, given, TWO, weights, [3, 2] + [0] * 6) == [[3, 2]]
    assert widths(policy, given, TWO, [[1, 1]], [0] * 8) == [[3, 4]]


def test_on_resident_blocks_goes_on_where_they_end() -> None:
    """A weak block that is here does not keep the strong one behind it from being loaded."""
    given = profile([1] * 8, [[8.0, 1.0, 8.0, 1.0]] * 8, [1] * 8)
    policy = ContributionResident(Fraction(1, 4))  # the threshold is 8
    assert widths(policy, given, TWO, [[1, 1]], [0, 2] + [0] * 6) == [[1, 3]]


@given(st.integers(0, 8), st.integers(0, 255))
def test_width_on_is_compiled_alike(resident: int, wanted: int) -> None:
    text = format(wanted, "08b")[::-1][resident:]
    expected = resident + len(text) - len(text.lstrip("1"))
    assert width_on(resident, wanted) == expected == COMPILED(resident, np.int64(wanted))


COMPILED = numba.njit(width_on)


def test_contributions_in_other_blocks_keep_their_sum() -> None:
    """8, 4, 2, 1 spread within four quarters, cut into eight and into two."""
    given = profile([1] * 8, sized())
    eight = contributions(MIXTRAL, given, "x")[0, 0]
    assert eight.tolist() == [4, 4, 2, 2, 1, 1, 0.5, 0.5]
    assert contributions(MIXTRAL.with_(block=7168), given, "x")[0, 0].tolist() == [12, 3]
    three = contributions(MIXTRAL.with_(block=4784), given, "x")[0, 0]  # 4/3 of a quarter each
    np.testing.assert_allclose(three, [8 + 4 / 3, 8 / 3 + 4 / 3, 2 / 3 + 1])


def test_an_expert_is_skipped_that_weighs_too_little_beside_its_anchor() -> None:
    given = profile([1] * 8, sized())
    rows, weights = [[0, 1], [0, 1], [3, -1]], [[0.75, 0.25], [0.5, 0.5], [1, 0]]
    assert widths(Skip(Fraction(1, 2)), given, rows, weights) == [[4, 0], [4, 4], [4, 0]]
    assert widths(Skip(Fraction(1, 3)), given, rows, weights)[0] == [4, 4]  # not below
    # contributing twice as much, expert 1 is worth .5 beside .75
    assert widths(SkipContribution(Fraction(1, 2)), given, rows, weights)[0] == [4, 4]
    assert widths(SkipContribution(Fraction(1, 2)), given, [[1, 0]], [[0.5, 0.25]]) == [[4, 0]]


def test_the_anchor_of_an_unordered_trace_is_never_skipped() -> None:
    given = profile([1, 5] + [1] * 6)
    bound = Skip(Fraction(1, 2)).bind(FOUR, given, False)
    found = bound.widths(0, TWO, np.array([[0.9, 0.1]], np.float16), None)
    assert found.tolist() == [[4, 4]]  # expert 1 is the more frequent one


def test_dropped_experts_never_run() -> None:
    given = profile([5, 1, 5, 5, 1, 5, 5, 5])
    rows = [[0, 1], [1, 0], [4, 1], [4, 2]]
    assert widths(Drop(Fraction(1, 4)), given, rows, None) == [[4, 0], [0, 4], [0, 0], [0, 4]]
    assert widths(Drop(Fraction(1, 5)), given, rows, None) == [[4, 4], [4, 4], [0, 4], [0, 4]]


def test_auxiliary_experts_run_at_what_is_here() -> None:
    given = profile([1] * 8)
    here = [0, 3, 1, 4] + [0] * 4
    policy = ResidentFloor(Fraction(1, 2))
    rows = [[0, 1], [0, 2], [1, 3], [2, -1]]
    assert widths(policy, given, rows, None, here) == [[4, 3], [4, 2], [4, 4], [4, 0]]
    assert widths(ResidentFloor(Fraction(0)), given, [[1, 0]], None, here) == [[4, 0]]


def test_quantiles_of_a_histogram() -> None:
    """Within a bin's width of numpy's, whatever the weights."""
    weights = np.random.default_rng(0).random((4000, 2)).astype(np.float16)
    experts = np.tile([[0, 2]], (4000, 1))
    counts = histogram(experts, weights, 3)
    assert counts.shape == (3, BINS) and counts.sum(axis=1).tolist() == [4000, 0, 4000]
    found = quantiles(counts)
    places = (np.arange(QUANTILES) * 2 + 1) / 64
    for column, expert in ((0, 0), (1, 2)):
        expected = np.quantile(weights[:, column].astype(float), places)
        np.testing.assert_allclose(found[expert], expected, rtol=0.05, atol=1e-3)
    assert not found[1].any()


def test_a_trace_with_weights_has_their_quantiles() -> None:
    trace = RoutingTrace.load(bundled_traces()["tiny-mixtral-docs"])
    found = Profile.from_trace(trace)
    assert found.router_weights is not None and trace.weights is not None
    first, own = trace.experts[:, 0, 0], trace.weights[:, 0, 0].astype(float)
    layer = found.router_weights[0].astype(float)
    assert (np.diff(layer, axis=1) >= 0).all()
    both = np.concatenate([own[first == 3], trace.weights[:, 0, 1][trace.experts[:, 0, 1] == 3]])
    np.testing.assert_allclose(np.median(layer[3]), np.median(both), rtol=0.05)


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("contribution(.5)", "width contribution: asks what each block contributes"),
        ("contribution-resident", "width contribution-resident: asks what each block"),
        ("skip-contribution", "width skip-contribution: asks what each block contributes"),
    ],
)
def test_contributions_must_be_known(text: str, message: str) -> None:
    with pytest.raises(CrispError, match=message):
        build(text, WIDTHS, "width").bind(FOUR, profile([1] * 8), True)


def test_what_cannot_be_is_refused() -> None:
    for text in ("skip(1.5)", "drop(2)", "resident(-1)", "contribution(1.1)"):
        with pytest.raises(CrispError, match="is not between 0 and 1"):
            build(text, WIDTHS, "width")
    with pytest.raises(CrispError, match="width skip: asks for the router's weights"):
        widths(Skip(), profile([1] * 8), TWO, None)
    with pytest.raises(CrispError, match="896 blocks an expert; at most 64"):
        ResidentFloor().bind(MIXTRAL.with_(block=16), profile([1] * 8), True)


@pytest.mark.parametrize("name", ["em", "drop", "contribution", "contribution-resident"])
def test_named(name: str) -> None:
    policy = named(name)
    by_block = name in ("contribution", "contribution-resident")
    assert policy.cache.unit == ("block" if by_block else "expert")
    assert named(name, unit="expert").cache.unit == "expert"
    assert policy.to_dict()["width"].partition("(")[0] == policy.width_name
