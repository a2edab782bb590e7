"""Residency: which blocks are on the device within the budget, and which must go.

An *entry* is one expert of one MoE layer, numbered layer by layer. It holds a prefix of blocks. The
budget has *parts*: one a layer (scope layer) or a single one (scope global).
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import NamedTuple

import numpy as np

from crisp.errors import CrispError, InvariantError
from crisp.extensions import origin_of
from crisp.model.spec import ModelSpec
from crisp.policy.anticipation import Anticipation
from crisp.policy.cache import Cache, kept_blocks
from crisp.policy.order import hash_key

# Why an entry is protected; the reasons are independent bits.
EVENT, PREDICTED = 1, 2


class Eviction(NamedTuple):
    """Blocks [first, last) of an expert that leave the device; row: its layer among MoE ones."""

    row: int
    expert: int
    first: int
    last: int


class Worth(NamedTuple):
    """What the profile says an entry and its blocks are worth: see `crisp.policy.retention`."""

    expected: Sequence[int]  # [entries] weight
    sizes: Sequence[int]  # [entries x blocks]


class StartingState(NamedTuple):
    """What is known of the device before the first event."""

    capacity: Sequence[int]  # [parts]: blocks of each part of the budget
    resident: Sequence[int] | None = None  # [entries]: blocks; None: nothing is resident
    expert_tiers: Sequence[int] | None = None  # [entries]; None: the cache does not ask for them
    worth: Worth | None = None  # the same
    anticipation: Anticipation | None = None  # None: the prefetcher does not ask for it


class Residency:
    """The cache's state. Rules decide over its arrays; this class keeps the sums they need."""

    def __init__(self, spec: ModelSpec, cache: Cache, start: StartingState) -> None:
        """Begin with what ``start`` says is resident."""
        capacity, initial, tiers = start.capacity, start.resident, start.expert_tiers
        rows, self._experts = len(spec.moe_layers), spec.n_experts
        entries = rows * self._experts
        self.resident = list(initial) if initial else [0] * entries
        self.protected = [0] * entries
        self.last = [-1] * entries  # event of the last use
        self.count = [0] * entries  # events taken part in
        self.capacity = list(capacity)
        self._rule, self._seed = cache.rule, cache.seed
        # Asked once a task: one look-up is quicker than two.
        self._note_use, self._note_entry = cache.rule.used, cache.rule.admitted
        self._event = 0
        # What the rule notes: see `crisp.policy.eviction`.
        self._layers = [row for row in range(rows) for _ in range(self._experts)]
        self.mark = list(tiers) if tiers else [0] * entries
        self.stamp = [0] * entries
        self._looks = getattr(self, cache.rule.last), getattr(self, cache.rule.count)
        self._victim, self._name = cache.victim, cache.name
        self._plugged = origin_of("cache", cache.name) is not None
        self._whole = cache.unit == "expert"
        size = entries // len(capacity)
        self._bounds = [(part * size, (part + 1) * size) for part in range(len(capacity))]
        self.part_of_row = list(range(rows)) if len(capacity) == rows else [0] * rows
        self.used = [sum(self.resident[low:high]) for low, high in self._bounds]
        self.locked = [0] * len(capacity)  # blocks of protected entries
        self.landed = sum(self.used)  # blocks of the budget that are there, not on their way

    def use(self, entry: int, part: int, event: int) -> int:
        """Protect an entry that an event asks for, and note the use; return its blocks."""
        blocks = self.resident[entry]
        if not self.protected[entry]:
            self.locked[part] += blocks
        self.protected[entry] |= EVENT
        self.last[entry] = event
        self.count[entry] += 1
        if self._note_use is not None:
            low, high = self._bounds[part]
            self._note_use(
                self.mark, self.stamp, self.resident, entry, event, low, high, self.capacity[part]
            )
        return blocks

    def begin(self, event: int, row: int) -> None:
        """Begin an event of MoE layer ``row``; with the first layer a forward pass begins."""
        self._event = event
        if self._rule.by_pass and row == 0:
            self.mark[:] = self._layers

    def protect(self, entry: int, part: int, why: int) -> None:
        """Protect an entry: nothing of it is evicted until every reason is released."""
        if not self.protected[entry]:
            self.locked[part] += self.resident[entry]
        self.protected[entry] |= why

    def release(self, entries: Iterable[int], part: int, why: int) -> None:
        """Take back one reason to protect some entries."""
        for entry in entries:
            self.protected[entry] &= ~why
            if not self.protected[entry]:
                self.locked[part] -= self.resident[entry]

    def admissible(self, part: int, missing: int) -> int:
        """Return how many of ``missing`` blocks could enter this part of the budget now."""
        if self._victim is None:
            return 0
        used = self.used[part]
        return kept_blocks(
            missing, self.capacity[part] - used, used - self.locked[part], self._whole
        )

    def admit(self, entry: int, part: int, blocks: int) -> Sequence[Eviction]:
        """Give a protected entry more blocks, evicting for them; `admissible` said they fit."""
        over = self.used[part] + blocks - self.capacity[part]
        evicted = self._evict(part, over) if over > 0 else ()
        if self._note_entry is not None and not self.resident[entry]:
            self._note_entry(self.mark, self.stamp, self.last, entry, self._event)
        self.resident[entry] += blocks
        self.used[part] += blocks
        self.locked[part] += blocks
        if self.used[part] > self.capacity[part]:
            raise InvariantError(f"part {part}: {self.used[part]} blocks in {self.capacity[part]}")
        return evicted

    def _evictable(self, entry: int, low: int, high: int) -> bool:
        return low <= entry < high and self.resident[entry] > 0 and not self.protected[entry]

    def _evict(self, part: int, over: int) -> list[Eviction]:
        low, high = self._bounds[part]
        last, count = self._looks
        evicted = []
        if self._rule.drawn:
            for entry in range(low, high):
                self.stamp[entry] = hash_key(self._seed, self._event, entry)
        while over > 0:
            assert self._victim is not None
            entry = self._victim(self.resident, self.protected, last, count, low, high)
            if self._plugged and not isinstance(entry, (int, np.integer)):
                raise CrispError(
                    f"cache {self._name}: chose {entry!r}, expected the number of an entry"
                )
            if self._plugged and not self._evictable(entry, low, high):
                raise CrispError(
                    f"cache {self._name}: chose entry {entry}, which is protected, empty or of "
                    "another part of the budget"
                )
            if entry < 0:
                raise InvariantError(f"part {part}: {over} blocks over budget, nothing to evict")
            had = self.resident[entry]
            leaves = had if self._whole else min(had, 1 if self._rule.suffixes else over)
            self.resident[entry] = had - leaves
            self.used[part] -= leaves
            self.landed -= leaves
            over -= leaves
            evicted.append(Eviction(*divmod(entry, self._experts), had - leaves, had))
        return evicted
