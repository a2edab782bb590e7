"""finish(): the metrics of a run that has ended."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import numpy.typing as npt

from crisp.errors import InvariantError
from crisp.hardware.energy import Energy, EnergyOf, StateDurations
from crisp.hardware.profile import CostModel
from crisp.model.spec import ModelSpec
from crisp.run.counters import Decided, FewestLoads
from crisp.run.metrics.bounds import time_bounds
from crisp.run.metrics.phases import (
    NO_TIME,
    NOT_RUN,
    Metrics,
    Why,
    joules_of,
    phase_metrics,
    sums_of_phases,
)
from crisp.run.result import Run, hash_settings
from crisp.run.timeline import RunTotals, StepLog
from crisp.trace import DECODE
from crisp.version import TOOL


@dataclass(frozen=True)
class HostTimes:
    """The time that a measured run's host spent on deciding, in ns (paper, Table 3)."""

    lookup: int  # from a router's answer to widths, but for waiting until the answer is there
    queue: int  # in the scheduler: orders, evictions, which task is next
    coordination: int  # around it: handing operations to the streams, hearing of their ends


def finish(
    settings: dict[str, Any],
    spec: ModelSpec,
    *,
    cost: CostModel | None,
    scheduler: Decided,
    sums: RunTotals,
    log: StepLog,
    total_ns: int,
    skipped: int,
    initial: Sequence[int] | None,
    energy: EnergyOf,
    host: HostTimes | None = None,
    belady: FewestLoads | None = None,
    sequence: npt.NDArray[np.int32] | None = None,
) -> Run:
    """Return the run that has ended, with its metrics.

    cost: of a simulated machine; None: times were measured, and bounds are unknown. initial: blocks
    of each expert that were resident from the start. energy: gives the joules of all, or of a
    phase. host: of a measured run. belady: the least that any
    cache could have loaded, see `crisp.scheduler.belady_bound`, and sequence: of each row of the
    trace; both of a simulated run.

    Raises InvariantError if its sums contradict each other.
    """
    end, rows, phase, opens, closes = log.columns()
    took = np.diff(end, prepend=0)
    tokens = int(rows.sum())
    both = sums.compute_hidden + sums.layer_hidden
    busy = sums.compute + sums.layer
    states = StateDurations(total_ns - sums.link - busy + both, sums.link - both, busy - both, both)
    _check(scheduler, sums, states, total_ns, belady, timed=cost is not None)
    n_bytes = scheduler.bytes_loaded

    metrics: Metrics = {
        "total_ns": total_ns,
        "link_ns": sums.link,
        "compute_ns": sums.compute,
        "layer_ns": sums.layer,
        "stall_ns": total_ns - busy,
        "tokens": tokens,
        "tasks": scheduler.tasks,
        "hits": scheduler.hits,
        "partial_hits": scheduler.partial_hits,
        "skipped": skipped,
        "blocks_loaded": scheduler.blocks_loaded,
        "bytes_loaded": n_bytes,
        "initial_bytes": _initial_bytes(spec, initial or ()),
        "hit_rate": _share(scheduler.hits, scheduler.tasks),
        "partial_hit_rate": _share(scheduler.partial_hits, scheduler.tasks),
        "link_busy": _share(sums.link, total_ns),
        "compute_busy": _share(busy, total_ns),
        "compute_hidden": _share(sums.compute_hidden, sums.compute),
        "link_hidden": _share(both, sums.link),
        "bubble": _share(total_ns - busy, total_ns),
    }
    why = {name: "nothing to take a share of" for name, value in metrics.items() if value is None}
    joules = energy(states, None)
    for name, (value, reason) in joules_of(joules).items():
        metrics[name] = value
        if value is None:
            why[name] = reason
    phases = sums_of_phases(log, sums, total_ns, n_bytes)
    bounds, unknown = time_bounds(spec, cost, sums, n_bytes, belady, len(end))
    for values, reasons in (
        phase_metrics(phases, joules, energy),
        ({name: whole and whole / tokens for name, whole in bounds.items()}, unknown),
        _latencies(took, rows, phase == DECODE),
        _first_tokens(end - took, end, opens == 1, closes == 1),
        _prefetched(scheduler),
        _host_times(host, scheduler.event + 1, tokens),
    ):
        metrics |= values
        why |= reasons
    steps = None if sequence is None else log.steps(sequence)
    origin = None if isinstance(joules, str) else joules
    return Run(settings, metrics, why, provenance(settings, sums, origin), steps)


def _latencies(
    took: npt.NDArray[np.int64], rows: npt.NDArray[np.int64], decode: npt.NDArray[np.bool_]
) -> tuple[Metrics, Why]:
    """Return the times of decoded tokens, of the steps' times and rows [steps]."""
    quantiles = (50, 95, 99)
    names = ("mean", *(f"p{percent}" for percent in quantiles))
    names = tuple(f"ms_per_token_{name}" for name in names)
    if not decode.any():
        names = ("tokens_per_second", *names)
        return dict.fromkeys(names), dict.fromkeys(names, NOT_RUN["decode"])
    ms = np.repeat(took[decode], rows[decode]) / 1e6
    metrics: Metrics = dict(
        zip(names, [float(ms.mean()), *np.percentile(ms, quantiles).tolist()], strict=True)
    )
    ns = int(took[decode].sum())
    metrics["tokens_per_second"] = len(ms) / (ns / 1e9) if ns else None
    return metrics, {} if ns else {"tokens_per_second": NO_TIME}


def _first_tokens(
    start: npt.NDArray[np.int64],
    end: npt.NDArray[np.int64],
    opens: npt.NDArray[np.bool_],
    closes: npt.NDArray[np.bool_],
) -> tuple[Metrics, Why]:
    """Return the mean time of a prompt, of steps' starts and ends [steps]."""
    if not closes.any():
        return {"ttft_ms": None}, {"ttft_ms": "no prompt was run to its end"}
    return {"ttft_ms": float((end[closes] - start[opens]).mean()) / 1e6}, {}


def _prefetched(scheduler: Decided) -> tuple[Metrics, Why]:
    ahead, names = scheduler.ahead, ("useful_bytes", "late_bytes", "wasted_bytes")
    if ahead is None:
        metrics = dict.fromkeys(f"prefetch_{name}" for name in names)
        return metrics, dict.fromkeys(metrics, "the policy does not prefetch")
    return {f"prefetch_{name}": getattr(ahead, name) for name in names}, {}


def _host_times(host: HostTimes | None, events: int, tokens: int) -> tuple[Metrics, Why]:
    metrics, why = Metrics(), Why()
    for name in ("lookup", "queue", "coordination"):
        for per, number in (("event", events), ("token", tokens)):
            key = f"{name}_us_per_{per}"
            metrics[key] = None
            if host is None:
                why[key] = "a simulated host takes no time"
            elif number:
                metrics[key] = getattr(host, name) / number / 1e3
            else:
                why[key] = "there was no event"
    return metrics, why


def provenance(settings: dict[str, Any], sums: RunTotals, energy: Energy | None) -> dict[str, Any]:
    """Return which program made a run of which inputs; the hash covers trace, profile and seed."""
    origin = None
    if energy is not None:  # its joules are metrics
        fields = {key: value for key, value in vars(energy).items() if value is not None}
        origin = {key: value for key, value in fields.items() if key not in ("gross_j", "net_j")}
    return {
        "tool": TOOL,
        "inputs_sha256": hash_settings(settings),
        "timeline_sha256": sums.digest(),
        "energy": origin,
    }


def _initial_bytes(spec: ModelSpec, initial: Sequence[int]) -> int:
    """Return the bytes of what was resident from the start: blocks of each expert."""
    n = spec.n_experts
    return sum(
        sum(initial[row * n : (row + 1) * n]) * size
        for row, size in enumerate(spec.row_block_bytes)
    )


def _share(part: int, whole: int) -> float | None:
    return part / whole if whole else None


def _check(
    scheduler: Decided,
    sums: RunTotals,
    states: StateDurations,
    total_ns: int,
    belady: FewestLoads | None,
    timed: bool,
) -> None:
    """Raise InvariantError unless sums counted in different places agree; timed: by a model."""
    facts = {
        "an event was left unfinished": scheduler.done,
        "blocks issued are not the blocks that landed": (
            0 <= scheduler.blocks_loaded - sums.blocks_landed <= (scheduler.ahead is not None)
        ),
        "fewer blocks were loaded than any cache could": (
            belady is None
            or (
                belady.blocks <= scheduler.blocks_loaded
                and belady.n_bytes <= scheduler.bytes_loaded
            )
        ),
        "the states do not add up to the run": min(vars(states).values()) >= 0
        and states.total == total_ns,
        "the run is shorter than the best order of its tasks": (
            not timed or sums.order_bound <= total_ns
        ),
    }
    for broken, holds in facts.items():
        if not holds:
            raise InvariantError(f"{broken}: {states}, {vars(sums)}")
