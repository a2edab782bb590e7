"""Where a timeline goes: a parquet file, or a window of it that is kept to be drawn."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import IO, Any

import numpy as np

from crisp.files import atomic
from crisp.run.timeline import COLUMNS, KIND, KINDS, STEP, Rows, Sink


class ParquetSink:
    """A sink that writes each block of rows as a row group of an open parquet writer."""

    def __init__(self, writer: Any) -> None:
        """writer: a pyarrow ParquetWriter with the schema of `schema`."""
        self._writer = writer

    def write(self, rows: Rows) -> None:
        """Write the next rows; none of them is kept."""
        import pyarrow

        if len(rows):
            columns = [pyarrow.array(np.ascontiguousarray(column)) for column in rows.T]
            codes = pyarrow.array(rows[:, KIND].astype(np.int8))
            columns[KIND] = pyarrow.DictionaryArray.from_arrays(codes, list(KINDS))
            # a third of the time that a detour by a data frame takes
            self._writer.write_table(pyarrow.Table.from_arrays(columns, schema=schema()))


def schema() -> Any:
    """Return the columns of ``timeline.parquet``: whole numbers, and the kind by name."""
    import pyarrow

    kinds = pyarrow.dictionary(pyarrow.int8(), pyarrow.string())
    return pyarrow.schema(
        [(name, kinds if name == "kind" else pyarrow.int64()) for name in COLUMNS]
    )


@contextmanager
def parquet(target: Path | IO[bytes]) -> Iterator[Sink]:
    """Open a sink that streams into a parquet file, or into an open binary stream.

    The file appears when the block ends, complete; it does not if the block fails.
    """
    import pyarrow.parquet

    if not isinstance(target, Path):
        with pyarrow.parquet.ParquetWriter(target, schema()) as writer:
            yield ParquetSink(writer)
        return
    with (
        atomic(target) as temporary,
        pyarrow.parquet.ParquetWriter(temporary, schema(), compression="zstd") as writer,
    ):
        yield ParquetSink(writer)


class TimelineWindow:
    """A sink that keeps one step's rows: of step ``wanted``, or the last of a shorter run."""

    def __init__(self, wanted: int) -> None:
        self._wanted = wanted
        self.rows: Rows = np.empty((0, len(COLUMNS)), np.int64)

    def write(self, rows: Rows) -> None:
        """Take the next rows; those of other steps are dropped at once."""
        seen = np.concatenate([self.rows, rows[rows[:, STEP] <= self._wanted]])
        self.rows = seen[seen[:, STEP] == seen[-1, STEP]] if len(seen) else seen


class FullTimeline:
    """A sink that keeps all rows: for short runs only."""

    def __init__(self) -> None:
        self._blocks: list[Rows] = []

    def write(self, rows: Rows) -> None:
        """Take the next rows."""
        self._blocks.append(rows)

    @property
    def rows(self) -> Rows:
        """All rows so far, [intervals, columns]."""
        return np.concatenate([np.empty((0, len(COLUMNS)), np.int64), *self._blocks])
