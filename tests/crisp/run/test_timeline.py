"""Sums over timelines, against plain counting."""

from __future__ import annotations

from itertools import permutations
from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from crisp.errors import InvariantError
from crisp.run.timeline import (
    COLUMNS,
    COMPUTE,
    LAYER,
    LOAD,
    PREFETCH,
    Recorder,
    TimelineTotals,
    makespan,
)

Jobs = list[tuple[int, int]]


def flow_shop(jobs: Jobs) -> int:
    loaded = computed = 0
    for load, compute in jobs:
        loaded += load
        computed = max(computed, loaded) + compute
    return computed


@given(st.lists(st.lists(st.tuples(st.integers(0, 9), st.integers(0, 9)), min_size=1, max_size=5)))
def test_makespan_equals_brute_force(events: list[Jobs]) -> None:
    jobs = np.array([job for event in events for job in event], np.int64).reshape(-1, 2)
    of = np.repeat(np.arange(len(events)), [len(event) for event in events])
    best = sum(min(flow_shop(list(order)) for order in permutations(event)) for event in events)
    assert makespan(jobs[:, 0], jobs[:, 1], of) == best


def row(
    kind: int, start: int, end: int, event: int = 0, expert: int = 0, **other: int
) -> list[int]:
    values = {"kind": kind, "start_ns": start, "end_ns": end, "alone_ns": end - start,
              "event": event, "expert": expert, "blocks": 1} | other  # fmt: skip
    return [values.get(name, 0) for name in COLUMNS]


# router 0-5; expert 0 loads 5-15, computes 15-20; expert 1 loads 15-30, computes 30-34; a prefetch
# begins at 30, is in flight when the event ends (34), and ends at 40; the next router takes 34-41.
TIMELINE = [
    row(LAYER, 0, 5, expert=-1, blocks=0),
    row(LOAD, 5, 15),
    row(COMPUTE, 15, 20),
    row(LOAD, 15, 30, expert=1),
    row(COMPUTE, 30, 34, expert=1),
    row(PREFETCH, 30, 40, event=-1),
    row(LAYER, 34, 41, event=1, expert=-1, blocks=0),
]


JOBS = [(0, 10, 5), (0, 15, 4)]  # what event 0 has to do: (event, to load, to compute)


def facts(sums: TimelineTotals) -> dict[str, Any]:
    return {k: v for k, v in vars(sums).items() if not k.startswith("_")}


def test_sums_by_hand() -> None:
    sums = TimelineTotals()
    sums.add(np.array(TIMELINE), 41, None)
    sums.add_jobs(np.array(JOBS))
    assert facts(sums) == {
        "layer": 12,
        "compute": 9,
        "link": 35,
        "compute_hidden": 9,  # 15-20 beside the second load, 30-34 beside the prefetch
        "layer_hidden": 6,  # 34-40
        "blocks_landed": 3,
        "blocks_computed": 2,
        "alone": 21,
        "order_bound": 12 + 29,  # layers; 10 + 15 + 4 (the shorter load first is as it was)
    }


def test_a_load_in_flight_counts_in_both_blocks() -> None:
    """The same timeline in two pieces, cut where the event ends."""
    whole, cut = TimelineTotals(), TimelineTotals()
    whole.add(np.array(TIMELINE), 41, None)
    cut.add(np.array(TIMELINE[:5]), 34, 30)
    cut.add(np.array(TIMELINE[5:]), 41, None)
    assert facts(cut) == facts(whole)


def test_overlapping_intervals_are_noticed() -> None:
    with pytest.raises(InvariantError, match="compute stream overlap"):
        TimelineTotals().add(np.array([row(LAYER, 0, 5), row(COMPUTE, 4, 6)]), 6, None)
    with pytest.raises(InvariantError, match="link stream overlap"):
        TimelineTotals().add(np.array([row(LOAD, 0, 5), row(LOAD, 4, 6)]), 6, None)


def test_rows_are_handed_on_in_blocks_of_bounded_size() -> None:
    seen: list[int] = []

    class Count:
        def write(self, rows: Any) -> None:
            seen.append(len(rows))

    recorder = Recorder([Count()])
    for time in range(200_000):
        recorder.add(row(LAYER, time, time + 1))
        recorder.flush(time + 1, None)
    recorder.flush(200_000, None, always=True)
    assert sum(seen) == 200_000 == recorder.sums.layer
    assert max(seen) == 8_192
