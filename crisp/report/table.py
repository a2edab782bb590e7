"""A table of runs, from run files or from a sweep's results, of which reports are made."""

from __future__ import annotations

import hashlib
import json
import re
from collections.abc import Hashable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from crisp.errors import CrispError
from crisp.report.caveats import RUN_KIND_FIELDS, RunKind
from crisp.run.metrics.older import in_todays_names
from crisp.run.result import Run
from crisp.run.schema import COUNTS, NAMED_BY_PHASE, NUMBERS
from crisp.units import parse_fraction

Number = int | float | None

MADE_BY, JOULES_FROM = "made by", "joules from"  # beside the settings, out of the provenance
# Of a sweep: the hash of its settings; of rows that are left out; read by `_reasons`.
_ASIDE = ("cell", "refused", "unavailable")
_ASKED, _PROVENANCE = "asked.", "provenance."  # settings as they were spelled; not settings
_TOP = ("engine", "granularity", "phase", "batch", "chunk", "seed", "limit")  # without a dot
_NEEDED = ("engine", "policy.name", "budget.asked", "phase")
OBJECTS = ("profile", "hardware", "device", "store", "trace.file")  # may be absent as a whole
_MOST = 1 << 63  # of a metric
_LONGEST = 90  # characters of a value; of a longer one its begin and its hash are shown
_DIGEST = re.compile("[0-9a-f]{64}")  # shown by its begin


@dataclass(frozen=True)
class RunTable:
    """A table of runs, one a row; columns have ``rows`` entries.

    settings: flattened with dots, as text; None: the run has no such setting. metrics: None: not
    measured, and ``reasons`` may say why. refused: cells of sweeps that were not run.
    """

    rows: int
    settings: dict[str, list[str | None]]
    metrics: dict[str, list[Number]]
    reasons: dict[str, list[str | None]]
    refused: int = 0

    def setting(self, name: str) -> list[str | None]:
        """Return a column of settings; None for every row where no run has it."""
        return self.settings.get(name, [None] * self.rows)

    def metric(self, name: str) -> list[Number]:
        """Return a column of metrics; None for every row where no run has it."""
        return self.metrics.get(name, [None] * self.rows)

    def reasons_for(self, name: str) -> list[str | None]:
        """Return the reasons beside a column of metrics."""
        return self.reasons.get(name, [None] * self.rows)

    def measured(self) -> list[bool]:
        """Return which runs were measured on a machine."""
        return [engine == "hw" for engine in self.setting("engine")]

    def machines(self) -> list[str | None]:
        """Return the device that each run was measured on, or the profile it was simulated with."""
        return [
            device or hardware
            for device, hardware in zip(
                self.setting("device.name"), self.setting("hardware.name"), strict=True
            )
        ]

    def run_kinds(self) -> list[RunKind]:
        """Return the settings of each row that `crisp.report.caveats` looks at."""
        return [RunKind(*row) for row in zip(*map(self.setting, RUN_KIND_FIELDS), strict=True)]

    def has_object(self, name: str) -> list[bool]:
        """Return which runs have an object of `OBJECTS`."""
        parts = [column for key, column in self.settings.items() if key.startswith(f"{name}.")]
        if not parts:
            return [False] * self.rows
        return [any(value is not None for value in row) for row in zip(*parts, strict=True)]

    def shares(self) -> list[float | None]:
        """Return the budgets as shares of all routed experts, 0 to 1.

        A share is as the user gave it, so that policies which floor it differently stand above each
        other; a budget in bytes is the share that it is. None: unknown.
        """
        given = map(_given_share, self.setting("budget.asked"))
        return [
            floored if share is None else share
            for share, floored in zip(given, self.floored_shares(), strict=True)
        ]

    def floored_shares(self) -> list[float | None]:
        """Return the budgets, floored to whole units, as shares of all routed experts."""
        return [_share(share or "") for share in self.setting("budget.share")]


def from_runs(runs: Sequence[Run]) -> RunTable:
    """Return a table with a row for each run."""
    settings, metrics, reasons = [], [], []
    for run in runs:
        flat = dict(flatten_settings(run.settings))
        flat[MADE_BY] = _text(run.provenance.get("tool"))
        energy = run.provenance.get("energy")
        if isinstance(energy, dict):
            flat[JOULES_FROM] = _joules_source(energy.get("method"), energy.get("source"))
        settings.append(flat)
        metrics.append({name: _finite(value) for name, value in run.metrics.items()})
        reasons.append({name: str(reason) for name, reason in run.unavailable.items()})
    return RunTable(len(runs), _to_columns(settings), _to_columns(metrics), _to_columns(reasons))


def from_parquet(path: Path) -> RunTable:
    """Read the results of a sweep; CrispError if the file holds something else."""
    import pyarrow
    import pyarrow.parquet

    try:
        with path.open("rb") as file:
            # no threads: they may outlive the interpreter, and abort it
            table = pyarrow.parquet.ParquetFile(file, pre_buffer=False).read(use_threads=False)
        table.validate(full=True)  # texts may be none
        names = table.schema.names
    except OSError as error:
        reason = str(error.strerror or error).partition("\n")[0]  # of damage: several lines
        raise CrispError(f"{path}: cannot be read: {reason}") from error
    except (pyarrow.ArrowException, ValueError) as error:
        raise CrispError(f"{path}: is not a parquet file") from error
    twice = [name for name in names if names.count(name) > 1]
    if twice:
        raise CrispError(f"{path}: is not what a sweep wrote: it has the column {twice[0]!a} twice")
    missing = [name for name in _NEEDED if name not in table.schema.names]
    if missing:
        raise CrispError(f"{path}: is not what a sweep wrote: it has no column {missing[0]}")
    places = list(range(len(table)))
    if "refused" in table.schema.names:  # cells that were not run, and why
        run = table.column("refused").is_null()
        places = [place for place, is_run in enumerate(run.to_pylist()) if is_run]
        refused, table = len(table) - len(places), table.filter(run)
    else:
        refused = 0
    if not len(table):
        raise CrispError(f"{path}: holds no run" + (", every cell is refused" if refused else ""))
    settings: dict[str, list[str | None]] = {}
    metrics: dict[str, list[Number]] = {}
    for name, kind in zip(table.schema.names, table.schema.types, strict=True):
        empty = table.column(name).null_count == len(table)
        numeric = empty or pyarrow.types.is_integer(kind) or pyarrow.types.is_floating(kind)
        if name in _ASIDE or name.startswith((_ASKED, _PROVENANCE)) or name in OBJECTS:
            continue
        values = table.column(name).to_pylist()
        if "." in name or name in _TOP:
            settings[name] = [_text(value) for value in values]
        elif numeric:
            metrics[name] = [_finite(value) for value in values]
        elif name in (*COUNTS, *NUMBERS, *NAMED_BY_PHASE):
            raise CrispError(f"{path}: column {name}: expected numbers, found {kind}")
        else:
            settings[name] = [_text(value) for value in values]
    for name in _NEEDED:
        if None in settings[name]:
            row = places[settings[name].index(None)] + 1
            raise CrispError(f"{path}: row {row} has no {name}")

    def provenance(name: str) -> list[Any]:
        column = f"{_PROVENANCE}{name}"
        present = column in table.schema.names
        return table.column(column).to_pylist() if present else [None] * len(table)

    settings[MADE_BY] = [_text(tool) for tool in provenance("tool")]
    origins = zip(provenance("energy.method"), provenance("energy.source"), strict=True)
    settings[JOULES_FROM] = [
        method and _joules_source(method, source) for method, source in origins
    ]
    metrics, reasons = _in_todays_names(metrics, _reasons(table), settings["phase"])
    return RunTable(len(table), settings, metrics, reasons, refused)


def _in_todays_names(
    metrics: dict[str, list[Number]], reasons: list[dict[str, str]], phases: list[str | None]
) -> tuple[dict[str, list[Number]], dict[str, list[str | None]]]:
    """Return columns of metrics and of reasons; those of an older crisp get today's names."""
    rows = [
        {name: values[place] for name, values in metrics.items()} for place in range(len(phases))
    ]
    both = [
        in_todays_names(row, why, phase)
        for row, why, phase in zip(rows, reasons, phases, strict=True)
    ]
    return _to_columns([row for row, _ in both]), _to_columns([why for _, why in both])


def _reasons(table: Any) -> list[dict[str, str]]:
    """Return why metrics are missing, for each row; the file has one text of JSON a row."""
    if "unavailable" not in table.schema.names:
        return [{} for _ in range(len(table))]
    texts = table.column("unavailable").to_pylist()
    reasons_by_text: dict[Any, dict[str, str]] = {}
    for text in set(texts):
        try:
            reasons = json.loads(text)
            reasons_by_text[text] = {str(name): str(reason) for name, reason in reasons.items()}
        except (TypeError, ValueError, AttributeError, RecursionError):
            reasons_by_text[text] = {}
    return [reasons_by_text[text] for text in texts]


def join_tables(tables: Sequence[RunTable]) -> RunTable:
    """Return all rows, in order, without those that repeat an earlier one in everything."""

    def column(part: str, name: str) -> list[Any]:
        return [
            value
            for table in tables
            for value in getattr(table, part).get(name, [None] * table.rows)
        ]

    parts = {
        part: {name: column(part, name) for name in _names(getattr(t, part) for t in tables)}
        for part in ("settings", "metrics", "reasons")
    }
    first: dict[Hashable, int] = {}
    for row, values in enumerate(
        zip(*parts["settings"].values(), *parts["metrics"].values(), strict=True)
    ):
        first.setdefault(values, row)
    kept = list(first.values())
    return RunTable(
        len(kept),
        **{
            part: {name: [values[row] for row in kept] for name, values in columns.items()}
            for part, columns in parts.items()
        },
        refused=sum(table.refused for table in tables),
    )


def flatten_settings(value: Any, place: str = "") -> Iterator[tuple[str, str | None]]:
    """Yield settings as (name with dots, text); an absent object has no names.

    >>> settings = {"batch": 1, "policy": {"name": "lru"}, "device": None, "limit": None}
    >>> list(flatten_settings(settings))
    [('batch', '1'), ('policy.name', 'lru'), ('limit', None)]
    """
    if isinstance(value, dict):
        for key, inner in value.items():
            yield from flatten_settings(inner, f"{place}.{key}" if place else str(key))
    elif value is not None or place not in OBJECTS:
        yield place, _text(value)


def _text(value: Any) -> str | None:
    """Return a value as text; hashes and long texts are shortened."""
    if value is None:
        return None
    text = value if isinstance(value, str) else json.dumps(value, default=str)
    text = _DIGEST.sub(lambda digest: f"{digest[0][:12]}…", text)
    if len(text) > _LONGEST:
        return f"{text[:24]}… ({hashlib.sha256(text.encode()).hexdigest()[:12]}…)"
    return text


def _joules_source(method: object, source: object) -> str:
    return f"{str(method).partition(':')[0]}, from {source}"  # behind the colon: watts at rest


def _finite(value: Any) -> Number:
    good = type(value) in (int, float) and abs(value) <= _MOST  # which no NaN is
    return value if good else None


def _given_share(budget: str | None) -> float | None:
    """Return a budget that was given as a share; None: it was not."""
    try:
        return _share(str(float(parse_fraction(budget or ""))))
    except CrispError:
        return None


def _share(text: str) -> float | None:
    try:
        share = float(text)
    except ValueError:
        return None
    return share if 0 <= share <= 1 else None


def _to_columns(rows: Sequence[dict[str, Any]]) -> dict[str, list[Any]]:
    """Return the columns of some rows, None where a row has no value."""
    return {name: [row.get(name) for row in rows] for name in _names(rows)}


def _names(parts: Any) -> list[str]:
    return list(dict.fromkeys(name for part in parts for name in part))
