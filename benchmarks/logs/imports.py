"""What the importers make of the fixtures, whose truth is known, and of files of real engines."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np

from benchmarks.logs.published import MODELS
from crisp.trace.importing.engines import EngineLog, ExpertCounts, read_log
from crisp.trace.importing.engines.registry import recognise_log

SIZES = {"n_experts": 128, "n_layers": 48, "top_k": 6}  # of the fixtures, where they do not say
TRUTH, FOLDER = "truth.npz", "logs/fixtures"
REAL: dict[str, dict[str, int]] = {
    "logs/llamacpp-moe-trace/excerpt.csv": {"n_experts": 256},
    "logs/moe-cache-eval/events.csv": {},
}


def imports(data: Path) -> list[dict[str, Any]]:
    """Return a line for each log: as what it is recognised, and whether it is what it should be."""
    truth = np.load(data / FOLDER / TRUTH)["experts"]
    counted = np.stack([np.bincount(truth[:, n].ravel(), minlength=128) for n in range(48)])
    found = []
    for path in sorted((data / FOLDER).iterdir()):
        if path.name in (TRUTH, "PROVENANCE.txt"):
            continue
        log = read_log([path], **SIZES)
        same = np.array_equal(counted, log.counts) if isinstance(log, ExpertCounts) else False
        if isinstance(log, EngineLog):
            same = np.array_equal(truth, log.trace.experts)
        found.append(_line(path, f"fixtures/{path.name}", log) | {"equal": same})
    for name, sizes in REAL.items():
        log = read_log([data / name], **sizes)
        found.append(_line(data / name, name.removeprefix("logs/"), log))
    for model in MODELS:
        path = model.log(data)
        found.append(_line(path, f"bigmoeonedge/{path.name}", read_log([path])))
    return found


def _line(path: Path, name: str, log: EngineLog | ExpertCounts) -> dict[str, Any]:
    line = {"name": name, "recognised": recognise_log(path), "engine": log.engine, "equal": None}
    if isinstance(log, ExpertCounts):
        return line | {"what": f"counts of {log.counts.shape[0]} layers"}
    trace = log.trace
    what = f"{trace.rows} tokens, {len(trace.moe_layers)} layers, top-{trace.k}"
    return line | {"what": what, "absent": log.absent}
