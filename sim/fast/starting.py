"""How an event begins: what it finds on the device, and what is predicted for the next one."""

from __future__ import annotations

import numpy as np
import numpy.typing as npt

from sim.fast import lookahead
from sim.fast.compiling import compiled
from sim.fast.residency import use
from sim.fast.state import (
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
    PLACE,
    PREFETCH,
    ROWS,
    STARTED,
    TASKS,
    TRANSIENT,
    WIDTH,
    Ints,
)


@compiled
def access(
    rules: Ints, now: Ints, entries: Ints, parts: Ints, slots: Ints,
    expert: Ints, width: Ints, row: int, first: int, count: int,
) -> None:  # fmt: skip
    """Protect the event's entries, note their use, and see what of them is here.

    Its tasks are ``count`` of the batch's from ``first`` on; expert, width: of the batch.
    """
    now[EVENT] += 1
    now[PART] = row if rules[PER_LAYER] else 0
    now[TASKS] += count
    for slot in range(count):
        place = first + slot
        entry = row * rules[EXPERTS] + expert[place]
        blocks = use(now, entries, parts, entry, now[PART])
        slots[ENTRY, slot], slots[PLACE, slot], slots[WIDTH, slot] = entry, place, width[place]
        slots[LOW, slot] = slots[HAVE, slot] = slots[ISSUED, slot] = blocks
        slots[STARTED, slot] = slots[ENDED, slot] = slots[FROM_STAGING, slot] = 0
        slots[TRANSIENT, slot] = -1
        if rules[PREFETCH] != NEVER:
            lookahead.claim(now, entries, slots, slot)
        if slots[HAVE, slot] >= width[place]:
            now[HITS] += 1
        elif slots[HAVE, slot] > 0:
            now[PARTIAL] += 1


@compiled
def look_ahead(
    rules: Ints, now: Ints, entries: Ints, parts: Ints, lists: Ints,
    expert: Ints, guess: npt.NDArray[np.int16], row: int, first: int, count: int,
    first_token: int, end_token: int,
) -> None:  # fmt: skip
    """Predict the next row's experts; tokens: the step's, in ``guess``."""
    wanted = lists[rules[ROWS]]
    lookahead.drop_rest(rules, now, entries, parts, wanted)
    lists[row, 0] = count
    for slot in range(count):
        lists[row, 1 + slot] = expert[first + slot]
    following = (row + 1) % rules[ROWS]
    if rules[PREFETCH] == GUESS:
        _first_seen(wanted, guess, row, first_token, end_token)
    else:
        for place in range(1 + lists[following, 0]):
            wanted[place] = lists[following, place]
    lookahead.predict(rules, now, entries, parts, wanted, following)


@compiled
def _first_seen(
    wanted: Ints, guess: npt.NDArray[np.int16], row: int, first_token: int, end_token: int
) -> None:
    """`crisp.policy.prefetch.first_seen` of the step's guesses."""
    found = 0
    for token in range(first_token, end_token):
        for rank in range(guess.shape[2]):
            expert, place = guess[token, row, rank], 1
            while place <= found and wanted[place] != expert:
                place += 1
            if place > found and expert >= 0:
                wanted[place] = expert
                found = place
    wanted[0] = found
