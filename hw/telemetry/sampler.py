"""The base of all meters: a window on a source, and a thread that samples it often enough."""

from __future__ import annotations

import threading
import time
from abc import ABC, abstractmethod
from collections.abc import Callable
from typing import Protocol

from crisp.hardware.energy import Probe, Reading

STARVED = 5  # intervals: a longer gap between two samples means that the thread got no time


class UnreadableMeter(Exception):
    """A source that cannot be read: the reason, and a remedy if the user has one."""

    def __init__(self, reason: str, remedy: str | None = None) -> None:
        super().__init__(reason)
        self.reason, self.remedy = reason, remedy


class SampleWindow(Protocol):
    """The samples of one source between a start and a stop."""

    @property
    def source(self) -> str:
        """The name of what is read."""

    def sample(self) -> None:
        """Read the source once. Raises nothing: failures are in the reading."""

    def reading(self) -> Reading:
        """Return the energy of all samples, or why there is none."""

    def close(self) -> None:
        """Release the source."""


class SampledMeter(ABC):
    """A `crisp.hardware.energy.Meter` that samples a window: when it begins, when it ends, and in a
    thread every ``interval`` seconds between.

    A subclass says how a window is opened; that may take a while, and happens before it begins.
    """

    name: str

    def __init__(self, interval: float, clock: Callable[[], int] = time.monotonic_ns) -> None:
        """interval: seconds; clock: ns."""
        self.interval, self.clock = interval, clock
        self._window: SampleWindow | None = None
        self._reason = "it was never started"
        self._ended = threading.Event()
        self._thread: threading.Thread | None = None
        self._lock = threading.Lock()  # one sample at a time

    @abstractmethod
    def open(self) -> SampleWindow:
        """Open a window on the source; `UnreadableMeter` if it cannot be read now."""

    def probe(self) -> Probe:
        """Return what would be read now, or why nothing can be."""
        try:
            window = self.open()
        except UnreadableMeter as error:
            return Probe(self.name, error.reason, error.remedy)
        window.close()
        return Probe(window.source)

    def start(self) -> None:
        """Begin a window."""
        try:
            self._window = self.open()
        except UnreadableMeter as error:
            self._window, self._reason = None, error.reason
            return
        self._window.sample()
        self._ended.clear()
        self._thread = threading.Thread(
            target=self._serve, name=f"crisp-{self.name.lower()}", daemon=True
        )
        self._thread.start()

    def stop(self) -> Reading:
        """End the window."""
        if self._window is None or self._thread is None:
            return Reading(None, self._reason, self.name, "not read", samples=0, window_ns=0)
        self._ended.set()
        self._thread.join()
        window, self._window, self._thread = self._window, None, None
        self._reason = "it was not started again"
        window.sample()
        window.close()
        return window.reading()

    def sample(self) -> None:
        """Sample the current window once."""
        with self._lock:
            if self._window is not None:
                self._window.sample()

    def _serve(self) -> None:
        """Sample until the window ends: the thread's function."""
        while not self._ended.wait(self.interval):
            self.sample()


class PowerWindow:
    """A window of power samples in watts, integrated by the trapezoid rule.

    Its uncertainty assumes that power stays between two neighbouring samples: half their difference
    times the time between them. In a gap of more than `STARVED` intervals, and for as long as a
    value lags behind (``lag`` ns), power may have been anything seen in the window. There is no
    energy if more than half of the window was not sampled in time, or if it is shorter than the
    lag.
    """

    def __init__(
        self,
        source: str,
        method: str,
        watts: Callable[[], float],
        meter: SampledMeter,
        lag: int = 0,
        close: Callable[[], None] = lambda: None,
    ) -> None:
        """watts: reads the power, may raise `UnreadableMeter`; lag: ns; close: releases it."""
        self.source, self.close = source, close
        self._method, self._watts, self._lag = method, watts, lag
        self._interval, self._clock = meter.interval, meter.clock
        self._reason: str | None = None
        self._samples = self._first = self._last = self._longest = self._starved = 0
        self._watt = self._highest = self._lowest = 0.0
        self._joules = self._open_j = 0.0
        self._curve: list[tuple[int, float]] = []

    def sample(self) -> None:
        """Read the power once."""
        if self._reason is not None:
            return
        try:
            watt = self._watts()
        except UnreadableMeter as error:
            self._reason = f"was lost during the run: {error.reason}"
            return
        now = self._clock()
        if self._samples:
            gap = now - self._last
            self._longest = max(self._longest, gap)
            self._joules += gap / 1e9 * (self._watt + watt) / 2
            if gap > STARVED * self._interval * 1e9:
                self._starved += gap
            else:
                self._open_j += gap / 1e9 * abs(self._watt - watt) / 2
            self._highest, self._lowest = max(self._highest, watt), min(self._lowest, watt)
        else:
            self._first, self._highest, self._lowest = now, watt, watt
        self._watt, self._last = watt, now
        self._samples += 1
        self._curve.append((now, self._joules))

    def reading(self) -> Reading:
        """Return the integral in joules, or why there is none."""
        length = self._last - self._first
        reason = self._reason or self._refused(length)
        blurred = (self._starved + self._lag) / 1e9 * (self._highest - self._lowest)
        return Reading(
            joules=self._joules if reason is None else None,
            reason=reason,
            source=self.source,
            method=f"{self._method}, sampled every {self._interval:g} s, "
            f"at most {self._longest / 1e9:.3g} s apart",
            samples=self._samples,
            window_ns=length,
            uncertainty_j=self._open_j + blurred if reason is None else None,
            curve=tuple(self._curve),
            blur_ns=self._lag,
        )

    def _refused(self, length: int) -> str | None:
        """Return why a window of ``length`` ns has no energy; None: it has."""
        if length <= self._lag:
            return (
                f"a window of {length / 1e9:.3g} s is too short: "
                f"a value is up to {self._lag / 1e9:.3g} s old"
            )
        if self._starved > length / 2:
            return (
                f"was not sampled in time for {self._starved / 1e9:.3g} s of "
                f"{length / 1e9:.3g} s: the machine left the meter no time"
            )
        if self._joules <= 0:
            return "its power was never above 0 W, so it measures nothing here"
        return None
