"""The begin of an event: what is on the device, and what is predicted for the next one."""

from __future__ import annotations

import numpy as np
import numpy.typing as npt

from crisp.errors import CrispError
from crisp.sim.compiling import compiled
from crisp.sim.fast import prefetch_queue as lookahead
from crisp.sim.fast.custom import address_of, call_address
from crisp.sim.fast.residency import begin, use
from crisp.sim.fast.state import (
    CUSTOM,
    ENDED,
    ENTRY,
    EVENT,
    EXPERTS,
    FROM_STAGING,
    GUESS,
    HAVE,
    HITS,
    ISSUED,
    LOW,
    NEVER,
    PART,
    PARTIAL,
    PER_LAYER,
    PERFECT,
    PLACE,
    PLACED,
    PREFETCH,
    PREFETCH_AT,
    RESIDENT,
    ROWS,
    SALIENT,
    SKIPPED,
    STARTED,
    STATES,
    TASKS,
    TRANSIENT,
    WIDTH,
    Ints,
)


@compiled
def access(
    rules: Ints, now: Ints, entries: Ints, parts: Ints, slots: Ints,
    entry: Ints, width: Ints, row: int, first: int, count: int, custom: Ints | None
) -> None:  # fmt: skip
    """Protect the event's entries, note their use, and see what of them is here.

    Its tasks are ``count`` of the batch's from ``first`` on, or those that `choose` has found;
    entry, width: of the batch.
    """
    now[EVENT] += 1
    now[PART] = row if rules[PER_LAYER] else 0
    now[TASKS] += count
    begin(rules, entries, row)
    for slot in range(count):
        if rules[STATES] == 1:
            slots[PLACE, slot], slots[ENTRY, slot] = first + slot, entry[first + slot]
        wide = width[slots[PLACE, slot]]
        blocks = use(rules, now, entries, parts, slots[ENTRY, slot], now[PART], custom)
        slots[WIDTH, slot] = wide
        slots[LOW, slot] = slots[HAVE, slot] = slots[ISSUED, slot] = blocks
        slots[STARTED, slot] = slots[ENDED, slot] = slots[FROM_STAGING, slot] = 0
        slots[TRANSIENT, slot], slots[PLACED, slot] = -1, 0
        if rules[PREFETCH] != NEVER:
            lookahead.claim(now, entries, slots, slot)
        if slots[HAVE, slot] >= wide:
            now[HITS] += 1
        elif slots[HAVE, slot] > 0:
            now[PARTIAL] += 1


@compiled
def choose(
    rules: Ints, now: Ints, entries: Ints, slots: Ints,
    entry: Ints, width: Ints, seen: Ints, bare: Ints, taken: Ints, first: int, count: int,
) -> int:  # fmt: skip
    """Choose which of its tasks an event has, by what is resident; return how many.

    They are put into their slots by first appearance.
    """
    chosen = 0
    for task in range(first, first + count):
        resident = entries[RESIDENT, entry[task]]
        place = task * rules[STATES] + resident
        taken[task] = width[place]
        if resident == 0:
            now[SKIPPED] += bare[task]
        if width[place] == 0:
            continue
        slot = chosen
        while slot > 0 and seen[slots[PLACE, slot - 1]] > seen[place]:
            slots[PLACE, slot], slots[ENTRY, slot] = slots[PLACE, slot - 1], slots[ENTRY, slot - 1]
            slot -= 1
        slots[PLACE, slot], slots[ENTRY, slot] = place, entry[task]
        chosen += 1
    return chosen


@compiled
def look_ahead(
    rules: Ints, now: Ints, entries: Ints, parts: Ints, lists: Ints, slots: Ints,
    entry: Ints, guess: npt.NDArray[np.int16], row: int, count: int, first: int, end: int,
    first_token: int, end_token: int, first_routed: Ints, routed: Ints, event: int,
    custom: Ints | None
) -> None:  # fmt: skip
    """Predict the next row's experts.

    count: tasks of the event; first, end: of the next one in ``entry``; tokens: the step's, in
    ``guess``; event: of the batch, whose ``routed`` weights are looked at.
    """
    wanted = lists[rules[ROWS]]
    lookahead.drop_rest(rules, now, entries, parts, wanted)
    if rules[SALIENT]:
        _weigh_ahead(rules, lists, guess, row, first_token, end_token, first_routed, routed, event)
        lookahead.predict(rules, now, entries, parts, wanted, (row + 1) % rules[ROWS])
        return
    lists[row, 0] = count
    for slot in range(count):
        lists[row, 1 + slot] = slots[ENTRY, slot] - row * rules[EXPERTS]
    following = (row + 1) % rules[ROWS]
    if custom is not None and rules[PREFETCH] == CUSTOM:
        n_wanted = call_address(
            custom[PREFETCH_AT],
            (
                address_of(guess), guess.shape[0], guess.shape[1], guess.shape[2], row,
                first_token, end_token, address_of(entry), first, end, following * rules[EXPERTS],
                address_of(lists[following]), address_of(wanted), rules[EXPERTS],
            ),
        )  # fmt: skip
        if n_wanted < 0:
            raise CrispError("the prefetcher of a plugin asked for an expert that there is not")
    elif rules[PREFETCH] == GUESS:
        _first_seen(wanted, guess, row, first_token, end_token)
    elif rules[PREFETCH] == PERFECT:
        wanted[0] = end - first
        for place in range(first, end):
            wanted[1 + place - first] = entry[place] - following * rules[EXPERTS]
    else:
        for place in range(1 + lists[following, 0]):
            wanted[place] = lists[following, place]
    lookahead.predict(rules, now, entries, parts, wanted, following)


@compiled
def _weigh_ahead(
    rules: Ints, lists: Ints, guess: npt.NDArray[np.int16], row: int,
    first_token: int, end_token: int, first_routed: Ints, routed: Ints, event: int,
) -> None:  # fmt: skip
    """Predict the next row's experts and their weights."""
    rows, following = rules[ROWS], (row + 1) % rules[ROWS]
    weights = rows + 1  # of an expert stand so many lists behind it
    _list_routed(rules, lists, row, first_routed[event], first_routed[event + 1], routed)
    if rules[PREFETCH] == PERFECT:
        _list_routed(rules, lists, rows, first_routed[event + 1], first_routed[event + 2], routed)
    elif rules[PREFETCH] == GUESS:
        _first_seen(lists[rows], guess, row, first_token, end_token)
        wanted, by_rank = lists[rows], lists[2 * weights + following]
        for place in range(1, 1 + wanted[0]):
            largest = 0
            for token in range(first_token, end_token):
                for rank in range(guess.shape[2]):
                    if guess[token, row, rank] == wanted[place]:
                        largest = max(largest, by_rank[rank])
            lists[weights + rows, place] = largest
    else:
        for place in range(1 + lists[following, 0]):
            lists[rows, place] = lists[following, place]
            lists[weights + rows, place] = lists[weights + following, place]


@compiled
def _list_routed(rules: Ints, lists: Ints, to: int, first: int, end: int, routed: Ints) -> None:
    """List the experts of routed [first, end) and the largest weight of each."""
    weights = rules[ROWS] + 1
    lists[to, 0] = end - first
    for place in range(first, end):
        lists[to, 1 + place - first] = routed[0, place] % rules[EXPERTS]
        lists[weights + to, 1 + place - first] = routed[2, place]


@compiled
def _first_seen(
    wanted: Ints, guess: npt.NDArray[np.int16], row: int, first_token: int, end_token: int
) -> None:
    """Do `crisp.policy.prefetch.first_seen` to the step's guesses."""
    n_wanted = 0
    for token in range(first_token, end_token):
        for rank in range(guess.shape[2]):
            expert, place = guess[token, row, rank], 1
            while place <= n_wanted and wanted[place] != expert:
                place += 1
            if place > n_wanted and expert >= 0:
                wanted[place] = expert
                n_wanted = place
    wanted[0] = n_wanted
