"""Belady's bound equals what trying everything finds, and what the oracle loads."""

from __future__ import annotations

from fractions import Fraction
from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from crisp.errors import InvariantError
from crisp.model.spec import ModelSpec
from crisp.policy import Budget, named
from crisp.profile import Profile
from crisp.run.case import Case, Conditions
from crisp.run.timeline import Rows
from crisp.scheduler.belady_bound import fewest_loads, places
from crisp.scheduler.residency import StartingState
from crisp.sim.bounds import Belady
from crisp.sim.hardware import hardware_profile
from crisp.sim.simulate import simulate
from crisp.trace import RoutingTrace
from crisp.trace.bundled import bundled_traces
from crisp.trace.fitting import fit_to_trace
from tests.oracles import caches
from tests.sim.toys import Toy

Use = tuple[int, int, int]  # (event, entry, width)


def bound(uses: list[Use], capacity: list[int], initial: list[int], blocks: int) -> int:
    events, entries, widths = zip(*uses, strict=True)
    known = places(capacity, initial, blocks)
    return fewest_loads(*known, events, entries, widths)


def test_by_hand() -> None:
    """Room for two of three: of 0 1 2 0 1 2, keeping 0 and 1 saves two of six loads."""
    uses = [(event, entry, 1) for event, entry in enumerate([0, 1, 2, 0, 1, 2])]
    assert bound(uses, [2], [0, 0, 0], 1) == 4
    assert bound(uses, [1], [0, 0, 0], 1) == 5
    assert bound(uses, [0], [0, 0, 0], 1) == 6
    assert bound(uses, [3], [0, 0, 0], 1) == 3
    assert bound(uses, [2], [0, 0, 1], 1) == 3  # 2 stays until it is asked for, and then 0 and 2
    assert bound(uses, [2], [1, 1, 0], 1) == 2  # the two are there all the time


def test_what_an_event_uses_needs_no_room_while_it_lasts() -> None:
    assert bound([(0, 0, 3), (0, 1, 3), (1, 0, 2), (1, 1, 2)], [2], [0, 0], 3) == 8


@st.composite
def small(draw: st.DrawFn) -> dict[str, Any]:
    """Two layers, 2 or 3 experts of up to 3 blocks, up to 8 events of each, some held before."""
    n, blocks = draw(st.integers(2, 3)), draw(st.integers(1, 3))
    rng = np.random.default_rng(draw(st.integers(0, 2**32 - 1)))
    widths = rng.integers(0, blocks + 1, (draw(st.integers(1, 8)), 2, n))
    room = [draw(st.integers(0, n * blocks)) for _ in range(2)]
    initial = np.zeros((2, n), int)
    for part in range(2):
        for expert in rng.permutation(n).tolist():
            left = room[part] - initial[part].sum()
            initial[part, expert] = rng.integers(0, min(blocks, left) + 1)
    return {"widths": widths, "room": room, "initial": initial, "blocks": blocks}


@settings(max_examples=150, deadline=None)
@given(small())
def test_is_what_trying_everything_finds(case: dict[str, Any]) -> None:
    """In each part by itself; what is held before is as if an event had asked for it, for free."""
    widths, room, initial = case["widths"], case["room"], case["initial"]
    uses = [
        (2 * event + part, part * widths.shape[2] + expert, int(width))
        for event, row in enumerate(widths)
        for part, own in enumerate(row)
        for expert, width in enumerate(own)
    ]
    expected = 0
    for part in range(2):
        events = [dict(enumerate(row.tolist())) for row in [initial[part], *widths[:, part]]]
        expected += caches.fewest_loads(events, widths.shape[2], room[part], whole=False)
    found = bound(uses, room, initial.ravel().tolist(), case["blocks"])
    assert found == expected - initial.sum()


def test_a_run_that_loads_less_is_a_fault(monkeypatch: pytest.MonkeyPatch) -> None:
    trace = RoutingTrace.load(bundled_traces()["tiny-mixtral-docs"])
    spec = fit_to_trace(ModelSpec.named("mixtral-8x7b"), trace)
    policy, counts = named("lru"), Profile.from_trace(trace)
    case = Case(trace, spec, policy, Budget.parse("20%"), counts, Conditions(limit=10))
    loaded = simulate(case, hardware_profile("rtx4090-pcie4")).metrics["blocks_loaded"]

    def claim(self: Belady, rows: Rows) -> None:
        self._blocks = [loaded + more]

    monkeypatch.setattr(Belady, "write", claim)
    more = 0
    metrics = simulate(case, hardware_profile("rtx4090-pcie4")).metrics
    assert metrics["belady_bytes_per_token"] == metrics["bytes_per_token"]
    assert metrics["belady_bound_ms_per_token"] == metrics["io_bound_ms_per_token"]
    more = 1
    with pytest.raises(InvariantError, match="fewer blocks were loaded than any cache"):
        simulate(case, hardware_profile("rtx4090-pcie4"))


def test_is_what_the_oracle_loads_in_long_runs() -> None:
    """Moments are numbered anew several times; blocks of different widths, both scopes, batches."""
    rng = np.random.default_rng(5)
    experts = (rng.random((300, 2, 6)) + np.linspace(0, 1, 6)).argsort(axis=2)[:, :, :2]
    for scope in ("layer", "global"):
        for share in (Fraction(1, 10), Fraction(4, 10)):
            for batch in (1, 3):
                toy = Toy(
                    experts, rng.integers(0, 5, experts.shape), 6, 4, cache="belady-blocks",
                    sequence=np.arange(300) // 60, scope=scope, share=share, unit="block",
                    batch=batch,
                )  # fmt: skip
                plain = Belady(toy.spec(), StartingState(toy.capacity()), compiled=False)
                compiled = Belady(toy.spec(), StartingState(toy.capacity()), compiled=True)
                loaded = toy.simulated(plain, compiled)["blocks_loaded"]
                assert plain.fewest.blocks == compiled.fewest.blocks == loaded
