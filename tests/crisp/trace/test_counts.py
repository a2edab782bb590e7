"""Traces drawn from counts: the shares are those of the counts, and nothing else is claimed."""

from __future__ import annotations

import numpy as np
import pytest

from crisp.errors import CrispError
from crisp.profile import Profile
from crisp.trace.counts import draw_from_counts


def test_every_expert_has_its_share() -> None:
    """Within five standard errors of n independent draws, and never twice in a row."""
    counts = np.random.default_rng(0).integers(0, 900, (3, 8)).astype(np.int64) * 8
    counts[1] = 0  # not MoE
    trace = draw_from_counts(counts, 2, note="n")
    trace.validate("t")
    assert trace.moe_layers == (0, 2)
    assert trace.rows == 4096
    drawn = Profile.from_trace(trace).expert_counts
    for layer in (0, 2):
        p = 2 * counts[layer] / counts[layer].sum()
        error = 5 * np.sqrt(np.maximum(p * (1 - p), 0) / trace.rows)
        assert (np.abs(drawn[layer] / trace.rows - p) <= error).all()
        assert (drawn[layer] > 0).tolist() == (counts[layer] > 0).tolist()
    header = trace.header
    assert (header.origin, header.seed, header.ordered, header.note) == ("synthetic", 0, False, "n")


def test_an_expert_that_every_token_has() -> None:
    counts = np.array([[5, 3, 2, 0]], np.int64)
    trace = draw_from_counts(counts, 2, note="n")
    assert trace.rows == 5
    assert (trace.experts == 0).any(axis=2).all()
    again = draw_from_counts(counts, 2, note="n")
    assert again.digest() == trace.digest()


def test_counts_that_no_top_k_gives() -> None:
    with pytest.raises(CrispError, match=r"expert 0 of layer 0 has 60\.0 % of them; of top-2 it"):
        draw_from_counts(np.array([[6, 3, 1]], np.int64), 2, note="n")


def test_counts_beyond_what_their_products_hold() -> None:
    small = np.array([[5, 3, 2, 6]], np.int64)
    large = draw_from_counts(small << 55, 2, note="n")
    drawn = Profile.from_trace(large).expert_counts[0] / large.rows
    np.testing.assert_allclose(drawn, 2 * small[0] / 16, atol=0.04)
