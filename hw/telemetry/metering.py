"""The energy of a run on real hardware: by a meter, or by a power model if that is asked for."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from functools import partial

from crisp.errors import CrispError
from crisp.hardware.energy import (
    Energy,
    Meter,
    Reading,
    StateDurations,
    measured_energy,
    modelled_energy,
)
from crisp.hardware.profile import HardwareProfile

IDLE_SECONDS = 2.0  # of the machine before a run


def power_model(hardware: HardwareProfile | None, asked: bool) -> HardwareProfile | None:
    """The profile whose power figures are asked for, if they are.

    Raises CrispError when they are, and there is no profile.
    """
    if not asked:
        return None
    if hardware is None:
        raise CrispError("--modelled-energy: needs a machine's profile; name it with --hardware")
    return hardware


class Metering:
    """The window of a run. ``start`` begins it, when what precedes the run is done."""

    def __init__(self, meter: Meter, idle: Reading | None) -> None:
        self._meter, self._idle = meter, idle
        self._running = False
        self._reading: Reading | None = None

    def start(self) -> None:
        """The run begins now."""
        self._meter.start()
        self._running = True

    def stop(self) -> None:
        """It has ended; more than once is fine."""
        if self._running:
            self._running = False
            self._reading = self._meter.stop()

    def energy(self, states: StateDurations) -> Energy | str:
        """Of the run, once it has ended."""
        if self._reading is None:
            return "the run was not metered"
        return measured_energy(self._reading, self._idle)


class Unmetered:
    """In place of a window: energy that needs none, or the reason why there is none."""

    def __init__(self, energy: Callable[[StateDurations], Energy | str]) -> None:
        self.energy = energy

    def start(self) -> None:
        """Nothing begins."""

    def stop(self) -> None:
        """Nothing ends."""


@contextmanager
def metering(
    meter: Meter | None, model: HardwareProfile | None, idle_seconds: float = IDLE_SECONDS
) -> Iterator[Metering | Unmetered]:
    """Measure the machine at rest for a moment; then the block from its call of ``start`` to its
    end, after which ``energy`` knows what that took.

    meter: None if there is none. model: a profile whose power figures are taken instead, as
    `power_model` returns it. idle_seconds: 0 measures nothing at rest, so there is no net.
    """
    if model is not None:
        yield Unmetered(partial(modelled_energy, model))
        return
    reason = "no meter was given" if meter is None else meter.probe().reason
    if meter is None or reason is not None:
        yield Unmetered(lambda states: reason or "")
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
