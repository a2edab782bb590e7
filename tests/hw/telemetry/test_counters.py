"""What counters have gained; more of it, by real sources, in the tests of those."""

from __future__ import annotations

import pytest

from crisp.hw.telemetry.counters import EnergyCounter
from crisp.hw.telemetry.sampler import UnreadableMeter

SECOND = 1_000_000_000


def counter(*spans: int) -> EnergyCounter:
    """In mJ; 10 W at most."""
    return EnergyCounter("it", lambda: 0, spans, 1000, 10)


def test_it_rises_or_begins_anew_or_was_set_back() -> None:
    own = counter(100_000)
    assert own.gain(5_000, 15_000, SECOND, 0) == 10_000
    assert own.gain(95_000, 5_000, SECOND, 0) == 10_000
    for old, new in ((5_000, 15_001), (95_000, 5_001), (5_000, 4_999)):
        with pytest.raises(
            UnreadableMeter, match=r"it: rose by .* in 1 s, more than 10 W: its counter"
        ):
            own.gain(old, new, SECOND, 0)
    assert own.gain(95_000, 5_001, SECOND, SECOND // 10_000) == 10_001  # read a little later


def test_a_value_beyond_its_span_is_no_way_back() -> None:
    with pytest.raises(UnreadableMeter, match="set back"):
        counter(100_000).gain(150_000, 1_000, SECOND, 0)


def test_the_span_that_holds_is_the_first_above_the_value() -> None:
    own = counter(100_000, 1_000_000)
    assert own.gain(99_000, 1_000, SECOND, 0) == 2_000
    assert own.gain(99_000, 101_000, SECOND, 0) == 2_000  # so it has the longer one
    assert own.gain(999_000, 1_000, SECOND, 0) == 2_000


def test_it_may_have_begun_anew_unseen_as_soon_as_its_shortest_span_is_over() -> None:
    own = counter(100_000, 1_000_000)
    assert own.gain(0, 50_000, 10 * SECOND, 0) == 50_000
    with pytest.raises(UnreadableMeter, match="it: was not read for 10 s"):
        own.gain(0, 50_000, 10 * SECOND + 1, 0)
