"""The cache of an oracle, which knows every task to come. A bound, not a policy to use.

When an event ends it keeps, of all blocks that were resident or just used, those that are asked for
soonest: a block used now may stay although it passed through the staging buffer, and an expert of
the event may go although it was protected. No machine could do that, and so no cache that obeys the
contract loads less (Belady, 1966): with single blocks, which all have one size, always; with whole
experts (cache belady, unit expert), where every task asks for the same width.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import Any, NamedTuple

import numpy as np
import numpy.typing as npt

from crisp.errors import InvariantError
from crisp.model.spec import ModelSpec
from crisp.policy.cache import Cache
from crisp.scheduler.residency import Eviction, Residency, StartingState
from crisp.scheduler.retention import Routed
from crisp.scheduler.tasks import Task

NEVER = 2**31 - 1
Ints = npt.NDArray[np.int64]
Events = npt.NDArray[np.int32]


class Future(NamedTuple):
    """All tasks of a run, one event after the other, by first appearance."""

    first: list[int]  # [events + 1]: where each event's tasks begin
    experts: npt.NDArray[np.int32]  # [tasks]
    following: Events  # [tasks, blocks]: the next event that asks for each block, or NEVER
    routed: Sequence[Routed] = ()  # of each event, where a prefetcher asks; then all else is empty

    def routing(self, event: int) -> Routed:
        """Return what an event is routed to; nothing after the last one."""
        return self.routed[event] if event < len(self.routed) else ()

    def tasks(self, event: int) -> list[int]:
        """Return the experts of an event, in their order; none after the last event."""
        if event + 1 >= len(self.first):
            return []
        experts: list[int] = self.experts[self.first[event] : self.first[event + 1]].tolist()
        return experts


def coming_routing(routed: Iterable[Routed]) -> Future:
    """Return the future of a run of which only the routing of each event is asked for."""
    return Future([0], np.empty(0, np.int32), np.empty((0, 0), np.int32), list(routed))


def look_ahead(spec: ModelSpec, events: Iterable[tuple[int, Sequence[Task]]]) -> Future:
    """Return the future of a run from (layer, tasks) of every event; 4 bytes a block of a task."""
    rows = {layer: row for row, layer in enumerate(spec.moe_layers)}
    first, experts, entries, widths = [0], [], [], []
    for layer, tasks in events:
        event_experts = [task.expert for task in tasks]
        experts += event_experts
        entries += [rows[layer] * spec.n_experts + expert for expert in event_experts]
        widths += [task.width for task in tasks]
        first.append(len(experts))
    following = np.empty((len(experts), spec.n_blocks), np.int32)
    soon = np.full((spec.n_routed, spec.n_blocks), NEVER, np.int32)
    for event in range(len(first) - 2, -1, -1):
        for task in range(first[event], first[event + 1]):
            entry = entries[task]
            following[task] = soon[entry]
            soon[entry, : widths[task]] = event
    return Future(first, np.array(experts, np.int32), following)


def soonest(here: Ints, soon: Events, room: int, whole: bool) -> Ints:
    """Return how many leading blocks of each expert to keep, [experts], ``room`` in all.

    here [experts]: leading blocks that could be kept; soon [experts, blocks]: the next event that
    asks for each, rising. whole: all of an expert or nothing, by its first block, and what does not
    fit is passed over. Ties: the lowest expert.
    """
    if whole:
        kept = np.zeros(len(here), np.int64)
        for entry in np.argsort(soon[:, 0].copy(), kind="mergesort"):
            if here[entry] <= room:
                kept[entry] = here[entry]
                room -= here[entry]
        return kept
    blocks = soon.shape[1]
    places = np.argsort(soon.copy().reshape(-1), kind="mergesort")
    places = places[places % blocks < here[places // blocks]][:room]
    return np.bincount(places // blocks, minlength=len(here))


class BeladyResidency(Residency):
    """The residency of an oracle that evicts what is asked for last.

    It keeps whole experts or single blocks by the cache's unit, single blocks always where the rule
    is ``by_block``. Where it ``keeps_used``, what was just used stays before all else, as in tools
    that admit whatever is asked for.
    """

    def __init__(
        self, spec: ModelSpec, cache: Cache, capacity: Sequence[int], future: Future
    ) -> None:
        """capacity: blocks of each part of the budget; nothing is resident."""
        super().__init__(spec, cache, StartingState(capacity))
        self._future = future
        self._whole = self._whole and not cache.rule.by_block
        self._forced = cache.rule.keeps_used
        self._soon: Any = np.full((spec.n_routed, spec.n_blocks), NEVER, np.int32)
        self._kept = [0] * spec.n_routed  # when the event has ended

    def plan(self, event: int, part: int, entries: Sequence[int], widths: Sequence[int]) -> None:
        """Decide what will stay after an event that asks for ``widths`` of ``entries``."""
        first = self._future.first
        self._soon[entries] = self._future.following[first[event] : first[event + 1]]
        low, high = self._bounds[part]
        here = np.array(self.resident[low:high], np.int64)
        for entry, width in zip(entries, widths, strict=True):
            here[entry - low] = max(here[entry - low], width)
        soon = self._soon[low:high]
        if self._forced:
            soon = soon.copy()
            soon[[entry - low for entry in entries]] = event
        kept = soonest(here, soon, self.capacity[part], self._whole)
        self._kept[low:high] = kept.tolist()

    def wanted(self, entry: int, issued: int) -> int:
        """Return how many more blocks than ``issued`` will stay."""
        return max(0, self._kept[entry] - issued)

    def admissible(self, part: int, missing: int) -> int:
        """Return how many of ``missing`` blocks can enter the budget before the event has ended."""
        low, high = self._bounds[part]
        leaving = sum(self._leaving(entry) for entry in range(low, high))
        fits = self.capacity[part] - self.used[part] + leaving
        return missing if missing <= fits else 0 if self._whole else fits

    def commit(self, part: int) -> None:
        """Make what was decided so: the event has ended."""
        low, high = self._bounds[part]
        changed = sum(self._kept[low:high]) - self.used[part]
        self.resident[low:high] = self._kept[low:high]
        self.used[part] += changed
        self.landed += changed
        if self.used[part] > self.capacity[part]:
            raise InvariantError(f"part {part}: {self.used[part]} blocks in {self.capacity[part]}")

    def _leaving(self, entry: int) -> int:
        return 0 if self.protected[entry] else max(0, self.resident[entry] - self._kept[entry])

    def _evict(self, part: int, over: int) -> list[Eviction]:
        evicted = []
        for entry in range(*self._bounds[part]):
            leaves = self._leaving(entry) if self._whole else min(over, self._leaving(entry))
            if over > 0 and leaves:
                had = self.resident[entry]
                self.resident[entry] = had - leaves
                self.used[part] -= leaves
                self.landed -= leaves
                over -= leaves
                evicted.append(Eviction(*divmod(entry, self._experts), had - leaves, had))
        return evicted
