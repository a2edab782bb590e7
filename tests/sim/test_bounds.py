"""Least times against what every piece takes."""

from __future__ import annotations

from itertools import combinations

import numpy as np
from hypothesis import given
from hypothesis import strategies as st

from crisp.sim.bounds import least_times


@given(st.lists(st.integers(0, 4), min_size=1, max_size=4), st.data())
def test_no_piece_takes_less_than_its_blocks_add(widths: list[int], data: st.DataObject) -> None:
    """Costs are any whole numbers, as rounding or a measurement may leave them; widths differ."""
    blocks = max(1, *widths)
    piece_ns = np.full((len(widths), blocks, blocks), -1)
    for task, width in enumerate(widths):
        for first, last in combinations(range(width + 1), 2):
            piece_ns[task, first, last - 1] = data.draw(st.integers(0, 9))
    added = least_times(piece_ns)
    assert (added >= 0).all()
    for task, width in enumerate(widths):
        assert not added[task, width:].any()
        for first, last in combinations(range(width + 1), 2):
            assert added[task, first:last].sum() <= piece_ns[task, first, last - 1]


def test_a_launch_counts_once() -> None:
    """A launch of 20 ns, and 5 a block."""
    first, last = np.mgrid[:3, 1:4]
    piece_ns = np.where(first < last, 20 + 5 * (last - first), -1)
    assert least_times(piece_ns[None]).tolist() == [[25, 5, 5]]


def test_cutting_may_save_time() -> None:
    """Two blocks at once take 30 ns, one by one 10 and 12."""
    assert least_times(np.array([[[10, 30], [-1, 12]]])).tolist() == [[10, 12]]
