"""The cells of the comparison: simulate and measure each, with plain reads in between."""

from __future__ import annotations

import datetime
import os
import platform
import random
import sys
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from statistics import median
from typing import Any

import numpy as np
import numpy.typing as npt
from plain_reads import probe, reread

from crisp.hardware.profile import HardwareProfile
from crisp.hw.calibration.calibrate import calibrate_device
from crisp.hw.calibration.tables import processor_name
from crisp.hw.decisions import DecisionLog, replay_decisions, same_decisions
from crisp.hw.devices.options import DeviceOptions
from crisp.hw.replay import replay
from crisp.hw.store.packing import pack_synthetic
from crisp.hw.store.reader import Store
from crisp.model.spec import ModelSpec
from crisp.run.case import Case
from crisp.run.setup import load_setup
from crisp.run.timeline import COMPUTE, END, EVENT, KIND, Rows
from crisp.scheduler.workload import WHOLE as WHOLE_PROMPT
from crisp.sim.simulate import simulate
from crisp.trace import RoutingTrace
from crisp.trace.bundled import bundled_traces

POLICIES = ("fo", "lru", "mo", "crisp")
BUDGETS = ("10%", "30%", "50%")
METRICS = ("hits", "partial_hits", "blocks_loaded", "bytes_loaded", "tokens", "link_busy",
           "compute_busy", "layer_ms_per_token", "total_ns")  # fmt: skip
GRANULARITIES = {"fo": ("block",), "lru": ("block", "expert"), "mo": ("block",),
                 "crisp": ("block", "expert")}  # fmt: skip
PROMPTS = 1024  # rows that are run: of one prompt, or of two with others' rows between them


@dataclass(frozen=True, eq=False)
class Geometry:
    """A model's sizes, and a trace whose routing fits them."""

    name: str
    trace: str
    spec: ModelSpec
    beside: int = 21  # runs of a cell beside plain reads
    prompts: str | None = None  # a trace of long prompts


GEOMETRIES = (
    Geometry(
        "8 experts, top-2, 22 MB each",
        "tiny-mixtral-docs",
        ModelSpec.from_config({
            "model_type": "mixtral", "hidden_size": 1024, "intermediate_size": 3584,
            "num_hidden_layers": 6, "num_attention_heads": 8, "num_key_value_heads": 8,
            "num_local_experts": 8, "num_experts_per_tok": 2, "dtype": "bfloat16",
        }, "8 experts"),
    ),
    Geometry(
        "32 experts, top-4, 17 MB each",
        "tiny-deepseek-docs",
        ModelSpec.from_config({
            "model_type": "deepseek", "hidden_size": 2048, "intermediate_size": 2048,
            "moe_intermediate_size": 1408, "num_hidden_layers": 5, "first_k_dense_replace": 1,
            "num_attention_heads": 16, "num_key_value_heads": 16, "n_routed_experts": 32,
            "n_shared_experts": 0, "num_experts_per_tok": 4, "dtype": "bfloat16",
        }, "32 experts"),
        prompts="tiny-deepseek-prompt-1920",
    ),
)  # fmt: skip
"""Geometries that are small enough for all cells."""
WHOLE = Geometry(
    "Mixtral 8x7B's, top-2, 352 MB each",
    "tiny-mixtral-docs",
    ModelSpec.named("mixtral-8x7b").first_layers(1),
    beside=9,
)
"""One layer of experts of a real size, which runs beside plain reads only."""


@dataclass(frozen=True)
class Cell:
    """One combination of geometry, policy, budget and granularity."""

    geometry: Geometry
    policy: str
    budget: str
    granularity: str
    chunk: int | str | None = None  # of a prompt; None: tokens are decoded

    def case(self, store: Store, tokens: int) -> Case:
        """Return the case that is run."""
        name, more = self.geometry.trace, {"limit": tokens}
        if self.chunk is not None and self.geometry.prompts is not None:
            name = self.geometry.prompts
            more = {"limit": PROMPTS, "phase": "prefill", "chunk": self.chunk}
        traced = RoutingTrace.load(bundled_traces()[name]).layers
        layers = min(traced, store.spec.n_layers)
        setup = load_setup(name, model=store.spec, layers=layers)
        return setup.case(self.policy, self.budget, granularity=self.granularity, **more)


def cells(geometry: Geometry) -> list[Cell]:
    """Return the cells of one geometry that decode."""
    return [
        Cell(geometry, policy, budget, granularity)
        for policy in POLICIES
        for budget in BUDGETS
        for granularity in GRANULARITIES[policy]
    ]


def _prompt_cells(geometry: Geometry) -> list[Cell]:
    return [
        Cell(geometry, policy, "10%", "block", chunk)
        for policy in ("lru", "crisp")
        for chunk in (512, WHOLE_PROMPT)
        if geometry.prompts is not None
    ]


def _cached_cells(geometry: Geometry) -> list[Cell]:
    """Return the cells that read through the page cache: experts are read again and again."""
    return [Cell(geometry, policy, "10%", "block") for policy in ("lru", "crisp")]


@dataclass(frozen=True, eq=False)
class Mode:
    """How the disk is read, and which cells run so."""

    options: DeviceOptions
    cells: Callable[[Geometry], list[Cell]]
    page_cache: int | None = None  # bytes; simulated from empty, and emptied before each run


MODES = {
    "paced": Mode(DeviceOptions(link_limit=300_000_000), cells),
    "free": Mode(DeviceOptions(), cells),
    "buffered": Mode(DeviceOptions(read="buffered"), _cached_cells, 1 << 40),
    "prompts": Mode(DeviceOptions(), _prompt_cells),
}


def measure_all(
    folder: Path,
    tokens: int,
    repeats: int,
    seconds: float,
    modes: dict[str, Mode],
    geometries: Sequence[Geometry],
) -> dict[str, Any]:
    """Calibrate, simulate and measure all cells; return the content of docs/fidelity.json."""
    runs, simulated, beside = [], [], []
    for number, geometry in enumerate(geometries):
        store = _packed(geometry, folder / f"store-{number}")
        for mode, how in modes.items():
            if not how.cells(geometry):
                continue
            options = how.options
            _say(f"{geometry.name}, {mode}: calibrating")
            toml = folder / f"{mode}-{number}.toml"
            toml.write_text(calibrate_device(store, options, seconds).toml(), encoding="utf-8")
            profile = HardwareProfile.load(toml).with_page_cache(how.page_cache)
            expected = {}
            for cell in how.cells(geometry):
                expected[cell] = _simulate(cell.case(store, tokens), profile)
                simulated.append(_describe_cell(cell, mode) | expected[cell].facts)
            draw = random.Random(0)
            for repeat in range(repeats):
                for cell in draw.sample(list(expected), len(expected)):
                    if how.page_cache is not None:
                        _empty_page_cache(store)
                    runs.append(
                        _describe_cell(cell, mode)
                        | {"repeat": repeat}
                        | _measure(cell.case(store, tokens), store, options, expected[cell])
                    )
                    _say(
                        f"{mode} {cell.policy} {cell.budget} {cell.granularity}: "
                        f"{runs[-1]['ms_per_token']:.1f} ms, simulated "
                        f"{expected[cell].facts['ms_per_token']:.1f}"
                    )
        if "free" in modes:
            beside += _beside(geometry, store, tokens)
    return {
        "conditions": {
            "date": datetime.date.today().isoformat(),
            "processor": processor_name(),
            "cores": len(os.sched_getaffinity(0)),
            "kernel": platform.release(),
            "tokens": tokens,
            "repeats": repeats,
            "calibration_s": seconds,
            "paced_bytes_per_s": modes["paced"].options.link_limit if "paced" in modes else None,
        },
        "simulated": simulated,
        "runs": runs,
        "beside_raw": beside,
    }


def beside_all(folder: Path, tokens: int, geometries: Sequence[Geometry]) -> list[dict[str, Any]]:
    """Measure only the runs beside plain reads."""
    found = []
    for geometry in geometries:
        store = _packed(geometry, folder / f"beside-{geometry.spec.name}")
        found += _beside(geometry, store, tokens)
    return found


def _packed(geometry: Geometry, path: Path) -> Store:
    _say(f"{geometry.name}: packing random weights")
    return pack_synthetic(geometry.spec, path)


def _beside(geometry: Geometry, store: Store, tokens: int) -> list[dict[str, Any]]:
    """Measure runs, each between two plain reads of the same blocks in the same order.

    So all find the same in the disk's caches, and other load on the disk affects all of them. The
    first run of a cell is not recorded: it only shows which blocks these are.
    """
    found = []
    by_block = [cell for cell in cells(geometry) if cell.granularity == "block"]
    for cell in (cell for cell in by_block if cell.policy in ("lru", "crisp")):
        log, case = DecisionLog(), cell.case(store, tokens)
        replay(case, store, DeviceOptions(), sinks=[log.sink])
        before = reread(store, log.sink.rows)
        for repeat in range(geometry.beside):
            run = replay(case, store, DeviceOptions(), sinks=[])
            link = run.metrics["link_busy"] * run.metrics["total_ns"]
            after = reread(store, log.sink.rows)
            found.append(
                _describe_cell(cell, "free")
                | {"repeat": repeat, "ns": run.metrics["total_ns"], "link_ns": int(link)}
                | {"raw_ns": [before, after], "bytes": run.metrics["bytes_loaded"]}
            )
            before = after
        last = found[-geometry.beside :]
        ratio = median(2 * run["ns"] / sum(run["raw_ns"]) for run in last)
        _say(f"beside plain reads {cell.policy} {cell.budget}: {ratio:.3f}")
    return found


@dataclass(frozen=True, eq=False)
class Expected:
    """A simulated cell: its metrics and its decisions."""

    facts: dict[str, Any]
    log: DecisionLog


def _simulate(case: Case, profile: HardwareProfile) -> Expected:
    log = DecisionLog()
    run = simulate(case, profile, sinks=[log.sink], watch=log.watch)
    return Expected(_facts(run.metrics), log)


def _measure(
    case: Case, store: Store, options: DeviceOptions, expected: Expected
) -> dict[str, Any]:
    log = DecisionLog()
    blocks = 1 if case.conditions.by_block else case.spec.n_blocks
    before = probe(store, blocks)
    run = replay(case, store, options, sinks=[log.sink], watch=log.watch)
    after = probe(store, blocks)
    prefetches = case.policy.prefetch.active
    same = replay_decisions(case, log) if prefetches else same_decisions(log, expected.log)
    return _facts(run.metrics) | {
        "probes_gb_per_s": [round(before, 4), round(after, 4)],
        "same_decisions": same,
        "event_errors": _errors(log.sink.rows, expected.log.sink.rows),
    }


def _facts(metrics: dict[str, Any]) -> dict[str, Any]:
    return {name: metrics[name] for name in METRICS} | {
        "ms_per_token": metrics["total_ns"] / metrics["tokens"] / 1e6
    }


def _empty_page_cache(store: Store) -> None:
    """Let the system's page cache hold nothing of a store."""
    for path in store.files:
        with path.open("rb") as file:
            os.fsync(file.fileno())
            os.posix_fadvise(file.fileno(), 0, 0, os.POSIX_FADV_DONTNEED)


def _describe_cell(cell: Cell, mode: str) -> dict[str, Any]:
    if cell.chunk is not None:
        mode = f"{mode} {cell.chunk}"
    return {
        "mode": mode,
        "geometry": cell.geometry.name,
        "policy": cell.policy,
        "budget": cell.budget,
        "granularity": cell.granularity,
    }


def _errors(measured: Rows, simulated: Rows) -> list[float]:
    """Return the relative errors of the times of events: the 5, 50 and 95 % quantiles."""
    errors = _events(simulated) / _events(measured) - 1
    return [round(float(q), 4) for q in np.percentile(errors, (5, 50, 95))]


def _events(rows: Rows) -> npt.NDArray[np.float64]:
    """Return the times from the end of one event to the end of the next, in ns."""
    ends = rows[rows[:, KIND] == COMPUTE]
    last = np.zeros(int(ends[:, EVENT].max()) + 1)
    np.maximum.at(last, ends[:, EVENT], ends[:, END])
    return np.diff(last, prepend=0.0)


def _say(text: str) -> None:
    print(text, file=sys.stderr, flush=True)
