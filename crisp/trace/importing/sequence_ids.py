"""Numbers for the ids of sequences: requests have names, or hashes that no int32 holds."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt
import pyarrow as pa
import pyarrow.compute as pc

from crisp.errors import CrispError, shorten
from crisp.trace.importing.columns import whole_numbers

MOST = np.iinfo(np.int32).max


class UnnumberedSequencesError(Exception):
    """Ids that are no numbers of an int32 have been found: all have to be numbered anew."""


class SequenceIds:
    """The numbers of ids that are text or large, from 0 by first appearance."""

    def __init__(self) -> None:
        self._numbers: dict[Any, int] = {}

    def number(self, path: Path, column: Any) -> npt.NDArray[np.int64]:
        """Return the number of each id of a column [n]; new ids get new numbers."""
        if column.null_count:
            raise CrispError(f"{path}: column sequence has an empty cell")
        encoded = column.dictionary_encode()
        numbers = self._numbers
        ids = [numbers.setdefault(one, len(numbers)) for one in encoded.dictionary.to_pylist()]
        index: npt.NDArray[np.int32] = encoded.indices.to_numpy(zero_copy_only=False)
        return np.array(ids, np.int64)[index]

    def name(self, number: int) -> str:
        """Return the id that has a number, as a message shows it."""
        return shorten(str(next(key for key, n in self._numbers.items() if n == number)))

    def __len__(self) -> int:
        return len(self._numbers)


def sequence_numbers(path: Path, column: Any, ids: SequenceIds | None) -> npt.NDArray[np.int64]:
    """Return the sequence of each row [n], as it is, or by ``ids``.

    Raises UnnumberedSequencesError for text and large numbers if ``ids`` is None; CrispError for
    what is no id.
    """
    if isinstance(column, pa.ChunkedArray):
        column = column.combine_chunks()
    kind = column.type
    if pa.types.is_dictionary(kind):
        column, kind = column.cast(kind.value_type), kind.value_type
    text = pa.types.is_string(kind) or pa.types.is_large_string(kind) or pa.types.is_binary(kind)
    if ids is not None and (text or pa.types.is_integer(kind)):
        return ids.number(path, column)
    if text:
        raise UnnumberedSequencesError
    if pa.types.is_integer(kind) and len(column):
        ends = pc.min_max(column).as_py()
        if ends["max"] is not None and (ends["max"] > MOST or ends["min"] < -MOST):
            raise UnnumberedSequencesError
    return whole_numbers(path, "sequence", column, MOST)
