"""Try every command on a tiny random model of every family, and write docs/models.md's table.

Run it with `make models`; it takes some minutes on two cores.
"""

from __future__ import annotations

import multiprocessing
import sys
import tempfile
from collections.abc import Iterable
from concurrent.futures import ProcessPoolExecutor
from pathlib import Path

ROOT = Path(__file__).resolve().parents[2]
sys.path.insert(0, str(ROOT))

from benchmarks.models.page import PAGE, insert, render  # noqa: E402
from benchmarks.models.tiny import model_types  # noqa: E402
from benchmarks.models.trial import Trial, try_family  # noqa: E402


def try_all(names: Iterable[str], workers: int = 2) -> list[Trial]:
    """Try families in processes of their own; those without experts are left out."""
    context = multiprocessing.get_context("spawn")
    with ProcessPoolExecutor(workers, context) as pool:
        trials = []
        for trial in pool.map(_try_one, names):
            if trial is not None:
                trials.append(trial)
                print(trial.model_type, trial.refusals or "", flush=True)
        return trials


def _try_one(name: str) -> Trial | None:
    with tempfile.TemporaryDirectory() as folder:
        return try_family(name, Path(folder) / name)


def main() -> None:
    """Write the table."""
    path = ROOT / PAGE
    trials = try_all(sys.argv[1:] or model_types())
    before = path.read_text(encoding="utf-8") if path.exists() else "# Models\n"
    path.write_text(insert(before, render(trials)), encoding="utf-8")
    print(f"{PAGE}: {sum(trial.complete for trial in trials)} of {len(trials)} families complete")


if __name__ == "__main__":
    main()
