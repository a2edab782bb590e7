"""Orders within an event: nothing ends sooner than Johnson's, and where that is widest-first."""

from __future__ import annotations

from dataclasses import replace
from fractions import Fraction
from itertools import permutations
from pathlib import Path

import numpy as np
import pytest
from hypothesis import assume, given, settings
from hypothesis import strategies as st

from crisp.policy import order as orders
from crisp.policy.order import johnson, widest_first
from tests.sim.toys import Costs, Toy

PAGE = Path(__file__).parents[3] / "docs" / "caches.md"
ORDERS = [name for name, rule in orders.ORDERS.items() if rule.overlaps]


def last_event(toy: Toy) -> int:
    """How long the last event takes."""
    found = toy.simulated()["activities"]
    starts = [end for _, name, *_, end in found if name == "layer"]
    return max(end for *_, end in found) - starts[-1]


@st.composite
def two_events(draw: st.DrawFn) -> Toy:
    """One event leaves prefixes behind, of whatever width; a second one needs other widths.

    All experts fit, so that whatever the order of the first event, it leaves the same.
    """
    n, blocks = draw(st.integers(2, 4)), draw(st.integers(2, 6))
    rng = np.random.default_rng(draw(st.integers(0, 2**32 - 1)))
    before = rng.integers(0, blocks + 1, n) * rng.integers(0, 2, n)  # half of them: nothing
    after = rng.integers(0, blocks + 1, n)
    after[rng.integers(n)] = blocks
    request, load, launch, compute = rng.integers((0, 1, 0, 1), (20, 30, 20, 30)).tolist()
    costs = Costs(request=request, load_block=load, launch=launch, compute_block=compute)
    experts = [[list(range(n))], [rng.permutation(n).tolist()]]
    widths = [[before.tolist()], [after.tolist()]]
    return Toy(experts, widths, n, blocks, share=Fraction(1), unit="block", costs=costs)


def reordered(toy: Toy, places: tuple[int, ...]) -> Toy:
    """The second event's tasks appear in another order, and are taken as they appear."""
    (_, (experts,)), (_, (widths,)) = toy.experts, toy.widths
    return replace(
        toy,
        order="fifo",
        experts=[toy.experts[0], [[experts[place] for place in places]]],
        widths=[toy.widths[0], [[widths[place] for place in places]]],
    )


@pytest.mark.seconds
@settings(max_examples=60)
@given(two_events())
def test_johnson_never_loses_within_an_event(toy: Toy) -> None:
    """At equal residency: no other order, and none of all permutations, ends sooner."""
    n = len(toy.experts[1][0])
    best = min(last_event(reordered(toy, places)) for places in permutations(range(n)))
    assert last_event(replace(toy, order="johnson")) == best
    assert all(last_event(replace(toy, order=order)) >= best for order in ORDERS)


@settings(max_examples=60)
@given(two_events())
def test_widest_first_is_as_good_where_loading_dominates(toy: Toy) -> None:
    """Where each load takes at least as long as its computation, and none is spared any of it.

    Then Johnson's rule takes the longest computation first, which is the widest task's. What is
    wholly resident does not matter: the link does not serve it, and compute takes it when it would
    idle otherwise. Of a task of which a part is resident, what is left must still dominate.
    """
    costs, (_, (widths,)) = toy.costs, toy.widths
    before = dict(zip(toy.experts[0][0], toy.widths[0][0], strict=True))
    for expert, width in zip(toy.experts[1][0], widths, strict=True):
        missing = width - before[expert]
        if missing > 0:
            load = costs.load(missing * costs.block_bytes)
            assume(load >= costs.compute(0, width, 0))
    assert last_event(replace(toy, order="widest")) == last_event(replace(toy, order="johnson"))


@given(st.lists(st.tuples(st.integers(1, 9), st.integers(0, 9)), min_size=1, max_size=8))
def test_johnson_is_widest_first_where_loading_dominates(tasks: list[tuple[int, int]]) -> None:
    """Task by task: (width, by how much its load exceeds its computation, of 2 ns a block)."""
    told = [(width, 2 * width + more, 2 * width, 0) for width, more in tasks]
    places = range(len(told))
    ranked = sorted(places, key=lambda place: johnson(*told[place]))
    assert ranked == sorted(places, key=lambda place: widest_first(*told[place]))


# The worked case of docs/caches.md: a block takes 1 ms to load and 2 ms to compute.
CASE = Toy([[[0, 1]]], [[[8, 2]]], 2, 8, share=Fraction(1), costs=Costs(0, 1, 0, 2, router=1))
LINES = {
    "widest": "load 0 to 8, compute 8 to 24 | load 8 to 10, compute 24 to 28 | 28 ms",
    "johnson": "load 2 to 10, compute 10 to 26 | load 0 to 2, compute 2 to 6 | 26 ms",
}


@pytest.mark.parametrize("order", LINES)
def test_widest_first_loses_where_computing_dominates(order: str) -> None:
    """The simulator has each line of the table, and the page has the table."""
    toy = replace(CASE, order=order)
    when: dict[int, list[str]] = {0: [], 1: []}
    for _, name, _, expert, *_, start, end in toy.simulated()["activities"]:
        if name != "layer":
            name = "compute" if name == "task" else name
            when[expert].append(f"{name} {start - 1} to {end - 1}")  # the router takes 1 ms before
    line = " | ".join([*(", ".join(own) for own in when.values()), f"{last_event(toy)} ms"])
    assert line == LINES[order]
    assert f"| `{order}` | {line} |" in PAGE.read_text("utf-8").splitlines()
