"""The cells, what is simulated and what is measured of each, and the plain reads in between."""

from __future__ import annotations

import datetime
import os
import platform
import random
import sys
import time
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from statistics import median
from typing import Any

import numpy as np
import numpy.typing as npt

from crisp.hardware.profile import HardwareProfile
from crisp.hw.calibration.calibrate import calibrated
from crisp.hw.calibration.tables import processor
from crisp.hw.decisions import DecisionLog, replay_decisions, same_decisions
from crisp.hw.devices.options import DeviceOptions
from crisp.hw.memory import map_anonymous
from crisp.hw.replay import replay
from crisp.hw.store.packing import pack_synthetic
from crisp.hw.store.reader import Store
from crisp.model.spec import PAGE, ModelSpec
from crisp.run.case import Case
from crisp.run.setup import load_setup
from crisp.run.timeline import COMPUTE, END, EVENT, EXPERT, FIRST, KIND, LAYER_ID, LOAD, Rows
from crisp.sim.simulate import simulate
from crisp.trace import RoutingTrace
from crisp.trace.bundled import bundled_traces

POLICIES = ("fo", "lru", "mo", "crisp")
BUDGETS = ("10%", "30%", "50%")
METRICS = ("hits", "partial_hits", "blocks_loaded", "bytes_loaded", "tokens", "link_busy",
           "compute_busy", "layer_ms_per_token", "total_ns")  # fmt: skip
GRANULARITIES = {"fo": ("block",), "lru": ("block", "expert"), "mo": ("block",),
                 "crisp": ("block", "expert")}  # fmt: skip
_POOL = 256_000_000  # bytes that plain reads go to
MODES = {"paced": 300_000_000, "free": None}  # bytes a second of the link


@dataclass(frozen=True, eq=False)
class Geometry:
    """A model's sizes, and a trace whose routing fits them."""

    name: str
    trace: str
    spec: ModelSpec
    beside: int = 21  # runs of a cell beside plain reads


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
    ),
)  # fmt: skip
"""Small enough for all cells."""
WHOLE = Geometry(
    "Mixtral 8x7B's, top-2, 352 MB each",
    "tiny-mixtral-docs",
    ModelSpec.named("mixtral-8x7b").first_layers(1),
    beside=9,
)
"""Experts of a real size, and one layer of them: beside plain reads."""


@dataclass(frozen=True)
class Cell:
    """One place of the matrix."""

    geometry: Geometry
    policy: str
    budget: str
    granularity: str

    def case(self, store: Store, tokens: int) -> Case:
        """What is run."""
        traced = RoutingTrace.load(bundled_traces()[self.geometry.trace]).layers
        layers = min(traced, store.spec.n_layers)
        setup = load_setup(self.geometry.trace, model=store.spec, layers=layers)
        return setup.case(self.policy, self.budget, granularity=self.granularity, limit=tokens)


def cells(geometry: Geometry) -> list[Cell]:
    """Of one geometry."""
    return [
        Cell(geometry, policy, budget, granularity)
        for policy in POLICIES
        for budget in BUDGETS
        for granularity in GRANULARITIES[policy]
    ]


def measure_all(
    folder: Path,
    tokens: int,
    repeats: int,
    seconds: float,
    modes: dict[str, int | None],
    geometries: Sequence[Geometry],
) -> dict[str, Any]:
    """Everything of the page: conditions, and a record of each run that was made."""
    runs, simulated, beside = [], [], []
    for number, geometry in enumerate(geometries):
        store = _packed(geometry, folder / f"store-{number}")
        for mode, limit in modes.items():
            options = DeviceOptions(link_limit=limit)
            _say(f"{geometry.name}, {mode}: calibrating")
            toml = folder / f"{mode}-{number}.toml"
            toml.write_text(calibrated(store, options, seconds).toml(), encoding="utf-8")
            profile = HardwareProfile.load(toml)
            expected = {}
            for cell in cells(geometry):
                expected[cell] = _simulate(cell.case(store, tokens), profile)
                simulated.append(_named(cell, mode) | expected[cell].facts)
            draw = random.Random(0)
            for repeat in range(repeats):
                for cell in draw.sample(list(expected), len(expected)):
                    runs.append(
                        _named(cell, mode)
                        | {"repeat": repeat}
                        | _measure(cell.case(store, tokens), store, options, expected[cell])
                    )
                    _say(
                        f"{mode} {cell.policy} {cell.budget} {cell.granularity}: "
                        f"{runs[-1]['ms_per_token']:.1f} ms, simulated "
                        f"{expected[cell].facts['ms_per_token']:.1f}"
                    )
        beside += _beside(geometry, store, tokens)
    return {
        "conditions": {
            "date": datetime.date.today().isoformat(),
            "processor": processor(),
            "cores": len(os.sched_getaffinity(0)),
            "kernel": platform.release(),
            "tokens": tokens,
            "repeats": repeats,
            "calibration_s": seconds,
            "paced_bytes_per_s": modes.get("paced"),
        },
        "simulated": simulated,
        "runs": runs,
        "beside_raw": beside,
    }


def beside_all(folder: Path, tokens: int, geometries: Sequence[Geometry]) -> list[dict[str, Any]]:
    """The runs beside plain reads alone."""
    found = []
    for geometry in geometries:
        store = _packed(geometry, folder / f"beside-{geometry.spec.name}")
        found += _beside(geometry, store, tokens)
    return found


def _packed(geometry: Geometry, path: Path) -> Store:
    _say(f"{geometry.name}: packing random weights")
    return pack_synthetic(geometry.spec, path)


def _beside(geometry: Geometry, store: Store, tokens: int) -> list[dict[str, Any]]:
    """Runs, each between two plain readings of the same blocks in the same order.

    So all find the same in whatever caches the disk has, and what others do to it touches all. The
    first run of a cell is not recorded: it tells which blocks these are.
    """
    found = []
    own = [cell for cell in cells(geometry) if cell.granularity == "block"]
    for cell in (cell for cell in own if cell.policy in ("lru", "crisp")):
        seen, case = DecisionLog(), cell.case(store, tokens)
        replay(case, store, DeviceOptions(), sinks=[seen.sink])
        before = _reread(store, seen.sink.rows)
        for repeat in range(geometry.beside):
            run = replay(case, store, DeviceOptions(), sinks=[])
            link = run.metrics["link_busy"] * run.metrics["total_ns"]
            after = _reread(store, seen.sink.rows)
            found.append(
                _named(cell, "free")
                | {"repeat": repeat, "ns": run.metrics["total_ns"], "link_ns": int(link)}
                | {"raw_ns": [before, after], "bytes": run.metrics["bytes_loaded"]}
            )
            before = after
        last = found[-geometry.beside :]
        ratio = median(2 * run["ns"] / sum(run["raw_ns"]) for run in last)
        _say(f"beside plain reads {cell.policy} {cell.budget}: {ratio:.3f}")
    return found


def _reread(store: Store, rows: Rows) -> int:
    """Plain O_DIRECT reads, one after the other, of what was loaded, into memory that is taken by
    turns; in ns.
    """
    size, turn = store.spec.block_bytes, 0
    slots = _POOL // size
    buffer = memoryview(map_anonymous(slots * size, "a buffer"))  # as the device's pool
    buffer[:] = bytes(slots * size)  # it is there
    files = [os.open(path, os.O_RDONLY | os.O_DIRECT) for path in store.files]
    place = {layer: row for row, layer in enumerate(store.spec.moe_layers)}
    begin = time.perf_counter_ns()
    for row in rows[rows[:, KIND] == LOAD]:
        layer, expert, first = int(row[LAYER_ID]), int(row[EXPERT]), int(row[FIRST])
        offset, done, start = store.offset(place[layer], expert, first), 0, turn * size
        turn = (turn + 1) % slots
        while done < size:
            into = buffer[start + done : start + size]
            done += os.preadv(files[place[layer]], [into], offset + done)
    took = time.perf_counter_ns() - begin
    for file in files:
        os.close(file)
    return took


@dataclass(frozen=True, eq=False)
class Expected:
    """A simulated cell."""

    facts: dict[str, Any]
    seen: DecisionLog


def _simulate(case: Case, profile: HardwareProfile) -> Expected:
    seen = DecisionLog()
    run = simulate(case, profile, sinks=[seen.sink], watch=seen.watch)
    return Expected(_facts(run.metrics), seen)


def _measure(
    case: Case, store: Store, options: DeviceOptions, expected: Expected
) -> dict[str, Any]:
    seen = DecisionLog()
    blocks = 1 if case.conditions.by_block else case.spec.n_blocks
    before = _probe(store, blocks)
    run = replay(case, store, options, sinks=[seen.sink], watch=seen.watch)
    after = _probe(store, blocks)
    prefetches = case.policy.prefetch.active
    same = replay_decisions(case, seen) if prefetches else same_decisions(seen, expected.seen)
    return _facts(run.metrics) | {
        "probes_gb_per_s": [round(before, 4), round(after, 4)],
        "same_decisions": same,
        "event_errors": _errors(seen.sink.rows, expected.seen.sink.rows),
    }


def _facts(metrics: dict[str, Any]) -> dict[str, Any]:
    return {name: metrics[name] for name in METRICS} | {
        "ms_per_token": metrics["total_ns"] / metrics["tokens"] / 1e6
    }


def _named(cell: Cell, mode: str) -> dict[str, Any]:
    return {
        "mode": mode,
        "geometry": cell.geometry.name,
        "policy": cell.policy,
        "budget": cell.budget,
        "granularity": cell.granularity,
    }


def _errors(measured: Rows, simulated: Rows) -> list[float]:
    """Of the times of events, relative: the 5, 50 and 95 % quantiles."""
    own, other = _events(measured), _events(simulated)
    return [round(float(q), 4) for q in np.percentile(other / own - 1, (5, 50, 95))]


def _events(rows: Rows) -> npt.NDArray[np.float64]:
    """From the end of one event to the end of the next, in ns."""
    ends = rows[rows[:, KIND] == COMPUTE]
    last = np.zeros(int(ends[:, EVENT].max()) + 1)
    np.maximum.at(last, ends[:, EVENT], ends[:, END])
    return np.diff(last, prepend=0.0)


def _probe(store: Store, blocks: int) -> float:
    """Plain O_DIRECT reads of so many blocks at random places: GB/s."""
    size, path = blocks * store.spec.block_bytes, store.files[0]
    buffer, draw = memoryview(map_anonymous(size, "a buffer")), random.Random(0)
    buffer[:] = bytes(size)
    file, spans = os.open(path, os.O_RDONLY | os.O_DIRECT), (path.stat().st_size - PAGE) // size
    places = [PAGE + size * draw.randrange(spans) for _ in range(max(4, 128_000_000 // size))]
    begin = time.perf_counter()
    for place in places:
        done = 0
        while done < size:
            done += os.preadv(file, [buffer[done:]], place + done)
    took = time.perf_counter() - begin
    os.close(file)
    return len(places) * size / took / 1e9


def _say(text: str) -> None:
    print(text, file=sys.stderr, flush=True)
