"""What reading quantised checkpoints costs, and what int4 loses with and without searched scales.

    python benchmarks/quantised --data DIR

writes docs/quantised.md and docs/quantised.json (every figure). DIR/data holds
{code,docs,kjv}.{calibration,heldout}.txt. Checkpoints of --bytes bytes and stores of up to four
times as many are written to a temporary folder in --work, one after the other.
"""

from __future__ import annotations

import argparse
import json
import os
import sys
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parents[2]
sys.path[0] = str(ROOT)  # not this folder: its modules have plain names

MODELS = ("tiny-mixtral", "tiny-deepseek")


def main() -> None:
    """Measure everything, and write the page."""
    parser = argparse.ArgumentParser(prog="benchmarks/quantised", description=__doc__)
    parser.formatter_class = argparse.RawDescriptionHelpFormatter
    parser.add_argument("--data", type=Path, help="the folder with data/KIND.PART.txt")
    parser.add_argument("--work", type=Path, default=ROOT / "out" / "quantised")
    parser.add_argument("--bytes", type=float, default=2e9, help="of a checkpoint")
    parser.add_argument("--render", action="store_true", help="only write the page anew")
    arguments = parser.parse_args()
    from benchmarks.quantised.page import CONTENT, write

    if arguments.render:
        write(ROOT, json.loads((ROOT / CONTENT).read_text(encoding="utf-8")))
        return
    if arguments.data is None:
        parser.error("--data DIR: the folder of texts is needed")
    write(ROOT, measure_all(arguments.data, arguments.work, int(arguments.bytes)))


def measure_all(data: Path, work: Path, nbytes: int) -> dict[str, Any]:
    """Measure everything of the page."""
    os.environ.setdefault("OMP_NUM_THREADS", "1")  # the models are too small for more
    from benchmarks.quality.estimates import rounded
    from benchmarks.quantised.checkpoints import KINDS
    from benchmarks.quantised.differences import differences
    from benchmarks.quantised.memory import measure
    from benchmarks.quantised.scales import compare

    def tell(what: str) -> None:
        print(what, file=sys.stderr, flush=True)

    work.mkdir(parents=True, exist_ok=True)
    memory = []
    for kind in KINDS:
        tell(f"packing {kind}")
        memory.append(measure(kind, nbytes, work))
    scales = [
        compare(ROOT / "traces" / name, data, lambda what, name=name: tell(f"{name}: {what}"))
        for name in MODELS
    ]
    content = {"differences": differences(), "memory": memory, "scales": scales}
    result: dict[str, Any] = rounded(content)
    return result


if __name__ == "__main__":
    main()
