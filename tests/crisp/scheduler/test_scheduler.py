"""EventScheduler by itself: whatever the timing, the same decisions."""

from __future__ import annotations

import dataclasses
from fractions import Fraction
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from crisp.policy.retention import routed_weights
from crisp.scheduler.tasks import Load, Task
from crisp.scheduler.workload import union
from tests.sim.drawn import toys
from tests.sim.toys import Toy

Decisions = list[tuple[Any, ...]]


def drive(toy: Toy, link_first: st.DataObject | bool) -> Decisions:
    """All events of a toy; after each step, ``link_first`` says which stream completes."""
    scheduler = toy.scheduler()
    experts, widths, *_ = toy.arrays()
    decisions: Decisions = []
    for row in range(len(experts)):
        for layer in toy.spec().moe_layers:
            tasks = union([experts[row, layer].tolist()], [widths[row, layer].tolist()])
            weights = toy.trace().weights
            assert weights is not None
            routed = routed_weights([experts[row, layer].tolist()], weights[row : row + 1, layer])
            scheduler.start(layer, tasks, (), routed)
            _run_event(scheduler, decisions, link_first)
            decisions.append(("after", scheduler.hits, scheduler.partial_hits,
                              scheduler.blocks_loaded, *scheduler.residency.resident))  # fmt: skip
    return decisions


def _run_event(scheduler: Any, decisions: Decisions, link_first: st.DataObject | bool) -> None:
    load: Load | None = None
    piece: Task | None = None
    while not scheduler.done:
        if load is None:
            load = scheduler.next_load()
            if load is not None:
                decisions.append((load.row, load.expert, load.first, load.blocks, *load.evicted))
        if piece is None:
            piece = scheduler.next_compute()
        assert load is not None or piece is not None, "nothing can go on"
        link = piece is None or (load is not None and _choice(link_first))
        if link:
            scheduler.loaded(load)
            load = None
        else:
            scheduler.computed(piece)
            piece = None
    assert load is None, "the event ended before its loads"


def _choice(link_first: st.DataObject | bool) -> bool:
    return link_first if isinstance(link_first, bool) else link_first.draw(st.booleans())


@settings(max_examples=150)
@given(toys(), st.data())
def test_without_prefetch_any_legal_timing_decides_the_same(toy: Toy, data: st.DataObject) -> None:
    toy = dataclasses.replace(toy, prefetch="none")
    assert drive(toy, data) == drive(toy, link_first=True) == drive(toy, link_first=False)


def one_event(widths: list[int], **options: Any) -> tuple[Any, list[Any]]:
    """A scheduler with one event of experts 0, 1, ... started, and its tasks."""
    experts = list(range(len(widths)))
    toy = Toy([[experts]], [[widths]], len(widths), max(widths), **options)
    scheduler = toy.scheduler()
    tasks = union([experts], [widths])
    scheduler.start(0, tasks)
    return scheduler, tasks


def test_the_widest_is_loaded_and_computed_first() -> None:
    scheduler, _ = one_event([1, 4, 2], order="widest", share=Fraction(1))
    loads = []
    while (load := scheduler.next_load()) is not None:
        loads.append((load.expert, load.blocks))
        scheduler.loaded(load)
    assert loads == [(1, 4), (2, 2), (0, 1)]
    assert [scheduler.next_compute().expert for _ in range(3)] == [1, 2, 0]


def test_a_third_transient_load_waits_for_the_staging_buffer() -> None:
    scheduler, _ = one_event([2, 2, 2], cache="none")
    for _ in range(2):
        scheduler.loaded(scheduler.next_load())
    assert scheduler.next_load() is None
    piece = scheduler.next_compute()
    assert scheduler.next_load() is None, "still in use"
    scheduler.computed(piece)
    assert scheduler.next_load().expert == 2


def test_a_piece_is_all_that_has_arrived_and_frees_its_staging_when_it_ends() -> None:
    """Staging holds 6 blocks: two tasks of 3. The third waits until what it needs is free."""
    scheduler, tasks = one_event([3, 3, 3], cache="none", granularity="block")
    scheduler.loaded(scheduler.next_load())
    assert scheduler.next_compute() is tasks[0]
    assert (tasks[0].ended, tasks[0].started) == (0, 1)
    for _ in range(5):
        scheduler.loaded(scheduler.next_load())
    assert tasks[0].started == 1, "what arrives meanwhile is of the next piece"
    scheduler.computed(tasks[0])
    assert scheduler.next_load() is None, "one block of 3 is free"
    assert scheduler.next_compute() is tasks[0]
    assert (tasks[0].ended, tasks[0].started) == (1, 3)
    assert scheduler.next_load() is None, "still in use"
    scheduler.computed(tasks[0])
    assert scheduler.next_load().expert == 2
    assert scheduler.next_compute() is tasks[1]
    assert (tasks[1].ended, tasks[1].started) == (0, 3)


def test_sequential_loads_nothing_while_it_computes() -> None:
    scheduler, _ = one_event([1, 1], order="sequential")
    scheduler.loaded(scheduler.next_load())
    assert scheduler.next_load() is None
    scheduler.computed(scheduler.next_compute())
    assert scheduler.next_load().expert == 1


def test_a_hit_never_shrinks_an_entry() -> None:
    toy = Toy([[[0]], [[0]], [[0]]], [[[2]], [[1]], [[2]]], 2, 2)
    assert toy.simulated()["residency"] == [{(0, 0): 2}] * 3
    assert toy.simulated()["hits"] == 2


def test_width_zero_is_no_access() -> None:
    """Expert 1, skipped by the third token, is older than expert 0 and is evicted for 2."""
    experts, widths = [[[1]], [[0]], [[1]], [[2]]], [[[1]], [[1]], [[0]], [[1]]]
    result = Toy(experts, widths, 3, 1, share=Fraction(2, 3)).simulated()
    assert result["residency"][-1] == {(0, 0): 1, (0, 2): 1}
    assert result["tasks"] == 3


@pytest.mark.parametrize(
    ("unit", "resident"), [("expert", {(0, 0): 2}), ("block", {(0, 0): 2, (0, 1): 1})]
)
def test_what_does_not_fit_is_transient(unit: str, resident: dict[tuple[int, int], int]) -> None:
    """Two experts of two blocks, both protected, in 3/4 of the memory: one expert or 3 blocks."""
    toy = Toy([[[0, 1]]], [[[2, 2]]], 2, 2, share=Fraction(3, 4), unit=unit)
    assert toy.simulated()["residency"] == [resident]


def test_blocks_count_as_landed_when_they_arrive() -> None:
    """Three blocks of room: expert 0 takes two, one at a time; of expert 1 one is kept."""
    scheduler, _ = one_event(
        [2, 2], share=Fraction(3, 4), unit="block", granularity="block", cache="lru"
    )
    landed = []
    for _ in range(4):
        load = scheduler.next_load()
        landed.append(scheduler.residency.landed)
        scheduler.loaded(load)
    assert [*landed, scheduler.residency.landed] == [0, 1, 2, 3, 3]
    assert scheduler.residency.used == [3]
