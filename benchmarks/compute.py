"""Time the cpu device's arithmetic at Mixtral's geometry: half the width against the whole.

Run it with `make bench`. It computes random experts of 8 blocks of 1792 neurons in bf16, three of
them by turns, so that the processor's caches do not hold them; beside them plain torch, on one
block of the same weights. All run on one thread, interleaved. No weight is copied or converted on
the way: see `test_no_weight_is_copied`.
"""

from __future__ import annotations

import os
import statistics
import tempfile
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

os.environ.setdefault("OMP_NUM_THREADS", "1")

import numpy as np
import torch

from crisp.hw.devices.batch import ExpertBatch
from crisp.hw.devices.cpu.arithmetic import Arithmetic
from crisp.hw.devices.protocol import BlockRange
from crisp.hw.store.packing import pack_synthetic
from crisp.hw.store.reader import view_blocks
from crisp.model.spec import ModelSpec

ROUNDS = {1: 25, 64: 7}
EXPERTS = 3  # of 352 MB each
AIM = 0.6


def work(x: Any, width: int) -> ExpertBatch:
    """Return the batch of all rows of x, at one width."""
    n = len(x)
    return ExpertBatch(0, np.arange(n), np.full(n, width), np.ones(n, np.float32), x)


def main() -> None:
    """Print both rows' ratios, GB/s and GFLOP/s, and torch's."""
    torch.set_num_threads(1)
    spec = ModelSpec.named("mixtral-8x7b").first_layers(1)
    n = spec.n_blocks
    with tempfile.TemporaryDirectory() as folder:
        store = pack_synthetic(spec, Path(folder) / "store")
        pool = np.fromfile(store.files[0], np.uint8)[store.offset(0, 0, 0) :]
    pool = pool[: EXPERTS * spec.expert_bytes].reshape(EXPERTS * n, -1)
    arithmetic = Arithmetic(store, pool, 1)
    begin = time.perf_counter()
    arithmetic.prepare()
    print(f"Mixtral's expert, {n} blocks of {spec.block} neurons, bf16, 1 thread; compiled or "
          f"fetched in {time.perf_counter() - begin:.1f} s")  # fmt: skip
    parts = view_blocks(torch.from_numpy(pool), store)

    def ours(x: Any, turn: int, width: int) -> None:
        first = n * (turn % EXPERTS)
        arithmetic.add(
            BlockRange(work(arithmetic.inputs(x), width), 0, range(first, first + width))
        )

    def theirs(x: Any, turn: int, width: int) -> None:
        """Compute with torch: a linear layer for each block and projection, as they are stored."""
        linear, out = torch.nn.functional.linear, torch.zeros(len(x), spec.d_model)
        first = n * (turn % EXPERTS)
        for i in range(first, first + width):
            act = torch.nn.functional.silu(linear(x, parts.gate[i])) * linear(x, parts.up[i])
            out += act @ parts.down[i]

    for rows, rounds in ROUNDS.items():
        x = torch.randn(rows, spec.d_model, generator=torch.Generator().manual_seed(0))
        x = x.bfloat16()
        kinds: dict[str, tuple[Callable[[Any, int, int], None], int]] = {
            "half": (ours, n // 2), "full": (ours, n), "torch": (theirs, 1),
        }  # fmt: skip
        taken: dict[str, list[float]] = {kind: [] for kind in kinds}
        for turn in range(rounds):
            for kind, (run, width) in kinds.items():
                if kind == "torch" and rows > 1 and turn > 0:
                    continue  # seconds a block
                begin = time.perf_counter()
                run(x, turn, width)
                taken[kind].append(time.perf_counter() - begin)
        ratios = sorted(a / b for a, b in zip(taken["half"], taken["full"], strict=True))
        print(f"{rows} row{'s' * (rows > 1)}, {rounds} rounds, medians:")
        for kind, (_, width) in kinds.items():
            seconds = statistics.median(taken[kind])
            weights = 3 * spec.d_model * spec.neurons(0, width)
            print(f"  {kind:5} {width} block{'s' * (width > 1):1}  {1e3 * seconds:9.2f} ms"
                  f"  {2 * weights / seconds / 1e9:7.2f} GB/s"
                  f"  {2 * weights * rows / seconds / 1e9:7.2f} GFLOP/s")  # fmt: skip
        print(f"  half / full      {statistics.median(ratios):6.3f}  (aim: at most {AIM}; "
              f"{ratios[0]:.3f} to {ratios[-1]:.3f})")  # fmt: skip


if __name__ == "__main__":
    main()
