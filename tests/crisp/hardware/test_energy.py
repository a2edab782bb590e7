"""Joules: modelled, measured, and not had."""

from __future__ import annotations

from dataclasses import replace

import pytest

from crisp.hardware.energy import Energy, Reading, StateDurations, measured_energy, modelled_energy
from crisp.hardware.profile import HardwareProfile, Power

PROFILE = HardwareProfile(
    name="box", kind="disk", model="table", loads_from=None, numbers={}, sources={},
    power=Power(idle=10, link=20, compute=30, both=45), no_power=None,
)  # fmt: skip
RUN = Reading(
    joules=120.0, reason=None, source="RAPL package-0", method="energy counters", samples=9,
    window_ns=4_000_000_000, uncertainty_j=0.06,
)  # fmt: skip
IDLE = replace(RUN, joules=20.0, samples=5, window_ns=2_000_000_000, uncertainty_j=0.02)


def missing(reading: Reading, reason: str) -> Reading:
    return replace(reading, joules=None, reason=reason, uncertainty_j=None)


def test_power_times_time() -> None:
    """1 s idle, 2 s link, 3 s compute, 4 s both: 10 + 40 + 90 + 180 J; 10 s idle are 100 J."""
    states = StateDurations(*(seconds * 10**9 for seconds in (1, 2, 3, 4)))
    made = modelled_energy(PROFILE, states)
    assert isinstance(made, Energy)
    assert (made.gross_j, made.net_j) == (320.0, 220.0)
    assert (made.samples, made.window_ns, made.uncertainty_j) == (None, None, None)
    assert made.method.startswith("modelled: ")
    assert (
        modelled_energy(replace(PROFILE, power=None, no_power="nobody knows"), states)
        == "nobody knows"
    )


def test_what_the_idle_machine_draws_is_taken_off() -> None:
    """20 J in 2 s are 10 W: 40 J of the 4 s of the run."""
    made = measured_energy(RUN, IDLE)
    assert made == Energy(
        gross_j=120.0,
        net_j=80.0,
        method="measured: energy counters; idle: 10 W over 2 s before",
        source="RAPL package-0",
        samples=9,
        window_ns=4_000_000_000,
        uncertainty_j=0.06,
    )


def test_a_run_that_draws_less_than_the_machine_before_it_is_not_rounded_up() -> None:
    made = measured_energy(replace(RUN, joules=39.0), IDLE)
    assert isinstance(made, Energy)
    assert made.net_j == -1.0


@pytest.mark.parametrize("idle", [None, missing(IDLE, "x"), replace(IDLE, window_ns=0)])
def test_without_an_idle_reading_there_is_no_net(idle: Reading | None) -> None:
    made = measured_energy(RUN, idle)
    assert isinstance(made, Energy)
    assert (made.gross_j, made.net_j) == (120.0, None)
    assert "idle" not in made.method


def test_what_cannot_be_read_has_a_reason_and_no_joules() -> None:
    assert measured_energy(missing(RUN, "permission denied"), IDLE) == "permission denied"
    for joules, reason in ((None, None), (1.0, "but")):
        with pytest.raises(ValueError, match="either"):
            replace(RUN, joules=joules, reason=reason)
