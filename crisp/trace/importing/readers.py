"""Readers of long routing tables, batch by batch: parquet, CSV and JSON lines behind one class."""

from __future__ import annotations

import re
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt
import pyarrow as pa

from crisp.errors import CrispError, reason_of, unknown_name
from crisp.extensions import find_name
from crisp.trace.importing import columns
from crisp.trace.importing.sequence_ids import SequenceIds, sequence_numbers
from crisp.trace.importing.sources import Batches, Source, open_csv, open_jsonl, open_parquet

Ints = npt.NDArray[np.int64]

KEYS = ("sequence", "token", "layer")
_BATCH_ROWS = 1 << 17
_COLUMNS = re.compile(r"sequence|token|layer|phase|experts|weights|[ew]\d{1,4}")


@dataclass(frozen=True)
class LongTable:
    """A table with one row per (sequence, token, layer).

    Its experts are columns e0.. with weights w0.. (both without gaps), or lists in the columns
    `experts` and `weights`; an empty cell, -1 or a short list means that an expert is absent.
    """

    path: Path
    source: Source
    called: Mapping[str, str] = field(default_factory=dict)  # ours -> the file's own name
    ids: SequenceIds | None = None  # of sequences that are numbered anew

    def __post_init__(self) -> None:
        missing = [name for name in KEYS if name not in self.names]
        experts, weights = self.experts, self.weights
        if missing or not experts:
            missing += [] if experts else ["e0"]
            raise CrispError(
                f"{self.path}: no column {', '.join(missing)}; found {', '.join(self.names)}"
            )
        if weights and len(weights) != len(experts):
            raise CrispError(
                f"{self.path}: {len(experts)} columns of experts, {len(weights)} of weights"
            )

    @property
    def names(self) -> tuple[str, ...]:
        """The columns, by the names they have here."""
        ours = {theirs: name for name, theirs in self.called.items()}
        kept = [name for name in self.source.names if name not in self.called or name in ours]
        return tuple(ours.get(name, name) for name in kept)

    @property
    def lists(self) -> bool:
        """Whether the experts of a row are one list."""
        return "experts" in self.names

    @property
    def experts(self) -> list[str]:
        """The columns of experts, by rank."""
        return ["experts"] if self.lists else self._ranks("e")

    @property
    def weights(self) -> list[str]:
        """The columns of weights, by rank; none where the table has no weights."""
        if self.lists:
            return ["weights"] if "weights" in self.names else []
        return self._ranks("w")

    def _ranks(self, letter: str) -> list[str]:
        """Return the columns e0.. or w0.., by rank; CrispError where one is missing."""
        ranks = sorted(int(n[1:]) for n in self.names if re.fullmatch(rf"{letter}\d{{1,4}}", n))
        if ranks != list(range(len(ranks))):
            raise CrispError(
                f"{self.path}: columns {letter}0.. end at {letter}{ranks[-1]}, with gaps"
            )
        return [f"{letter}{rank}" for rank in ranks]

    def renumbered(self) -> LongTable:
        """Return the table with its sequences numbered anew, by first appearance."""
        return replace(self, ids=SequenceIds())

    def sequence_name(self, number: int) -> str:
        """Return a sequence's id as the table has it."""
        return str(number) if self.ids is None else self.ids.name(number)

    def batches(self, names: list[str]) -> Batches:
        """Yield the table's rows, these columns only; an unreadable file is a CrispError."""
        ours = {self.called.get(name, name): name for name in names}
        try:
            for batch, share in self.source.read(ours, self.ids is not None):
                shown = [ours[name] for name in batch.schema.names]
                yield pa.RecordBatch.from_arrays(batch.columns, names=shown), share
        except (pa.ArrowException, OSError) as error:
            what = reason_of(error)
            what = "a line is too long for a table" if "straddle" in what else what
            raise CrispError(f"{self.path}: {what}") from error

    def sequences(self, batch: Any) -> Ints:
        """Return the sequence of each row [n]; see `sequence_numbers` for what it raises."""
        return sequence_numbers(self.path, batch.column("sequence"), self.ids)

    def integers(self, batch: Any, name: str, limit: int) -> Ints:
        """Return whole numbers [n], 0 to ``limit``."""
        return columns.whole_numbers(self.path, name, batch.column(name), limit)

    def expert_matrix(self, batch: Any, k: int | None, limit: int) -> Ints:
        """Return experts [n, k], 0 to ``limit``; -1 where absent. k: of the longest, if None."""
        if self.lists:
            ids: Ints = columns.list_matrix(
                self.path, "experts", batch.column("experts"), k, whole=True
            )
            columns.check_range(self.path, "expert", ids, limit, -1)
            return ids
        ranks = [
            columns.whole_numbers(self.path, name, batch.column(name), limit, lowest=-1)
            for name in self.experts
        ]
        return np.stack(ranks, axis=1)

    def weight_matrix(self, batch: Any, k: int) -> npt.NDArray[np.float64]:
        """Return weights [n, k], NaN where there is none."""
        if self.lists:
            return columns.list_matrix(self.path, "weights", batch.column("weights"), k)
        return np.stack(
            [columns.real_numbers(self.path, n, batch.column(n)) for n in self.weights], axis=1
        )


def open_table(
    path: Path, reader: str | None = None, called: Mapping[str, str] | None = None
) -> LongTable:
    """Open the table at ``path``, by its ending, or with a reader by its name.

    called: the file's own names of columns, by ours. Raises CrispError for an unreadable file, an
    unknown ending, an unknown reader and columns that are not there.
    """
    if reader is None:
        if not path.is_file():
            raise CrispError(f"{path}: {'not a file' if path.exists() else 'no such file'}")
        if path.suffix.lower() not in ENDINGS:
            raise CrispError(f"{path}: unknown kind of table; expected {', '.join(ENDINGS)}")
        reader = ENDINGS[path.suffix.lower()]
    open_with = find_name(READERS, reader, "importer")
    try:
        table = open_with(path)
    except (pa.ArrowException, OSError) as error:
        raise CrispError(f"{path}: {reason_of(error)}") from error
    source = table.source if isinstance(table, LongTable) else table
    _check_called(path, source, called or {})
    return LongTable(path, source, called or {})


def _check_called(path: Path, source: Source, called: Mapping[str, str]) -> None:
    for ours, theirs in called.items():
        if not _COLUMNS.fullmatch(ours):
            raise unknown_name(ours, (*KEYS, "phase", "experts", "weights", "e0", "w0"), "column")
        if theirs not in source.names:
            raise CrispError(f"{path}: no column {theirs}; found {', '.join(source.names)}")
    if len(set(called.values())) < len(called):
        raise CrispError(f"{path}: a column is named twice: {', '.join(called.values())}")


def table_of_columns(path: Path, columns: Mapping[str, npt.ArrayLike]) -> LongTable:
    """Return a table that is in memory already, one row per (sequence, token, layer).

    columns: `sequence`, `token` and `layer` [n] whole numbers; `experts` [n, k], -1 where absent;
    `weights` [n, k] and `phase` [n], if known. Raises CrispError for other names and shapes.
    """
    if not isinstance(columns, Mapping):
        raise CrispError(
            f"{path}: the importer returned {type(columns).__name__}, expected columns by name"
        )
    try:
        arrays = {name: np.asarray(values) for name, values in columns.items()}
    except (ValueError, OverflowError) as error:
        raise CrispError(
            f"{path}: the importer's columns are no arrays: {reason_of(error)}"
        ) from error
    for name, array in arrays.items():
        if array.dtype.kind not in ("iuf" if name == "weights" else "iu"):
            raise CrispError(
                f"{path}: the importer's {name} are {array.dtype}, expected "
                f"{'numbers' if name == 'weights' else 'whole numbers of 64 bits'}"
            )
    unknown = set(arrays) - {*KEYS, "experts", "weights", "phase"}
    if unknown:
        raise CrispError(f"{path}: the importer gives a column {min(unknown)}, which is unknown")
    n = len(arrays.get("sequence", ()))
    fields: dict[str, Any] = {}
    for name, array in arrays.items():
        wanted = 2 if name in ("experts", "weights") else 1
        if array.ndim != wanted or len(array) != n:
            raise CrispError(
                f"{path}: the importer's {name} are {list(array.shape)}, expected "
                f"{[n, 'k'] if wanted == 2 else [n]}".replace("'", "")
            )
        if wanted == 1:
            fields[name] = pa.array(array)
            continue
        absent = np.isnan(array) if name == "weights" else array < 0
        for rank in range(array.shape[1]):
            fields[f"{name[0]}{rank}"] = pa.array(array[:, rank], mask=absent[:, rank])

    def read(names: Mapping[str, str], _: bool) -> Batches:
        whole = pa.table({name: fields[name] for name in names})
        for batch in whole.to_batches(_BATCH_ROWS):
            yield batch, 1.0

    return LongTable(path, Source(tuple(fields), read))


Open = Callable[[Path], Source | LongTable]

READERS: dict[str, Open] = {"parquet": open_parquet, "csv": open_csv, "jsonl": open_jsonl}
ENDINGS = {".parquet": "parquet", ".csv": "csv", ".jsonl": "jsonl", ".ndjson": "jsonl"}
