"""Time the fast engine of a million tokens: 5 budgets x 8 policies at Mixtral's size.

Run it with `make million`. The trace is drawn as `crisp trace synth` draws it, from statistics of a
real Mixtral where DIR/traces holds them, else from even shares; it lies in a file that every worker
maps, and is read in batches. Each run computes its bounds, as always. Printed are minutes, and the
peak of memory of every process together.
"""

from __future__ import annotations

import argparse
import resource
import tempfile
import time
from concurrent.futures import ProcessPoolExecutor
from dataclasses import replace
from functools import cache
from itertools import combinations
from multiprocessing import get_context
from pathlib import Path

import numpy as np

from crisp.run.result import Run
from crisp.run.setup import Setup, load_setup
from crisp.sim.fast_simulate import fast_simulate
from crisp.sim.hardware import hardware_profile
from crisp.trace import chains as statistics
from crisp.trace.synth import synthesize

TOKENS, COUNTED, SEQUENCE = 1_000_000, 20_000, 1000  # rows: simulated, of the profile, of a text
LAYERS, EXPERTS = 32, 8
BUDGETS = ("10%", "20%", "30%", "40%", "50%")
POLICIES = {
    "fo": {},
    "lru": {},
    "mo": {},
    "up": {},
    "em": {},
    "drop": {},
    "crisp": {},
    "crisp by block": {"unit": "block"},
}


def chains(data: Path | None) -> dict[int, statistics.PairChain]:
    """Return the routing of each layer: real statistics in ``data``, else every pair as often."""
    if data is not None:
        names = ("mixtral-8x7b-pair-counts.csv", "mixtral-8x7b-persistence.csv")
        return statistics.read_chains(*(data / "traces" / name for name in names))
    pairs = np.array(list(combinations(range(EXPERTS), 2)), np.int16)
    even = np.ones(len(pairs), np.int64)
    return dict.fromkeys(
        range(LAYERS), statistics.fit_chain(pairs, 2 * even, even, np.array([0.5, 0.43, 0.07]))
    )


@cache
def loaded(folder: Path) -> Setup:
    """Load the trace and what its profile is counted from, once a process."""
    whole, counted = (folder / f"{name}.trace.safetensors" for name in ("whole", "counted"))
    return load_setup(whole, profile=counted, model="mixtral-8x7b")


def one(folder: Path, policy: str, budget: str) -> tuple[str, str, Run, float, int]:
    """Return a run (without its steps), its seconds, and the peak of this process in KiB."""
    begin = time.perf_counter()
    setup = loaded(folder)
    case = setup.case(setup.policy(policy.split()[0], **POLICIES[policy]), budget)
    run = fast_simulate(case, hardware_profile("rtx4090-pcie4"))
    took = time.perf_counter() - begin
    run = replace(run, steps=None)
    return policy, budget, run, took, resource.getrusage(resource.RUSAGE_SELF).ru_maxrss


def main() -> None:
    """Draw, run all, and print."""
    parser = argparse.ArgumentParser(prog="benchmarks/million.py", description=__doc__)
    parser.formatter_class = argparse.RawDescriptionHelpFormatter
    parser.add_argument("--data", type=Path, help="the folder with traces/")
    parser.add_argument("--tokens", type=int, default=TOKENS)
    parser.add_argument("--workers", type=int, default=2)
    arguments = parser.parse_args()
    with tempfile.TemporaryDirectory() as name:
        folder, drawn = Path(name), chains(arguments.data)
        for seed, (what, tokens) in enumerate((("counted", COUNTED), ("whole", arguments.tokens))):
            texts = max(1, tokens // SEQUENCE)
            synthesize(drawn, tokens, seed, sequences=texts).save(
                folder / f"{what}.trace.safetensors"
            )
        size = (folder / "whole.trace.safetensors").stat().st_size
        print(f"{arguments.tokens:,} tokens, {LAYERS} layers, {size / 1e6:.0f} MB; "
              f"{len(BUDGETS)} budgets x {len(POLICIES)} policies")  # fmt: skip
        begin = time.perf_counter()
        cells = [(folder, policy, share) for policy in POLICIES for share in BUDGETS]
        seconds = peak = 0.0
        with ProcessPoolExecutor(arguments.workers, mp_context=get_context("spawn")) as pool:
            for policy, share, run, took, kib in pool.map(one, *zip(*cells, strict=True)):
                loaded, least = (
                    run.metrics[f"{name}_per_token"] or 0 for name in ("bytes", "belady_bytes")
                )
                print(f"  {policy:14} {share:>4} {took:6.1f} s, {loaded / 1e9:6.2f} GB a token, "
                      f"Belady {least / 1e9:6.2f}, {kib / 1024:5.0f} MB", flush=True)  # fmt: skip
                seconds, peak = seconds + took, max(peak, kib / 1024)
        minutes = (time.perf_counter() - begin) / 60
    rate = arguments.tokens * len(cells) / seconds
    own_peak = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 1024
    together = arguments.workers * peak + own_peak
    print(f"{minutes:.1f} minutes with {arguments.workers} workers, {rate:,.0f} tokens/s each; "
          f"peak memory {peak:.0f} MB a worker, of which the mapped trace is {size / 1e6:.0f}, and "
          f"{own_peak:.0f} MB to draw the trace: {together:.0f} MB together "
          f"(aim: below 2000)")  # fmt: skip


if __name__ == "__main__":
    main()
