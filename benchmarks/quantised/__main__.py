"""What reading quantised checkpoints costs, and what int4 loses with and without fitted scales.

    python benchmarks/quantised --data DIR

writes docs/quantised.md and docs/quantised.json (every figure). DIR/data holds
{code,docs,kjv}.{calibration,heldout}.txt. Checkpoints of --bytes bytes and stores of up to four
times as many are written to a temporary folder in --work, one after the other; that takes most of
the time. --only PART measures a part anew and keeps the figures of the others.
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

PARTS = ("differences", "memory", "scales")
MODELS = ("tiny-mixtral", "tiny-deepseek")


def main() -> None:
    """Measure everything, and write the page."""
    parser = argparse.ArgumentParser(prog="benchmarks/quantised", description=__doc__)
    parser.formatter_class = argparse.RawDescriptionHelpFormatter
    parser.add_argument("--data", type=Path, help="the folder with data/KIND.PART.txt")
    parser.add_argument("--work", type=Path, default=ROOT / "out" / "quantised")
    parser.add_argument("--bytes", type=float, default=2e9, help="of a checkpoint")
    parser.add_argument("--only", choices=PARTS, help="measure one part anew")
    parser.add_argument("--render", action="store_true", help="only write the page anew")
    arguments = parser.parse_args()
    os.environ.setdefault("OMP_NUM_THREADS", "1")  # the models are too small for more
    from benchmarks.quality.estimates import rounded
    from benchmarks.quantised.page import CONTENT, write

    parts = () if arguments.render else (arguments.only,) if arguments.only else PARTS
    if "scales" in parts and arguments.data is None:
        parser.error("--data DIR: the folder of texts is needed")
    content = dict[str, Any]()
    if len(parts) < len(PARTS):
        content = json.loads((ROOT / CONTENT).read_text(encoding="utf-8"))
    for part in parts:
        content[part] = rounded(
            _measure(part, arguments.data, arguments.work, int(arguments.bytes))
        )
    write(ROOT, content)


def _measure(part: str, data: Path, work: Path, nbytes: int) -> list[dict[str, Any]]:
    """Measure a part of the page."""
    from benchmarks.quantised.checkpoints import KINDS
    from benchmarks.quantised.differences import differences
    from benchmarks.quantised.memory import measure
    from benchmarks.quantised.scales import compare

    def tell(what: str) -> None:
        print(what, file=sys.stderr, flush=True)

    if part == "differences":
        return differences()
    if part == "memory":
        work.mkdir(parents=True, exist_ok=True)
        memory = []
        for kind in KINDS:
            tell(f"packing {kind}")
            memory.append(measure(kind, nbytes, work))
        return memory
    return [
        compare(ROOT / "traces" / name, data, lambda what, name=name: tell(f"{name}: {what}"))
        for name in MODELS
    ]


if __name__ == "__main__":
    main()
