"""`crisp.scheduler.residency` over arrays: which blocks are on the device within the budget, and
who goes.
"""

from __future__ import annotations

from typing import Any

from crisp.errors import CrispError, InvariantError
from crisp.policy import eviction
from crisp.policy.cache import kept_blocks
from crisp.policy.order import hash_key
from crisp.scheduler.residency import EVENT as BY_EVENT
from crisp.sim.compiling import compiled
from crisp.sim.fast.custom import address_of, call_address, evictable
from crisp.sim.fast.state import (
    BY_PASS,
    CACHE_SEED,
    CAPACITY,
    COUNT,
    COUNT_FROM_HERE,
    COUNT_USE,
    CUSTOM,
    DRAWN,
    ENTRY_AT,
    EVENT,
    EXPERTS,
    FREQUENCY,
    LAST,
    LFRU,
    LFU,
    LOCKED,
    LRU,
    MARK,
    NOBODY,
    NOTHING,
    ON_ENTRY,
    ON_USE,
    PART_SIZE,
    PROMOTE,
    PROTECTED,
    RECENCY,
    RESIDENT,
    STAMP,
    STAMP_ENTRY,
    SUFFIX_LRU,
    SUFFIXES,
    USE_AT,
    USED,
    VICTIM,
    VICTIM_AT,
    WHOLE,
    WORTH_LEAST,
    Ints,
)

_REFUSED = -2  # a plugin's rule chose what cannot be evicted

_lru: Any = compiled(eviction.lru_victim)
_lfu: Any = compiled(eviction.lfu_victim)
_lfru: Any = compiled(eviction.lfru_victim)
_suffix_lru: Any = compiled(eviction.suffix_lru_victim)
_suffix_lfu: Any = compiled(eviction.suffix_lfu_victim)
_count_use: Any = compiled(eviction.count_use)
_promote: Any = compiled(eviction.promote)
_use_current: Any = compiled(eviction.use_current)
_count_from_here: Any = compiled(eviction.count_from_here)
_stamp_entry: Any = compiled(eviction.stamp_entry)
_on_probation: Any = compiled(eviction.on_probation)
_kept_blocks, _hash_key = compiled(kept_blocks), compiled(hash_key)


@compiled
def begin(rules: Ints, entries: Ints, row: int) -> None:
    """Begin an event of a row; with the first row a forward pass begins."""
    if rules[BY_PASS] and row == 0:
        for entry in range(entries.shape[1]):
            entries[MARK, entry] = entry // rules[EXPERTS]


@compiled
def use(
    rules: Ints, now: Ints, entries: Ints, parts: Ints, entry: int, part: int, custom: Ints | None
) -> int:
    """Protect an entry that an event asks for, and note the use; return its blocks."""
    protect(entries, parts, entry, part, BY_EVENT)
    entries[LAST, entry] = now[EVENT]
    entries[COUNT, entry] += 1
    if rules[ON_USE] != NOTHING:
        _note_use(rules, now, entries, parts, entry, part, custom)
    blocks: int = entries[RESIDENT, entry]
    return blocks


@compiled
def protect(entries: Ints, parts: Ints, entry: int, part: int, why: int) -> None:
    """Protect an entry for one more reason."""
    if entries[PROTECTED, entry] == 0:
        parts[LOCKED, part] += entries[RESIDENT, entry]
    entries[PROTECTED, entry] |= why


@compiled
def release(entries: Ints, parts: Ints, entry: int, part: int, why: int) -> None:
    """Take back a reason to protect an entry."""
    entries[PROTECTED, entry] &= ~why
    if entries[PROTECTED, entry] == 0:
        parts[LOCKED, part] -= entries[RESIDENT, entry]


@compiled
def admissible(rules: Ints, parts: Ints, part: int, missing: int) -> int:
    """Return how many of ``missing`` blocks could enter the budget now."""
    if rules[VICTIM] == NOBODY:
        return 0
    used = parts[USED, part]
    if rules[VICTIM] == WORTH_LEAST:  # what goes has gone
        room: int = parts[CAPACITY, part] - used
        return min(missing, room)
    free, evictable = parts[CAPACITY, part] - used, used - parts[LOCKED, part]
    return _kept_blocks(missing, free, evictable, rules[WHOLE] == 1)


@compiled
def admit(
    rules: Ints,
    now: Ints,
    entries: Ints,
    parts: Ints,
    entry: int,
    part: int,
    blocks: int,
    custom: Ints | None,
) -> None:
    """Give a protected entry more blocks, evicting for them."""
    over = parts[USED, part] + blocks - parts[CAPACITY, part]
    if over > 0 and rules[DRAWN]:
        _draw(rules, now, entries, part)
    while over > 0:
        victim = _victim(rules, entries, part, custom)
        if custom is not None and victim == _REFUSED:
            raise CrispError("a plugin's cache chose a victim that is protected or empty")
        if victim < 0:
            raise InvariantError("a part of the budget is exceeded, and nothing can be evicted")
        leaves = entries[RESIDENT, victim]
        if rules[WHOLE] == 0:
            leaves = min(leaves, 1 if rules[SUFFIXES] else over)
        entries[RESIDENT, victim] -= leaves
        parts[USED, part] -= leaves
        over -= leaves
    if rules[ON_ENTRY] != NOTHING and entries[RESIDENT, entry] == 0:
        _note_entry(rules, now, entries, entry, custom)
    entries[RESIDENT, entry] += blocks
    parts[USED, part] += blocks
    parts[LOCKED, part] += blocks


@compiled
def _victim(rules: Ints, entries: Ints, part: int, custom: Ints | None) -> int:
    low = part * rules[PART_SIZE]
    high = low + rules[PART_SIZE]
    resident, protected = entries[RESIDENT], entries[PROTECTED]
    last, count = entries[rules[RECENCY]], entries[rules[FREQUENCY]]
    victim: int
    if custom is not None and rules[VICTIM] == CUSTOM:
        victim = call_address(
            custom[VICTIM_AT],
            (
                address_of(resident), address_of(protected), address_of(last), address_of(count),
                len(resident), low, high,
            ),
        )  # fmt: skip
        return victim if evictable(resident, protected, victim, low, high) else _REFUSED
    if rules[VICTIM] == LRU:
        victim = _lru(resident, protected, last, count, low, high)
    elif rules[VICTIM] == LFU:
        victim = _lfu(resident, protected, last, count, low, high)
    elif rules[VICTIM] == LFRU:
        victim = _lfru(resident, protected, last, count, low, high)
    elif rules[VICTIM] == SUFFIX_LRU:
        victim = _suffix_lru(resident, protected, last, count, low, high)
    else:
        victim = _suffix_lfu(resident, protected, last, count, low, high)
    return victim


@compiled
def _note_use(
    rules: Ints, now: Ints, entries: Ints, parts: Ints, entry: int, part: int, custom: Ints | None
) -> None:
    low = part * rules[PART_SIZE]
    high = low + rules[PART_SIZE]
    mark, stamp, resident = entries[MARK], entries[STAMP], entries[RESIDENT]
    event, room = now[EVENT], parts[CAPACITY, part]
    if custom is not None and rules[ON_USE] == CUSTOM:
        call_address(
            custom[USE_AT],
            (
                address_of(mark), address_of(stamp), address_of(resident), len(mark),
                entry, event, low, high, room,
            ),
        )  # fmt: skip
    elif rules[ON_USE] == COUNT_USE:
        _count_use(mark, stamp, resident, entry, event, low, high, room)
    elif rules[ON_USE] == PROMOTE:
        _promote(mark, stamp, resident, entry, event, low, high, room)
    else:
        _use_current(mark, stamp, resident, entry, event, low, high, room)


@compiled
def _note_entry(rules: Ints, now: Ints, entries: Ints, entry: int, custom: Ints | None) -> None:
    mark, stamp, last, event = entries[MARK], entries[STAMP], entries[LAST], now[EVENT]
    if custom is not None and rules[ON_ENTRY] == CUSTOM:
        call_address(
            custom[ENTRY_AT],
            (address_of(mark), address_of(stamp), address_of(last), len(mark), entry, event),
        )
    elif rules[ON_ENTRY] == COUNT_FROM_HERE:
        _count_from_here(mark, stamp, last, entry, event)
    elif rules[ON_ENTRY] == STAMP_ENTRY:
        _stamp_entry(mark, stamp, last, entry, event)
    else:
        _on_probation(mark, stamp, last, entry, event)


@compiled
def _draw(rules: Ints, now: Ints, entries: Ints, part: int) -> None:
    """Draw random keys for all entries of a part, in the place of when they came."""
    low = part * rules[PART_SIZE]
    for entry in range(low, low + rules[PART_SIZE]):
        entries[STAMP, entry] = _hash_key(rules[CACHE_SEED], now[EVENT], entry)
