"""Energy: joules that always name their source; what cannot be read has a reason, never 0 J.

A meter is anything that counts or samples what a machine draws; this module knows only its
protocol.
"""

from __future__ import annotations

from bisect import bisect_left
from dataclasses import dataclass
from typing import Protocol, TypeAlias

from crisp.hardware.profile import HardwareProfile


@dataclass(frozen=True)
class StateDurations:
    """The time each combination of busy streams lasted, in ns."""

    idle: int
    link: int
    compute: int
    both: int

    @property
    def total(self) -> int:
        """The duration of the whole run."""
        return self.idle + self.link + self.compute + self.both


@dataclass(frozen=True)
class Energy:
    """The joules of a run: gross, and above what the idle machine would have drawn in that time."""

    gross_j: float
    net_j: float | None  # None: what the idle machine draws was not measured
    method: str
    source: str
    samples: int | None = None  # this and what follows: of a measurement
    window_ns: int | None = None
    uncertainty_j: float | None = None  # of gross_j


@dataclass(frozen=True)
class Reading:
    """The result of a meter: joules between start and stop, or the reason why there are none."""

    joules: float | None
    reason: str | None
    source: str  # what was read, such as the counters' names
    method: str  # how
    samples: int
    window_ns: int  # from the first sample to the last
    uncertainty_j: float | None = None  # None: unknown
    curve: tuple[tuple[int, float], ...] = ()  # (ns by the monotonic clock, joules until then)
    blur_ns: int = 0  # by which a sample may be late

    def __post_init__(self) -> None:
        if (self.joules is None) == (self.reason is None):
            raise ValueError("a reading has either joules or a reason")


@dataclass(frozen=True)
class Probe:
    """Whether a meter can be read on this machine, and why not."""

    source: str  # what would be read
    reason: str | None = None  # why it cannot be; None: it can
    remedy: str | None = None  # what the user can do about it


Spans: TypeAlias = tuple[tuple[int, int], ...]
"""(start, end) of parts of a run, one after the other, in ns from its start."""


class EnergyOf(Protocol):
    """Gives the joules of a run or of parts of it, or says why there are none."""

    def __call__(self, states: StateDurations, spans: Spans | None = None) -> Energy | str:
        """Return the energy in ``spans``, None: of all; states: how long what was busy in them."""


class Meter(Protocol):
    """A meter of energy. One that cannot be read says so in its reading, and raises nothing."""

    @property
    def name(self) -> str:
        """The meter's name, such as ``RAPL``."""

    def probe(self) -> Probe:
        """Return whether it can be read now."""

    def start(self) -> None:
        """Begin a window; windows may follow one another."""

    def sample(self) -> None:
        """Sample the current window once, in whatever thread."""

    def stop(self) -> Reading:
        """End the window that was begun, and return its reading."""


MOST_OPEN = 0.05  # of a part's joules: where the samples leave more open, it has none


def part_of(reading: Reading, spans: Spans) -> Reading:
    """Return what a meter counted in ``spans``, by the clock of its curve.

    Between two samples power is taken to be constant. The uncertainty takes it for anything from 0
    to twice that, from each end of a span to the nearer sample, and for as long as that may be
    late.
    """
    times = [ns for ns, _ in reading.curve]
    length = sum(end - start for start, end in spans)
    joules = left_open = 0.0
    for sign, at in ((sign, at) for span in spans for sign, at in zip((-1, 1), span, strict=True)):
        after = min(max(bisect_left(times, at), 1), len(times) - 1) if len(times) > 1 else 0
        if not after:
            break
        (since, low), (until, high) = reading.curve[after - 1 : after + 1]
        share = min(max((at - since) / (until - since), 0.0), 1.0) if until > since else 1.0
        joules += sign * (low + share * (high - low))
        if times[0] < at < times[-1]:
            watts = (high - low) / max(until - since, 1)  # J/ns
            left_open += watts * (min(at - since, until - at) + reading.blur_ns)
    reason = reading.reason
    if reason is None and len(times) < 2:
        reason = "the meter kept no samples to divide by phases"
    if reason is None and left_open > MOST_OPEN * joules:
        share = 100 * left_open / joules if joules > 0 else 100.0
        reason = (
            f"the meter's samples leave {share:.2g} % of the joules of these "
            f"{length / 1e9:.3g} s open, expected at most {100 * MOST_OPEN:.0f} %"
        )
    return Reading(
        joules if reason is None else None, reason, reading.source, reading.method,
        reading.samples, length, left_open if reason is None else None,
    )  # fmt: skip


def modelled_energy(
    hardware: HardwareProfile, states: StateDurations, spans: Spans | None = None
) -> Energy | str:
    """Return the energy by the profile's power in each state, or the reason why it has none.

    spans: no matter: ``states`` are already those of the part that is asked for.
    """
    power = hardware.power
    if power is None:
        return hardware.no_power or f"{hardware.name} has no power figures"
    watts_ns = (
        power.idle * states.idle
        + power.link * states.link
        + power.compute * states.compute
        + power.both * states.both
    )
    idle = power.idle * states.total
    return Energy(
        gross_j=watts_ns / 1e9,
        net_j=(watts_ns - idle) / 1e9,
        method="modelled: power of each state of the streams times its duration",
        source=f"hardware profile {hardware.name}",
    )


def measured_energy(run: Reading, idle: Reading | None) -> Energy | str:
    """Return the energy of a run by a meter's reading, or the reason why it has no joules.

    idle: a reading of the same machine doing nothing. The net energy is the gross less the idle
    watts over the run's window; it may come out below 0 where the run draws hardly more.
    """
    if run.joules is None:
        return run.reason or ""
    net, method = None, f"measured: {run.method}"
    if idle is not None and idle.joules is not None and idle.window_ns > 0:
        net = run.joules - idle.joules * run.window_ns / idle.window_ns
        watts, seconds = idle.joules / idle.window_ns * 1e9, idle.window_ns / 1e9
        method += f"; idle: {watts:.4g} W over {seconds:.3g} s before"
    return Energy(
        gross_j=run.joules,
        net_j=net,
        method=method,
        source=run.source,
        samples=run.samples,
        window_ns=run.window_ns,
        uncertainty_j=run.uncertainty_j,
    )
