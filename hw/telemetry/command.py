"""A command under a meter, as often as its joules ask for."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from statistics import fmean
from typing import Any

from crisp.errors import CrispError, unknown_name
from crisp.hardware.energy import Energy, Meter, StateDurations
from crisp.hw.telemetry.child import CompletedCommand, run
from crisp.hw.telemetry.metering import metering
from crisp.run.repeats import INTERRUPTED, NoMoreRunsError, StoppingRule, repeat
from crisp.statistics import CONFIDENCE, Interval, interval
from crisp.version import TOOL

VERSION = 1
NO_REST = "what the machine draws at rest was not measured"

_DEVICES = ("unified", "cuda", "cpu")  # from the most particular meter to the one most have
_UNKNOWN = StateDurations(0, 0, 0, 0)  # a command's streams


@dataclass(frozen=True)
class MeteredRun:
    """One run of the command; energy: or why there is none."""

    ended: CompletedCommand
    energy: Energy | str

    def to_dict(self) -> dict[str, Any]:
        """What was measured, safe for JSON."""
        told: dict[str, Any] = {"exit_code": self.ended.code, "seconds": self.ended.ns / 1e9}
        if isinstance(self.energy, str):
            return told | {"joules": None, "unavailable": self.energy}
        own = self.energy
        return told | {
            "joules": own.gross_j,
            "net_joules": own.net_j,
            "window_ns": own.window_ns,
            "samples": own.samples,
            "uncertainty_j": own.uncertainty_j,
            "method": own.method,
            "source": own.source,
        }


@dataclass(frozen=True)
class MeteredCommand:
    """The runs that count. code: of the last one, whether it counts or not. interrupt: what ended
    the repeats, if no command was running then.
    """

    command: Sequence[str]
    rule: StoppingRule
    runs: Sequence[MeteredRun]
    ended: str  # why there are no more
    code: int
    interrupt: KeyboardInterrupt | None = None

    @property
    def metered(self) -> list[Energy]:
        """The energy of each run; none of them if there is no meter."""
        return [run.energy for run in self.runs if isinstance(run.energy, Energy)]

    @property
    def gross(self) -> Interval | None:
        """Joules of a run; None: see ``ended``."""
        joules = [energy.gross_j for energy in self.metered]
        return interval(joules) if joules else None

    @property
    def net(self) -> Interval | None:
        """Joules of a run above what the machine draws at rest; None: that is not known."""
        known = [energy.net_j for energy in self.metered if energy.net_j is not None]
        return interval(known) if known and len(known) == len(self.metered) else None

    @property
    def watts(self) -> float | None:
        """The mean over runs of their mean power, gross."""
        known = [one.gross_j / one.window_ns * 1e9 for one in self.metered if one.window_ns]
        return fmean(known) if known else None

    def to_dict(self, tokens: int | None) -> dict[str, Any]:
        """All of it, safe for JSON. tokens: of a run."""
        gross, net = self.gross, self.net
        told: dict[str, Any] = {
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
            told["unavailable"] = {"joules": self.ended, "net_joules": self.ended}
        elif net is None:
            told["unavailable"] = {"net_joules": NO_REST}
        if tokens is not None:
            told["tokens"] = tokens
            for name in ("joules", "net_joules"):
                told[f"{name}_per_token"] = told[name] and told[name] / tokens
        return told


def measure(
    command: Sequence[str], meter: Meter | str, idle: float, rule: StoppingRule
) -> MeteredCommand:
    """Run a command as often as the rule asks while it succeeds; once where nothing can be metered.

    meter: or why there is none. idle: seconds at rest before each run.
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
    """The meter whose name begins so, or one that can be read; else why there is none.

    Raises CrispError for a name that is no meter's, or that of several.
    """
    from crisp.hw.telemetry import chosen, meters

    if name is not None:
        known = meters()
        found = [one for one in known if one.name.lower().startswith(name.lower())]
        if len(found) > 1:
            several = ", ".join(one.name for one in found)
            raise CrispError(f"--meter {name}: could be {several}; name one of them")
        if not found:
            raise unknown_name(name, [one.name for one in known], "meter")
        return found[0]
    for device in _DEVICES:
        meter = chosen(device)
        if meter.probe().reason is None:
            return meter
    reasons = [(one.name, one.probe().reason or "can be read") for one in meters()]
    told = "; ".join(f"{name}: {reason.removeprefix(f'{name}: ')}" for name, reason in reasons)
    return f"no meter can be read ({told}); crisp doctor says what can be done"


def _once(command: Sequence[str], meter: Meter | str, idle: float) -> MeteredRun:
    if isinstance(meter, str):
        return MeteredRun(run(command), meter)
    with metering(meter, None, idle) as metered:
        metered.start()
        ended = run(command)
        metered.stop()
    return MeteredRun(ended, metered.energy(_UNKNOWN))


def _joules(run: MeteredRun) -> float:
    assert isinstance(run.energy, Energy)
    return run.energy.gross_j
