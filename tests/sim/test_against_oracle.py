"""The simulator and the straight-line oracle agree on every activity of random small runs."""

from __future__ import annotations

from dataclasses import replace

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from crisp.model.spec import PAGE
from tests.sim.drawn import SALIENT, toys
from tests.sim.toys import Toy

SAME = ("total_ns", "tasks", "hits", "partial", "blocks_loaded", "size_loaded",
        "skipped_entries")  # fmt: skip


def check(toy: Toy) -> None:
    ours, theirs = toy.simulated(), toy.oracle()
    assert ours["activities"] == theirs["activities"]
    assert ours["residency"] == theirs["residency"]
    assert {name: ours[name] for name in SAME} == {name: theirs[name] for name in SAME}
    assert ours["order_bound"] <= ours["total_ns"]


@pytest.mark.seconds
@settings(max_examples=300)
@given(toys())
def test_every_activity_agrees(toy: Toy) -> None:
    check(toy)


@pytest.mark.seconds
@settings(max_examples=200)
@given(toys(), st.integers(0, 40))
def test_every_activity_agrees_behind_a_page_cache(toy: Toy, pages: int) -> None:
    check(replace(toy, page_cache=PAGE * pages))


@pytest.mark.seconds
@settings(max_examples=300)
@given(toys(["saliency"]))
def test_every_activity_agrees_where_saliency_decides(toy: Toy) -> None:
    check(toy)


@pytest.mark.seconds
@settings(max_examples=300)
@given(toys(prefetches=SALIENT))
def test_every_activity_agrees_where_saliency_prefetches(toy: Toy) -> None:
    check(toy)
