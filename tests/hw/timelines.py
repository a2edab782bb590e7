"""What timelines say of loads and computations."""

from __future__ import annotations

from crisp.run.timeline import BLOCKS, COMPUTE, EVENT, EXPERT, FIRST, KIND, LAYER_ID, Rows


def of_kind(rows: Rows, kind: int) -> list[list[int]]:
    """[event, layer, expert, first block, blocks] of each interval of a kind."""
    found: list[list[int]] = rows[rows[:, KIND] == kind][
        :, [EVENT, LAYER_ID, EXPERT, FIRST, BLOCKS]
    ].tolist()
    return found


def computed(rows: Rows) -> dict[tuple[int, int, int], list[int]]:
    """Blocks of each (event, layer, expert) in their order, in however many pieces.

    Into which pieces a task is cut depends on when its blocks come.
    """
    found: dict[tuple[int, int, int], list[int]] = {}
    for event, layer, expert, first, blocks in of_kind(rows, COMPUTE):
        found.setdefault((event, layer, expert), []).extend(range(first, first + blocks))
    return found
