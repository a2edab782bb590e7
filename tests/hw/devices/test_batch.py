"""Which rows an event's experts take, against what one counts row by row."""

from __future__ import annotations

import numpy as np
from hypothesis import given
from hypothesis import strategies as st

from crisp.hw.devices.batch import expert_batches


@st.composite
def events(draw: st.DrawFn) -> tuple[list[list[int]], list[list[int]]]:
    """(ids, widths), both [rows][k]; -1 and width 0: nothing there."""
    rows, k = draw(st.integers(1, 7)), draw(st.integers(1, 4))
    chosen = st.permutations(range(-1, 5)).map(lambda found: list(found[:k]))
    ids = draw(st.lists(chosen, min_size=rows, max_size=rows))
    widths = [[draw(st.integers(0, 5)) if expert >= 0 else 0 for expert in row] for row in ids]
    return ids, widths


@given(events())
def test_every_row_is_where_it_asked_for_blocks(
    event: tuple[list[list[int]], list[list[int]]],
) -> None:
    ids, widths = event
    weights = np.random.default_rng(0).random(np.shape(ids), np.float32)
    made = expert_batches(np.array(ids), np.array(widths), weights, "hidden")
    asked = [
        (expert, row, width, float(weights[row, rank]))
        for row, own in enumerate(ids)
        for rank, expert in enumerate(own)
        if (width := widths[row][rank])
    ]
    assert sorted(made) == sorted({expert for expert, *_ in asked})
    for expert, work in made.items():
        own = [one[1:] for one in asked if one[0] == expert]
        falling = sorted(own, key=lambda one: -one[1])  # rows stay in order among equals
        assert work.rows.tolist() == [row for row, _, _ in falling]
        assert work.weights.tolist() == [weight for _, _, weight in falling]
        assert work.counts == [sum(w > block for _, w, _ in own) for block in range(falling[0][1])]
        assert (work.expert, work.hidden) == (expert, "hidden")


def test_one_row() -> None:
    made = expert_batches(
        np.array([[4, 2]]), np.array([[1, 3]]), np.array([[0.75, 0.25]], np.float32), None
    )
    assert {expert: work.counts for expert, work in made.items()} == {2: [1, 1, 1], 4: [1]}
    assert [float(made[expert].weights[0]) for expert in (2, 4)] == [0.25, 0.75]
