"""Measure the energy of a run on real hardware, or take it from a power model if asked to."""

from __future__ import annotations

import time
from collections.abc import Iterator
from contextlib import contextmanager
from functools import partial

from crisp.errors import CrispError
from crisp.hardware.energy import (
    Energy,
    EnergyOf,
    Meter,
    Reading,
    Spans,
    StateDurations,
    measured_energy,
    modelled_energy,
    part_of,
)
from crisp.hardware.profile import HardwareProfile

IDLE_SECONDS = 2.0  # for which the machine is measured at rest before a run


def power_model(hardware: HardwareProfile | None, requested: bool) -> HardwareProfile | None:
    """Return the profile whose power figures are to be used; None: none are asked for.

    Raises CrispError when they are asked for and there is no profile.
    """
    if not requested:
        return None
    if hardware is None:
        raise CrispError("--modelled-energy: needs a machine's profile; name it with --hardware")
    return hardware


class Metering:
    """The measurement of one run; ``start`` begins it when all preparations are done."""

    def __init__(self, meter: Meter, idle: Reading | None) -> None:
        self._meter, self._idle = meter, idle
        self._running = False
        self._reading: Reading | None = None
        self._zero = 0

    def start(self, zero: int = 0) -> None:
        """Begin to measure; zero: when the run's clock began, by the monotonic clock in ns."""
        self._zero = zero
        self._meter.start()
        self._running = True

    def sample(self) -> None:
        """Sample the meter now, where one phase of the run ends and another begins."""
        self._meter.sample()

    def stop(self) -> None:
        """End the measurement; idempotent."""
        if self._running:
            self._running = False
            self._reading = self._meter.stop()

    def energy(self, states: StateDurations, spans: Spans | None = None) -> Energy | str:
        """Return the energy of the run, or of ``spans`` of it, once it has ended, or why there is
        none.
        """
        if self._reading is None:
            return "the run was not metered"
        if spans is None:
            return measured_energy(self._reading, self._idle)
        by_clock = tuple((self._zero + start, self._zero + end) for start, end in spans)
        return measured_energy(part_of(self._reading, by_clock), self._idle)


class Unmetered:
    """Stands in for `Metering` where energy is modelled, or there is none."""

    def __init__(self, energy: EnergyOf) -> None:
        self.energy = energy

    def start(self, zero: int = 0) -> None:
        """No-op: nothing is measured."""

    def sample(self) -> None:
        """No-op: nothing is measured."""

    def stop(self) -> None:
        """No-op: nothing is measured."""


@contextmanager
def metering(
    meter: Meter | None, model: HardwareProfile | None, idle_seconds: float = IDLE_SECONDS
) -> Iterator[Metering | Unmetered]:
    """Measure the machine at rest; then the block, from its call of ``start`` on.

    After the block ``energy`` returns the energy. meter: None if there is none. model: a profile
    whose power figures are used instead, see `power_model`. idle_seconds: 0: nothing is measured at
    rest, and there is no net energy.
    """
    if model is not None:
        yield Unmetered(partial(modelled_energy, model))
        return
    reason = "no meter was given" if meter is None else meter.probe().reason
    if meter is None or reason is not None:
        yield Unmetered(lambda states, spans=None: reason or "")
        return
    idle = None
    if idle_seconds:
        meter.start()
        try:
            time.sleep(idle_seconds)
        finally:
            idle = meter.stop()
    metered = Metering(meter, idle)
    try:
        yield metered
    finally:
        metered.stop()
