"""The published figures once more, from the route traces alone; and what other readings give."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np

from benchmarks.logs.published import (
    MIB,
    MODELS,
    Metrics,
    Model,
    read_curve,
    read_flags,
    read_metrics,
)
from benchmarks.logs.times import time_fits
from crisp.diagnose.calls import Calls
from crisp.diagnose.contracts import CONTRACTS, CURVES
from crisp.diagnose.logged_run import LoggedRun
from crisp.diagnose.reads import Reads, cost_of
from crisp.diagnose.replay import Replayed, replay
from crisp.trace import PREFILL, RoutingTrace
from crisp.trace.importing.engines import EngineLog, read_log

CONTRACT = CONTRACTS["bigmoeonedge"]


def logged_run(data: Path, model: Model) -> LoggedRun:
    """Read one of the three route traces."""
    log = read_log([model.log(data)])
    assert isinstance(log, EngineLog) and log.expert_bytes is not None
    return LoggedRun(model.log(data).name, log.trace, log.expert_bytes, notes=log.notes)


def reproduce(data: Path, *, curves: bool = True) -> list[dict[str, Any]]:
    """Return, for each model, what is published and what is recomputed; curves: half a minute."""
    return [_one(data, model, curves) for model in MODELS]


def _one(data: Path, model: Model, curves: bool) -> dict[str, Any]:
    run, metrics = logged_run(data, model), read_metrics(data, model)
    calls = run.calls()
    done = replay(calls, CONTRACT.policy, metrics.budget_bytes)
    aligned = CONTRACT.counting.aligned * run.projections
    read = done.read_bytes(aligned)
    decoded = calls.token >= 0
    by_token = np.bincount(calls.token[decoded], read[decoded]).astype(np.int64)
    rates = [f"{100 * rate:.2f}" for rate in done.cumulative()]
    flags, found = read_flags(data, model), done.hit[np.repeat(decoded, done.per_call()[:, 0])]
    sizes = sorted(set(run.expert_bytes))
    return {
        "model": model.title,
        "k": run.trace.k,
        "layers": len(run.trace.moe_layers),
        "experts": run.trace.header.n_experts,
        "expert_bytes": sizes,
        "budget_mib": metrics.budget_bytes // MIB,
        "prompt": int((run.trace.phase == PREFILL).sum()),
        "tokens": calls.tokens,
        "absent": int((run.trace.experts[:, :, 0] < 0).sum()),
        "hit": [model.hit_percent, 100 * done.hit_rate()],
        "mib": [float(metrics.read_bytes.mean() / MIB), float(by_token.mean() / MIB)],
        "worst_token_bytes": int(np.abs(by_token - metrics.read_bytes).max()),
        "rates_equal": sum(a == b for a, b in zip(rates, metrics.hit_percent, strict=True)),
        "flags_equal": int((flags == found).sum()),
        "flags": len(flags),
        "curve": _curve(data, model, calls) if curves else [],
        "readings": _readings(run, metrics),
        "engines": _engines(run, metrics.budget_bytes),
        "times": time_fits(metrics),
    }


def _curve(data: Path, model: Model, calls: Calls) -> list[dict[str, Any]]:
    """Return every published cell beside the replayed one, both as text."""
    cells = []
    for (mib, rule), published in read_curve(data, model).items():
        if rule not in CURVES:
            continue  # random: its draws are another program's
        done = replay(calls, CURVES[rule], mib * MIB)
        found = (
            f"{100 * done.hit_rate():.3f}",
            f"{100 * done.hit_rate(decode=True):.3f}",
            f"{done.read_bytes().sum() / MIB:.1f}",
        )
        cells.append({"mib": mib, "rule": rule, "published": published, "found": found})
    return cells


def _engines(run: LoggedRun, budget: int) -> dict[str, tuple[float, float]]:
    """Return (hit %, MiB a token) of decoded tokens by each engine's contract."""
    found = {}
    for name, contract in CONTRACTS.items():
        done = replay(run.calls(contract.counting.lookups), contract.policy, budget)
        cost = cost_of(Reads.of(done, contract.counting.aligned * run.projections), None)
        found[name] = 100 * cost.decode_hit_rate, cost.bytes_per_token / MIB
    return found


def _readings(run: LoggedRun, metrics: Metrics) -> dict[str, float]:
    """Return the hit rates, in percent, that wrong readings of the same trace give."""

    def rate(calls: Calls) -> float:
        done: Replayed = replay(calls, CONTRACT.policy, metrics.budget_bytes)
        return 100 * done.hit_rate()

    trace, sizes = run.trace, run.expert_bytes
    moe = list(trace.moe_layers)
    mean = sum(sizes[layer] for layer in moe) // len(moe)
    return {
        "of a prompt only its last token": rate(Calls.from_trace(_last_of_prompts(trace), sizes)),
        "prompt token by token": rate(Calls.from_trace(trace, sizes, prompts="by token")),
        "one mean expert size": rate(Calls.from_trace(trace, (mean,) * trace.layers)),
    }


def _last_of_prompts(trace: RoutingTrace) -> RoutingTrace:
    """Return what is left of a pruned prompt where incomplete rows are dropped, and the rest."""
    return trace.select(slice(int((trace.phase == PREFILL).sum()) - 1, None))
