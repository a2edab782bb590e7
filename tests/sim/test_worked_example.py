"""The simulator returns exactly what docs/worked-example.md works out by hand."""

from __future__ import annotations

from fractions import Fraction

import pytest

from tests.oracles import example
from tests.sim.toys import Costs, Toy


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
