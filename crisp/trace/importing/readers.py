"""Readers of long routing tables, batch by batch: parquet, CSV and JSON lines behind one class."""

from __future__ import annotations

import json
import re
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt
import pyarrow as pa
import pyarrow.compute as pc
import pyarrow.csv
import pyarrow.json
import pyarrow.parquet

from crisp.errors import CrispError
from crisp.extensions import find_name

Ints = npt.NDArray[np.int64]
Batches = Iterator[tuple[Any, float]]  # record batches, with the share of the file read so far

KEYS = ("sequence", "token", "layer")
_BATCH_ROWS = 1 << 17
_BLOCK_BYTES = 1 << 21  # of text; Arrow reads a few dozen blocks ahead


@dataclass(frozen=True)
class LongTable:
    """A table with one row per (sequence, token, layer).

    Its experts are columns e0.. with weights w0.. (both without gaps), or lists in the columns
    `experts` and `weights`; an empty cell or a short list means that an expert is absent.
    """

    path: Path
    names: tuple[str, ...]
    read: Callable[[list[str]], Batches]

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

    def batches(self, columns: list[str]) -> Batches:
        """Yield the table's rows, these columns only; an unreadable file is a CrispError."""
        try:
            yield from self.read(columns)
        except (pa.ArrowException, OSError) as error:
            raise CrispError(f"{self.path}: {str(error).splitlines()[0]}") from error

    def integers(self, batch: Any, name: str, limit: int, *, optional: bool = False) -> Ints:
        """Return whole numbers [n], 0 to ``limit``; -1 where ``optional`` cells are empty."""
        column = batch.column(name)
        if not pa.types.is_integer(column.type):
            raise CrispError(f"{self.path}: column {name} is {column.type}; expected integers")
        if column.null_count:
            if not optional:
                raise CrispError(f"{self.path}: column {name} has an empty cell")
            column = column.cast(pa.int64()).fill_null(-1)
        values: Ints = column.cast(pa.int64()).to_numpy(zero_copy_only=False)
        self._check_range(values, name, limit, -1 if optional else 0)
        return values

    def _check_range(self, values: Ints, name: str, limit: int, lowest: int) -> None:
        if len(values) and not lowest <= values.min() <= values.max() <= limit:
            bad = values[(values < lowest) | (values > limit)][0]
            raise CrispError(f"{self.path}: {name} {bad} found; expected 0 to {limit}")

    def expert_matrix(self, batch: Any, k: int, limit: int) -> Ints:
        """Return experts [n, k], 0 to ``limit``; -1 where absent."""
        if self.lists:
            ids = _pad_lists(self.path, batch.column("experts"), k, -1, pa.int64())
            self._check_range(ids, "expert", limit, -1)
            return ids
        ranks = [self.integers(batch, name, limit, optional=True) for name in self.experts]
        return np.stack(ranks, axis=1)

    def weight_matrix(self, batch: Any, k: int) -> npt.NDArray[np.float64]:
        """Return weights [n, k], NaN where there is none."""
        if self.lists:
            return _pad_lists(self.path, batch.column("weights"), k, np.nan, pa.float64())
        columns = [batch.column(n).cast(pa.float64()).fill_null(np.nan) for n in self.weights]
        return np.stack([column.to_numpy(zero_copy_only=False) for column in columns], axis=1)

    def longest(self, batch: Any) -> int:
        """Return the most experts a row of this batch has."""
        if not self.lists:
            return len(self.experts)
        return int(pc.max(pc.list_value_length(batch.column("experts"))).as_py() or 0)


def open_table(path: Path, reader: str | None = None) -> LongTable:
    """Open the table at ``path``, by its ending, or with a reader by its name.

    Raises CrispError for an unreadable file, an unknown ending and an unknown reader.
    """
    if reader is None:
        if not path.is_file():
            raise CrispError(f"{path}: {'not a file' if path.exists() else 'no such file'}")
        if path.suffix.lower() not in _ENDINGS:
            raise CrispError(f"{path}: unknown kind of table; expected {', '.join(_ENDINGS)}")
        reader = _ENDINGS[path.suffix.lower()]
    open_with = find_name(READERS, reader, "importer")
    try:
        return open_with(path)
    except (pa.ArrowException, OSError) as error:
        raise CrispError(f"{path}: {str(error).splitlines()[0]}") from error


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
        raise CrispError(f"{path}: the importer's columns are no arrays: {error}") from error
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

    def read(names: list[str]) -> Batches:
        whole = pa.table({name: fields[name] for name in names})
        for batch in whole.to_batches(_BATCH_ROWS):
            yield batch, 1.0

    return LongTable(path, tuple(fields), read)


def _open_parquet(path: Path) -> LongTable:
    def read(columns: list[str]) -> Batches:
        # Page by page: else the columns of a row group, which may hold the whole table, or of all
        # of them are read ahead.
        with pa.parquet.ParquetFile(path, pre_buffer=False, buffer_size=_BLOCK_BYTES) as file:
            done = 0
            for batch in file.iter_batches(_BATCH_ROWS, columns=columns):
                done += batch.num_rows
                yield batch, done / file.metadata.num_rows

    return LongTable(path, tuple(pa.parquet.read_schema(path).names), read)


def _open_csv(path: Path) -> LongTable:
    def read(columns: list[str]) -> Batches:
        types = {name: _arrow_type(name) for name in columns}
        with pa.OSFile(str(path)) as file:
            reader = pa.csv.open_csv(
                file,
                read_options=pa.csv.ReadOptions(block_size=_BLOCK_BYTES),
                convert_options=pa.csv.ConvertOptions(
                    column_types=types, include_columns=columns, null_values=[""]
                ),
            )
            for batch in reader:
                yield batch, file.tell() / file.size()

    with path.open(encoding="utf-8-sig", errors="replace") as file:
        names = [name.strip('"') for name in file.readline().rstrip().split(",")]
    return LongTable(path, tuple(names), read)


def _open_jsonl(path: Path) -> LongTable:
    with path.open("rb") as file:
        try:
            first = json.loads(file.readline() or b"null")
        except ValueError:
            first = None
    if not isinstance(first, dict):
        raise CrispError(f"{path}: the first line is not a JSON object")

    def read(columns: list[str]) -> Batches:
        schema = pa.schema([(name, _arrow_type(name)) for name in columns])
        options = pa.json.ParseOptions(explicit_schema=schema, unexpected_field_behavior="ignore")
        size = path.stat().st_size
        with path.open("rb") as file:
            while block := file.read(_BLOCK_BYTES):
                block += file.readline()
                table = pa.json.read_json(pa.BufferReader(block), parse_options=options)
                for batch in table.combine_chunks().to_batches():
                    yield batch, file.tell() / size

    return LongTable(path, tuple(first), read)


def _arrow_type(name: str) -> Any:
    """Return the type of a column by its name."""
    number = pa.float64() if name.startswith("w") else pa.int64()
    return pa.list_(number) if name in ("experts", "weights") else number


def _pad_lists(path: Path, column: Any, k: int, absent: float, kind: Any) -> npt.NDArray[Any]:
    """Return lists of up to k numbers as a matrix [n, k]."""
    if column.null_count:
        raise CrispError(f"{path}: a row has no list of experts or weights")
    lengths = pc.list_value_length(column).to_numpy(zero_copy_only=False)
    if lengths.max(initial=0) > k:
        raise CrispError(f"{path}: a list of weights is longer than the longest of experts, {k}")
    numbers = column.flatten().cast(kind).fill_null(absent).to_numpy(zero_copy_only=False)
    matrix = np.full((len(lengths), k), absent, numbers.dtype)
    matrix[np.arange(k) < lengths[:, None]] = numbers
    return matrix


READERS: dict[str, Callable[[Path], LongTable]] = {
    "parquet": _open_parquet,
    "csv": _open_csv,
    "jsonl": _open_jsonl,
}
_ENDINGS = {".parquet": "parquet", ".csv": "csv", ".jsonl": "jsonl", ".ndjson": "jsonl"}
