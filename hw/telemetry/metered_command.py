"""Measure the energy of a command, repeated until its mean is known well enough."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from statistics import fmean
from typing import Any

from crisp.errors import CrispError, unknown_name
from crisp.hardware.energy import Energy, Meter, StateDurations
from crisp.hw.telemetry.metering import metering
from crisp.hw.telemetry.run_command import CompletedCommand, run_command
from crisp.run.repeats import INTERRUPTED, NoMoreRunsError, StoppingRule, repeat
from crisp.statistics import CONFIDENCE, Interval, interval
from crisp.version import TOOL

VERSION = 1
NO_REST = "what the machine draws at rest was not measured"

_DEVICES = ("unified", "cuda", "cpu")  # from the most specific meter to the most common one
_UNKNOWN = StateDurations(0, 0, 0, 0)  # of a command's streams nothing is known


@dataclass(frozen=True)
class MeteredRun:
    """One run of the command, and its energy."""

    ended: CompletedCommand
    energy: Energy | str  # or why there is none

    def to_dict(self) -> dict[str, Any]:
        """Return what was measured, safe for JSON."""
        fields: dict[str, Any] = {"exit_code": self.ended.code, "seconds": self.ended.ns / 1e9}
        if isinstance(self.energy, str):
            return fields | {"joules": None, "unavailable": self.energy}
        energy = self.energy
        return fields | {
            "joules": energy.gross_j,
            "net_joules": energy.net_j,
            "window_ns": energy.window_ns,
            "samples": energy.samples,
            "uncertainty_j": energy.uncertainty_j,
            "method": energy.method,
            "source": energy.source,
        }


@dataclass(frozen=True)
class MeteredCommand:
    """The runs of a command that count."""

    command: Sequence[str]
    rule: StoppingRule
    runs: Sequence[MeteredRun]
    ended: str  # why there are no more runs
    code: int  # the exit code of the last run, whether it counts or not
    interrupt: KeyboardInterrupt | None = None  # that ended the repeats while no command ran

    @property
    def metered(self) -> list[Energy]:
        """The energy of each run; empty if there is no meter."""
        return [run.energy for run in self.runs if isinstance(run.energy, Energy)]

    @property
    def gross(self) -> Interval | None:
        """Joules of a run, gross; None: ``ended`` says why."""
        joules = [energy.gross_j for energy in self.metered]
        return interval(joules) if joules else None

    @property
    def net(self) -> Interval | None:
        """Joules of a run above what the machine draws at rest; None: not known."""
        joules = [energy.net_j for energy in self.metered if energy.net_j is not None]
        return interval(joules) if joules and len(joules) == len(self.metered) else None

    @property
    def watts(self) -> float | None:
        """The mean over runs of their mean power in W, gross."""
        powers = [one.gross_j / one.window_ns * 1e9 for one in self.metered if one.window_ns]
        return fmean(powers) if powers else None

    def to_dict(self, tokens: int | None) -> dict[str, Any]:
        """Return all results, safe for JSON. tokens: of one run; None: not known."""
        gross, net = self.gross, self.net
        fields: dict[str, Any] = {
            "version": VERSION,
            "tool": TOOL,
            "command": list(self.command),
            "exit_code": self.code,
            "seconds": fmean(run.ended.ns for run in self.runs) / 1e9,
            "joules": gross and gross.mean,
            "net_joules": net and net.mean,
            "watts": self.watts,
            "confidence": CONFIDENCE,
            "half_width_j": gross and gross.half_width,
            "half_width_net_j": net and net.half_width,
            "within": self.rule.within,
            "reached": gross is not None and self.rule.met(gross),
            "ended": self.ended,
            "unavailable": {},
            "runs": [run.to_dict() for run in self.runs],
        }
        if gross is None:
            fields["unavailable"] = {"joules": self.ended, "net_joules": self.ended}
        elif net is None:
            fields["unavailable"] = {"net_joules": NO_REST}
        if tokens is not None:
            fields["tokens"] = tokens
            for name in ("joules", "net_joules"):
                fields[f"{name}_per_token"] = fields[name] and fields[name] / tokens
        return fields


def measure_command(
    command: Sequence[str], meter: Meter | str, idle: float, rule: StoppingRule
) -> MeteredCommand:
    """Run a command as often as the rule asks, while it succeeds; once if nothing can be metered.

    meter: or why there is none. idle: seconds for which the machine is measured at rest before
    each run.
    """
    codes: list[int] = []

    def once() -> MeteredRun:
        run = _once(command, meter, idle)
        codes.append(run.ended.code)
        return run

    def again() -> MeteredRun:
        run = once()
        if run.ended.asked_to_end:
            raise NoMoreRunsError(INTERRUPTED)
        if run.ended.code:
            raise NoMoreRunsError(f"run {len(codes)} ended with exit code {run.ended.code}")
        if isinstance(run.energy, str):
            raise NoMoreRunsError(f"run {len(codes)} has no joules: {run.energy}")
        return run

    first = once()
    if isinstance(first.energy, str):
        return MeteredCommand(command, rule, [first], first.energy, codes[-1])
    if first.ended.asked_to_end:
        return MeteredCommand(command, rule, [first], INTERRUPTED, codes[-1])
    if first.ended.code:
        why = f"it ended with exit code {first.ended.code}"
        return MeteredCommand(command, rule, [first], why, codes[-1])
    series = repeat(first, again, _joules, rule)
    return MeteredCommand(command, rule, series.items, series.ended, codes[-1], series.interrupt)


def find_meter(name: str | None) -> Meter | str:
    """Return the meter whose name begins so; None: one that can be read, else why there is none.

    Raises CrispError for a name that no meter's or several meters' names begin with.
    """
    from crisp.hw.telemetry import meter_for, meters

    if name is not None:
        every_meter = meters()
        matches = [one for one in every_meter if one.name.lower().startswith(name.lower())]
        if len(matches) > 1:
            several = ", ".join(one.name for one in matches)
            raise CrispError(f"--meter {name}: could be {several}; name one of them")
        if not matches:
            raise unknown_name(name, [one.name for one in every_meter], "meter")
        return matches[0]
    for device in _DEVICES:
        meter = meter_for(device)
        if meter.probe().reason is None:
            return meter
    reasons = [(one.name, one.probe().reason or "can be read") for one in meters()]
    text = "; ".join(f"{name}: {reason.removeprefix(f'{name}: ')}" for name, reason in reasons)
    return f"no meter can be read ({text}); crisp doctor says what can be done"


def _once(command: Sequence[str], meter: Meter | str, idle: float) -> MeteredRun:
    if isinstance(meter, str):
        return MeteredRun(run_command(command), meter)
    with metering(meter, None, idle) as metered:
        metered.start()
        ended = run_command(command)
        metered.stop()
    return MeteredRun(ended, metered.energy(_UNKNOWN))


def _joules(run: MeteredRun) -> float:
    assert isinstance(run.energy, Energy)
    return run.energy.gross_j
