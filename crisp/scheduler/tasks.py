"""Tasks of an event, and the loads that bring their blocks."""

from __future__ import annotations

from collections.abc import Sequence

from crisp.scheduler.residency import Eviction


class Task:
    """One expert of one event: loaded once at its widest, computed for each row at its own width.

    The scheduler keeps its progress here: blocks [0, have) are on the device, [0, issued) are there
    or on the way, [0, ended) are computed, and the piece [ended, started) is being computed. Of
    them, [0, low) were in the budget when the event began, [low, low + staged) wait in the prefetch
    staging, and [transient, width) pass through the staging buffer (-1: not known yet).
    """

    __slots__ = (
        "ended", "entry", "expert", "have", "issued", "low", "placed", "rank",
        "staged", "started", "transient", "width", "widths",
    )  # fmt: skip

    entry: int
    rank: int
    low: int
    have: int
    issued: int
    staged: int

    def __init__(self, expert: int, widths: Sequence[int]) -> None:
        """widths: blocks asked for by each row that uses the expert, all above 0."""
        self.expert = expert
        self.widths = widths
        self.width = widths[0] if len(widths) == 1 else max(widths)
        self.started = self.ended = 0
        self.transient = -1
        self.placed = False  # whether its missing blocks have a place to go to

    def neurons(self, first: int, last: int, upto: Sequence[int]) -> int:
        """Return neurons of blocks [first, last) over all rows; upto[b]: of b whole blocks."""
        widths = self.widths
        if len(widths) == 1:
            return upto[last] - upto[first]
        return sum(upto[min(w, last)] - upto[first] for w in widths if w > first)


class Load:
    """One request on the link: blocks [first, first + blocks) of an expert, for a task.

    row: the MoE layer, counted among MoE layers.
    """

    __slots__ = ("blocks", "evicted", "expert", "first", "row", "task")
    prefetch = False
    task: Task | None

    def __init__(
        self,
        row: int,
        expert: int,
        first: int,
        blocks: int,
        evicted: Sequence[Eviction],
        task: Task | None,
    ) -> None:
        self.row, self.expert = row, expert
        self.first, self.blocks = first, blocks
        self.evicted = evicted
        self.task = task


class Fetch(Load):
    """A prefetch: no task waits for it, unless its event starts while it is in flight."""

    __slots__ = ("entry", "staged", "unwanted")
    prefetch = True

    def __init__(
        self,
        row: int,
        expert: int,
        first: int,
        evicted: Sequence[Eviction],
        entry: int,
        staged: bool,
    ) -> None:
        """entry: the expert's in `Residency`. staged: the budget cannot take the block."""
        super().__init__(row, expert, first, 1, evicted, None)
        self.entry = entry
        self.staged = staged
        self.unwanted = False  # staged, and its event started without asking for it
