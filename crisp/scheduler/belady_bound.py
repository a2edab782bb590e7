"""The fewest blocks that any cache could load for the tasks of a run (Belady, 1966).

A block need not be loaded again if it was kept from one use to the next. So what a cache of some
capacity can save at most are as many such intervals as fit: at no moment more of them than blocks.
That is interval scheduling on as many machines, here called places. Intervals are taken as they
end, each into the place that has been free for the shortest time when it begins; no other choice
fits more (Faigle and Nawijn, Note on scheduling intervals on-line, 1995). So nothing of the future
need be known, and every run can be told its bound while it goes on. What it counts is what the
oracle `crisp.scheduler.oracle` loads by single blocks, which may decline to keep what was just
used.
"""

from __future__ import annotations

from collections.abc import MutableSequence, Sequence
from typing import Any, NamedTuple

import numpy as np

Marks = Sequence[MutableSequence[int]]
"""Rows of numbers: lists, or an array where the function is compiled."""

_SPARE = 64  # moments, at least, from one time that they are numbered anew to the next


class Places(NamedTuple):
    """The state between two events. An entry is one expert of one MoE layer.

    Every part of the budget counts its own moments: 0 is before its first event, and each of its
    events takes place at another one. The blocks of an entry that were used last at one moment are
    a run; the last use of a later block was never later.
    """

    runs: Marks  # [1, entries]: how many each entry has
    since: Marks  # [entries, runs]: the moment of a run, falling
    upto: Marks  # [entries, runs]: the block behind it, rising
    free: Marks  # [parts, moments]: places whose last interval ended then
    before: Marks  # [parts, moments]: itself if there are any, else a moment on the way to the last
    # earlier one that has; -1: none has
    moment: Marks  # [1, parts]: the last event's
    part: Marks  # [1, entries]: which it belongs to

    def arrays(self) -> Places:
        """Return the same as arrays, for a compiled function."""
        arrays: list[Any] = [np.array(rows, np.int32) for rows in self]
        return Places(*arrays)


def places(capacity: Sequence[int], initial: Sequence[int], blocks: int) -> Places:
    """Return the state before any event; capacity [parts], initial [entries]: blocks.

    blocks: of an expert.
    """
    parts, entries = len(capacity), len(initial)
    moments = max(capacity) + 1 + max(_SPARE, entries * blocks // parts // 4)
    return Places(
        runs=[[int(held > 0) for held in initial]],
        since=[[0] * blocks for _ in range(entries)],
        upto=[[held] * blocks for held in initial],
        free=[[room] + [0] * (moments - 1) for room in capacity],
        before=[[0] * moments for _ in range(parts)],
        moment=[[0] * parts],
        part=[[entry * parts // entries for entry in range(entries)]],
    )


def fewest_loads(
    runs: Marks, since: Marks, upto: Marks, free: Marks, before: Marks, moment: Marks,
    part_of_entry: Marks, event: Sequence[int], entry: Sequence[int], width: Sequence[int],
) -> int:  # fmt: skip
    """Return the blocks that had to be loaded for the next uses; first come the `Places`.

    A use is of the first ``width`` blocks of an entry in an event; all uses of an event stand
    together.
    """
    n_runs, moments, part_of, n_moments = runs[0], moment[0], part_of_entry[0], len(free[0])
    experts = len(n_runs) // len(free)
    missing = 0
    now = begun = -1
    places, latest = free[0], before[0]
    for use in range(len(event)):
        one, wide = entry[use], width[use]
        if wide == 0:
            continue
        if begun != event[use]:
            begun, part = event[use], part_of[one]
            places, latest, now = free[part], before[part], moments[part]
            latest[now] = now - (places[now] == 0)
            now += 1
            if now == n_moments:  # keep the moments with free places, and number them anew
                now = 0
                for old in range(n_moments):
                    if places[old] > 0:
                        places[now] = places[old]
                        now += 1
                    latest[old] = now - 1
                for other in range(part * experts, part * experts + experts):
                    for run in range(n_runs[other]):
                        if since[other][run] >= 0:
                            since[other][run] = latest[since[other][run]]
                for kept in range(now):
                    latest[kept] = kept
            places[now], latest[now], moments[part] = 0, now, now
        one_since, one_upto, count = since[one], upto[one], n_runs[one]
        block = run = 0
        while block < wide and run < count:
            needed, at = min(wide, one_upto[run]) - block, one_since[run]
            block += needed
            while needed > 0:
                while at >= 0 and latest[at] != at:
                    if latest[at] >= 0:
                        latest[at] = latest[latest[at]]
                    at = latest[at]
                if at < 0:
                    break
                taken = min(needed, places[at])
                places[at] -= taken
                places[now] += taken
                needed -= taken
                if places[at] == 0:
                    latest[at] = at - 1
            missing += needed
            if one_upto[run] <= wide:
                run += 1
        missing += wide - block
        # the runs before `run` become one, of now
        if run == 0:
            for other in range(count, 0, -1):
                one_since[other], one_upto[other] = one_since[other - 1], one_upto[other - 1]
        elif run > 1:
            for other in range(run, count):
                place = other - run + 1
                one_since[place], one_upto[place] = one_since[other], one_upto[other]
        one_since[0], one_upto[0], n_runs[one] = now, wide, count - run + 1
    return missing
