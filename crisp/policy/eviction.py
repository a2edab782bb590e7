"""Eviction rules: which entry must go, and what a cache notes about its entries for that.

Plain functions over arrays indexed by entry (MoE layer x expert), so that numba can compile them.
A victim rule looks at two arrays and takes the smallest; what stands in them makes the policy.
"""

from __future__ import annotations

from collections.abc import Callable, MutableSequence, Sequence

Array = Sequence[int]
Marks = MutableSequence[int]
VictimRule = Callable[[Array, Array, Array, Array, int, int], int]
UsedRule = Callable[[Marks, Marks, Array, int, int, int, int, int], None]
AdmittedRule = Callable[[Marks, Marks, Array, int, int], None]

CURRENT = 1 << 20  # added to the layer of an entry used in this forward pass: above any layer


# -- victims: (resident, protected, last, count, low, high) -> entry, or -1 if there is none -------


def lru_victim(
    resident: Array, protected: Array, last: Array, count: Array, low: int, high: int
) -> int:
    """Return the resident, unprotected entry in [low, high) used longest ago; ties: the lowest."""
    best = -1
    for entry in range(low, high):
        if resident[entry] > 0 and protected[entry] == 0 and (best < 0 or last[entry] < last[best]):
            best = entry
    return best


def lfu_victim(
    resident: Array, protected: Array, last: Array, count: Array, low: int, high: int
) -> int:
    """Return the one used in the fewest events; ties: least recently, then the lowest."""
    best, least = -1, (0, 0)
    for entry in range(low, high):
        if resident[entry] > 0 and protected[entry] == 0:
            use = count[entry], last[entry]
            if best < 0 or use < least:
                best, least = entry, use
    return best


def lfru_victim(
    resident: Array, protected: Array, last: Array, count: Array, low: int, high: int
) -> int:
    """Return the one with the fewest uses for its age; ties: least recently, then the lowest.

    Age is counted in events, from its last use to the latest use of any entry in [low, high); so it
    does not matter how many layers there are beside.
    """
    now = 0
    for entry in range(low, high):
        now = max(now, last[entry])
    best = -1
    for entry in range(low, high):
        if resident[entry] > 0 and protected[entry] == 0:
            if best < 0:
                best = entry
            else:  # count / age, compared exactly
                use = count[entry] * (now - last[best])
                best_use = count[best] * (now - last[entry])
                if use < best_use or (use == best_use and last[entry] < last[best]):
                    best = entry
    return best


def suffix_lru_victim(
    resident: Array, protected: Array, last: Array, count: Array, low: int, high: int
) -> int:
    """Return the one with the most blocks; ties: least recently used, then the lowest."""
    best, least = -1, (0, 0)
    for entry in range(low, high):
        if resident[entry] > 0 and protected[entry] == 0:
            use = -resident[entry], last[entry]
            if best < 0 or use < least:
                best, least = entry, use
    return best


def suffix_lfu_victim(
    resident: Array, protected: Array, last: Array, count: Array, low: int, high: int
) -> int:
    """Return the one with the most blocks; ties: fewest events, least recently, the lowest."""
    best, least = -1, (0, 0, 0)
    for entry in range(low, high):
        if resident[entry] > 0 and protected[entry] == 0:
            use = -resident[entry], count[entry], last[entry]
            if best < 0 or use < least:
                best, least = entry, use
    return best


# -- what is noted when an event uses an entry: (mark, stamp, resident, entry, event, low, high,
#    room of the part), and when an entry that had no block is admitted: (mark, stamp, last, entry,
#    event) ----------------------------------------------------------------------------------------


def count_use(
    mark: Marks,
    stamp: Marks,
    resident: Array,
    entry: int,
    event: int,
    low: int,
    high: int,
    room: int,
) -> None:
    """Count one more use; `count_from_here` begins anew when the entry comes back."""
    mark[entry] += 1


def count_from_here(mark: Marks, stamp: Marks, last: Array, entry: int, event: int) -> None:
    """Count uses from now on; the event that brings an entry counts if it asks for it."""
    mark[entry] = 1 if last[entry] == event else 0


def stamp_entry(mark: Marks, stamp: Marks, last: Array, entry: int, event: int) -> None:
    """Note the event in which the entry came, for first in, first out."""
    stamp[entry] = event


def use_current(
    mark: Marks,
    stamp: Marks,
    resident: Array,
    entry: int,
    event: int,
    low: int,
    high: int,
    room: int,
) -> None:
    """Mark the entry as used in this forward pass (each is, once at most)."""
    mark[entry] += CURRENT


def promote(
    mark: Marks,
    stamp: Marks,
    resident: Array,
    entry: int,
    event: int,
    low: int,
    high: int,
    room: int,
) -> None:
    """Move an entry that is used again to the protected segment of a segmented LRU (mark 1).

    The protected segment takes half of the room. What is above it goes back, least recent first
    (ties: the lowest), to the recent end of the other segment.
    """
    if resident[entry] == 0:
        return
    mark[entry], stamp[entry] = 1, event
    blocks = 0
    for other in range(low, high):
        blocks += resident[other] * mark[other]
    while blocks > room // 2:
        oldest = -1
        for other in range(low, high):
            if resident[other] * mark[other] > 0 and (oldest < 0 or stamp[other] < stamp[oldest]):
                oldest = other
        mark[oldest], stamp[oldest] = 0, event
        blocks -= resident[oldest]


def on_probation(mark: Marks, stamp: Marks, last: Array, entry: int, event: int) -> None:
    """Put an entry that comes into the other segment of a segmented LRU (mark 0)."""
    mark[entry], stamp[entry] = 0, event
