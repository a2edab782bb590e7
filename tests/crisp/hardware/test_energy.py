"""Joules: modelled, measured, and not had."""

from __future__ import annotations

from dataclasses import replace

import pytest

from crisp.hardware.energy import (
    Energy,
    Reading,
    StateDurations,
    measured_energy,
    modelled_energy,
    part_of,
)
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

SECOND = 10**9  # ns


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


def test_the_joules_of_a_phase_are_those_between_its_ends() -> None:
    """60 J until 1 s, 100 J in the second after; the clock is 7 s ahead of the run's."""
    curve = ((7 * SECOND, 0.0), (8 * SECOND, 60.0), (9 * SECOND, 160.0))
    reading = Reading(160.0, None, "x", "y", 3, 2 * SECOND, curve=curve)
    prompts = part_of(reading, ((7 * SECOND, 8 * SECOND),))
    decoding = part_of(reading, ((8 * SECOND, 9 * SECOND),))
    assert (prompts.joules, prompts.window_ns, prompts.uncertainty_j) == (60, SECOND, 0)
    assert (decoding.joules, decoding.window_ns) == (100, SECOND)
    idle = Reading(10.0, None, "x", "rest", 2, SECOND)
    energy = measured_energy(decoding, idle)
    assert isinstance(energy, Energy)
    assert (energy.gross_j, energy.net_j) == (100, 90)
    half = part_of(reading, ((7 * SECOND, 7 * SECOND + SECOND // 50), (8 * SECOND, 9 * SECOND)))
    assert half.joules == pytest.approx(101.2)  # a fiftieth of the first second, too


def test_where_samples_are_far_apart_a_phase_has_no_joules() -> None:
    """The phase ends 0.3 s from the nearer sample, where 100 W were drawn: 30 of 70 J are open."""
    curve = ((0, 0.0), (SECOND, 100.0))
    reading = Reading(100.0, None, "x", "y", 2, SECOND, curve=curve)
    part = part_of(reading, ((0, 7 * SECOND // 10),))
    assert part.joules is None
    assert part.reason == (
        "the meter's samples leave 43 % of the joules of these 0.7 s open, expected at most 5 %"
    )
    late = Reading(100.0, None, "x", "y", 3, SECOND, curve=(*curve, (2 * SECOND, 200.0)),
                   blur_ns=SECOND // 10)  # fmt: skip
    assert part_of(late, ((0, SECOND),)).reason is not None  # 10 of 100 J: a sample may be late
    without = Reading(100.0, None, "x", "y", 2, SECOND)
    assert part_of(without, ((0, SECOND),)).reason == (
        "the meter kept no samples to divide by phases"
    )
    lost = Reading(None, "gone", "x", "y", 2, SECOND)
    assert part_of(lost, ((0, SECOND),)).reason == "gone"
