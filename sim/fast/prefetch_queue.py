"""`crisp.scheduler.prefetch_queue` over arrays: blocks of predicted experts, loaded while nothing
is urgent.
"""

from __future__ import annotations

from typing import Any

from crisp.policy import anticipation
from crisp.scheduler.residency import PREDICTED
from crisp.sim.compiling import compiled
from crisp.sim.fast.residency import admissible, admit, protect, release
from crisp.sim.fast.state import (
    AHEAD_FREE,
    AHEAD_PART,
    AHEAD_ROW,
    BLOCKS,
    ENTRY,
    EXPERTS,
    FETCHED,
    FETCHED_FROM,
    FLIGHT,
    FLIGHT_STAGED,
    FROM_STAGING,
    HAVE,
    ISSUED,
    LATE,
    LOAD_SLOT,
    LOW,
    N_ENTRIES,
    PER_LAYER,
    RESIDENT,
    ROWS,
    SALIENT,
    SIZE,
    STAGED,
    UNWANTED,
    USEFUL,
    WASTED,
    WIDTH,
    Ints,
)

_most_worth: Any = compiled(anticipation.most_worth)


@compiled
def predict(rules: Ints, now: Ints, entries: Ints, parts: Ints, wanted: Ints, row: int) -> None:
    """Queue the experts in ``wanted``, whose number stands first, for the event of ``row``."""
    now[AHEAD_ROW], now[AHEAD_PART] = row, row if rules[PER_LAYER] else 0
    for place in range(1, 1 + wanted[0]):
        protect(entries, parts, row * rules[EXPERTS] + wanted[place], now[AHEAD_PART], PREDICTED)


@compiled
def drop_rest(rules: Ints, now: Ints, entries: Ints, parts: Ints, wanted: Ints) -> None:
    """Drop what the predicted event has not claimed: it was fetched in vain."""
    for place in range(1, 1 + wanted[0]):
        entry = now[AHEAD_ROW] * rules[EXPERTS] + wanted[place]
        release(entries, parts, entry, now[AHEAD_PART], PREDICTED)
        now[WASTED] += entries[FETCHED, entry] * now[SIZE]
        _discard(now, entry, entries[STAGED, entry])
        entries[FETCHED, entry] = entries[STAGED, entry] = 0


@compiled
def fetch(
    rules: Ints, now: Ints, entries: Ints, parts: Ints, lists: Ints, custom: Ints | None
) -> bool:
    """Issue the next missing block of the first predicted expert that lacks one, or the missing
    block that is worth most, if there is a place for it.
    """
    wanted = lists[rules[ROWS]]
    if rules[SALIENT]:
        weights, end = lists[2 * rules[ROWS] + 1], 1 + wanted[0]
        entry = _most_worth(
            wanted[1:end], weights[1:end], entries[N_ENTRIES:].reshape(-1), entries[RESIDENT],
            entries[STAGED], now[AHEAD_ROW] * rules[EXPERTS], rules[BLOCKS],
        )  # fmt: skip
        if entry < 0:
            return False
        first = entries[RESIDENT, entry] + entries[STAGED, entry]
        return _issue(rules, now, entries, parts, entry, first, custom)
    for place in range(1, 1 + wanted[0]):
        entry = now[AHEAD_ROW] * rules[EXPERTS] + wanted[place]
        first = entries[RESIDENT, entry] + entries[STAGED, entry]
        if first < rules[BLOCKS]:
            return _issue(rules, now, entries, parts, entry, first, custom)
    return False


@compiled
def landed(now: Ints) -> None:
    """Take note that the block in flight has arrived."""
    now[FLIGHT] = -1
    if now[UNWANTED]:
        now[AHEAD_FREE] += 1


@compiled
def claim(now: Ints, entries: Ints, slots: Ints, slot: int) -> None:
    """Claim a task's blocks of those that were fetched for its event."""
    entry, width, low = slots[ENTRY, slot], slots[WIDTH, slot], slots[LOW, slot]
    staged, fetched = entries[STAGED, entry], entries[FETCHED, entry]
    issued = low + staged
    here = issued - 1 if _in_flight(now, entry) else issued
    taken = max(0, min(issued, width) - low) if staged else 0
    late = 1 if here < min(issued, width) else 0
    _discard(now, entry, staged - taken)
    if fetched:
        useful = max(0, min(width, here) - entries[FETCHED_FROM, entry])
        now[USEFUL] += useful * now[SIZE]
        now[LATE] += late * now[SIZE]
        now[WASTED] += (fetched - useful - late) * now[SIZE]
    entries[STAGED, entry] = entries[FETCHED, entry] = 0
    slots[HAVE, slot], slots[ISSUED, slot], slots[FROM_STAGING, slot] = here, here + late, taken
    if late:
        now[LOAD_SLOT] = slot


@compiled
def _issue(
    rules: Ints, now: Ints, entries: Ints, parts: Ints, entry: int, first: int, custom: Ints | None
) -> bool:
    part, staged = now[AHEAD_PART], entries[STAGED, entry]
    # once staged, always: no hole in a prefix
    kept = staged == 0 and admissible(rules, parts, part, 1) > 0
    if kept:
        admit(rules, now, entries, parts, entry, part, 1, custom)
    elif now[AHEAD_FREE]:
        now[AHEAD_FREE] -= 1
        entries[STAGED, entry] += 1
    else:
        return False
    if entries[FETCHED, entry] == 0:
        entries[FETCHED_FROM, entry] = first
    entries[FETCHED, entry] += 1
    now[FLIGHT], now[FLIGHT_STAGED], now[UNWANTED] = entry, 0 if kept else 1, 0
    return True


@compiled
def _in_flight(now: Ints, entry: int) -> bool:
    """Return whether a block of this entry is in flight and wanted."""
    wanted: bool = now[FLIGHT] == entry and now[UNWANTED] == 0
    return wanted


@compiled
def _discard(now: Ints, entry: int, blocks: int) -> None:
    """Free staged blocks that nobody asked for; the one in flight goes when it arrives."""
    if blocks and _in_flight(now, entry) and now[FLIGHT_STAGED]:
        now[UNWANTED] = 1
        blocks -= 1
    now[AHEAD_FREE] += blocks
