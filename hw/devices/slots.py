"""Block tables: which slot of the pool holds which block, following the scheduler's decisions.

Slots are all alike, so a wider prefix is a longer list and no block is ever moved. The scheduler
counts the blocks of the budget, of the staging buffer and of prefetching apart; the pool has room
for all three together, and any slot serves any of them.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence

from crisp.errors import InvariantError
from crisp.hw.store.block_io import IN_FLIGHT
from crisp.model.spec import ModelSpec
from crisp.scheduler.residency import Eviction
from crisp.scheduler.scheduler import STAGING_EXPERTS
from crisp.scheduler.tasks import Fetch, Load, Task


def slots_needed(spec: ModelSpec, capacity: Sequence[int], prefetches: bool) -> int:
    """Return how many slots budget and staging need, and prefetching if it is used.

    capacity: of the budget, in blocks, by part.
    """
    return sum(capacity) + (STAGING_EXPERTS + prefetches) * spec.n_blocks


class Slots:
    """The slots of all blocks that the budget, the current event or a prefetch holds."""

    def __init__(self, spec: ModelSpec, slots: int) -> None:
        self._experts = spec.n_experts
        self._free = list(range(slots))[::-1]
        self._resident: list[list[int]] = [[] for _ in range(spec.n_routed)]  # by entry
        self._event: dict[int, list[int]] = {}  # of the event's tasks, by entry
        self._staged: dict[int, list[int]] = {}  # prefetched and not in the budget, by entry
        self._promised: list[int] = []  # the slots that `ahead` has reserved
        self._unwanted = -1  # the slot of a prefetch that arrives and will not be used

    @property
    def free(self) -> int:
        """The number of empty slots, between two events."""
        return len(self._free)

    def resident(self) -> list[int]:
        """Return how many blocks of every entry are in the budget."""
        return [len(table) for table in self._resident]

    def begin(
        self, tasks: Iterable[Task], flight: Load | None, evicted: Iterable[Eviction] = ()
    ) -> None:
        """Start an event: its tasks take over their resident and staged blocks.

        The slots of what is evicted become free, but for those that a task reads: they are staging
        slots now. Staged blocks that no task asked for become free, but for one in ``flight``,
        which becomes free when it has arrived.
        """
        self._event = {}
        for task in tasks:
            slots = self._resident[task.entry][: task.width]
            if task.staged:
                staged = self._staged[task.entry]
                slots += staged[: task.staged]
                self._staged[task.entry] = staged[task.staged :]
            self._event[task.entry] = slots
        for row, expert, first, last in evicted:
            entry = row * self._experts + expert
            table, read = self._resident[entry], len(self._event.get(entry, ()))
            self._free += table[max(first, read) : last]
            del table[first:last]
        for entry, staged in self._staged.items():
            if isinstance(flight, Fetch) and flight.unwanted and flight.entry == entry:
                self._unwanted = staged.pop()
            self._free += staged
        self._staged = {}

    def take(self, load: Load) -> list[int]:
        """Return the slots of a load that is issued now; the slots of what it evicts become free
        first.
        """
        self._free += reversed(self._promised)  # the first of them is taken first
        self._promised = []
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
        self._event[task.entry] += taken
        self._resident[task.entry] += taken[: max(0, task.transient - load.first)]
        return taken

    def ahead(self, load: Load) -> Sequence[int]:
        """Reserve and return the slots of the single blocks that are loaded next, as far as they
        are known and the disk is given them along with ``load``.

        They are known while a task has more blocks to load: these follow each other, and room for
        all of them was set aside.
        """
        task = load.task
        if task is None or load.prefetch:
            return ()
        self._promised = [
            self._free.pop() for _ in range(min(IN_FLIGHT - 1, task.width - task.issued))
        ]
        return self._promised

    def of(self, task: Task, first: int, last: int) -> list[int]:
        """Return the slots of blocks [first, last) of one of the event's tasks."""
        return self._event[task.entry][first:last]

    def landed(self, load: Load) -> None:
        """End a load: the slot of a prefetch that nobody wants any more becomes free."""
        if isinstance(load, Fetch) and load.unwanted:
            self._free.append(self._unwanted)

    def used(self, task: Task, first: int, last: int) -> None:
        """End the use of blocks [first, last) of a task: their staging slots become free."""
        for block, slot in enumerate(self._event[task.entry][first:last], first):
            transient = 0 <= task.transient <= block
            if transient or task.low <= block < task.low + task.staged:
                self._free.append(slot)

    def preload(self, entry: int, blocks: int) -> list[int]:
        """Return slots for ``blocks`` leading blocks that are resident before the first event."""
        taken = [self._free.pop() for _ in range(blocks)]
        self._resident[entry] = list(taken)
        return taken
