"""The windows of a run: the machine at rest, then what runs from its start on."""

from __future__ import annotations

import pytest

from crisp.errors import CrispError
from crisp.hardware.energy import Energy, Probe, Reading, StateDurations
from crisp.hw.telemetry.metering import metering, power_model
from tests.crisp.hardware.test_energy import PROFILE

STATES = StateDurations(10**9, 0, 0, 10**9)


class FakeMeter:
    """The machine draws what the test says; every window lasts a second."""

    name = "fake"

    def __init__(self, *joules: float, reason: str | None = None, off: float | None = None) -> None:
        self.joules, self.reason, self.off = list(joules), reason, off
        self.calls: list[str] = []

    def probe(self) -> Probe:
        return Probe(self.name, self.reason)

    def start(self) -> None:
        self.calls.append("start")

    def sample(self) -> None:
        pass

    def stop(self) -> Reading:
        self.calls.append("stop")
        joules = self.joules.pop(0)
        return Reading(joules, None, "fake", "made up", 2, 10**9, self.off)


def test_rest_is_measured_before_and_only_the_run_counts() -> None:
    meter = FakeMeter(5, 12)
    with metering(meter, None, 1e-9) as metered:
        assert meter.calls == ["start", "stop"]
        metered.start()
        metered.stop()
        assert meter.calls == ["start", "stop"] * 2
    assert meter.calls == ["start", "stop"] * 2
    energy = metered.energy(STATES)
    assert isinstance(energy, Energy)
    assert (energy.gross_j, energy.net_j) == (12, 7)


def test_no_rest_no_net() -> None:
    meter = FakeMeter(12)
    with metering(meter, None, 0) as metered:
        assert meter.calls == []
        metered.start()
        metered.stop()
    energy = metered.energy(STATES)
    assert isinstance(energy, Energy)
    assert (energy.gross_j, energy.net_j) == (12, None)


def test_a_failing_run_ends_its_window() -> None:
    meter = FakeMeter(5, 12)
    with pytest.raises(OSError, match="disk"), metering(meter, None, 1e-9) as metered:
        metered.start()
        raise OSError("the disk is gone")
    assert meter.calls == ["start", "stop"] * 2


def test_a_run_that_never_began_has_no_joules() -> None:
    meter = FakeMeter(5)
    with metering(meter, None, 1e-9) as metered:
        pass
    assert metered.energy(STATES) == "the run was not metered"


def test_a_meter_that_cannot_be_read_is_not_waited_for() -> None:
    meter = FakeMeter(reason="permission denied")
    for given, reason in ((meter, "permission denied"), (None, "no meter was given")):
        with metering(given, None, 1000) as metered:
            metered.start()
            metered.stop()
        assert metered.energy(STATES) == reason
    assert meter.calls == []


def test_a_power_model_only_if_asked_for() -> None:
    """1 s at 10 W and 1 s at 45 W."""
    assert power_model(PROFILE, False) is None
    assert power_model(None, False) is None
    with pytest.raises(CrispError, match="--modelled-energy: needs a machine's profile"):
        power_model(None, True)
    meter = FakeMeter()
    with metering(meter, power_model(PROFILE, True)) as metered:
        metered.start()
    energy = metered.energy(STATES)
    assert isinstance(energy, Energy)
    assert (energy.gross_j, energy.method[:9]) == (55, "modelled:")
    assert meter.calls == []
