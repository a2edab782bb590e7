"""The checks of the report: functions from the machine to the rows of a table."""

from __future__ import annotations

import itertools
import math
import statistics
import time
from collections.abc import Callable, Iterator
from functools import partial
from typing import Any

import numpy as np
import torch
from machine import ROUNDS, Machine

from crisp.hardware.profile import HardwareProfile
from crisp.hw.calibration.calibrate import calibrate_device
from crisp.hw.devices.gpu.cuda import cuda
from crisp.hw.devices.gpu.kernels import BlockLayout, add_blocks, reference
from crisp.hw.devices.gpu.unified import time_operation
from crisp.hw.devices.protocol import Copy
from crisp.hw.model.lookup import WidthLookup
from crisp.hw.replay import replay
from crisp.hw.store.reader import Store
from crisp.hw.telemetry import meter_for
from crisp.policy import Budget, named
from crisp.profile import Profile
from crisp.run.case import Case, Conditions
from crisp.sim.simulate import simulate
from crisp.trace import Header, RoutingTrace

DTYPES = ("bf16", "fp16", "fp32", "int8", "int4")
BUDGETS = ("10%", "30%", "50%")

Table = list[dict[str, Any]]


def peaks(machine: Machine) -> Table:
    """Measure the card's peak memory bandwidth and matmul rates, which shares are taken of."""
    n = 256 if machine.dry else 8192
    size = 1 << (20 if machine.dry else 30)
    a, b = (torch.empty(size, dtype=torch.uint8, device=machine.device) for _ in range(2))
    copied = machine.milliseconds(lambda: a.copy_(b))
    found = [
        {"what": "device copy, read and write", "rate": 2 * size / copied / 1e6, "unit": "GB/s"}
    ]
    for name, kind in (("bf16", torch.bfloat16), ("fp16", torch.float16)):
        x = torch.randn(n, n, device=machine.device).to(kind)
        took = machine.milliseconds(lambda x=x: x @ x)
        found.append(
            {"what": f"matmul {n}, {name}", "rate": 2 * n**3 / took / 1e9, "unit": "TFLOP/s"}
        )
    return found


def kernels(machine: Machine) -> Table:
    """Check an expert of each dtype against the reference, and time it for 1 and 128 rows.

    Experts are taken by turns, of more bytes than the card's cache holds.
    """
    memory, *rest = peaks(machine)
    peak = {"bf16": rest[0]["rate"], "fp16": rest[1]["rate"]}
    found, turn = [], itertools.count()
    for dtype in DTYPES:
        store = machine.store("kernels", 1, dtype)
        layout, spec, n = BlockLayout.of(store), store.spec, store.spec.n_blocks
        first = store.offset(0, 0, 0)
        raw = np.fromfile(store.files[0], np.uint8)[first:].reshape(-1, spec.block_bytes)
        pool = torch.from_numpy(raw[: 4 * n]).to(machine.device)
        kind = {"fp16": torch.float16, "fp32": torch.float32}.get(dtype, torch.bfloat16)
        neurons = torch.tensor(
            [spec.neurons(i, i + 1) for i in range(n)], dtype=torch.int32, device=machine.device
        )
        for rows in (1, 128):
            x = torch.randn(rows, spec.d_model, device=machine.device).to(kind)
            counts = torch.full((n,), rows, dtype=torch.int32, device=machine.device)
            sums = torch.zeros(rows, spec.d_model, device=machine.device)
            tables = [
                torch.arange(e * n, (e + 1) * n, dtype=torch.int32, device=machine.device)
                for e in range(4)
            ]
            right = torch.zeros_like(sums)
            add_blocks(layout, pool, tables[0], counts, neurons, x, sums)
            reference.add_blocks(layout, pool, tables[0], counts, neurons, x, right)
            error = float((sums - right).abs().max() / right.abs().max())
            args = counts, neurons, x, sums

            def work(
                pool_and_layout: Any = (layout, pool), tables: Any = tables, args: Any = args
            ) -> None:
                add_blocks(*pool_and_layout, tables[next(turn) % len(tables)], *args)

            took = machine.milliseconds(work)
            read = n * spec.block_bytes / took / 1e6
            flops = 6 * rows * spec.d_model * spec.d_ff / took / 1e9
            found.append({
                "dtype": dtype, "rows": rows, "error": error, "ms": took, "GB/s": read,
                "of memory": read / memory["rate"], "TFLOP/s": flops,
                "of matmul": flops / peak[dtype] if dtype in peak and rows > 1 else None,
            })  # fmt: skip
    return found


def link(machine: Machine) -> Table:
    """Time loads of a device against one plain copy of page-locked memory."""
    store = machine.store("kernels", 1)
    size = store.spec.expert_bytes
    there = torch.empty(size, dtype=torch.uint8, device=machine.device)
    here = torch.empty(size, dtype=torch.uint8, pin_memory=not machine.dry)
    plain = machine.milliseconds(lambda: there.copy_(here, non_blocking=True))
    device = cuda(machine.streams, store, 2 * store.spec.n_blocks)
    try:
        times = []
        for turn in range(4 if machine.dry else 2 * ROUNDS):
            slots = range(store.spec.n_blocks)
            copy = Copy(0, turn % store.spec.n_experts, 0, slots)
            times.append(time_operation(device, partial(device.copy, copy)) / 1e6)
        loads = device.describe()
    finally:
        device.close()
    ours = statistics.median(times)
    return [{
        "MB": size / 1e6, "plain GB/s": size / plain / 1e6, "load GB/s": size / ours / 1e6,
        "of plain": plain / ours, "page-locked": loads.get("pageable") is None,
    }]  # fmt: skip


def overlap(machine: Machine) -> Table:
    """Time a copy from page-locked memory and kernels, alone and side by side, by CUDA's events."""
    if machine.dry:
        return [{"copy ms": None, "kernels ms": None, "together ms": None, "hidden": None}]
    store = machine.store("kernels", 1)
    layout, spec, n = BlockLayout.of(store), store.spec, store.spec.n_blocks
    pool = torch.randn(2 * n * spec.block_bytes // 2, device="cuda").to(torch.bfloat16)
    pool = pool.view(torch.uint8).view(2 * n, spec.block_bytes)
    here = torch.empty(spec.expert_bytes, dtype=torch.uint8, pin_memory=True)
    there = torch.empty(spec.expert_bytes, dtype=torch.uint8, device="cuda")
    ints = {"dtype": torch.int32, "device": "cuda"}
    slots, counts = torch.arange(n, **ints), torch.ones(n, **ints)
    neurons = torch.tensor([spec.neurons(i, i + 1) for i in range(n)], **ints)
    x = torch.randn(1, spec.d_model, device="cuda").bfloat16()
    sums = torch.zeros(1, spec.d_model, device="cuda")
    streams = torch.cuda.Stream(), torch.cuda.Stream()

    def copy() -> None:
        with torch.cuda.stream(streams[0]):
            there.copy_(here, non_blocking=True)

    def compute() -> None:
        with torch.cuda.stream(streams[1]):
            for _ in range(repeats):
                add_blocks(layout, pool, slots, counts, neurons, x, sums)

    def timed(*works: Callable[[], None]) -> float:
        def both() -> None:
            current = torch.cuda.current_stream()
            for stream in streams:
                stream.wait_stream(current)
            for work in works:
                work()
            for stream in streams:
                current.wait_stream(stream)

        return machine.milliseconds(both)

    repeats = 1
    copied = timed(copy)
    repeats = max(1, round(copied / timed(compute)))
    computed, together = timed(compute), timed(copy, compute)
    hidden = (copied + computed - together) / min(copied, computed)
    return [{"copy ms": copied, "kernels ms": computed, "together ms": together, "hidden": hidden}]


def cases(machine: Machine, store: Store) -> Iterator[Case]:
    """Yield the cases of two policies and three budgets over random routing."""
    tokens, spec, draw = (4 if machine.dry else 24), store.spec, np.random.default_rng(0)
    experts = draw.random((tokens, spec.n_layers, spec.n_experts)).argsort(2)[:, :, : spec.top_k]
    trace = RoutingTrace(
        experts=experts.astype(np.int16), sequence=np.zeros(tokens, np.int32),
        position=np.arange(tokens, dtype=np.int32), phase=np.ones(tokens, np.uint8),
        header=Header(n_experts=8, top_k=2, ordered=True, origin="synthetic", seed=0),
    )  # fmt: skip
    for policy in ("lru", "crisp"):
        for budget in BUDGETS:
            yield Case(
                trace, spec, named(policy), Budget.parse(budget), Profile.from_trace(trace),
                Conditions("block"),
            )  # fmt: skip


def fidelity(machine: Machine) -> Table:
    """Calibrate; then simulate and measure the same cases: ms per token, and joules."""
    store, options = machine.store("replay", 2), machine.options()
    path = machine.folder / "measured.toml"
    times = calibrate_device(store, options, 1 if machine.dry else 40)
    path.write_text(times.toml(), encoding="utf-8")
    profile, meter, found = HardwareProfile.load(path), meter_for("cuda"), []
    for case in cases(machine, store):
        guessed = simulate(case, profile).metrics
        run = replay(case, store, options, meter=meter)
        metrics, tokens = run.metrics, run.metrics["tokens"] or 1
        expected, took = ((m["total_ns"] or 0) / tokens / 1e6 for m in (guessed, metrics))
        found.append({
            "policy": case.policy.name, "budget": case.budget.text, "simulated ms": expected,
            "measured ms": took, "error": expected / took - 1,
            "same blocks": guessed["blocks_loaded"] == metrics["blocks_loaded"],
            "J/token": metrics["energy_j_per_token"],
            "net J/token": metrics["energy_net_j_per_token"],
            "coordination us/event": metrics["coordination_us_per_event"],
            "why no joules": run.unavailable.get("energy_j_per_token"),
        })  # fmt: skip
    return found


def lookup(machine: Machine) -> Table:
    """Time the lookup of widths on the device, of a policy that is a table: one row, top-2 of 8."""
    spec = machine.spec(2)
    device = cuda(machine.streams, machine.store("replay", 2), 2 * spec.n_blocks)
    try:
        profile = Profile.from_trace(next(cases(machine, machine.store("replay", 2))).trace)
        widths = named("crisp").width.bind(spec, profile, True)
        widths_of = WidthLookup(spec, widths, device.upload, device.fetch)
        index = torch.tensor([[3, 1]], device=machine.device)
        weights = torch.tensor([[0.7, 0.3]], device=machine.device)
        took, host = [], []
        for _ in range(10 if machine.dry else 500):
            before, begin = widths_of.own_ns, time.perf_counter_ns()
            widths_of(0, "layer", index, weights, None)
            took.append(time.perf_counter_ns() - begin)
            host.append(widths_of.own_ns - before)
    finally:
        device.close()
    return [{
        "lookup us, all of it": statistics.median(took) / 1e3,
        "the host's part us": statistics.median(host) / 1e3,
    }]  # fmt: skip


SECTIONS: dict[str, Callable[[Machine], Table]] = {
    "What the card reaches": peaks,
    "Kernels": kernels,
    "Link": link,
    "Overlap": overlap,
    "Simulated against measured, and joules": fidelity,
    "Lookup": lookup,
}


def format_cell(value: Any) -> str:
    """Return a value as a cell of a table."""
    if value is None:
        return "–"
    if isinstance(value, float):
        return "nan" if math.isnan(value) else f"{value:.3g}"
    return str(value)
