"""Run: what a simulation or a measurement returns. Settings, metrics, and where they come from."""

from __future__ import annotations

import hashlib
import json
from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from crisp.errors import CrispError
from crisp.files import atomic, check_readable
from crisp.run.metrics.older import in_todays_names
from crisp.run.schema import check
from crisp.run.timeline import StepTimes

VERSION = 1


@dataclass(frozen=True)
class Run:
    """One run. A metric that could not be had is None, and ``unavailable`` says why."""

    settings: dict[str, Any]
    metrics: dict[str, int | float | None]
    unavailable: dict[str, str]
    provenance: dict[str, Any]
    steps: StepTimes | None = field(default=None, compare=False, repr=False)
    """Of a simulation that was made here: files have none."""

    def to_dict(self) -> dict[str, Any]:
        """Return everything, safe for JSON."""
        return {
            "version": VERSION,
            "settings": self.settings,
            "metrics": self.metrics,
            "unavailable": self.unavailable,
            "provenance": self.provenance,
        }


def hash_settings(settings: dict[str, Any]) -> str:
    """Return the hash by which a run file's settings are known to be those of its run."""
    return hashlib.sha256(json.dumps(settings, sort_keys=True).encode()).hexdigest()


def to_json(runs: Run | list[Run]) -> str:
    """Return a run, or a list of them, as JSON text: the same run gives the same bytes."""
    content = runs.to_dict() if isinstance(runs, Run) else [run.to_dict() for run in runs]
    return json.dumps(content, indent=1, allow_nan=False) + "\n"


def save_runs(runs: Run | list[Run], path: str | Path) -> None:
    """Write a run, or a list of them, as ``run.json``."""
    with atomic(path) as temporary:
        temporary.write_text(to_json(runs), encoding="utf-8")


def load_runs(path: str | Path) -> list[Run]:
    """Return the runs in a file of `save_runs`, one at least; CrispError for another file."""
    check_readable(path)
    try:
        content = json.loads(Path(path).read_text(encoding="utf-8"))
        json.dumps(content, allow_nan=False, ensure_ascii=False).encode()  # numbers and text, all
    except OSError as error:
        raise CrispError(f"{path}: cannot be read: {error.strerror or error}") from error
    except (ValueError, RecursionError) as error:
        raise CrispError(f"{path}: is not a run file") from error
    runs = content if isinstance(content, list) else [content]
    if not runs or not all(isinstance(run, dict) and "version" in run for run in runs):
        raise CrispError(f"{path}: is not a run file")
    for number, run in enumerate(runs, 1):
        if run["version"] != VERSION:
            raise CrispError(f"{path}: made by another version of crisp")
        where = str(path) if run is content else f"{path}: run {number}"
        check(run, where)
        if run["provenance"].get("inputs_sha256") != hash_settings(run["settings"]):
            raise CrispError(f"{where}: its settings were changed after it was made")
    return [_from_dict(run) for run in runs]


def _from_dict(run: dict[str, Any]) -> Run:
    """Return a run that has been checked; an older crisp's metrics get today's names."""
    settings = run["settings"]
    metrics, why = in_todays_names(run["metrics"], run["unavailable"], settings["phase"])
    return Run(settings, metrics, why, run["provenance"])


def nth_run(runs: Sequence[Run], number: int, path: Path) -> Run:
    """Return one of a file's runs, counted from 1; CrispError for one that it does not hold."""
    if not 1 <= number <= len(runs):
        raise CrispError(f"--run {number}: {path} holds {len(runs)} runs, counted from 1")
    return runs[number - 1]
