"""`crisp.scheduler.retention` over arrays: what stays after an event, decided at its start."""

from __future__ import annotations

from typing import Any

from crisp.policy import retention
from crisp.sim.compiling import allocating, compiled, inlined
from crisp.sim.fast.state import (
    BLOCKS,
    CAPACITY,
    ENTRY,
    EXPECTED,
    EXPERTS,
    FIXED,
    FROM_STAGING,
    HELD,
    ISSUED,
    KEPT,
    LOCKED,
    PART,
    PART_SIZE,
    PROTECTED,
    RECENT,
    RESIDENT,
    STAGING,
    TRANSIENT,
    USED,
    WIDTH,
    Ints,
)

_fade: Any = compiled(retention.fade)
_retain: Any = allocating(retention.retain)


@inlined
def retain(
    rules: Ints, now: Ints, entries: Ints, parts: Ints, slots: Ints, sizes: Ints | None,
    first_routed: Ints, routed: Ints, event: int, row: int, count: int,
) -> None:  # fmt: skip
    """Decide what stays after an event of ``count`` tasks, if the cache retains; what goes and is
    read goes to staging.

    event: of the batch, whose ``routed`` weights are looked at.
    """
    if sizes is not None:
        first, end = first_routed[event], first_routed[event + 1]
        _plan(rules, now, entries, parts, slots, sizes, routed, first, end, row, count)


@compiled
def _plan(
    rules: Ints, now: Ints, entries: Ints, parts: Ints, slots: Ints, sizes: Ints, routed: Ints,
    first: int, end: int, row: int, count: int,
) -> None:  # fmt: skip
    recent = entries[RECENT]
    _fade(recent, row * rules[EXPERTS], (row + 1) * rules[EXPERTS])
    for place in range(first, end):
        recent[routed[0, place]] += routed[1, place] // 10
    low = now[PART] * rules[PART_SIZE]
    high = low + rules[PART_SIZE]
    for entry in range(low, high):
        entries[KEPT, entry] = entries[RESIDENT, entry]
        entries[HELD, entry] = entries[FIXED, entry] = 0
    for slot in range(count):
        entry = slots[ENTRY, slot]
        resident = entries[RESIDENT, entry]
        if slots[FROM_STAGING, slot] > 0:
            entries[FIXED, entry], entries[HELD, entry] = 1, resident
        else:
            entries[HELD, entry] = min(resident, slots[WIDTH, slot])
            entries[KEPT, entry] = max(resident, slots[WIDTH, slot])
    _retain(
        entries[KEPT], entries[HELD], entries[FIXED], entries[EXPECTED], recent, sizes,
        rules[BLOCKS], low, high, parts[CAPACITY, now[PART]], rules[BLOCKS],
    )  # fmt: skip
    for entry in range(low, high):
        if entries[KEPT, entry] < entries[RESIDENT, entry]:
            _let_go(now, entries, parts, entry)
    for slot in range(count):
        stays = entries[KEPT, slots[ENTRY, slot]]
        readable = min(slots[ISSUED, slot], slots[WIDTH, slot])
        if stays < readable and slots[FROM_STAGING, slot] == 0:
            now[STAGING] -= readable - stays
            slots[TRANSIENT, slot] = stays


@compiled
def _let_go(now: Ints, entries: Ints, parts: Ints, entry: int) -> None:
    leaves = entries[RESIDENT, entry] - entries[KEPT, entry]
    entries[RESIDENT, entry] -= leaves
    parts[USED, now[PART]] -= leaves
    if entries[PROTECTED, entry]:
        parts[LOCKED, now[PART]] -= leaves
