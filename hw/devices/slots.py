"""Block tables: which slot of the pool holds which block, following the scheduler's decisions.

Slots are all alike, so that a wider prefix is a longer list and nothing is ever moved. The
scheduler counts blocks in the budget and in the staging buffers; the pool has room for all three
together, and which slot is which is of no importance.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence

from crisp.errors import InvariantError
from crisp.model.spec import ModelSpec
from crisp.scheduler.scheduler import STAGING_EXPERTS
from crisp.scheduler.tasks import Fetch, Load, Task


def slots_needed(spec: ModelSpec, capacity: Sequence[int], prefetches: bool) -> int:
    """Slots for the budget, the staging buffer, and another expert if blocks are prefetched."""
    return sum(capacity) + (STAGING_EXPERTS + prefetches) * spec.n_blocks


class Slots:
    """Where the blocks are that the budget, or the event, or a prefetch holds."""

    def __init__(self, spec: ModelSpec, slots: int) -> None:
        self._experts = spec.n_experts
        self._free = list(range(slots))[::-1]
        self._resident: list[list[int]] = [[] for _ in range(spec.n_routed)]  # by entry
        self._own: dict[int, list[int]] = {}  # of the event's tasks, by entry
        self._staged: dict[int, list[int]] = {}  # prefetched and not in the budget, by entry
        self._next = -1  # what `ahead` has promised
        self._unwanted = -1  # where a prefetch is arriving that nobody will use

    @property
    def free(self) -> int:
        """Slots that hold nothing, between two events."""
        return len(self._free)

    def resident(self) -> list[int]:
        """Blocks in the budget, of every entry."""
        return [len(own) for own in self._resident]

    def begin(self, tasks: Iterable[Task], flight: Load | None) -> None:
        """An event has started. Its tasks take what is here for them; staged blocks that nobody
        asked for are free, but for one in ``flight``: that goes when it has arrived.
        """
        self._own = {}
        for task in tasks:
            own = self._resident[task.entry][: task.width]
            if task.staged:
                staged = self._staged[task.entry]
                own += staged[: task.staged]
                self._staged[task.entry] = staged[task.staged :]
            self._own[task.entry] = own
        for entry, staged in self._staged.items():
            if isinstance(flight, Fetch) and flight.unwanted and flight.entry == entry:
                self._unwanted = staged.pop()
            self._free += staged
        self._staged = {}

    def take(self, load: Load) -> list[int]:
        """The slots that a load which is issued now goes to; what it evicts is free before."""
        if self._next >= 0:
            self._free.append(self._next)
            self._next = -1
        for row, expert, first, last in load.evicted:
            table = self._resident[row * self._experts + expert]
            self._free += table[first:last]
            del table[first:last]
        if load.blocks > len(self._free):
            raise InvariantError(f"{load.blocks} blocks to load, {len(self._free)} free slots")
        taken = [self._free.pop() for _ in range(load.blocks)]
        if isinstance(load, Fetch):
            where = self._staged.setdefault(load.entry, []) if load.staged else None
            (self._resident[load.entry] if where is None else where).extend(taken)
            return taken
        task = load.task
        assert task is not None
        self._own[task.entry] += taken
        self._resident[task.entry] += taken[: max(0, task.transient - load.first)]
        return taken

    def ahead(self, load: Load) -> int:
        """The slot of the block that is loaded next, alone; -1: that is not known. It is where a
        task has more to load: its blocks follow each other, and room for all was set aside.
        """
        task = load.task
        if task is None or load.prefetch or task.issued == task.width:
            return -1
        self._next = self._free.pop()
        return self._next

    def of(self, task: Task, first: int, last: int) -> list[int]:
        """The slots of blocks [first, last) of one of the event's tasks."""
        return self._own[task.entry][first:last]

    def landed(self, load: Load) -> None:
        """A load has arrived."""
        if isinstance(load, Fetch) and load.unwanted:
            self._free.append(self._unwanted)

    def used(self, task: Task, first: int, last: int) -> None:
        """Blocks [first, last) of a task were computed by every row: staging slots are free."""
        for block, slot in enumerate(self._own[task.entry][first:last], first):
            transient = 0 <= task.transient <= block
            if transient or task.low <= block < task.low + task.staged:
                self._free.append(slot)

    def preload(self, entry: int, blocks: int) -> list[int]:
        """Slots for blocks that are resident before the first event."""
        taken = [self._free.pop() for _ in range(blocks)]
        self._resident[entry] = list(taken)
        return taken
