"""Energy counters: their gain over a window, across overflows; one that is set back is refused."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

from crisp.hardware.energy import Reading
from crisp.hw.telemetry.sampler import SampledMeter, UnreadableMeter


@dataclass(frozen=True)
class EnergyCounter:
    """One counter of energy, in units of 1/``per_joule`` J.

    spans: values at which it may start again at 0; of several, the first above its value holds.
    most_watts: what it counts never draws more, which bounds how soon it overflows and how fast it
    rises.
    """

    name: str
    read: Callable[[], int]  # may raise Unreadable
    spans: tuple[int, ...]
    per_joule: int
    most_watts: int
    always: bool = True  # what it counts always draws power; else the counter may stand still

    def gain(self, old: int, new: int, elapsed: int, slack: int) -> int:
        """Return the gain from one reading to the next, ``elapsed`` ns later, +- ``slack``.

        Raises `UnreadableMeter` where it is ambiguous.
        """
        span = next((span for span in self.spans if old < span), self.spans[-1])
        gain = new - old if new >= old else new + span - old
        if elapsed / 1e9 > self.spans[0] / self.per_joule / self.most_watts:
            raise UnreadableMeter(
                f"{self.name}: was not read for {elapsed / 1e9:.3g} s, in which it may have begun "
                "anew more than once"
            )
        if not 0 <= gain <= self.most_watts * self.per_joule * (elapsed + slack) / 1e9:
            raise UnreadableMeter(
                f"{self.name}: rose by {gain / self.per_joule:.3g} J in {elapsed / 1e9:.3g} s, "
                f"more than {self.most_watts} W: its counter was set back"
            )
        return gain


class CounterWindow:
    """A window that sums some counters, each of a part that no other counts."""

    def __init__(
        self,
        source: Callable[[list[str]], str],
        method: str,
        counters: list[EnergyCounter],
        update: int,
        meter: SampledMeter,
        close: Callable[[], None] = lambda: None,
    ) -> None:
        """source: names the sum of counters of these names; update: ns within which a counter is
        renewed; close: releases them.
        """
        self.close = close
        self._named, self._method, self._counters, self._update = source, method, counters, update
        self._interval, self._clock = meter.interval, meter.clock
        self._values: list[int] = []
        self._gained = [0] * len(counters)
        self._reason: str | None = None
        self._samples = self._first = self._last = 0
        self._curve: list[tuple[int, float]] = []
        self._longest = self._slowest = 0  # from one sample to the next; reading all of them

    @property
    def source(self) -> str:
        """The name of the sum of all counters."""
        return self._named([counter.name for counter in self._counters])

    def sample(self) -> None:
        """Read all counters once and add what they have gained."""
        if self._reason is not None:
            return
        before = self._clock()
        try:
            values = [counter.read() for counter in self._counters]
        except UnreadableMeter as error:
            self._reason = f"a counter was lost during the run: {error.reason}"
            return
        now = self._clock()
        self._slowest = max(self._slowest, now - before)
        if self._samples:
            elapsed, slack = now - self._last, self._slowest + self._update
            self._longest = max(self._longest, elapsed)
            for place, counter in enumerate(self._counters):
                try:
                    gain = counter.gain(self._values[place], values[place], elapsed, slack)
                except UnreadableMeter as error:
                    self._reason = error.reason
                    return
                self._gained[place] += gain
        else:
            self._first = now
        self._values, self._last = values, now
        self._samples += 1
        self._curve.append((now, self._joules()))

    def reading(self) -> Reading:
        """Return the sum in joules, or why there is none.

        A counter that stands still although what it counts always draws power makes the sum
        invalid; others that stand still are not named.
        """
        pairs = list(zip(self._counters, self._gained, strict=True))
        reason = self._reason
        length = self._last - self._first
        if reason is None and length <= self._update:
            reason = (
                f"a window of {length / 1e9:.3g} s is too short: "
                f"counters move every {self._update / 1e9:.3g} s"
            )
        for counter, gain in pairs:
            if reason is None and counter.always and not gain:
                reason = f"{counter.name}: its counter did not move, so it counts nothing here"
        joules = self._joules() if reason is None else None
        moved = [counter.name for counter, gain in pairs if gain]
        blurred = 2 * (self._update + self._slowest)  # at the ends
        return Reading(
            joules=joules,
            reason=reason,
            source=self.source if joules is None else self._named(moved),
            method=f"{self._method}, read every {self._interval:g} s, "
            f"at most {self._longest / 1e9:.3g} s apart",
            samples=self._samples,
            window_ns=length,
            uncertainty_j=joules * blurred / length if joules is not None and length else None,
            curve=tuple(self._curve),
            blur_ns=self._update + self._slowest,
        )

    def _joules(self) -> float:
        """Return the sum of what all have gained."""
        pairs = zip(self._counters, self._gained, strict=True)
        return sum((gain / counter.per_joule for counter, gain in pairs), 0.0)
