"""The simulator returns exactly what docs/worked-example.md works out by hand."""

from __future__ import annotations

from fractions import Fraction

import numpy as np
import pytest

from tests.oracles import example
from tests.sim.toys import Costs, Toy


def test_pieces_by_hand() -> None:
    """One expert of four blocks, twice: 10 ns to load a block, 15 to launch and 5 to compute one.

    While block 0 is computed (30-50) block 1 arrives, and block 2 at its very end: they are one
    piece. The second time all is resident, and is one piece, launched once.
    """
    costs = Costs(request=0, load_block=10, launch=15, compute_block=5, router=20)
    widths = np.full((2, 1, 1), 4)
    result = Toy(
        np.zeros((2, 1, 1)), widths, 1, 4, granularity="block", share=Fraction(1), costs=costs
    ).simulated()
    computed = [activity[4:] for activity in result["activities"] if activity[1] == "task"]
    assert computed == [(0, 1, 30, 50), (1, 2, 50, 75), (3, 1, 75, 95), (0, 4, 115, 150)]
    assert result["total_ns"] == 150
    # in the best order, as if a launch were paid once: 40 for the loads, 5 for the last block
    assert result["order_bound"] == (20 + 10 + 15 + 20) + (20 + 15 + 20)


@pytest.mark.parametrize("variant", example.tables(), ids="-".join)
def test_the_timeline_worked_out_by_hand(variant: tuple[str, str, str, str]) -> None:
    given, table = example.toy(), example.tables()[variant]
    order, unit, granularity, prefetch = variant
    load, compute = given["load_ns"], given["compute_ns"]
    result = Toy(
        given["experts"], given["widths"], given["n_experts"], given["n_blocks"],
        given["sequence"], order=order, unit=unit, granularity=granularity, prefetch=prefetch,
        cache=given["cache"], scope=given["scope"],
        share=Fraction(given["budget"].rstrip("%")) / 100,
        costs=Costs(load["request"], load["block"], compute["launch"], compute["block"],
                    router=given["layer_ns"]),
    ).simulated()  # fmt: skip
    summary = ("total_ns", "hits", "partial", "blocks_loaded")
    assert {name: result[name] for name in summary} == {name: table[name] for name in summary}
    expected = [(a[0], *a[2:]) for a in table["activities"]]
    found = [(a[0], *a[3:]) for a in result["activities"]]  # without kind and layer
    assert found == expected
    kept = [
        {expert: blocks for (layer, expert), blocks in after.items() if layer == event % 2}
        for event, after in enumerate(result["residency"])
    ]
    assert kept == table["kept"]
