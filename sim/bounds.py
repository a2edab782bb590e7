"""What no run falls below: Belady's bound (`crisp.scheduler.belady_bound`) and least times."""

from __future__ import annotations

from collections.abc import Callable
from functools import cache

import numpy as np
import numpy.typing as npt

from crisp.model.spec import ModelSpec
from crisp.run.counters import FewestLoads
from crisp.run.timeline import BLOCKS, COMPUTE, EVENT, EXPERT, FIRST, KIND, LAYER_ID, Rows
from crisp.scheduler.belady_bound import fewest_loads, places
from crisp.scheduler.residency import StartingState

Ints = npt.NDArray[np.int64]

FEW = 400_000  # uses: to go through them takes less time than to import numba


class Belady:
    """The fewest blocks that a cache could load for what has been executed so far."""

    def __init__(
        self,
        spec: ModelSpec,
        start: StartingState,
        compiled: bool,
    ) -> None:
        """The arguments are those of `EventScheduler`. compiled: for more than FEW uses."""
        empty = places(start.capacity, start.resident or [0] * spec.n_routed, spec.n_blocks)
        self._places, self._compiled = empty.arrays() if compiled else empty, compiled
        self._first_entry = np.zeros(spec.n_layers, np.int64)
        self._first_entry[list(spec.moe_layers)] = np.arange(0, spec.n_routed, spec.n_experts)
        self._experts, self._sizes = spec.n_experts, spec.row_block_bytes
        self._apart = len(set(self._sizes)) > 1 and len(start.capacity) == len(self._sizes)
        self._blocks = [0] * (len(self._sizes) if self._apart else 1)

    @property
    def fewest(self) -> FewestLoads:
        """What has to be loaded so far.

        Layers with a budget of their own and blocks of their own size are counted apart; in a
        common budget every block counts as one of the smallest.
        """
        sizes = self._sizes if self._apart else (min(self._sizes),)
        n_bytes = sum(n * size for n, size in zip(self._blocks, sizes, strict=True))
        return FewestLoads(sum(self._blocks), n_bytes)

    def write(self, rows: Rows) -> None:
        """Take the next rows of the timeline, of whole events."""
        computed = rows[rows[:, KIND] == COMPUTE]
        entry = self._first_entry[computed[:, LAYER_ID]] + computed[:, EXPERT]
        event, width = computed[:, EVENT].copy(), computed[:, FIRST] + computed[:, BLOCKS]
        if computed[:, FIRST].any():  # a task in several pieces is a single use
            last = np.lexsort((width, entry, event))
            change = np.diff(event[last], append=-1) | np.diff(entry[last], append=-1)
            last = last[change != 0]
            event, entry, width = event[last], entry[last], width[last]
        self.add(event, entry, width)

    def add(self, event: Rows, entry: Rows, width: Rows) -> None:
        """Take the next uses, see `fewest_loads`: [uses] each."""
        if not self._apart:
            self._blocks[0] += self._fewest(event, entry, width)
            return
        row = entry // self._experts
        for place in np.unique(row).tolist():  # parts of the budget know nothing of each other
            own = row == place
            self._blocks[place] += self._fewest(event[own], entry[own], width[own])

    def _fewest(self, event: Rows, entry: Rows, width: Rows) -> int:
        if self._compiled:
            return int(_compiled()(*self._places, event, entry, width))
        return fewest_loads(*self._places, event.tolist(), entry.tolist(), width.tolist())


def least_times(piece_ns: Ints) -> Ints:
    """Return what each block adds to the least time that it and those before it take to compute.

    piece_ns [tasks, first, last - 1]: of blocks [first, last) as one piece; -1 where a task has no
    such blocks. Returns [tasks, blocks] ns. No piece takes less than what its blocks add, whatever
    the costs. Where cutting a task saves nothing the launch counts with block 0 alone.
    """
    tasks, blocks, _ = piece_ns.shape
    costs = np.where(piece_ns >= 0, piece_ns, np.int64(1) << 61)
    least = np.zeros((tasks, blocks + 1), np.int64)
    for block in range(blocks):  # by a piece that includes it, behind any of those before it
        best = (least[:, : block + 1, None] + costs[:, : block + 1, block:]).min(axis=(1, 2))
        there = piece_ns[:, block, block] >= 0
        least[:, block + 1] = np.where(there, best, least[:, block])
    return np.diff(least, axis=1)


@cache
def _compiled() -> Callable[..., int]:
    from crisp.sim.compiling import (  # imports numba, for which short runs need not wait
        BARE,
        kept,
    )

    return kept(fewest_loads, **BARE)
