"""How stored tensors follow when an axis of the weight they make is put into another order.

Along an axis some numbers share a scale. An order that keeps such runs together, and moves a
shorter last one nowhere, is carried by the format exactly: each stored number goes to a new place,
and none is rounded anew.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import NamedTuple

import numpy as np
import numpy.typing as npt

from crisp.checkpoint.quantised.numbers import Array, pack, unpack

Order = npt.NDArray[np.intp]
"""[n]: at each place of the new axis the one of the old."""
Move = Callable[[Array, Order], Array]
"""``move(bits, order) -> bits`` of one stored tensor, or of one expert's share of it."""


class AxisOrder(NamedTuple):
    """What orders an axis of a weight can take, and how the stored tensors follow."""

    run: int  # neighbours that share a scale: an order keeps them together; 1: any order will do
    moves: Mapping[str, Move]  # by part; the others stay as they are


Axes = tuple[AxisOrder | None, AxisOrder | None]
"""Of a weight's rows and columns; None: no order can be carried exactly."""
FIXED: Axes = (None, None)


def take(axis: int, run: int = 1) -> Move:
    """Return the move of a tensor that has one entry for each ``run`` numbers along an axis."""

    def move(bits: Array, order: Order) -> Array:
        moved: Array = np.take(bits, order[::run] // run, axis=axis)
        return moved

    return move


def take_packed(bits_each: int, axis: int) -> Move:
    """Return the move of int32 words with numbers packed along an axis, see `unpack`."""

    def move(words: Array, order: Order) -> Array:
        numbers = unpack(words, bits_each, axis)
        return pack(np.take(numbers, order, axis=axis), bits_each, axis)

    return move


def take_halves(columns: int, axis: int, high_first: bool) -> Move:
    """Return the move of bytes with two numbers each, in rows of ``columns`` numbers.

    axis: 0 moves rows, 1 numbers within each row. high_first: which half is the first number.
    """
    first, second = (4, 0) if high_first else (0, 4)

    def move(data: Array, order: Order) -> Array:
        rows = data.reshape(-1, columns // 2)
        if axis == 0:
            return np.take(rows, order, axis=0).reshape(data.shape)
        numbers = np.stack([rows >> first & 15, rows >> second & 15], axis=-1)
        chosen = np.take(numbers.reshape(len(rows), columns), order, axis=1)
        both = chosen[:, 0::2] << np.uint8(first) | chosen[:, 1::2] << np.uint8(second)
        return both.astype(np.uint8).reshape(data.shape)

    return move


def take_rows_of(columns: int, axis: int, run: int = 1) -> Move:
    """Return the move of a tensor seen as rows of ``columns`` entries, one for each ``run``."""

    def move(data: Array, order: Order) -> Array:
        rows = data.reshape(-1, columns)
        return np.take(rows, order[::run] // run, axis=axis).reshape(data.shape)

    return move
