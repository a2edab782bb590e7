"""Columns of tables of other tools as arrays: each value right, or an error that names the column.

Numbers may come as integers of any width, as floating point (15.0, where a tool had empty cells
beside it) or as text; lists as lists or as text.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt
import pyarrow as pa
import pyarrow.compute as pc

from crisp.errors import CrispError, shorten

Ints = npt.NDArray[np.int64]
Floats = npt.NDArray[np.float64]

_EXACT = 1 << 53  # floating-point numbers beyond are not whole numbers for sure


def whole_numbers(path: Path, name: str, column: Any, limit: int, *, lowest: int = 0) -> Ints:
    """Return whole numbers [n], ``lowest`` to ``limit``.

    An empty cell is -1 where ``lowest`` is, and an error else.
    """
    column = _plain(column)
    if pa.types.is_null(column.type):
        column = column.cast(pa.int64())
    if pa.types.is_string(column.type):
        column = _parse(path, name, column, whole=True)
    if pa.types.is_integer(column.type):
        # Unsigned numbers beyond int64 are told before they are cast.
        highest = pc.max(column).as_py()
        if highest is not None and highest > limit:
            raise _out_of_range(path, name, highest, limit)
        empty = np.asarray(column.is_null()) if column.null_count else None
        filled = column if empty is None else column.fill_null(0)
        values: Ints = filled.cast(pa.int64()).to_numpy(zero_copy_only=False)
    elif pa.types.is_floating(column.type):
        numbers = _floats(path, name, column)
        empty = np.isnan(numbers)
        whole = np.where(empty, 0, numbers)
        odd = (whole != np.floor(whole)) | ~np.isfinite(whole)
        if odd.any():
            raise CrispError(f"{path}: column {name} has {whole[odd][0]:g}; expected whole numbers")
        if np.abs(whole).max(initial=0) > _EXACT:
            raise _out_of_range(path, name, int(np.abs(whole).max()), limit)
        values = whole.astype(np.int64)
    else:
        raise CrispError(f"{path}: column {name} is {column.type}; expected whole numbers")
    if empty is not None and empty.any():
        if lowest == 0:
            raise CrispError(f"{path}: column {name} has an empty cell")
        values = np.where(empty, -1, values)
    check_range(path, name, values, limit, lowest)
    return values


def check_range(path: Path, name: str, values: Ints, limit: int, lowest: int = 0) -> None:
    """Raise CrispError unless all values are from ``lowest`` to ``limit``."""
    if values.size and not lowest <= values.min() <= values.max() <= limit:
        bad = values[(values < lowest) | (values > limit)][0]
        raise _out_of_range(path, name, int(bad), limit)


def real_numbers(path: Path, name: str, column: Any) -> Floats:
    """Return numbers [n], NaN where a cell is empty."""
    column = _plain(column)
    if pa.types.is_string(column.type):
        column = _parse(path, name, column, whole=False)
    return _floats(path, name, column)


def list_lengths(path: Path, name: str, column: Any) -> Ints:
    """Return how long the lists of a column are: [n]."""
    lengths: Ints = pc.list_value_length(_lists(path, name, column)).to_numpy(zero_copy_only=False)
    return lengths.astype(np.int64)


def list_matrix(
    path: Path, name: str, column: Any, k: int | None, *, whole: bool = False
) -> npt.NDArray[Any]:
    """Return lists of up to ``k`` numbers as a matrix [n, k]; k: of the longest, if None.

    Where a list is shorter: -1 in a matrix of ``whole`` numbers, else NaN. Raises CrispError for a
    row without a list.
    """
    lists = _lists(path, name, column)
    lengths = list_lengths(path, name, lists)
    longest = int(lengths.max(initial=0))
    if k is None:
        k = longest
    if longest > k:
        raise CrispError(f"{path}: a list of {name} is longer than the longest of experts, {k}")
    items = lists.flatten()
    numbers: npt.NDArray[Any]
    if whole:
        numbers = whole_numbers(path, name, items, np.iinfo(np.int64).max, lowest=-1)
    else:
        numbers = real_numbers(path, name, items)
    matrix = np.full((len(lengths), k), -1 if whole else np.nan, numbers.dtype)
    matrix[np.arange(k) < lengths[:, None]] = numbers
    return matrix


def _lists(path: Path, name: str, column: Any) -> Any:
    """Return a column of lists; text such as ``[2, 11]`` is taken apart."""
    column = _plain(column)
    if pa.types.is_fixed_size_list(column.type) or pa.types.is_large_list(column.type):
        column = column.cast(pa.list_(column.type.value_type))
    if column.null_count:
        raise CrispError(f"{path}: column {name}: a row has no list, others have")
    if pa.types.is_string(column.type):
        bare = pc.replace_substring_regex(column, r"^\s*[\[(]\s*|\s*[\])]\s*$", "")
        one = pc.replace_substring_regex(bare, r"\s*[,;\s]\s*", ",")
        split = pc.split_pattern(one, ",")
        empty = np.asarray(pc.equal(pc.utf8_trim_whitespace(bare), ""))
        if empty.any():
            none = pa.scalar([], type=split.type)
            split = pc.if_else(pa.array(empty), none, split)
        return split
    if not pa.types.is_list(column.type):
        raise CrispError(f"{path}: column {name} is {column.type}; expected lists")
    return column


def _plain(column: Any) -> Any:
    """Return a column without dictionaries, chunks and the wide kinds of text."""
    if isinstance(column, pa.ChunkedArray):
        column = column.combine_chunks()
    if pa.types.is_dictionary(column.type):
        column = column.cast(column.type.value_type)
    if pa.types.is_large_string(column.type) or pa.types.is_string_view(column.type):
        column = column.cast(pa.string())
    return column


def _parse(path: Path, name: str, column: Any, *, whole: bool) -> Any:
    """Return text as numbers, empty text as empty cells; CrispError names what is none."""
    text = pc.utf8_trim_whitespace(column)
    text = pc.if_else(pc.equal(text, ""), pa.scalar(None, pa.string()), text)
    for kind in (pa.int64(), pa.float64()) if whole else (pa.float64(),):
        try:
            return text.cast(kind)
        except pa.ArrowInvalid:
            continue
    expected = "whole numbers" if whole else "numbers"
    for value in text.to_pylist():
        try:
            float(value or 0)
        except ValueError:
            raise CrispError(
                f"{path}: column {name} has {shorten(repr(value))}; expected {expected}"
            ) from None
    raise CrispError(f"{path}: column {name} is text; expected {expected}")


def _floats(path: Path, name: str, column: Any) -> Floats:
    try:
        numbers = column.cast(pa.float64()).fill_null(np.nan)
    except (pa.ArrowInvalid, pa.ArrowNotImplementedError) as error:
        raise CrispError(f"{path}: column {name} is {column.type}; expected numbers") from error
    values: Floats = numbers.to_numpy(zero_copy_only=False)
    return values


def _out_of_range(path: Path, name: str, value: int, limit: int) -> CrispError:
    return CrispError(f"{path}: {name} {value} found; expected 0 to {limit}")
