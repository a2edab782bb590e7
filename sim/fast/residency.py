"""`crisp.residency` over arrays: which blocks are on the device within the budget, and who goes."""

from __future__ import annotations

from typing import Any

from crisp.errors import InvariantError
from crisp.policy.cache import kept_blocks
from crisp.policy.eviction import lfu_victim, lru_victim
from crisp.residency import EVENT as BY_EVENT
from sim.fast.compiling import compiled
from sim.fast.state import (
    CAPACITY,
    COUNT,
    EVENT,
    HELD,
    LAST,
    LOCKED,
    LRU,
    NOBODY,
    PART_SIZE,
    RESIDENT,
    USED,
    VICTIM,
    WHOLE,
    Ints,
)

_lru: Any = compiled(lru_victim)
_lfu: Any = compiled(lfu_victim)
_kept_blocks = compiled(kept_blocks)


@compiled
def use(now: Ints, entries: Ints, parts: Ints, entry: int, part: int) -> int:
    """An event asks for an entry. Returns its blocks."""
    hold(entries, parts, entry, part, BY_EVENT)
    entries[LAST, entry] = now[EVENT]
    entries[COUNT, entry] += 1
    blocks: int = entries[RESIDENT, entry]
    return blocks


@compiled
def hold(entries: Ints, parts: Ints, entry: int, part: int, why: int) -> None:
    """Protect an entry for one more reason."""
    if entries[HELD, entry] == 0:
        parts[LOCKED, part] += entries[RESIDENT, entry]
    entries[HELD, entry] |= why


@compiled
def release(entries: Ints, parts: Ints, entry: int, part: int, why: int) -> None:
    """Take back a reason to protect an entry."""
    entries[HELD, entry] &= ~why
    if entries[HELD, entry] == 0:
        parts[LOCKED, part] -= entries[RESIDENT, entry]


@compiled
def keepable(rules: Ints, parts: Ints, part: int, missing: int) -> int:
    """How many of ``missing`` blocks could enter the budget now."""
    if rules[VICTIM] == NOBODY:
        return 0
    used = parts[USED, part]
    free, evictable = parts[CAPACITY, part] - used, used - parts[LOCKED, part]
    return _kept_blocks(missing, free, evictable, rules[WHOLE] == 1)


@compiled
def admit(rules: Ints, entries: Ints, parts: Ints, entry: int, part: int, blocks: int) -> None:
    """Give a protected entry more blocks, evicting for them."""
    over = parts[USED, part] + blocks - parts[CAPACITY, part]
    while over > 0:
        victim = _victim(rules, entries, part)
        if victim < 0:
            raise InvariantError("a part of the budget is exceeded, and nothing can be evicted")
        leaves = entries[RESIDENT, victim]
        if rules[WHOLE] == 0:
            leaves = min(leaves, over)
        entries[RESIDENT, victim] -= leaves
        parts[USED, part] -= leaves
        over -= leaves
    entries[RESIDENT, entry] += blocks
    parts[USED, part] += blocks
    parts[LOCKED, part] += blocks


@compiled
def _victim(rules: Ints, entries: Ints, part: int) -> int:
    low = part * rules[PART_SIZE]
    high = low + rules[PART_SIZE]
    resident, held, last, count = entries[RESIDENT], entries[HELD], entries[LAST], entries[COUNT]
    victim: int
    if rules[VICTIM] == LRU:
        victim = _lru(resident, held, last, count, low, high)
    else:
        victim = _lfu(resident, held, last, count, low, high)
    return victim
