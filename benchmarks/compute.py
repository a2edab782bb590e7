"""Time the cpu device's arithmetic beside plain reads of memory, torch and numba's prange.

Run it with `make bench`. Experts of Mixtral's and of Qwen3-30B-A3B's size lie in one pool, in huge
pages as a device's, and are computed by turns, so that no cache holds them. Every line's kinds take
turns, too. Others may use the machine as well: so the time of one thread is the processor's, a
median of the rounds, and the time of several the fastest round's. Plain reads are a sum of float32
over 64 MB of the pool, in as many threads. torch computes a linear layer for each block and
projection, as they are stored; numba's prange plain loops over neurons and then columns. No weight
is copied or converted on the way: see `test_no_weight_is_copied`.
"""

from __future__ import annotations

import argparse
import os
import time
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from types import SimpleNamespace
from typing import Any

os.environ.setdefault("OMP_WAIT_POLICY", "passive")  # no thread of torch's waits at work

import numpy as np
import torch
from numba import njit, prange

from crisp.hw.devices.batch import ExpertBatch
from crisp.hw.devices.cpu.arithmetic import Arithmetic
from crisp.hw.devices.protocol import BlockRange
from crisp.hw.memory import map_anonymous
from crisp.hw.store.packing import synthetic_geometry
from crisp.hw.store.reader import view_blocks
from crisp.model.spec import ModelSpec

MODELS = ("mixtral-8x7b", "qwen3-30b-a3b")
FORMATS = ("bf16", "fp16", "fp32", "int8", "int4")
POOL, PLAIN = 2_200_000_000, 64 << 20  # bytes
SECONDS = 0.6  # for a kind; at least 3 rounds
Kind = Callable[[int], None]


def main() -> None:
    """Print a line for each model, format, number of rows and of threads."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--model", default=",".join(MODELS))
    parser.add_argument("--format", default=",".join(FORMATS))
    parser.add_argument("--rows", default="1,64")
    parser.add_argument("--threads", default="1,2")
    given = parser.parse_args()
    memory = np.frombuffer(map_anonymous(POOL, "the pool"), np.uint8)
    print("GB/s of weights, in parentheses of plain reads; 64 rows: GFLOP/s. half, full: ours")
    print(f"{'':32}{'plain':>7}{'half':>14}{'full':>14}{'torch':>14}{'prange':>14}")
    for name in given.model.split(","):
        for dtype in given.format.split(","):
            model = _Model(name, dtype, memory)
            for rows in map(int, given.rows.split(",")):
                for threads in map(int, given.threads.split(",")):
                    speeds = _race(model.kinds(rows, threads), threads)
                    print(f"{name:15}{dtype:6}{rows:3} row{'s' * (rows > 1):1}{threads:3} thr"
                          + _line(model, rows, threads, speeds), flush=True)  # fmt: skip


def _line(model: _Model, rows: int, threads: int, times: dict[str, float]) -> str:
    plain = PLAIN / times["plain"] / 1e9
    line = f"{plain:7.1f}"
    for kind in ("half", "full", "torch", "prange"):
        if kind not in times:
            line += f"{'–':>14}"
        elif rows == 1:
            size = model.bytes * model.calls(rows, threads) * (0.5 if kind == "half" else 1)
            speed = size / times[kind] / 1e9
            line += f"{speed:7.1f} ({speed / plain:4.2f})"
        else:
            flops = model.numbers * (0.5 if kind == "half" else 1) * 2 * rows
            line += f"{flops / times[kind] / 1e9:14.0f}"
    return line


def _race(kinds: dict[str, Kind], threads: int) -> dict[str, float]:
    """Return each kind's seconds, by turns."""
    taken: dict[str, list[float]] = {kind: [] for kind in kinds}
    clock = time.thread_time if threads == 1 else time.perf_counter
    for run in kinds.values():  # whatever is made at a first call
        run(0)
    turn, over = 0, time.monotonic() + SECONDS * len(kinds)
    while turn < 3 * len(kinds) or time.monotonic() < over:
        for kind, run in kinds.items():
            begin = clock()
            run(turn)
            taken[kind].append(clock() - begin)
            turn += 1
    of = np.median if threads == 1 else np.min
    return {kind: float(of(times)) for kind, times in taken.items()}


class _Model:
    """Experts of one size and format in the pool."""

    def __init__(self, name: str, dtype: str, memory: Any) -> None:
        _, self.spec = synthetic_geometry(ModelSpec.named(name).first_layers(1), dtype, 0)
        spec = self.spec
        self.store: Any = SimpleNamespace(spec=spec, dtype=dtype, activation="silu")
        self.experts = POOL // spec.expert_bytes
        self.memory = memory
        self.pool = memory[: self.experts * spec.expert_bytes].reshape(-1, spec.block_bytes)
        self.pool[:] = _block(spec, dtype)
        self.numbers = 3 * spec.d_model * spec.d_ff
        self.bytes = self.numbers * spec.bits / 8
        self.parts = view_blocks(torch.from_numpy(self.pool), self.store)

    def calls(self, rows: int, threads: int) -> int:
        """Return how many experts a round computes: of one row, as many bytes as plain reads.

        Several threads compute one, so that a round is short and one of them is not disturbed.
        """
        return 1 if rows > 1 or threads > 1 else max(1, round(PLAIN / self.bytes))

    def _blocks(self, turn: int, calls: int) -> Iterator[int]:
        """Yield the blocks in the pool of a round's experts."""
        for call in range(calls):
            first = self.spec.n_blocks * ((turn * calls + call) % self.experts)
            yield from range(first, first + self.spec.n_blocks)

    def kinds(self, rows: int, threads: int) -> dict[str, Kind]:
        """Return what is raced: functions of the turn."""
        arithmetic = Arithmetic(self.store, self.pool, threads)
        arithmetic.prepare()
        torch.set_num_threads(threads)
        x = torch.randn(rows, self.spec.d_model).bfloat16()
        inputs, n = arithmetic.inputs(x), self.spec.n_blocks
        calls = self.calls(rows, threads)

        def ours(width: int) -> Kind:
            def run(turn: int) -> None:
                for call in range(calls):
                    first = n * ((turn * calls + call) % self.experts)
                    widths, ones = np.full(rows, width), np.ones(rows, np.float32)
                    batch = ExpertBatch(0, np.arange(rows), widths, ones, inputs)
                    arithmetic.add(BlockRange(batch, 0, range(first, first + width)))

            return run

        kinds = {"plain": self._plain(threads), "half": ours(n // 2), "full": ours(n)}
        if self.store.dtype in ("bf16", "fp16", "fp32"):
            kinds["torch"] = self._torch(x, calls)
            if self.store.dtype != "fp16" and rows == 1 and threads > 1:
                kinds["prange"] = self._prange(inputs[0], calls)
        return kinds

    def _plain(self, threads: int) -> Kind:
        helpers = ThreadPoolExecutor(threads - 1 or 1)
        size = PLAIN // threads

        def run(turn: int) -> None:
            begin = turn * 5 * PLAIN % (POOL - PLAIN) // 4096 * 4096
            first, *others = (
                self.memory[at : at + size].view(np.float32)
                for at in range(begin, begin + PLAIN, size)
            )
            parts = [helpers.submit(_total, other) for other in others]
            _total(first)
            for part in parts:
                part.result()

        return run

    def _torch(self, x: Any, calls: int) -> Kind:
        linear, parts = torch.nn.functional.linear, self.parts
        x = x.to(parts.gate.dtype)

        def run(turn: int) -> None:
            out = torch.zeros(len(x), self.spec.d_model)
            for i in self._blocks(turn, calls):
                act = torch.nn.functional.silu(linear(x, parts.gate[i])) * linear(x, parts.up[i])
                out += act @ parts.down[i]

        return run

    def _prange(self, x: Any, calls: int) -> Kind:
        spec = self.spec
        weights = self.pool.view(np.uint16 if self.store.dtype == "bf16" else np.float32)

        def run(turn: int) -> None:
            out = np.zeros(spec.d_model, np.float32)
            for i in self._blocks(turn, calls):
                block = weights[i, : 3 * spec.block * spec.d_model]
                _loops(x, block.reshape(3, spec.block, spec.d_model), out)

        return run


def _block(spec: ModelSpec, dtype: str) -> Any:
    """Return a block's bytes: small random weights of a format, and the scales of groups."""
    draw, n = np.random.default_rng(0), 3 * spec.block * spec.d_model
    block = np.zeros(spec.block_bytes, np.uint8)
    if dtype in ("int8", "int4"):
        size = n if dtype == "int8" else n // 2
        block[:size] = draw.integers(0, 256, size, np.uint8)
        block[size:].view(np.float16)[: n // 64] = 0.001
        return block
    numbers = draw.standard_normal(n, np.float32) / 50
    if dtype == "bf16":
        numbers = (numbers.view(np.uint32) >> 16).astype(np.uint16)
    elif dtype == "fp16":
        numbers = numbers.astype(np.float16)
    block[: numbers.nbytes] = numbers.view(np.uint8)
    return block


@njit(fastmath=True, nogil=True, cache=True)
def _total(numbers: Any) -> Any:
    total = np.float32(0)
    for i in range(len(numbers)):
        total += numbers[i]
    return total


@njit(fastmath=True)
def _wide(number: Any) -> Any:
    if isinstance(number, np.uint16):
        return np.uint32(number << 16).view(np.float32)
    return number


@njit(parallel=True, fastmath=True, cache=True)
def _loops(x: Any, weights: Any, out: Any) -> None:
    """Add a block's output for one row, as one writes it."""
    _, block, d = weights.shape
    hidden = np.empty(block, np.float32)
    for i in prange(block):
        gate, up = np.float32(0), np.float32(0)
        for j in range(d):
            gate += x[j] * _wide(weights[0, i, j])
            up += x[j] * _wide(weights[1, i, j])
        hidden[i] = gate / (np.float32(1) + np.exp(-gate)) * up
    for part in prange(d // 256):
        low = part * 256
        for i in range(block):
            for j in range(low, low + 256):
                out[j] += hidden[i] * _wide(weights[2, i, j])


if __name__ == "__main__":
    main()
