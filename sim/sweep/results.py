"""Results of a sweep: a row a cell, with the whole setting and every metric, as parquet."""

from __future__ import annotations

import hashlib
import json
from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import contextmanager
from itertools import islice
from math import isfinite
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq

from crisp.errors import CrispError, InvariantError
from crisp.files import atomic, check_readable
from crisp.run.result import Run
from crisp.run.schema import COUNTS, NAMED_BY_PHASE, NUMBERS

Scalar = str | int | float | bool | None
Row = dict[str, Scalar]
Sequences = dict[str, list[int]]  # sequence, tokens, bytes, ns: of each sequence of a run

MARK = b"crisp.sweep"  # the key in a file's metadata
_AT_ONCE = 4096  # rows
_NUMBERS = (*COUNTS, *NUMBERS, *NAMED_BY_PHASE)
_MOST = 1 << 63  # of a column's whole numbers
_TYPES = {bool: pa.bool_(), int: pa.int64(), float: pa.float64(), str: pa.string()}
SEQUENCES = pa.schema(
    [("cell", pa.string()), *((name, pa.int64()) for name in ("sequence", "tokens", "bytes", "ns"))]
)


def hash_settings(setting: Mapping[str, Any]) -> str:
    """Return a cell's name: the hash of all that decides its figures."""
    return hashlib.sha256(json.dumps(setting, sort_keys=True).encode()).hexdigest()


def run_row(run: Run) -> Row:
    """Return a run as a row: dotted names of settings, names of metrics, the rest as JSON."""
    row = flatten(run.settings) | run.metrics
    row["unavailable"] = json.dumps(run.unavailable, sort_keys=True)
    return row | flatten({"provenance": run.provenance})


def flatten(nested: Mapping[str, Any], before: str = "") -> Row:
    """Return nested tables as one, with dots between the names.

    >>> flatten({"policy": {"width": "full"}, "batch": 1, "layers": [0, 1]})
    {'policy.width': 'full', 'batch': 1, 'layers': '[0, 1]'}
    """
    row: Row = {}
    for name, value in nested.items():
        if isinstance(value, Mapping):
            row |= flatten(value, f"{before}{name}.")
        elif value is None or isinstance(value, str | int | float):
            row[before + name] = value
        else:
            row[before + name] = json.dumps(value)
    return row


def sequences_of(run: Run) -> Sequences:
    """Return what each sequence of a run took, in their order; of runs at batch 1 only."""
    steps = run.steps
    if steps is None:
        raise InvariantError("a simulated run does not know its steps")
    taken = np.diff(steps.end_ns, prepend=0), np.diff(steps.n_bytes, prepend=0)
    ids, place = np.unique(steps.sequence, return_inverse=True)
    tokens, ns, n_bytes = (
        np.bincount(place, values).astype(np.int64).tolist() for values in (steps.rows, *taken)
    )
    return {"sequence": ids.tolist(), "tokens": tokens, "bytes": n_bytes, "ns": ns}


def is_record(record: Any) -> bool:
    """Return whether this is what a sweep keeps of a cell: its row, and its sequences or None."""
    if not isinstance(record, dict):
        return False
    cell, row, sequences = (record.get(name) for name in ("cell", "row", "sequences"))
    if not isinstance(row, dict) or not isinstance(cell, str) or row.get("cell") != cell:
        return False
    if not all(_is_scalar(name) and _is_scalar(value) for name, value in row.items()):
        return False
    if not isinstance(row.get("refused", 0), str | None):
        return False
    if row["refused"] is None and not isinstance(row.get("engine"), str):
        return False
    if any(type(row.get(name)) not in (int, float, type(None)) for name in _NUMBERS):
        return False
    return sequences is None or _are_sequences(sequences)


def _is_scalar(value: Any) -> bool:
    """Return whether a file can hold it."""
    if isinstance(value, str):
        return value.isascii() or not any("\ud800" <= letter <= "\udfff" for letter in value)
    return value is None or isinstance(value, int) or (type(value) is float and isfinite(value))


def _are_sequences(columns_by_name: Any) -> bool:
    if not isinstance(columns_by_name, dict) or sorted(columns_by_name) != sorted(
        SEQUENCES.names[1:]
    ):
        return False
    columns = list(columns_by_name.values())
    return all(
        isinstance(values, list)
        and len(values) == len(columns[0])
        and all(type(value) is int and -_MOST <= value < _MOST for value in values)
        for values in columns
    )


def save_rows(path: Path, rows: Callable[[], Iterable[Row]], about: Mapping[str, Any]) -> None:
    """Write rows as a file; they are gone through twice, and never all in memory.

    Columns stand in the order in which they appear, with the type that holds all their values.
    about: of the sweep, for the file's metadata.
    """
    kinds: dict[str, type | None] = {}
    for row in rows():
        for name, value in row.items():
            kinds[name] = _wider(kinds.get(name), value)
    fields = [(name, _TYPES[kind or str]) for name, kind in kinds.items()]
    schema = pa.schema(fields, {MARK: json.dumps(about, sort_keys=True).encode()})

    def tables() -> Iterator[pa.Table]:
        for some in _batches(rows()):
            columns = {
                name: [_as(row.get(name), kind or str) for row in some]
                for name, kind in kinds.items()
            }
            yield pa.table(columns, schema)

    _write(path, schema, tables())


def save_sequences(path: Path, cells: Iterable[tuple[str, Sequences]]) -> None:
    """Write what each sequence of each cell took."""

    def tables() -> Iterator[pa.Table]:
        for some in _batches(cells):
            yield pa.table(
                {
                    "cell": [key for key, sequences in some for _ in sequences["sequence"]],
                    **{
                        name: [value for _, sequences in some for value in sequences[name]]
                        for name in SEQUENCES.names[1:]
                    },
                },
                SEQUENCES,
            )

    _write(path, SEQUENCES, tables())


def load_rows(path: Path, wanted: Callable[[str], bool] = lambda name: True) -> Iterator[Row]:
    """Yield the rows of a file that `save_rows` wrote; CrispError for another one.

    wanted: which columns.
    """
    with _opened(path) as file:
        if MARK not in (file.schema_arrow.metadata or {}):
            raise CrispError(f"{path}: was not written by crisp sweep")
        names = file.schema_arrow.names
        twice = [name for name in names if names.count(name) > 1]
        if twice:
            raise CrispError(f"{path}: has the column {twice[0]!a} twice")
        names = [name for name in names if wanted(name)]
        for batch in file.iter_batches(_AT_ONCE, columns=names):
            yield from batch.to_pylist()


def check_results(path: Path) -> None:
    """Raise CrispError for a file that a sweep cannot go on from: not of one, or damaged."""
    next(load_rows(path), None)
    for number, row in enumerate(load_rows(path, ("cell", "refused", "engine").__contains__), 1):
        needed = ["cell", "refused", *(["engine"] if row.get("refused") is None else [])]
        for name in needed:
            if name not in row or (name != "refused" and not isinstance(row[name], str)):
                raise CrispError(f"{path}: row {number} has no {name}, as crisp sweep writes it")


def load_sequences(path: Path) -> dict[str, Sequences]:
    """Return what each sequence of each cell took; CrispError for a file of another kind."""
    check_sequences(path)
    cells: dict[str, Sequences] = {}
    with _opened(path) as file:
        for batch in file.iter_batches(_AT_ONCE):
            for row in batch.to_pylist():
                if None in row.values():
                    raise CrispError(f"{path}: is damaged: a row has no value")
                columns = cells.setdefault(row["cell"], {name: [] for name in SEQUENCES.names[1:]})
                for name, values in columns.items():
                    values.append(row[name])
    return cells


def check_sequences(path: Path) -> None:
    """Raise CrispError, without a look at the rows, if `save_sequences` did not write it."""
    with _opened(path) as file:
        if not file.schema_arrow.equals(SEQUENCES):
            raise CrispError(f"{path}: is not what crisp sweep --per-sequence writes")


@contextmanager
def _opened(path: Path) -> Iterator[pq.ParquetFile]:
    """Open a file; CrispError with its name for all that goes wrong while it is read."""
    check_readable(path)
    try:
        file = pq.ParquetFile(path)
    except (OSError, ValueError, pa.ArrowException) as error:
        raise CrispError(f"{path}: is not a parquet file") from error
    try:
        with file:
            yield file
    except (OSError, ValueError, pa.ArrowException) as error:
        reason = str(error).partition("\n")[0]
        raise CrispError(f"{path}: is damaged: {reason}") from error


def _wider(kind: type | None, value: Scalar) -> type | None:
    """Return the type that holds all values so far and this one too."""
    if value is None:
        return kind
    value_kind = type(value)
    if value_kind is int and not -_MOST <= int(value) < _MOST:
        value_kind = str
    if kind is None or kind is value_kind:
        return value_kind
    return float if {kind, value_kind} == {int, float} else str


def _as(value: Scalar, kind: type) -> Scalar:
    if value is None or type(value) is kind:
        return value
    return float(value) if kind is float else str(value)


def _batches(items: Iterable[Any]) -> Iterator[list[Any]]:
    rest = iter(items)
    while some := list(islice(rest, _AT_ONCE)):
        yield some


def _write(path: Path, schema: pa.Schema, tables: Iterable[pa.Table]) -> None:
    with atomic(path) as temporary, pq.ParquetWriter(temporary, schema) as writer:
        for table in tables:
            writer.write_table(table)
