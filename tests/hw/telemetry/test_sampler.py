"""Watts over time: the integral, what it leaves open, and what is no energy at all."""

from __future__ import annotations

import threading
from collections.abc import Callable

import pytest

from crisp.hw.telemetry.sampler import PowerWindow, SampledMeter, SampleWindow, UnreadableMeter
from tests.hw.telemetry.clocks import Clock


class Meter(SampledMeter):
    """Samples what a test puts into ``watts``, when it is told to."""

    name = "Made-Up"

    def __init__(self, interval: float = 1000, lag: int = 0) -> None:
        super().__init__(interval, Clock())
        self.watts: float | UnreadableMeter = 0.0
        self.lag, self.closed = lag, 0

    def open(self) -> SampleWindow:
        self.read()
        return PowerWindow("a socket", "power", self.read, self, self.lag, self.close)

    def read(self) -> float:
        if isinstance(self.watts, UnreadableMeter):
            raise self.watts
        return self.watts

    def close(self) -> None:
        self.closed += 1

    def at(self, seconds: float, watts: float | UnreadableMeter) -> None:
        """One sample that long after the last."""
        self.clock.passes(seconds)  # type: ignore[attr-defined]
        self.watts = watts
        self.sample()


@pytest.fixture
def meter() -> Meter:
    return Meter()


def begun(meter: Meter, watts: float) -> Meter:
    meter.watts = watts
    meter.start()
    return meter


def test_power_goes_straight_from_sample_to_sample(meter: Meter) -> None:
    begun(meter, 10)
    meter.at(2, 30)  # 40 J
    meter.at(1, 0)  # 15 J
    meter.clock.now += 500_000_000  # type: ignore[attr-defined]
    reading = meter.stop()  # 0 J
    assert reading.joules == 55
    assert reading.samples == 4
    assert reading.window_ns == 3_500_000_000
    assert reading.uncertainty_j == 2 * 20 / 2 + 1 * 30 / 2  # had each jump come at either end
    assert reading.method == "power, sampled every 1000 s, at most 2 s apart"
    assert (reading.source, reading.reason) == ("a socket", None)


def test_windows_do_not_add_up_and_let_go_of_their_source(meter: Meter) -> None:
    for watts in (1, 2):
        begun(meter, watts)
        meter.at(3, watts)
        assert meter.stop().joules == 3 * watts
    assert meter.closed == 2
    assert meter.probe().source == "a socket"
    assert meter.closed == 3


def test_a_gap_counts_as_anything_that_was_seen() -> None:
    """Five intervals of 1000 s are meant; six are a gap, in which 10 to 30 W may have flowed."""
    for seconds, open_j in ((5000, 5000 * 20 / 2), (6000, 6000 * 20)):
        meter = begun(Meter(), 10)
        meter.at(seconds, 30)
        meter.at(5000, 30)
        meter.at(2000, 30)
        reading = meter.stop()
        assert reading.joules == seconds * 20 + 7000 * 30
        assert reading.uncertainty_j == open_j
        assert reading.method.endswith(f"at most {seconds} s apart".replace("000", "e+03"))


def test_a_window_of_gaps_says_nothing(meter: Meter) -> None:
    begun(meter, 10)
    meter.at(4000, 10)
    meter.at(6000, 10)
    reading = meter.stop()
    assert reading.joules is reading.uncertainty_j is None
    assert reading.reason == (
        "was not sampled in time for 6e+03 s of 1e+04 s: the machine left the meter no time"
    )


def test_a_value_that_lags_leaves_more_open_and_says_nothing_of_less() -> None:
    meter = begun(Meter(lag=1_000_000_000), 10)
    meter.at(4, 30)
    reading = meter.stop()
    assert reading.joules == 80
    assert reading.uncertainty_j == 4 * 20 / 2 + 1 * 20
    begun(meter, 10)
    meter.at(1, 10)
    reading = meter.stop()
    assert reading.joules is None
    assert reading.reason == "a window of 1 s is too short: a value is up to 1 s old"


def test_no_time_and_no_power_are_no_joules_and_not_none_of_them(meter: Meter) -> None:
    begun(meter, 10)
    reading = meter.stop()
    assert reading.joules is None
    assert reading.reason is not None
    assert reading.reason.startswith("a window of 0 s is too short")
    for watts in (0, -1):
        begun(meter, watts)
        meter.at(3, watts)
        reading = meter.stop()
        assert reading.joules is None
        assert reading.reason == "its power was never above 0 W, so it measures nothing here"


def test_what_is_lost_stays_lost(meter: Meter) -> None:
    begun(meter, 10)
    meter.at(1, UnreadableMeter("it went up in smoke"))
    meter.at(1, UnreadableMeter("there is no smoke any more"))
    meter.at(1, 10)
    reading = meter.stop()
    assert reading.joules is None
    assert reading.reason == "was lost during the run: it went up in smoke"
    assert meter.closed == 1


def test_what_cannot_be_opened_says_why(meter: Meter) -> None:
    meter.watts = UnreadableMeter("locked away", "find the key")
    probe = meter.probe()
    assert (probe.source, probe.reason, probe.remedy) == ("Made-Up", "locked away", "find the key")
    meter.start()
    reading = meter.stop()
    assert (reading.joules, reading.samples, reading.window_ns) == (None, 0, 0)
    assert reading.reason == "locked away"


def test_a_window_that_was_never_begun_has_no_joules(meter: Meter) -> None:
    assert meter.stop().reason == "it was never started"
    begun(meter, 10)
    meter.at(1, 10)
    assert meter.stop().joules == 10
    assert meter.stop().joules is None


def test_a_thread_samples_and_ends() -> None:
    """A step up between two samples of the thread is seen by it, not only at the end."""
    meter, looked = Meter(0.001), threading.Semaphore(0)
    read: Callable[[], float] = meter.read

    def counting() -> float:
        meter.clock.passes(1e-6)  # type: ignore[attr-defined]
        looked.release()
        return read()

    meter.read = counting  # type: ignore[method-assign]
    begun(meter, 5)
    for _ in range(10):
        assert looked.acquire(timeout=20)
    reading = meter.stop()
    assert reading.samples >= 9
    assert reading.joules == pytest.approx(5 * reading.window_ns / 1e9)
    assert "crisp-made-up" not in {thread.name for thread in threading.enumerate()}
