"""Run: what a simulation or a measurement returns. Settings, metrics, and where they come from."""

from __future__ import annotations

import hashlib
import json
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt

from crisp.errors import CrispError, InvariantError
from crisp.files import atomic, check_readable
from crisp.hardware.cost import costs_by_row
from crisp.hardware.energy import Energy, StateDurations
from crisp.hardware.profile import CostModel
from crisp.model.spec import ModelSpec
from crisp.run.counters import Decided, FewestLoads
from crisp.run.schema import check
from crisp.run.timeline import RunTotals, StepLog, StepTimes
from crisp.trace import DECODE
from crisp.version import TOOL

VERSION = 1


@dataclass(frozen=True)
class Run:
    """One run. A metric that could not be had is None, and ``unavailable`` says why."""

    settings: dict[str, Any]
    metrics: dict[str, int | float | None]
    unavailable: dict[str, str]
    provenance: dict[str, Any]
    steps: StepTimes | None = field(default=None, compare=False, repr=False)
    """Of a simulation that was made here: files have none."""

    def to_dict(self) -> dict[str, Any]:
        """Return everything, safe for JSON."""
        return {
            "version": VERSION,
            "settings": self.settings,
            "metrics": self.metrics,
            "unavailable": self.unavailable,
            "provenance": self.provenance,
        }


@dataclass(frozen=True)
class HostTimes:
    """The time that a measured run's host spent on deciding, in ns (paper, Table 3)."""

    lookup: int  # from a router's answer to widths, but for waiting until the answer is there
    queue: int  # in the scheduler: orders, evictions, which task is next
    coordination: int  # around it: handing operations to the streams, hearing of their ends


def provenance(settings: dict[str, Any], sums: RunTotals, energy: Energy | None) -> dict[str, Any]:
    """Return which program made a run of which inputs; the hash covers trace, profile and seed."""
    origin = None
    if energy is not None:  # its joules are metrics
        fields = {key: value for key, value in vars(energy).items() if value is not None}
        origin = {key: value for key, value in fields.items() if key not in ("gross_j", "net_j")}
    return {
        "tool": TOOL,
        "inputs_sha256": _digest(settings),
        "timeline_sha256": sums.digest(),
        "energy": origin,
    }


def _digest(settings: dict[str, Any]) -> str:
    return hashlib.sha256(json.dumps(settings, sort_keys=True).encode()).hexdigest()


def to_json(runs: Run | list[Run]) -> str:
    """Return a run, or a list of them, as JSON text: the same run gives the same bytes."""
    content = runs.to_dict() if isinstance(runs, Run) else [run.to_dict() for run in runs]
    return json.dumps(content, indent=1, allow_nan=False) + "\n"


def save_runs(runs: Run | list[Run], path: str | Path) -> None:
    """Write a run, or a list of them, as ``run.json``."""
    with atomic(path) as temporary:
        temporary.write_text(to_json(runs), encoding="utf-8")


def load_runs(path: str | Path) -> list[Run]:
    """Return the runs in a file of `save_runs`, one at least; CrispError for another file."""
    check_readable(path)
    try:
        content = json.loads(Path(path).read_text(encoding="utf-8"))
        json.dumps(content, allow_nan=False, ensure_ascii=False).encode()  # numbers and text, all
    except OSError as error:
        raise CrispError(f"{path}: cannot be read: {error.strerror or error}") from error
    except (ValueError, RecursionError) as error:
        raise CrispError(f"{path}: is not a run file") from error
    runs = content if isinstance(content, list) else [content]
    if not runs or not all(isinstance(run, dict) and "version" in run for run in runs):
        raise CrispError(f"{path}: is not a run file")
    for number, run in enumerate(runs, 1):
        if run["version"] != VERSION:
            raise CrispError(f"{path}: made by another version of crisp")
        where = str(path) if run is content else f"{path}: run {number}"
        check(run, where)
        if run["provenance"].get("inputs_sha256") != _digest(run["settings"]):
            raise CrispError(f"{where}: its settings were changed after it was made")
    parts = ("settings", "metrics", "unavailable", "provenance")
    return [Run(**{part: run[part] for part in parts}) for run in runs]


def nth_run(runs: Sequence[Run], number: int, path: Path) -> Run:
    """Return one of a file's runs, counted from 1; CrispError for one that it does not hold."""
    if not 1 <= number <= len(runs):
        raise CrispError(f"--run {number}: {path} holds {len(runs)} runs, counted from 1")
    return runs[number - 1]


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
    energy: Callable[[StateDurations], Energy | str],
    host: HostTimes | None = None,
    belady: FewestLoads | None = None,
    sequence: npt.NDArray[np.int32] | None = None,
) -> Run:
    """Return the run that has ended, with its metrics.

    cost: of a simulated machine; None: times were measured, and bounds are unknown. initial: blocks
    of each expert that were resident from the start. energy: joules from how long which streams
    were busy, or why there are none. host: of a measured run. belady: the least that any
    cache could have loaded, see `crisp.scheduler.belady_bound`, and sequence: of each row of the
    trace; both of a simulated run.

    Raises InvariantError if its sums contradict each other.
    """
    end, rows, phase, opens, closes = log.columns()
    took = np.diff(end, prepend=0)
    decode = phase == DECODE
    tokens, decoded = int(rows.sum()), int(rows[decode].sum())
    prefilled = tokens - decoded
    blocks, ahead = scheduler.blocks_loaded, scheduler.ahead
    both = sums.compute_hidden + sums.layer_hidden
    busy = sums.compute + sums.layer
    states = StateDurations(total_ns - sums.link - busy + both, sums.link - both, busy - both, both)
    _check(scheduler, sums, states, total_ns, belady, timed=cost is not None)
    stall = total_ns - busy
    n_bytes = scheduler.bytes_loaded

    metrics: dict[str, int | float | None] = {
        "total_ns": total_ns,
        "tokens": tokens,
        "tasks": scheduler.tasks,
        "hits": scheduler.hits,
        "partial_hits": scheduler.partial_hits,
        "skipped": skipped,
        "blocks_loaded": blocks,
        "bytes_loaded": n_bytes,
        "initial_bytes": _initial_bytes(spec, initial or ()),
        "bytes_per_token": n_bytes / tokens,
        "hit_rate": _share(scheduler.hits, scheduler.tasks),
        "partial_hit_rate": _share(scheduler.partial_hits, scheduler.tasks),
        "link_busy": _share(sums.link, total_ns),
        "compute_busy": _share(busy, total_ns),
        "compute_hidden": _share(sums.compute_hidden, sums.compute),
        "link_hidden": _share(both, sums.link),
        "bubble": _share(stall, total_ns),
        "stall_ms_per_token": stall / tokens / 1e6,
        "compute_ms_per_token": sums.compute / tokens / 1e6,
        "layer_ms_per_token": sums.layer / tokens / 1e6,
    }
    why = {name: "nothing to take a share of" for name, value in metrics.items() if value is None}
    bounds, unknown = _bounds(spec, cost, sums, n_bytes, belady, len(end))
    metrics |= {name: whole and whole / tokens for name, whole in bounds.items()}
    why |= unknown

    latency = np.repeat(took[decode], rows[decode]) / 1e6
    speed = decoded / (int(took[decode].sum()) / 1e9) if decoded and latency.any() else None
    metrics["tokens_per_second"] = speed
    metrics["ms_per_token_mean"] = float(latency.mean()) if decoded else None
    for percent in (50, 95, 99):
        quantile = float(np.percentile(latency, percent)) if decoded else None
        metrics[f"ms_per_token_p{percent}"] = quantile
    for name in (
        "tokens_per_second",
        *(f"ms_per_token_{q}" for q in ("mean", "p50", "p95", "p99")),
    ):
        if metrics[name] is None:
            why[name] = "no decode rows were run"

    metrics["ttft_ms"] = metrics["prefill_tokens_per_second"] = None
    if closes.any():
        begin = (end - took)[opens == 1]
        metrics["ttft_ms"] = float((end[closes == 1] - begin).mean()) / 1e6
    else:
        why["ttft_ms"] = "no prompt was run to its end"
    if prefilled:
        metrics["prefill_tokens_per_second"] = prefilled / (int(took[~decode].sum()) / 1e9)
    else:
        why["prefill_tokens_per_second"] = "no prefill rows were run"

    for name in ("useful", "late", "wasted"):
        key = f"prefetch_{name}_bytes"
        metrics[key] = None if ahead is None else getattr(ahead, f"{name}_bytes")
        if ahead is None:
            why[key] = "the policy does not prefetch"

    for name in ("lookup", "queue", "coordination"):
        for per, number in (("event", scheduler.event + 1), ("token", tokens)):
            key = f"{name}_us_per_{per}"
            metrics[key] = None
            if host is None:
                why[key] = "a simulated host takes no time"
            elif number:
                metrics[key] = getattr(host, name) / number / 1e3
            else:
                why[key] = "there was no event"

    steps = None if sequence is None else log.steps(sequence)
    joules = energy(states)
    names = {"energy_j_per_token": "gross_j", "energy_net_j_per_token": "net_j"}
    if isinstance(joules, str):
        metrics |= dict.fromkeys(names)
        why |= dict.fromkeys(names, joules)
        return Run(settings, metrics, why, provenance(settings, sums, None), steps)
    for name, part in names.items():
        metrics[name] = getattr(joules, part) and getattr(joules, part) / tokens
        if metrics[name] is None:
            why[name] = "what the idle machine draws was not measured"
    return Run(settings, metrics, why, provenance(settings, sums, joules), steps)


def _bounds(
    spec: ModelSpec,
    cost: CostModel | None,
    sums: RunTotals,
    n_bytes: int,
    belady: FewestLoads | None,
    steps: int,
) -> tuple[dict[str, float | None], dict[str, str]]:
    """Return (lower bounds of time in ms and of bytes, the reasons of those that are None)."""
    names = ("io", "belady", "order", "compute", "memory")
    bounds: dict[str, float | None] = dict.fromkeys(
        ("belady_bytes_per_token", *(f"{name}_bound_ms_per_token" for name in names))
    )
    if cost is None or belady is None:
        reason = "the times of single activities, undisturbed, were not measured"
        why = dict.fromkeys(bounds, reason)
        why["belady_bytes_per_token"] = "it is counted of simulated runs"
        return bounds, why
    fewest = belady.n_bytes
    bounds |= {
        "belady_bytes_per_token": fewest,
        "io_bound_ms_per_token": cost.io_bound(n_bytes) / 1e6,
        "belady_bound_ms_per_token": cost.io_bound(fewest) / 1e6,
        "order_bound_ms_per_token": sums.order_bound / 1e6,
        "compute_bound_ms_per_token": sums.alone / 1e6,
    }
    if cost.memory_bandwidth is None:
        return bounds, {"memory_bound_ms_per_token": "link and compute share no memory"}
    computed = sums.computed_by_layer()
    by_row = zip(spec.moe_layers, costs_by_row(cost, spec), strict=True)
    traffic = cost.load_traffic(n_bytes)
    traffic += sum(own.compute_traffic(0, computed.get(layer, 0)) for layer, own in by_row)
    traffic += sum(cost.layer_traffic(layer) for layer in range(spec.n_layers)) * steps
    return bounds | {"memory_bound_ms_per_token": traffic / cost.memory_bandwidth * 1e3}, {}


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
