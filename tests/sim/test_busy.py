"""Calibrated machines: link and compute slow each other down by measured factors."""

from __future__ import annotations

from fractions import Fraction

import pytest
import simpy

from crisp.hardware.measured import BlockGeometry, MeasuredCost, MeasuredTables, TimeCurve, TimeGrid
from crisp.sim.contention import Shared, constant, sharing
from tests.sim.toys import Costs, Toy

LINK, COMPUTE = 0, 1


def finishes(slow: tuple[float, float], *activities: tuple[int, int, int]) -> list[int]:
    """When activities (stream, start, ns alone) end; those of one stream must not overlap."""
    env = simpy.Environment()
    shared = Shared(env, constant(dict(zip((LINK, COMPUTE), slow, strict=True))), [-1, -1])
    ends = [0] * len(activities)

    def run(place: int, stream: int, start: int, ns: int):  # type: ignore[no-untyped-def]
        yield env.timeout(start)
        done = env.event()
        shared.occupy(stream, ns, 0, done)
        yield done
        ends[place] = int(env.now)

    for place, activity in enumerate(activities):
        env.process(run(place, *activity))
    env.run()
    return ends


@pytest.mark.parametrize(
    ("slow", "activities", "ends"),
    [
        ((1.25, 2), [(LINK, 0, 100)], [100]),  # alone: as fast as alone
        # compute does 50 of 100 by 100, the load 80 of 100; then compute runs on alone
        ((1.25, 1), [(LINK, 0, 100), (COMPUTE, 0, 500)], [125, 500]),
        # the load takes 125; by then compute has done 62.5 of 200, and 137.5 are left: 262.5
        ((1.25, 2), [(LINK, 0, 100), (COMPUTE, 0, 200)], [125, 263]),
        # compute from 50 to 90: the load does 50 alone, 32 beside, 18 alone: 50 + 40 + 18
        ((1.25, 1), [(LINK, 0, 100), (COMPUTE, 50, 40)], [108, 90]),
        # two loads in a row beside one computation, half as fast all the while
        ((1, 2), [(LINK, 0, 30), (LINK, 30, 30), (COMPUTE, 0, 40)], [30, 60, 70]),
        ((1, 1), [(LINK, 0, 100), (COMPUTE, 30, 100)], [100, 130]),
    ],
)
def test_by_hand(
    slow: tuple[float, float], activities: list[tuple[int, int, int]], ends: list[int]
) -> None:
    assert finishes(slow, *activities) == ends


def measured(slow_load: str, slow_compute: str) -> MeasuredCost:
    """A load of a block takes 100, a computation of one 80, a layer 10."""
    toy = Toy([[[0, 1]]], [[[1, 1]]], 2, 1)
    return MeasuredCost(
        toy.spec(),
        MeasuredTables(
            geometry=BlockGeometry.of(toy.spec()),
            load=TimeCurve((4096,), (Fraction(100),)),
            compute=TimeGrid((1,), (1,), ((Fraction(80),),)),
            layer=TimeCurve((1,), (Fraction(10),)),
            slow_load=Fraction(slow_load),
            slow_compute=Fraction(slow_compute),
        ),
    )


def activities(costs: object) -> list[tuple[object, ...]]:
    """Two experts of one block, which are not there yet."""
    assert isinstance(costs, MeasuredCost | Costs)
    toy = Toy([[[0, 1]]], [[[1, 1]]], 2, 1, share=Fraction(1), costs=costs)  # type: ignore[arg-type]
    found: list[tuple[object, ...]] = toy.simulated()["activities"]
    return found


def test_an_event_on_a_calibrated_machine() -> None:
    """Load 0 alone: 10 to 110. Beside load 1, computing 0 takes twice its 80 ns: 110 to 270.

    Load 1 is slowed by 1.25: 110 to 235. Until then compute has done 62.5 of 80, so 17.5 are left
    and it ends at 252.5, rounded up to 253. Computing 1 is alone again: to 333.
    """
    assert activities(measured("1.25", "2")) == [
        ("compute", "layer", 0, None, 0, 0, 0, 10),
        ("link", "load", 0, 0, 0, 1, 10, 110),
        ("compute", "task", 0, 0, 0, 1, 110, 253),
        ("link", "load", 0, 1, 0, 1, 110, 235),
        ("compute", "task", 0, 1, 0, 1, 253, 333),
    ]


def test_without_slow_downs_streams_are_apart() -> None:
    """The same times from costs that know of none, through the other path."""
    costs = Costs(request=0, load_block=100, launch=0, compute_block=80, router=10)
    assert sharing(measured("1", "1"), (LINK, COMPUTE)) is None
    assert activities(measured("1", "1")) == activities(costs)
    # nearly 1: the shared path, with times that round to the same
    assert activities(measured("1.000000000001", "1")) == activities(costs)
