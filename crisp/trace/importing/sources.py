"""Files of tables as a stream of Arrow batches: parquet, CSV and JSON lines."""

from __future__ import annotations

import csv
import re
from collections import Counter
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.csv
import pyarrow.json
import pyarrow.parquet

from crisp.errors import CrispError, shorten
from crisp.trace.importing.sequence_ids import UnnumberedSequencesError

Batches = Iterator[tuple[Any, float]]  # record batches, with the share of the file read so far

_BATCH_ROWS = 1 << 17
_BLOCK_BYTES = 1 << 21  # of text; Arrow reads a few dozen blocks ahead
_LONGEST_HEADER = 1 << 17  # characters: more than the csv module takes apart
_DEEPEST = 200  # brackets within each other in a JSON line: Arrow's parser dies of many
_STRING = re.compile(rb'"(?:[^"\\]|\\.)*"?')
_CONVERSION = re.compile(r"In CSV column #(\d+): .*conversion error.*invalid value '(.*)'", re.S)
_SEQUENCE = "sequence"
_OPENING, _CLOSING = np.frombuffer(b"[{", np.uint8), np.frombuffer(b"]}", np.uint8)


@dataclass(frozen=True)
class Source:
    """The columns of a file.

    ``read({file's name: ours}, text)`` yields the batches of these columns, under the file's names;
    text: whether ids of sequences are read as text where the file does not say what they are.
    """

    names: tuple[str, ...]
    read: Callable[[Mapping[str, str], bool], Batches]


def open_parquet(path: Path) -> Source:
    """Open a parquet file; an Arrow exception where it is none."""

    def read(names: Mapping[str, str], _: bool) -> Batches:
        # Page by page: else the columns of a row group, which may hold the whole table, or of all
        # of them are read ahead.
        with pa.parquet.ParquetFile(path, pre_buffer=False, buffer_size=_BLOCK_BYTES) as file:
            done = 0
            for batch in file.iter_batches(_BATCH_ROWS, columns=list(names)):
                done += batch.num_rows
                yield batch, done / file.metadata.num_rows

    return Source(tuple(pa.parquet.read_schema(path).names), read)


def open_csv(path: Path) -> Source:
    """Open a CSV file with a header, as spreadsheets and pandas write it.

    Names may be quoted or have spaces around them; fields are apart by commas, or by semicolons or
    tabs if the header has no commas. Numbers are read as floating point: ``15.0`` stands beside
    empty cells.
    """
    with path.open(encoding="utf-8-sig", errors="replace") as file:
        line = file.readline(_LONGEST_HEADER).rstrip("\r\n")
    if not line.strip():
        raise CrispError(f"{path}: its first line is empty; names of columns were expected")
    if len(line) >= _LONGEST_HEADER or any(ord(mark) < 32 and mark != "\t" for mark in line):
        raise CrispError(f"{path}: its first line is not text with the names of columns")
    apart = next((mark for mark in ",;\t" if mark in line), ",")
    names = [name.strip() for name in next(csv.reader([line], delimiter=apart), [])]
    for name, times in Counter(names).items():
        if times > 1:
            raise CrispError(f"{path}: has {times} columns called '{shorten(name)}'")

    def read(wanted: Mapping[str, str], text: bool) -> Batches:
        types = {theirs: _csv_type(ours, text) for theirs, ours in wanted.items()}
        try:
            with pa.OSFile(str(path)) as file:
                reader = pa.csv.open_csv(
                    file,
                    read_options=pa.csv.ReadOptions(
                        block_size=_BLOCK_BYTES, column_names=names, skip_rows=1
                    ),
                    parse_options=pa.csv.ParseOptions(delimiter=apart),
                    convert_options=pa.csv.ConvertOptions(
                        column_types=types, include_columns=list(wanted), null_values=["", " "]
                    ),
                )
                for batch in reader:
                    yield batch, file.tell() / file.size()
        except pa.ArrowInvalid as error:
            if "Empty CSV file" in str(error):
                return
            match = _CONVERSION.match(str(error))
            if match is None:
                raise
            name = wanted[names[int(match[1])]]
            if name == _SEQUENCE and not text:
                raise UnnumberedSequencesError from error
            expected = "numbers" if name.startswith("w") else "whole numbers"
            raise CrispError(
                f"{path}: column {name} has '{shorten(match[2])}'; expected {expected}"
            ) from error

    return Source(tuple(names), read)


def _csv_type(name: str, text: bool) -> Any:
    """Return how a column is read, by our name for it."""
    if name == _SEQUENCE:
        return pa.string() if text else pa.int64()
    return pa.string() if name in ("experts", "weights") else pa.float64()


def open_jsonl(path: Path) -> Source:
    """Open JSON lines; the columns are the keys of all lines, which are looked through first."""
    kinds: dict[str, Any] = {}  # by key, in order of appearance
    with path.open("rb") as file:
        first = file.readline(1 << 20).lstrip()
    if not first.startswith(b"{"):
        raise CrispError(f"{path}: the first line is not a JSON object")
    for table, _ in _json_blocks(path, pa.json.ParseOptions()):
        for field in table.schema:
            kind = kinds.get(field.name)
            if (
                kind is None
                or pa.types.is_null(kind)
                or (pa.types.is_floating(field.type) and pa.types.is_integer(kind))
            ):
                kinds[field.name] = field.type

    def read(wanted: Mapping[str, str], _: bool) -> Batches:
        schema = pa.schema([(key, _json_type(ours, kinds[key])) for key, ours in wanted.items()])
        options = pa.json.ParseOptions(explicit_schema=schema, unexpected_field_behavior="ignore")
        for table, share in _json_blocks(path, options):
            for batch in table.combine_chunks().to_batches():
                yield batch, share

    return Source(tuple(kinds), read)


def _json_blocks(path: Path, options: Any) -> Iterator[tuple[Any, float]]:
    """Yield the table of each block of whole lines, and the share of the file read so far."""
    size = path.stat().st_size
    with path.open("rb") as file:
        while block := file.read(_BLOCK_BYTES):
            block += file.readline()
            _check_nesting(path, block)
            if block.strip():
                yield (
                    pa.json.read_json(pa.BufferReader(block), parse_options=options),
                    file.tell() / size,
                )


def _check_nesting(path: Path, block: bytes) -> None:
    """Raise CrispError for a line whose lists and objects are nested too deeply."""
    if max(block.count(b"["), block.count(b"{")) <= _DEEPEST:
        return
    for line in block.splitlines():
        if line.count(b"[") + line.count(b"{") <= _DEEPEST:
            continue
        codes = np.frombuffer(_STRING.sub(b"", line), np.uint8)
        steps = np.isin(codes, _OPENING).astype(np.int64) - np.isin(codes, _CLOSING)
        if steps.cumsum().max(initial=0) > _DEEPEST:
            raise CrispError(f"{path}: a line is nested too deeply")


def _json_type(name: str, kind: Any) -> Any:
    """Return how a column is read, by our name for it and what its values look like."""
    if pa.types.is_string(kind) or pa.types.is_timestamp(kind):
        return pa.string()
    if name == _SEQUENCE:
        # What is beyond int64 looks like a floating-point number, which would not hold it.
        return pa.uint64() if pa.types.is_floating(kind) else pa.int64()
    if name in ("experts", "weights"):
        text = pa.types.is_list(kind) and pa.types.is_string(kind.value_type)
        return pa.list_(pa.string() if text else pa.float64())
    return pa.float64()
