"""Try every family, two at a time."""

from __future__ import annotations

import multiprocessing
import tempfile
from collections.abc import Callable, Iterable
from concurrent.futures import ProcessPoolExecutor
from pathlib import Path

from benchmarks.models.trial import Trial, try_family


def try_all(
    names: Iterable[str],
    workers: int = 2,
    report: Callable[[Trial], None] = lambda trial: None,
) -> list[Trial]:
    """Try families in other processes; those without experts are left out."""
    trials = []
    with ProcessPoolExecutor(workers, multiprocessing.get_context("spawn")) as pool:
        for trial in pool.map(_try_one, names):
            if trial is not None:
                trials.append(trial)
                report(trial)
    return trials


def _try_one(name: str) -> Trial | None:
    with tempfile.TemporaryDirectory() as folder:
        return try_family(name, Path(folder) / name)
