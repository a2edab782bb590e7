"""Caches, prefetchers and orders, one thing varied at a time.

    python benchmarks/caches [--data DIR]

writes docs/caches.json (every figure), docs/caches.md and docs/images/caches.png. DIR/traces holds
gpt-oss-20b's routing; without it, its tables are left out. Some minutes on two cores.
"""

from __future__ import annotations

import argparse
import json
import sys
import tempfile
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parents[2]
sys.path[0] = str(ROOT)  # not this folder: its modules have plain names

from joblib import Parallel, delayed  # noqa: E402
from rich.console import Console  # noqa: E402
from rich.progress import track  # noqa: E402

from benchmarks.caches.cells import REAL, cells, file_of, inputs_of, run  # noqa: E402
from benchmarks.caches.page import CONTENT, write  # noqa: E402
from crisp.errors import CrispError  # noqa: E402
from crisp.model.spec import ModelSpec  # noqa: E402
from crisp.trace.importing.table import import_table  # noqa: E402

TABLE = "traces/gpt-oss-20b__mmlu-gpqa-mix.parquet"


def main() -> None:
    """Run all cells, and write the page."""
    parser = argparse.ArgumentParser(prog="benchmarks/caches", description=__doc__)
    parser.formatter_class = argparse.RawDescriptionHelpFormatter
    parser.add_argument("--data", type=Path, help=f"the folder with {TABLE}")
    parser.add_argument("--jobs", type=int, default=-1, help="processes; -1: one a core")
    parser.add_argument("--render", action="store_true", help="only write the page anew")
    arguments = parser.parse_args()
    if arguments.render:
        write(ROOT, json.loads((ROOT / CONTENT).read_text(encoding="utf-8")))
        return
    try:
        with tempfile.TemporaryDirectory() as folder:
            write(ROOT, counted(arguments.data, Path(folder), arguments.jobs))
    except CrispError as error:
        parser.exit(2, f"error: {error}\n")


def counted(data: Path | None, folder: Path, jobs: int) -> dict[str, Any]:
    """Run all cells; return all figures, as docs/caches.json has them."""
    real = None
    if data is not None:
        real = folder / f"{REAL}.trace.safetensors"
        import_table(data / TABLE, real, spec=ModelSpec.named(REAL))
    todo = list(cells(real is not None))
    runs = []
    pool = Parallel(n_jobs=jobs, return_as="generator")
    records = pool(delayed(run)(cell, real) for cell in todo)
    shown = Console(stderr=True)
    for record in track(
        records, "runs", len(todo), console=shown, transient=True, disable=not shown.is_terminal
    ):
        runs.append(record)
    traces = {}
    for name in dict.fromkeys(cell.trace for cell in todo):
        inputs = inputs_of(file_of(name, real))
        traces[name] = {"digest": inputs.trace.digest(), "cut": inputs.split}
    return {"version": 1, "traces": traces, "runs": runs}


if __name__ == "__main__":
    main()
