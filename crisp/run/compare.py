"""compare(): a simulated run beside a measured one of the same case."""

from __future__ import annotations

import hashlib
from collections.abc import Sequence
from dataclasses import dataclass
from itertools import zip_longest
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt

from crisp.errors import CrispError
from crisp.run.metrics.phases import PHASES
from crisp.run.metrics.phases import TIMES as PARTS
from crisp.run.repeats import half_width
from crisp.run.result import Run, load_runs, nth_run
from crisp.run.timeline import (
    BLOCKS,
    COMPUTE,
    END,
    EVENT,
    EXPERT,
    FIRST,
    KIND,
    KINDS,
    LAYER,
    LAYER_ID,
    LOAD,
    PREFETCH,
    RESIDENT,
    Rows,
)

MAY_DIFFER = ("engine", "hardware", "device", "store", "trace.file", "profile.from")
"""Settings: where it ran, and which files its routing and its counts were read from."""
COUNTS = ("tasks", "hits", "partial_hits", "skipped", "blocks_loaded", "bytes_loaded")
TIMES = (
    "tokens_per_second", "ms_per_token_mean", "ms_per_token_p50", "ms_per_token_p95",
    "prefill_tokens_per_second", "ttft_ms", "link_busy", "compute_busy",
    *(f"{phase}_{part}_per_token" for phase in PHASES for part in PARTS),
)  # fmt: skip
QUANTILES = (5, 50, 95)  # percent
_WHERE = [EVENT, LAYER_ID, EXPERT, FIRST, BLOCKS]


@dataclass(frozen=True)
class ComparedMetric:
    """A metric of both runs; None: a run does not have it."""

    metric: str
    simulated: float | None
    measured: float | None
    half_width: float | None = None  # of the measured one's 95 % interval; None: not known

    @property
    def differs(self) -> bool | None:
        """Whether the simulated value is outside the measured one's interval; None: not known."""
        if self.simulated is None or self.measured is None or self.half_width is None:
            return None
        return abs(self.simulated - self.measured) > self.half_width

    @property
    def error(self) -> float | None:
        """Simulated over measured, less 1; None where there is nothing to divide by."""
        if self.simulated is None or not self.measured:
            return 0.0 if self.simulated == self.measured == 0 else None
        return self.simulated / self.measured - 1


@dataclass(frozen=True)
class TimelineComparison:
    """What timelines say beyond the metrics; a difference is None, or the first one in words.

    errors: simulated over measured duration of an event, less 1, at QUANTILES. An event lasts from
    the end of the one before, so its layer is in it.
    """

    events: int
    errors: tuple[float, ...]
    loads: str | None  # in the order in which they ended
    computed: str | None  # blocks of each task, in whatever order and however many pieces
    residents: str | None  # blocks of the budget after each event

    @property
    def identical(self) -> bool:
        """Whether both made the same decisions."""
        return (self.loads, self.computed, self.residents) == (None, None, None)


@dataclass(frozen=True)
class Comparison:
    """Two runs of one case."""

    pairs: tuple[ComparedMetric, ...]
    timelines: TimelineComparison | None  # None: not given

    def error(self, metric: str) -> float | None:
        """Return the relative error of one metric."""
        return next(pair.error for pair in self.pairs if pair.metric == metric)


def compare(
    simulated: Run, measured: Run, simulated_rows: Rows | None, measured_rows: Rows | None
) -> Comparison:
    """Lay a simulated run beside a measured one; timelines need both runs' rows.

    Raises CrispError, naming the first setting that differs, for runs of different cases.
    """
    check_same_case(simulated, measured)
    pairs = tuple(
        ComparedMetric(
            name, simulated.metrics[name], measured.metrics[name], half_width(measured, name)
        )
        for name in (*COUNTS, *TIMES)
    )
    if simulated_rows is None or measured_rows is None:
        return Comparison(pairs, None)
    return Comparison(pairs, _timelines(simulated_rows, measured_rows))


def load_one_run(path: Path, number: int | None = None, *, measured: bool) -> Run:
    """Return the only run in a file, or its ``number``th, from 1.

    Raises CrispError if the file holds more or fewer, or one of the other kind.
    """
    runs = load_runs(path)
    if number is None and len(runs) != 1:
        raise CrispError(f"{path}: holds {len(runs)} runs, expected one; --run says which")
    run = nth_run(runs, 1 if number is None else number, path)
    kinds = ("simulated", "measured")
    is_measured = run.settings["engine"] == "hw"
    if is_measured != measured:
        raise CrispError(f"{path}: is a {kinds[is_measured]} run, expected a {kinds[measured]} one")
    return run


def check_same_case(simulated: Run, measured: Run) -> None:
    """Raise CrispError unless the settings agree in all but where the runs ran."""
    difference = _difference("", simulated.settings, measured.settings)
    difference = difference or _other_blocks(simulated.settings, measured.settings)
    if difference is not None:
        raise CrispError(f"the runs are not of the same case: {difference}")


def load_run_timeline(run: Run, run_path: Path, path: Path) -> Rows:
    """Return the rows of a run's own timeline; CrispError for another's or a changed one.

    run_path: where the run is from.
    """
    rows = read_timeline_rows(path)
    if hashlib.sha256(rows.tobytes()).hexdigest() != run.provenance.get("timeline_sha256"):
        raise CrispError(f"{path}: is of another run than {run_path}, or was changed")
    return rows


def read_timeline_rows(path: Path) -> Rows:
    """Return the rows of a ``timeline.parquet``; CrispError if it is something else."""
    import pyarrow.compute
    import pyarrow.parquet

    from crisp.run.sinks import schema

    try:
        with path.open("rb") as file:
            # no threads: they may outlive the interpreter, and abort it
            table = pyarrow.parquet.ParquetFile(file, pre_buffer=False).read(use_threads=False)
    except OSError as error:
        raise CrispError(f"{path}: cannot be read: {error.strerror or error}") from error
    except pyarrow.ArrowException as error:
        raise CrispError(f"{path}: is not a parquet file") from error
    if table.schema.names != schema().names:
        raise CrispError(f"{path}: is not a timeline")
    rows = np.empty((len(table), table.num_columns), np.int64)
    for place, (name, expected) in enumerate(zip(table.schema.names, schema().types, strict=True)):
        column = table.column(name)
        if column.type != expected or column.null_count:
            raise CrispError(f"{path}: is not a timeline: {name} is not all {expected}")
        if place == KIND:
            column = pyarrow.compute.index_in(column, pyarrow.array(KINDS))
            if column.null_count:
                raise CrispError(f"{path}: is not a timeline: kind: expected {', '.join(KINDS)}")
        rows[:, place] = column.to_numpy()
    return rows


def _difference(place: str, one: Any, other: Any) -> str | None:
    """Return the first key whose values differ, and both values, in words; None: none does."""
    if not (isinstance(one, dict) and isinstance(other, dict)):
        return None if one == other else f"{place} is {one!r:.60} and {other!r:.60}"
    for key in dict.fromkeys([*one, *other]):
        inner = f"{place}.{key}" if place else key
        if inner in MAY_DIFFER:
            continue
        difference = _difference(inner, one.get(key), other.get(key))
        if difference is not None:
            return difference
    return None


def _other_blocks(simulated: dict[str, Any], measured: dict[str, Any]) -> str | None:
    """Say in what a calibrated profile's blocks are not the store's, as far as both tell."""
    blocks: Any = simulated
    for key in ("hardware", "tables", "geometry"):
        blocks = blocks.get(key) if isinstance(blocks, dict) else None
    store = measured.get("store")
    if isinstance(blocks, dict) and isinstance(store, dict):
        for key in ("dtype", "activation"):
            one, other = blocks.get(key), store.get(key)
            if None not in (one, other) and one != other:
                return f"{key} of calibrated blocks is {one!r:.60}, of the store's {other!r:.60}"
    return None


# -- timelines -----------------------------------------------------------------------------------


def _timelines(simulated: Rows, measured: Rows) -> TimelineComparison:
    ends = [_event_ends(rows) for rows in (simulated, measured)]
    count = min(map(len, ends))
    durations = [np.diff(end_rows[:count, END], prepend=0) for end_rows in ends]
    positive = durations[1] > 0
    errors: Sequence[float] = ()
    if positive.any():
        quantiles = np.percentile(durations[0][positive] / durations[1][positive] - 1, QUANTILES)
        errors = [float(error) for error in quantiles]
    return TimelineComparison(
        events=count,
        errors=tuple(errors),
        loads=_first_difference("load", _loads(simulated), _loads(measured)),
        computed=_first_difference("task", _computed(simulated), _computed(measured)),
        residents=_first_difference(
            "blocks after event", *(end_rows[:, [EVENT, RESIDENT]].tolist() for end_rows in ends)
        ),
    )


def _event_ends(rows: Rows) -> Rows:
    """Return the row that ends each event: of its last computation, or of its layer."""
    event_rows = rows[
        ((rows[:, KIND] == COMPUTE) | (rows[:, KIND] == LAYER)) & (rows[:, EVENT] >= 0)
    ]
    last = np.append(event_rows[1:, EVENT] != event_rows[:-1, EVENT], True)[: len(event_rows)]
    ends: Rows = event_rows[last]
    return ends


def _loads(rows: Rows) -> list[list[int]]:
    on_link = (rows[:, KIND] == LOAD) | (rows[:, KIND] == PREFETCH)
    return _named(rows[on_link])


def _computed(rows: Rows) -> list[list[int]]:
    """Return the tasks that were computed, in order of (event, layer, expert).

    Into which pieces a task is cut depends on when its blocks come.
    """
    pieces = np.array(_named(rows[rows[:, KIND] == COMPUTE]), np.int64).reshape(-1, len(_WHERE))
    tasks, place = np.unique(pieces[:, :3], axis=0, return_inverse=True)
    blocks = np.bincount(place.reshape(-1), pieces[:, 4], len(tasks)).astype(np.int64)
    return [[*task, 0, n] for task, n in zip(tasks.tolist(), blocks.tolist(), strict=True)]


def _named(rows: Rows) -> list[list[int]]:
    places: npt.NDArray[np.int64] = rows[:, _WHERE]
    return [list(row) for row in places.tolist()]


def _first_difference(
    what: str, simulated: list[list[int]], measured: list[list[int]]
) -> str | None:
    """Describe the first thing that happened in only one of the runs, or differently."""
    for place, (one, other) in enumerate(zip_longest(simulated, measured)):
        if one != other:
            entries = f"simulated {_describe_entry(one)}, measured {_describe_entry(other)}"
            return f"{what} {place}: {entries}"
    return None


def _describe_entry(where: list[int] | None) -> str:
    """Describe an entry of a list."""
    if where is None:
        return "none"
    if len(where) == 2:
        return f"{where[1]} (event {where[0]})"
    event, layer, expert, first, blocks = where
    when = "a prefetch" if event < 0 else f"event {event}"
    return f"L{layer} E{expert} [{first},{first + blocks}) ({when})"
