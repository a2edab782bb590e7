"""Metrics of each phase: what decoding takes over decoded tokens, what prompts take over theirs."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

from crisp.hardware.energy import Energy, EnergyOf, Spans, StateDurations
from crisp.run.timeline import RunTotals, StepLog, StreamTimes
from crisp.trace import DECODE

Metrics = dict[str, int | float | None]
Why = dict[str, str]  # of metrics that are None

PHASES = ("decode", "prefill")
TIMES = ("load_ms", "compute_ms", "layer_ms", "stall_ms")
JOULES = ("energy_j", "energy_net_j")
PARTS = tuple(f"{part}_per_token" for part in ("ms", "bytes", *TIMES, *JOULES))
TOTALS = ("link_ns", "compute_ns", "layer_ns", "stall_ns", *JOULES)
"""Of the whole run."""
OF_PHASES = tuple(
    f"{phase}_{name}" for phase in PHASES for name in ("tokens", "ns", "tokens_per_second", *PARTS)
)
"""All metrics that are of one phase."""
OF_ONE_PHASE = tuple(
    f"{part}_per_token" for part in ("bytes", "compute_ms", "layer_ms", "stall_ms", *JOULES)
)
"""Metrics that do not name a phase: of runs of a single one."""
NOT_RUN = {phase: f"no {phase} rows were run" for phase in PHASES}
NO_TIME = "its steps took no time"


@dataclass(frozen=True)
class PhaseSums:
    """What one phase of a run took. spans: when its steps ran, ns from the start of the run."""

    tokens: int
    ns: int
    n_bytes: int
    times: StreamTimes
    spans: Spans

    @property
    def states(self) -> StateDurations:
        """How long which streams were busy."""
        compute = self.times.compute + self.times.layer
        link, both = self.times.link - self.times.both, self.times.both
        return StateDurations(self.times.stall - link, link, compute - both, both)


def sums_of_phases(
    log: StepLog, sums: RunTotals, total_ns: int, n_bytes: int
) -> dict[str, PhaseSums]:
    """Return the sums of each phase that was run; they add up to the run's.

    What lies between steps or behind the last one, in a measured run, is decoding's if there is
    any.
    """
    end, rows, phase, _, _ = log.columns()
    took = np.diff(end, prepend=0)
    busy = sums.compute + sums.layer
    whole = StreamTimes(
        sums.compute,
        sums.layer,
        total_ns - busy,
        sums.link,
        sums.compute_hidden + sums.layer_hidden,
    )
    prompts = phase != DECODE
    if prompts.all() or not prompts.any():
        name = PHASES[int(prompts.all())]
        spans = ((0, total_ns),)
        return {name: PhaseSums(int(rows.sum()), int(took.sum()), n_bytes, whole, spans)}
    times = sums.prompt_times(prompts)
    loaded = int(np.diff(log.bytes_loaded(), prepend=0)[prompts].sum())
    rest = StreamTimes(*(one - other for one, other in zip(whole, times, strict=True)))
    return {
        name: PhaseSums(
            int(rows[of].sum()), int(took[of].sum()), part, stream_times, _spans(log, of)
        )
        for name, of, part, stream_times in (
            ("decode", ~prompts, n_bytes - loaded, rest),
            ("prefill", prompts, loaded, times),
        )
    }


def phase_metrics(
    phases: dict[str, PhaseSums],
    whole: Energy | str,
    energy: EnergyOf,
) -> tuple[Metrics, Why]:
    """Return `OF_PHASES` and `OF_ONE_PHASE`, and why some are None.

    whole: the joules of the run, or why there are none. energy: gives those of a phase.
    """
    metrics: Metrics = dict.fromkeys((*OF_ONE_PHASE, *OF_PHASES))
    why = {
        f"{phase}_{name}": NOT_RUN[phase]
        for phase in PHASES
        for name in ("tokens_per_second", *PARTS)
    }
    for phase in PHASES:
        metrics |= {f"{phase}_tokens": 0, f"{phase}_ns": 0}
    for phase, sums in phases.items():
        joules = whole if len(phases) == 1 else energy(sums.states, sums.spans)
        values, unknown = _metrics(sums, joules)
        for name, value in values.items():
            metrics[f"{phase}_{name}"] = value
            why.pop(f"{phase}_{name}", None)
        why |= {f"{phase}_{name}": reason for name, reason in unknown.items()}
    only = next(iter(phases)) if len(phases) == 1 else None
    for name in OF_ONE_PHASE:
        if only is None:
            why[name] = both_were_run(name)
        else:
            metrics[name] = metrics[f"{only}_{name}"]
            if f"{only}_{name}" in why:
                why[name] = why[f"{only}_{name}"]
    return metrics, why


def both_were_run(name: str) -> str:
    """Say why a metric that names no phase is None."""
    return f"prompts and decoding were run: see decode_{name} and prefill_{name}"


def _metrics(sums: PhaseSums, joules: Energy | str) -> tuple[Metrics, Why]:
    tokens, times = sums.tokens, sums.times
    milliseconds = {
        "ms": sums.ns, "load_ms": times.link, "compute_ms": times.compute, "layer_ms": times.layer,
        "stall_ms": times.stall,
    }  # fmt: skip
    metrics: Metrics = {
        "tokens": tokens,
        "ns": sums.ns,
        "tokens_per_second": tokens / (sums.ns / 1e9) if sums.ns else None,
        "bytes_per_token": sums.n_bytes / tokens,
        **{f"{name}_per_token": ns / tokens / 1e6 for name, ns in milliseconds.items()},
    }
    why = {} if sums.ns else {"tokens_per_second": NO_TIME}
    for name, (value, reason) in joules_of(joules).items():
        metrics[f"{name}_per_token"] = None if value is None else value / tokens
        if value is None:
            why[f"{name}_per_token"] = reason
    return metrics, why


def joules_of(joules: Energy | str) -> dict[str, tuple[float | None, str]]:
    """Return gross and net joules by the names of `JOULES`, each with why it is None."""
    gross, net = JOULES
    if isinstance(joules, str):
        return dict.fromkeys(JOULES, (None, joules))
    unmeasured = "what the idle machine draws was not measured"
    return {gross: (joules.gross_j, ""), net: (joules.net_j, unmeasured)}


def _spans(log: StepLog, of: np.ndarray[tuple[int], np.dtype[np.bool_]]) -> Spans:
    """Return when steps ran, those that follow one another as one span."""
    end = log.columns()[0]
    edges = np.diff(of.astype(np.int8), prepend=0, append=0)
    begins, stops = np.flatnonzero(edges == 1), np.flatnonzero(edges == -1) - 1
    starts = np.where(begins > 0, end[begins - 1], 0)
    return tuple(zip(starts.tolist(), end[stops].tolist(), strict=True))
