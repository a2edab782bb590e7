"""The cells of the page's tables, and how each is run."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, replace
from fractions import Fraction
from functools import lru_cache
from pathlib import Path
from typing import Any

import numba
import numpy as np

from benchmarks.caches import theirs
from crisp.hardware.profile import HardwareProfile
from crisp.model.spec import ModelSpec
from crisp.policy import Budget, named
from crisp.policy.widths.base import Full
from crisp.run.case import Case, Conditions
from crisp.run.inputs import LoadedInputs
from crisp.scheduler.oracle import NEVER, Future, soonest
from crisp.sim.fast_simulate import fast_simulate
from crisp.sim.hardware import hardware_profile
from crisp.trace import RoutingTrace
from crisp.trace.bundled import bundled_traces
from crisp.trace.fitting import fit_to_trace

BUDGETS = ("10%", "20%", "30%", "40%", "50%")
TEXTS = ("code", "docs", "kjv")
BUNDLED = ("tiny-mixtral", "tiny-deepseek")
REAL = "gpt-oss-20b"
TOKENS = 8000  # of its trace that are run, all layers
CACHES = (
    "none", "static", "random", "fifo", "lru", "least-stale", "lfu", "lfu-in-cache", "lfru", "slru",
    "tier-aware", "belady-forced",
)  # fmt: skip
GLOBAL = ("fifo", "lru", "least-stale", "lfu", "lfru", "slru")
FEWER = ("10%", "30%", "50%")
SUFFIXES = ("lru", "lfu", "suffix-lru", "suffix-lfu")
PREFETCHERS = ("none", "previous", "guess", "frequent", "perfect")
ORDERS = ("widest", "johnson", "fifo", "narrowest", "resident-first", "random")
SEEDS = (0, 1, 2)  # of random orders
SHIPPED, EXCHANGED = ("rtx4090-pcie4", "paper-table1"), "paper-table1, exchanged"
# Of the small models the routing alone is taken, for experts that are worth loading.
SIZES = {"tiny-mixtral": "mixtral-8x7b", "tiny-deepseek": "deepseek-moe-16b"}
BITS = Fraction("4.25")
# What is recorded of a section's runs: parts of the cell, and metrics.
_PREFETCHED = ("prefetch_useful_bytes", "prefetch_late_bytes", "prefetch_wasted_bytes")
RECORDED: dict[str, tuple[tuple[str, ...], tuple[str, ...]]] = {
    "caches": (("by_access",), ()),
    "global": ((), ()),
    "suffixes": ((), ()),
    "prefetchers": ((), ("total_ns", *_PREFETCHED)),
    "orders": (("machine", "granularity", "batch"), ("total_ns",)),
}


@dataclass(frozen=True)
class Cell:
    """A run of the page. ``policy``: the name, and the parts that replace its own."""

    section: str
    trace: str
    policy: tuple[str, dict[str, Any]]
    budget: str
    machine: str = SHIPPED[0]
    by_access: bool = False
    granularity: str = "expert"
    batch: int = 1

    def named(self) -> dict[str, Any]:
        """Return what the run is, for its record."""
        name, parts = self.policy
        parts_recorded = {part: getattr(self, part) for part in RECORDED[self.section][0]}
        shown = {"section": self.section, "trace": self.trace, "budget": self.budget}
        return {**shown, "policy": name, **parts, **parts_recorded}


def cells(real: bool) -> Iterator[Cell]:
    """Yield all runs of the page; real: whether the trace of gpt-oss-20b is there."""
    small = [f"{model}-{text}" for model in BUNDLED for text in TEXTS]
    for trace in [*small, *([REAL] if real else [])]:
        for name in CACHES:
            for single in (False, True):
                for budget in BUDGETS:
                    yield Cell("caches", trace, ("lru", {"cache": name}), budget, by_access=single)
        for name in GLOBAL:
            for budget in FEWER:
                yield Cell("global", trace, ("lru", {"cache": name, "scope": "global"}), budget)
    for trace in small:
        for budget in BUDGETS:
            for name in SUFFIXES:
                parts = {"cache": name, "unit": "block"}
                yield Cell("suffixes", trace, ("crisp", parts), budget)
        for budget in FEWER:
            for name in PREFETCHERS:
                yield Cell("prefetchers", trace, ("lru", {"prefetch": name}), budget)
        for order in [*ORDERS[:-1], *(f"random({seed})" for seed in SEEDS)]:
            for where in (*SHIPPED, EXCHANGED):
                for granularity in ("expert", "block"):
                    for batch in (1, 8):
                        yield Cell(
                            "orders", trace, ("crisp", {"order": order}), "30%", where,
                            granularity=granularity, batch=batch,
                        )  # fmt: skip


@lru_cache(maxsize=2)
def inputs_of(file: Path) -> LoadedInputs:
    """Read a trace: the profile is counted from its first half, the rest is run."""
    return LoadedInputs.from_trace(RoutingTrace.load(file))


def geometry(trace: str, routing: RoutingTrace, sized: bool) -> ModelSpec:
    """Return the model that a trace is run with.

    sized: experts as large as those of a model in use.
    """
    if trace == REAL:
        return fit_to_trace(ModelSpec.named(REAL), routing)
    if sized:
        model = ModelSpec.named(SIZES[trace.rpartition("-")[0]]).with_(bits=BITS)
        return fit_to_trace(
            replace(model, n_experts=routing.header.n_experts, top_k=routing.k), routing
        )
    assert routing.header.spec is not None
    return fit_to_trace(ModelSpec.from_dict(routing.header.spec, trace), routing)


def file_of(trace: str, real: Path | None) -> Path:
    """Return the file of a trace; real: that of gpt-oss-20b."""
    if trace == REAL:
        assert real is not None
        return real
    return bundled_traces()[trace]


def by_access(trace: RoutingTrace) -> RoutingTrace:
    """Return the same accesses one expert at a time: a row for each of a token's experts."""
    rows, layers, k = trace.experts.shape
    return RoutingTrace(
        experts=np.ascontiguousarray(trace.experts.transpose(0, 2, 1)).reshape(-1, layers, 1),
        sequence=np.repeat(trace.sequence, k),
        position=np.arange(rows * k, dtype=np.int32),
        phase=np.repeat(trace.phase, k),
        header=replace(trace.header, top_k=1),
    )


_accesses = lru_cache(maxsize=1)(by_access)


def hardware(name: str) -> HardwareProfile:
    """Return a shipped profile, or Table 1 with the times of loading and computing exchanged."""
    if name != EXCHANGED:
        return hardware_profile(name)
    shipped = hardware_profile("paper-table1")
    load, compute = "table.expert_load_ms", "table.expert_compute_ms"
    numbers = {load: shipped.numbers[compute], compute: shipped.numbers[load]}
    return replace(shipped, name=EXCHANGED, numbers={**shipped.numbers, **numbers})


def case_of(cell: Cell, real: Path | None) -> Case:
    """Return the case that a cell runs."""
    inputs = inputs_of(file_of(cell.trace, real))
    k = inputs.trace.k
    spec = geometry(cell.trace, inputs.trace, sized=cell.section in ("prefetchers", "orders"))
    if cell.by_access:
        inputs = replace(inputs, trace=_accesses(inputs.trace))
        spec = spec.with_(top_k=1)
    name, parts = cell.policy
    limit = TOKENS * (k if cell.by_access else 1) if cell.trace == REAL else None
    conditions = Conditions(granularity=cell.granularity, batch=cell.batch, limit=limit)
    return inputs.case(spec, named(name, **parts), Budget.parse(cell.budget), conditions)


def run(cell: Cell, real: Path | None) -> dict[str, Any]:
    """Run a cell; return its record: what it is, and what was counted."""
    case = case_of(cell, real)
    record = cell.named() | {"n_blocks": case.spec.n_blocks}
    tokens, cache = len(case.rows()), case.policy.cache.name
    if cell.by_access:
        tokens //= inputs_of(file_of(cell.trace, real)).trace.k
        if cache in theirs.NAMES:
            record |= _theirs(case)
    record["tokens"] = tokens
    if cache == "belady-forced":
        future = _future(cell.trace, cell.by_access, real)
        return record | {"blocks_loaded": forced(case, future)}
    metrics = fast_simulate(case, hardware(cell.machine)).metrics
    fewest = metrics["belady_bytes_per_token"] * metrics["tokens"] / case.spec.block_bytes
    kept = {name: metrics[name] for name in ("blocks_loaded", *RECORDED[cell.section][1])}
    return record | kept | {"belady_blocks": round(fewest)}


def _theirs(case: Case) -> dict[str, Any]:
    experts = case.trace.experts[case.rows()][:, case.spec.moe_layers, 0]
    room = [blocks // case.spec.n_blocks for blocks in case.capacity()]
    return theirs.misses(case.policy.cache.name, experts, room)


@lru_cache(maxsize=2)
def _future(trace: str, by_access: bool, real: Path | None) -> Future:
    """Return all tasks of a trace at full width."""
    return case_of(Cell("caches", trace, ("lru", {}), "100%", by_access=by_access), real).future()


def forced(case: Case, future: Future) -> int:
    """Count the blocks that belady-forced loads at full width, event after event.

    It keeps to its own rule.
    """
    spec, cache = case.spec, case.policy.cache
    assert isinstance(case.policy.width, Full) and cache.scope == "layer"
    first, room = np.array(future.first), np.array(case.capacity())
    whole, n = cache.unit == "expert", spec.n_experts
    loads: int = _forced(first, future.experts, future.following, room, n, whole)
    return loads


_soonest = numba.njit(soonest)


@numba.njit
def _forced(first: Any, experts: Any, following: Any, capacity: Any, n: int, whole: bool) -> int:
    """Every layer has an event in every step, so they take turns."""
    layers, blocks = len(capacity), following.shape[1]
    soon = np.full((layers, n, blocks), NEVER, np.int32)
    residents = np.zeros((layers, n), np.int64)
    loads = 0
    for event in range(len(first) - 1):
        layer = event % layers
        here = residents[layer].copy()
        tasks = range(first[event], first[event + 1])
        for task in tasks:
            loads += blocks - residents[layer, experts[task]]
            here[experts[task]] = blocks
            soon[layer, experts[task]] = following[task]
        now = soon[layer].copy()
        for task in tasks:
            now[experts[task]] = event
        residents[layer] = _soonest(here, now, capacity[layer], whole)
    return loads
