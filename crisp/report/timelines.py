"""The time of one step, out of timelines: what each stream did from when to when."""

from __future__ import annotations

import hashlib
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt

from crisp.errors import CrispError
from crisp.model.spec import ModelSpec
from crisp.run.compare import read_timeline_rows
from crisp.run.result import Run
from crisp.run.timeline import (
    BLOCKS,
    COMPUTE,
    END,
    EVENT,
    EXPERT,
    FIRST,
    KIND,
    LAYER,
    LAYER_ID,
    START,
    STEP,
    Rows,
)

MOST_BARS = 20_000  # of one step: a prefill by blocks may have more
_STEPS = ((50, "typical", "the median"), (95, "slow", "the 95th percentile"))  # by their times


@dataclass(frozen=True)
class Timeline:
    """The rows of a run's timeline, and when each step began and ended, in ns: [steps]."""

    run: Run
    rows: Rows
    begins: npt.NDArray[np.int64]
    ends: npt.NDArray[np.int64]


def read_timeline(path: Path, runs: Sequence[Run]) -> Timeline:
    """Read the timeline of one of the runs; CrispError if it belongs to none of them."""
    rows = read_timeline_rows(path)
    digest = hashlib.sha256(rows.tobytes()).hexdigest()
    run = next((run for run in runs if run.provenance.get("timeline_sha256") == digest), None)
    if run is None:
        raise CrispError(f"{path}: is of none of the runs, or was changed")
    compute = rows[(rows[:, KIND] == LAYER) | (rows[:, KIND] == COMPUTE)]
    if not len(compute):
        raise CrispError(f"{path}: nothing is computed in it")
    steps = np.unique(compute[:, STEP])
    first = np.searchsorted(compute[:, STEP], steps)
    ends = np.maximum.reduceat(compute[:, END], first)
    begins = np.minimum.reduceat(compute[:, START], first)
    return Timeline(run, rows, begins, ends)


def steps_shown(timelines: Sequence[Timeline]) -> list[dict[str, Any]]:
    """Return a typical and a slow step of the first timeline, and the same steps of the others.

    Each is ``{"label", "lanes": [bars of a timeline ...]}``, with bars as `bars` makes them.
    """
    took = timelines[0].ends - timelines[0].begins
    order = np.argsort(took, kind="stable")
    steps: dict[int, dict[str, Any]] = {}
    for percent, word, where in _STEPS:
        step = int(order[(len(order) - 1) * percent // 100])
        label = f"step {step}, {word}: {where} of {len(took):,}"
        lanes = [bars(one, step) for one in timelines]
        steps.setdefault(step, {"label": label, "lanes": lanes})
    return list(steps.values())


def bars(timeline: Timeline, step: int) -> dict[str, Any]:
    """Return what the streams did during a step, or during the last one of a shorter run.

    Times are in ns since the step began. Each bar is [kind, event, layer, expert, task, tasks,
    first block, blocks, start, end]; task: from 1, in the order in which the event's experts
    begin to compute; 0: router and attention, and prefetches.
    """
    step = min(step, len(timeline.ends) - 1)
    begin, end = int(timeline.begins[step]), int(timeline.ends[step])
    rows = timeline.rows
    in_step = rows[(rows[:, START] < end) & (rows[:, END] > begin)]
    in_step = in_step[np.argsort(in_step[:, START], kind="stable")]
    kept = in_step[:MOST_BARS]
    places = _tasks(in_step)
    drawn = []
    for row in kept.tolist():
        task, tasks = places.get((row[EVENT], row[EXPERT]), (0, 0))
        times = [max(row[START], begin) - begin, min(row[END], end) - begin]
        where = [row[EVENT], row[LAYER_ID], row[EXPERT], task, tasks, row[FIRST], row[BLOCKS]]
        drawn.append([row[KIND], *where, *times])
    return {
        "step": step,
        "ns": end - begin,
        "blocks": ModelSpec.from_dict(timeline.run.settings["model"]).n_blocks,
        "left_out": len(in_step) - len(kept),
        "bars": drawn,
    }


def _tasks(rows: Rows) -> dict[tuple[int, int], tuple[int, int]]:
    """Return (place among its event's tasks, their number) of each (event, expert) computed."""
    places: dict[int, dict[int, int]] = {}
    for event, expert in rows[rows[:, KIND] == COMPUTE][:, [EVENT, EXPERT]].tolist():
        experts = places.setdefault(event, {})
        experts.setdefault(expert, len(experts) + 1)
    return {
        (event, expert): (place, len(experts))
        for event, experts in places.items()
        for expert, place in experts.items()
    }
