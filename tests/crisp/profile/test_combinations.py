"""Counts and tiers."""

from __future__ import annotations

from fractions import Fraction

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from crisp.errors import CrispError
from crisp.profile import COLD, HOT, WARM, Profile, tiers
from crisp.trace import Header, RoutingTrace
from tests.oracles import offline


def trace(experts: np.ndarray, n_experts: int, ordered: bool = True) -> RoutingTrace:
    rows = len(experts)
    return RoutingTrace(
        experts=experts.astype(np.int16),
        sequence=np.zeros(rows, np.int32),
        position=np.arange(rows, dtype=np.int32),
        phase=np.ones(rows, np.uint8),
        header=Header(
            n_experts=n_experts, top_k=experts.shape[2], ordered=ordered, origin="synthetic"
        ),
    )


def test_tiers_by_hand() -> None:
    """Counts 6, 3, 1: before them 0, 60 and 90 %. At alpha .6 the second is no longer HOT."""
    pairs = [[0, 1]] * 6 + [[2, 1]] * 3 + [[0, 2]]
    profile = Profile.from_trace(trace(np.array(pairs)[:, None], 4))
    assert profile.pair_counts[0, 0, 1] == 6 and profile.pair_counts[0, 1, 2] == 3
    assert profile.expert_counts[0].tolist() == [7, 9, 4, 0]
    tier = tiers(profile, Fraction(3, 5), Fraction(9, 10))[0]
    assert (tier[0, 1], tier[1, 0]) == (HOT, HOT)
    assert (tier[1, 2], tier[0, 2], tier[0, 3]) == (WARM, COLD, COLD)
    tier = tiers(profile, Fraction(601, 1000), Fraction(901, 1000))[0]
    assert (tier[1, 2], tier[0, 2]) == (HOT, WARM)


def test_equal_counts_go_by_pair() -> None:
    pairs = np.array([[[2, 3]], [[0, 3]], [[0, 1]], [[1, 2]]])
    tier = tiers(Profile.from_trace(trace(pairs, 4)), Fraction(1, 2), Fraction(3, 4))[0]
    assert [tier[i, j] for i, j in ((0, 1), (0, 3), (1, 2), (2, 3))] == [HOT, HOT, WARM, COLD]


@given(st.integers(0, 10_000), st.integers(1, 4), st.booleans())
def test_counts_and_tiers_equal_the_oracles(seed: int, k: int, ordered: bool) -> None:
    rng = np.random.default_rng(seed)
    experts = rng.random((40, 2, 6)).argsort(axis=2)[:, :, :k]
    experts[rng.random(40) < 0.2, 0, -1] = -1
    profile = Profile.from_trace(trace(experts, 6, ordered))
    assert profile.expert_counts.tolist() == offline.expert_counts(experts, 6).tolist()
    pairs = offline.pair_counts(experts, 6, ordered)
    assert profile.pair_counts.tolist() == pairs.tolist()
    alpha, beta = Fraction(2, 5), Fraction(4, 5)
    assert tiers(profile, alpha, beta).tolist() == offline.tiers(pairs, alpha, beta).tolist()


def test_thresholds_out_of_order_are_refused() -> None:
    profile = Profile.from_trace(trace(np.array([[[0, 1]]]), 4))
    with pytest.raises(CrispError, match="alpha <= beta"):
        tiers(profile, Fraction(9, 10), Fraction(1, 2))
