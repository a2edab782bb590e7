"""`crisp.scheduler.scheduler` over arrays: what to load and what to compute next."""

from __future__ import annotations

from crisp.scheduler.residency import EVENT as BY_EVENT
from crisp.sim.compiling import compiled, inlined
from crisp.sim.fast import prefetch_queue as lookahead
from crisp.sim.fast.residency import admissible, admit, release
from crisp.sim.fast.state import (
    AHEAD_FREE,
    BLOCKS_COMPUTED,
    BLOCKS_LANDED,
    BLOCKS_LOADED,
    BY_BLOCK,
    ENDED,
    ENTRY,
    FLIGHT,
    FROM_STAGING,
    HAVE,
    ISSUED,
    KEPT,
    LEFT,
    LOAD_BLOCKS,
    LOAD_SLOT,
    LOW,
    LOWEST,
    NEVER,
    NEXT,
    PART,
    PENDING,
    PLACED,
    PREFETCH,
    QUEUE,
    RANK,
    READY,
    SEQUENTIAL,
    SLOT_OF,
    STAGING,
    STARTED,
    TRANSIENT,
    TURN,
    VICTIM,
    WIDTH,
    WORTH_LEAST,
    Ints,
)


@inlined
def queue(rules: Ints, now: Ints, slots: Ints, count: int) -> None:
    """Line up what is to be loaded and what can be computed at once."""
    now[LEFT], now[TURN], now[NEXT], now[PENDING], now[LOWEST] = count, 0, 0, 0, count
    for place in range(count):
        slot = slots[SLOT_OF, place]
        have, width = slots[HAVE, slot], slots[WIDTH, slot]
        slots[RANK, slot] = place
        slots[READY, place] = 0
        if slots[ISSUED, slot] < width:
            slots[QUEUE, now[PENDING]] = place
            now[PENDING] += 1
        if have >= width or (have > 0 and _by_block(rules)):
            _make_ready(now, slots, slot)


@inlined
def next_load(
    rules: Ints,
    now: Ints,
    entries: Ints,
    parts: Ints,
    lists: Ints,
    slots: Ints,
    custom: Ints | None,
) -> bool:
    """Issue the next request; the link must be free. False: nothing may be loaded now."""
    if now[NEXT] == now[PENDING]:
        if rules[PREFETCH] == NEVER:
            return False
        if not lookahead.fetch(rules, now, entries, parts, lists, custom):
            return False
        now[LOAD_SLOT], now[LOAD_BLOCKS] = -1, 1
        now[BLOCKS_LOADED] += 1
        return True
    place = slots[QUEUE, now[NEXT]]
    slot = slots[SLOT_OF, place]
    if rules[SEQUENTIAL] and place != now[TURN]:
        return False
    if slots[PLACED, slot] == 0 and not _place(rules, now, entries, parts, slots, slot, custom):
        return False
    blocks = 1 if rules[BY_BLOCK] else slots[WIDTH, slot] - slots[ISSUED, slot]
    slots[ISSUED, slot] += blocks
    now[LOAD_SLOT], now[LOAD_BLOCKS] = slot, blocks
    now[BLOCKS_LOADED] += blocks
    if slots[ISSUED, slot] == slots[WIDTH, slot]:
        now[NEXT] += 1
    return True


@inlined
def loaded(rules: Ints, now: Ints, slots: Ints) -> None:
    """Take note that the request on the link has arrived."""
    now[BLOCKS_LANDED] += now[LOAD_BLOCKS]
    if now[FLIGHT] >= 0:
        lookahead.landed(now)
    slot = now[LOAD_SLOT]
    if slot < 0:
        return
    before = slots[HAVE, slot]
    slots[HAVE, slot] = before + now[LOAD_BLOCKS]
    if _by_block(rules):
        ready = before == slots[STARTED, slot] and before == slots[ENDED, slot]
    else:
        ready = slots[HAVE, slot] >= slots[WIDTH, slot]
    if ready:
        _make_ready(now, slots, slot)


@inlined
def next_compute(rules: Ints, now: Ints, slots: Ints) -> int:
    """Issue the next piece of the slot that is returned; -1: no task has what it needs."""
    place, count = now[LOWEST], now[TURN] + now[LEFT]
    while place < count and slots[READY, place] == 0:
        place += 1
    if place == count or (rules[SEQUENTIAL] and place != now[TURN]):
        return -1
    slots[READY, place], now[LOWEST] = 0, place + 1
    slot: int = slots[SLOT_OF, place]
    slots[STARTED, slot] = min(slots[HAVE, slot], slots[WIDTH, slot])
    return slot


@inlined
def computed(now: Ints, entries: Ints, parts: Ints, slots: Ints, slot: int) -> None:
    """Take note that a piece has ended: staging is free, and perhaps the event over."""
    first, last = slots[ENDED, slot], slots[STARTED, slot]
    _free_staging(now, slots, slot, first, last)
    slots[ENDED, slot] = last
    now[BLOCKS_COMPUTED] += last - first
    if last < slots[WIDTH, slot]:
        if slots[HAVE, slot] > last:
            _make_ready(now, slots, slot)
        return
    now[TURN] += 1
    now[LEFT] -= 1
    if now[LEFT] == 0:
        for other in range(now[TURN]):
            release(entries, parts, slots[ENTRY, other], now[PART], BY_EVENT)


@compiled
def _by_block(rules: Ints) -> bool:
    """Return whether a task is computed while it is loaded."""
    by_block: bool = rules[BY_BLOCK] == 1 and rules[SEQUENTIAL] == 0
    return by_block


@compiled
def _make_ready(now: Ints, slots: Ints, slot: int) -> None:
    place = slots[RANK, slot]
    slots[READY, place] = 1
    now[LOWEST] = min(now[LOWEST], place)


@compiled
def _place(
    rules: Ints, now: Ints, entries: Ints, parts: Ints, slots: Ints, slot: int, custom: Ints | None
) -> bool:
    """Decide where a task's missing blocks go, and evict for them; False: staging is full."""
    part, missing, kept = now[PART], slots[WIDTH, slot] - slots[ISSUED, slot], 0
    if slots[FROM_STAGING, slot] == 0:
        wanted = missing
        if rules[VICTIM] == WORTH_LEAST:
            wanted = max(0, entries[KEPT, slots[ENTRY, slot]] - slots[ISSUED, slot])
        kept = admissible(rules, parts, part, wanted)
    if missing - kept > now[STAGING]:
        return False
    now[STAGING] -= missing - kept
    slots[PLACED, slot] = 1
    if slots[TRANSIENT, slot] < 0:
        slots[TRANSIENT, slot] = slots[ISSUED, slot] + kept
    if kept:
        admit(rules, now, entries, parts, slots[ENTRY, slot], part, kept, custom)
    return True


@compiled
def _free_staging(now: Ints, slots: Ints, slot: int, first: int, last: int) -> None:
    transient, staged, low = slots[TRANSIENT, slot], slots[FROM_STAGING, slot], slots[LOW, slot]
    if 0 <= transient < last:
        now[STAGING] += last - max(first, transient)
    if staged:
        now[AHEAD_FREE] += max(0, min(last, low + staged) - max(first, low))
