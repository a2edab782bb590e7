"""Time loading by the number of reads that the disk is given at once, in the executor.

    python benchmarks/fidelity/reads_in_flight.py --rounds 12

Full offloading at granularity block, of stores with blocks of several sizes, which are written
first (2 GB of disk; 5 with --whole). Numbers take turns in random order, so that whatever else the
disk does hits all alike; ratios are of two runs of the same round.
"""

from __future__ import annotations

import argparse
import random
import tempfile
from pathlib import Path
from statistics import median, quantiles

from matrix import GEOMETRIES, WHOLE, Cell, Geometry

from crisp.hw.devices import slots
from crisp.hw.devices.options import DeviceOptions
from crisp.hw.replay import replay
from crisp.hw.store import block_io
from crisp.hw.store.packing import pack_synthetic

NUMBERS = (1, 2, 4, 8)


def main() -> None:
    """Print a line for each geometry."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--rounds", type=int, default=12)
    parser.add_argument("--tokens", type=int, default=4)
    parser.add_argument("--whole", action="store_true", help="a layer of Mixtral 8x7B's, too")
    options = parser.parse_args()
    with tempfile.TemporaryDirectory(dir=Path()) as folder:
        for number, geometry in enumerate([*GEOMETRIES, *([WHOLE] if options.whole else [])]):
            print(_line(geometry, Path(folder) / str(number), options.rounds, options.tokens))


def _line(geometry: Geometry, folder: Path, rounds: int, tokens: int) -> str:
    """Return GB/s with one read at a time, and the others' ratios to it: median and quartiles."""
    store, draw = pack_synthetic(geometry.spec, folder), random.Random(0)
    case = Cell(geometry, "fo", "10%", "block").case(store, tokens)
    rates: dict[int, list[float]] = {number: [] for number in NUMBERS}
    for _ in range(rounds):
        for number in draw.sample(NUMBERS, len(NUMBERS)):
            slots.IN_FLIGHT = block_io.IN_FLIGHT = number
            metrics = replay(case, store, DeviceOptions()).metrics
            loading_ns = float(metrics["link_busy"] or 0) * float(metrics["total_ns"] or 0)
            rates[number].append(float(metrics["bytes_loaded"] or 0) / loading_ns)
    words = [f"{store.spec.block_bytes / 1e6:.1f} MB a block: 1: {median(rates[1]):.2f} GB/s"]
    for number in NUMBERS[1:]:
        ratios = [rate / one for rate, one in zip(rates[number], rates[1], strict=True)]
        low, middle, high = quantiles(ratios, n=4)
        words.append(f"{number}: x {middle:.2f} ({low:.2f} to {high:.2f})")
    return ", ".join(words)


if __name__ == "__main__":
    main()
