"""Ratios of pairs, and how far they are known."""

from __future__ import annotations

import random

import pytest

from crisp.errors import CrispError
from crisp.sim.sweep.paired import paired_ratios


def taken(n_bytes: list[int], ns: list[int]) -> dict[str, list[int]]:
    n = len(n_bytes)
    return {"sequence": list(range(n)), "tokens": [4] * n, "bytes": n_bytes, "ns": ns}


def test_a_constant_ratio_is_known_exactly() -> None:
    base = taken([10, 30, 50], [100, 500, 300])
    pair = paired_ratios(taken([5, 15, 25], [100, 500, 300]), base)
    assert pair.bytes_per_token is not None
    assert pair.ms_per_token is not None
    assert (pair.bytes_per_token.value, pair.bytes_per_token.interval) == (0.5, (0.5, 0.5))
    assert (pair.ms_per_token.value, pair.ms_per_token.interval) == (1.0, (1.0, 1.0))


def test_sums_are_divided_not_ratios_averaged() -> None:
    pair = paired_ratios(taken([0, 90], [1, 1]), taken([10, 90], [1, 1]))
    assert pair.bytes_per_token is not None
    assert pair.bytes_per_token.value == 0.9


def test_the_interval_is_a_bootstraps() -> None:
    """Drawn once more, by plain loops."""
    draw = random.Random(3)
    base = [draw.randrange(50, 150) for _ in range(30)]
    own = [round(b * draw.uniform(0.4, 0.9)) for b in base]
    pair = paired_ratios(taken(own, own), taken(base, base))
    ratios = []
    for _ in range(4000):
        drawn = draw.choices(range(30), k=30)
        ratios.append(sum(own[i] for i in drawn) / sum(base[i] for i in drawn))
    ratios.sort()
    assert pair.bytes_per_token is not None
    assert pair.bytes_per_token.interval is not None
    assert pair.bytes_per_token.interval == pytest.approx((ratios[100], ratios[3900]), abs=0.01)
    assert pair.ms_per_token == pair.bytes_per_token


def test_nothing_to_compare_with() -> None:
    pair = paired_ratios(taken([1], [1]), taken([0], [2]))
    assert pair.bytes_per_token is None
    assert pair.ms_per_token is not None
    assert pair.ms_per_token.interval is None  # a single sequence says nothing of others
    with pytest.raises(CrispError, match="not of the same sequences"):
        paired_ratios(taken([1], [1]), taken([1, 2], [1, 2]))
