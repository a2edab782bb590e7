"""Unified memory: max-min fair shares, and nothing slows down that fits."""

from __future__ import annotations

from dataclasses import dataclass
from fractions import Fraction

import pytest
import simpy
from hypothesis import given
from hypothesis import strategies as st

from crisp.sim.contention import Shared, fair, fair_rates
from tests.sim.toys import Costs, Toy

BANDWIDTH = 100.0  # bytes per ns


def finishes(*activities: tuple[int, int, int]) -> list[int]:
    """When activities (start, ns alone, bytes) on separate streams end."""
    env = simpy.Environment()
    memory = Shared(env, fair(BANDWIDTH), [-1] * len(activities))
    ends = [0] * len(activities)

    def run(stream: int, start: int, alone_ns: int, traffic: int):  # type: ignore[no-untyped-def]
        yield env.timeout(start)
        done = env.event()
        memory.occupy(stream, alone_ns, traffic, done)
        yield done
        ends[stream] = int(env.now)

    for stream, activity in enumerate(activities):
        env.process(run(stream, *activity))
    env.run()
    return ends


@pytest.mark.parametrize(
    ("activities", "ends"),
    [
        ([(0, 10, 1000)], [10]),  # alone: as fast as alone
        ([(0, 10, 900), (0, 10, 100)], [10, 10]),  # the demands just fit
        ([(0, 10, 1000), (0, 10, 1000)], [20, 20]),  # half each
        ([(0, 10, 1000), (5, 10, 1000)], [15, 20]),  # 5 alone, 10 shared, 5 alone
        # 30 B/ns get what they ask for, the copy of 100 B/ns runs at 0.7: 7 of 10 by 10, 3 alone
        ([(0, 10, 1000), (0, 10, 300)], [13, 10]),
        ([(0, 10, 1000), (0, 10, 0)], [10, 10]),  # computing without memory disturbs nobody
    ],
)
def test_by_hand(activities: list[tuple[int, int, int]], ends: list[int]) -> None:
    assert finishes(*activities) == ends


@given(st.lists(st.floats(0, 300), min_size=1, max_size=4))
def test_shares_are_max_min_fair(demands: list[float]) -> None:
    rates = fair_rates(demands, BANDWIDTH)
    taken = [rate * demand for rate, demand in zip(rates, demands, strict=True)]
    assert sum(taken) <= BANDWIDTH * (1 + 1e-9)
    assert all(0 < rate <= 1 for rate in rates)
    if sum(demands) <= BANDWIDTH:
        assert rates == [1.0] * len(demands)
    else:  # whoever gets less than asked gets as much as anyone
        assert sum(taken) == pytest.approx(BANDWIDTH)
        assert all(t >= max(taken) * (1 - 1e-9) for t, r in zip(taken, rates, strict=True) if r < 1)


@dataclass(frozen=True)
class SharedCosts(Costs):
    """A load or a computation of one block: 10 ns, 1000 bytes. The router moves nothing."""

    request: int = 0
    load_block: int = 10
    launch: int = 0
    compute_block: int = 10
    router: int = 10

    memory_bandwidth = BANDWIDTH * 1e9

    def load_traffic(self, n_bytes: int) -> int:
        return 1000 * n_bytes // self.block_bytes

    def compute_traffic(self, first: int, last: int) -> int:
        return 1000 * (last - first)


def test_an_event_whose_load_and_computation_share_the_memory() -> None:
    """Router to 10, load 0 to 20; computing 0 beside loading 1 takes both twice as long: to 40."""
    toy = Toy([[[0, 1]]], [[[1, 1]]], 2, 1, share=Fraction(1), costs=SharedCosts())
    assert toy.simulated()["activities"] == [
        ("compute", "layer", 0, None, 0, 0, 0, 10),
        ("link", "load", 0, 0, 0, 1, 10, 20),
        ("compute", "task", 0, 0, 0, 1, 20, 40),
        ("link", "load", 0, 1, 0, 1, 20, 40),
        ("compute", "task", 0, 1, 0, 1, 40, 50),
    ]
