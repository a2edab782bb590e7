"""Logs of one sequence after another that number neither: forward passes told by their layers."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np
from numpy.typing import NDArray

from crisp.errors import CrispError
from crisp.trace import DECODE, PREFILL
from crisp.trace.importing.engines.assembly.rows import Floats, Ints, LayerRecords


def number_passes(layer: Ints, call: Ints | None = None) -> Ints:
    """Return the forward pass of each record [n], in order: it ends where the layer falls.

    call: of one layer in one pass; a new one with the same layer is another pass, too.
    """
    falls = np.diff(layer, prepend=layer[:1]) < 0
    if call is not None:
        again = (np.diff(layer, prepend=layer[:1] - 1) == 0) & (
            np.diff(call, prepend=call[:1]) != 0
        )
        falls |= again
    return np.cumsum(falls)


def place_passes(
    number: Ints,
    layer: Ints,
    row: Ints,
    experts: Ints,
    weights: Floats | None,
    *,
    ordered: bool = True,
) -> tuple[LayerRecords, list[str]]:
    """Return records [n] of passes with their sequences and positions, and notes.

    A pass of several rows is a prompt, or a part of one, and begins a new sequence where it
    follows a pass of one row, which is a decode token. A layer with fewer rows than its pass has
    the last ones: engines prune the last layer of prompts to the tokens whose output is wanted.
    """
    passes = int(number.max()) + 1
    size = np.zeros(passes, np.int64)
    np.maximum.at(size, number, row + 1)
    prompt = size > 1
    before = np.concatenate([[True], ~prompt[:-1]])  # a decode token, or nothing
    sequence = np.cumsum(prompt & before)
    sequence -= sequence[0]
    start = np.cumsum(size) - size
    opens = np.flatnonzero(np.diff(sequence, prepend=-1))
    start -= np.repeat(start[opens], np.diff(opens, append=passes))
    # Of each (pass, layer), how many rows it lacks at the front.
    cells = number * (int(layer.max()) + 1) + layer
    rows_of_cell = np.zeros(int(cells.max()) + 1, np.int64)
    np.maximum.at(rows_of_cell, cells, row + 1)
    lacking = size[number] - rows_of_cell[cells]
    notes = []
    later = int((prompt & before)[1:].sum())
    if later:
        notes.append(
            f"{later} pass{'es' * (later != 1)} of several rows after decode tokens: taken as new "
            "prompts (with drafts they would be verifications, which are not told apart)"
        )
    if not prompt[0]:
        notes.append("a first pass of one row is taken as decode: prompts of one token look alike")
    return (
        LayerRecords(
            sequence=sequence[number],
            position=start[number] + row + lacking,
            layer=layer,
            phase=np.where(prompt[number], PREFILL, DECODE).astype(np.uint8),
            experts=experts,
            weights=weights,
            ordered=ordered,
        ),
        notes,
    )


def pad_ids(lists: Sequence[Sequence[int]], name: str) -> Ints:
    """Return lists of expert ids as a matrix [n, longest], -1 behind the shorter ones.

    Raises CrispError that calls the log ``name`` for numbers that no int64 holds.
    """
    try:
        flat = np.array([x for one in lists for x in one], np.int64)
    except OverflowError as error:
        raise CrispError(f"{name}: an expert is out of range") from error
    return _padded(flat, lists, -1)


def pad_weights(lists: Sequence[Sequence[float]], empty: float = 0) -> Floats:
    """Return lists of numbers as a matrix [n, longest], ``empty`` behind the shorter ones."""
    return _padded(np.array([x for one in lists for x in one], np.float64), lists, empty)


def _padded(flat: NDArray[Any], lists: Sequence[Sequence[float]], empty: float) -> NDArray[Any]:
    lengths = np.array([len(one) for one in lists])
    matrix = np.full((len(lists), int(lengths.max(initial=1))), empty, flat.dtype)
    matrix[np.arange(matrix.shape[1]) < lengths[:, None]] = flat
    return matrix
