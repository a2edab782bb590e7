"""The state of a fast run: its rules, and all that changes while it goes on.

Few and large arrays, for every array that a compiled function is given costs time. Places in them
have names. An *entry* is one expert of one MoE layer, numbered layer by layer; a *row* is a MoE
layer's number among MoE layers; a *slot* is a task's number in its event, by first appearance.
"""

from __future__ import annotations

from typing import NamedTuple

import numpy as np
import numpy.typing as npt

from crisp.scheduler.residency import StartingState
from crisp.scheduler.scheduler import STAGING_EXPERTS

Ints = npt.NDArray[np.int64]

# Rules by number. NOBODY is ever evicted by the caches none and static, which admit nothing.
# WORTH_LEAST: the event's start has decided who goes, see `crisp.sim.fast.retention`.
NOBODY, LRU, LFU, LFRU, SUFFIX_LRU, SUFFIX_LFU, WORTH_LEAST = range(7)
NOTHING, COUNT_USE, PROMOTE, USE_CURRENT = range(4)
COUNT_FROM_HERE, STAMP_ENTRY, ON_PROBATION = range(1, 4)  # or NOTHING
FIRST_SEEN, WIDEST, NARROWEST, RESIDENT_FIRST, JOHNSON, RANDOM_KEY = range(6)
NEVER, PREVIOUS, GUESS, PERFECT = range(4)
CUSTOM = 99  # of any of these: a plugin's, called by its address, see `crisp.sim.fast.custom`

# `rules`: what does not change during a run.
(
    BY_BLOCK,  # 1: granularity block
    SEQUENTIAL,  # 1: nothing overlaps
    WHOLE,  # 1: unit expert
    VICTIM, ON_USE, ON_ENTRY, ORDER, SEED, PREFETCH,  # by number, as above; the order's seed
    SALIENT,  # 1: as in `crisp.policy.prefetch.PrefetchRule`
    RECENCY, FREQUENCY,  # which of `entries` a victim rule sees in the place of LAST and COUNT
    DRAWN, CACHE_SEED, BY_PASS, SUFFIXES,  # as in `crisp.policy.cache.CacheRule`
    TIMED, ORDER_DRAWN,  # as in `crisp.policy.order.OrderRule`
    EXPERTS, BLOCKS, ROWS,  # experts of a layer, blocks of an expert, MoE layers
    STATES,  # of an expert that its width depends on: 1, or one for each number of blocks it has
    PER_LAYER,  # 1: a row has its own part of the budget
    PART_SIZE,  # entries of a part
    N_RULES,
) = range(25)  # fmt: skip

# `custom`: addresses of a plugin's rules, 0 where it has none.
VICTIM_AT, USE_AT, ENTRY_AT, KEY_AT, PREFETCH_AT, N_CUSTOM = range(6)

# `now`: single numbers.
(
    TIME,  # of the compute stream, in ns
    EVENT,  # number of the last event begun
    PART, LEFT, TURN,  # of the event: its part of the budget, tasks to compute, and computed
    PENDING, NEXT,  # of the event: tasks to load for, and those issued in full
    LOWEST,  # ranks below are not ready
    STAGING,  # free blocks
    BUSY, SINCE, UNTIL,  # the link: whether it loads, from when and until when
    ROW, SIZE,  # of the event: its row, bytes of a block there
    LOAD_SLOT, LOAD_BLOCKS,  # what it loads: the slot that waits for it or -1, and how many blocks
    AHEAD_ROW, AHEAD_PART, AHEAD_FREE,  # predicted: the row, its part; free blocks of staging
    FLIGHT, FLIGHT_STAGED, UNWANTED,  # the prefetch on the link: its entry or -1, as in `Fetch`
    TASKS, HITS, PARTIAL, SKIPPED,  # these and what follows are totals
    BLOCKS_LOADED, BLOCKS_LANDED, BLOCKS_COMPUTED,  # blocks
    BYTES_LOADED, USEFUL, LATE, WASTED,  # bytes
    LAYER_NS, COMPUTE_NS, LINK_NS, LAYER_HIDDEN, COMPUTE_HIDDEN, ORDER_BOUND, ALONE,
    N_NOW,
) = range(41)  # fmt: skip

# `entries` [., entries], `parts` [., parts]: as in `Residency`, `PrefetchQueue` and
# `RetainingResidency`. Behind them, one after the other, the sizes of all blocks as in
# `Anticipation`, if the prefetcher is salient.
(
    RESIDENT, PROTECTED, LAST, COUNT, MARK, STAMP, STAGED, FETCHED_FROM, FETCHED,
    EXPECTED, RECENT, KEPT, HELD, FIXED,
    N_ENTRIES,
) = range(15)  # fmt: skip
CAPACITY, USED, LOCKED, N_PARTS = range(4)

# `slots` [., experts]: tasks of the event, as in `Task`, by slot.
(
    ENTRY, WIDTH, HAVE, ISSUED, LOW, FROM_STAGING, TRANSIENT, STARTED, ENDED,
    PLACED,  # 1: its missing blocks have a place to go to
    PLACE,  # among the tasks of the batch, or (task, state)s
    KIND,  # what it is computed like: its row of piece_ns
    RANK,
    SLOT_OF, READY,  # by rank; 1: its next piece may be computed
    QUEUE,  # ranks of the tasks to load for
    N_SLOTS,
) = range(17)  # fmt: skip

# `jobs` [., experts x blocks]: scratch of orders.
KEY, SECOND_KEY, SORTED, JOB_LOAD, JOB_COMPUTE, N_JOBS = range(6)


class Machine(NamedTuple):
    """Rules and state, all int64."""

    rules: Ints  # [N_RULES]
    load_ns: Ints  # [rows, blocks + 1] of a request for so many; behind them, bytes of a block
    row_of_layer: Ints  # [layers]; -1: it is not MoE
    now: Ints
    entries: Ints
    parts: Ints
    lists: Ints  # [rows + 1, 1 + experts] experts of each row's last event, and predicted ones;
    # how many there are stands first. If the prefetcher is salient, as many lists of their weights
    # follow, and then for each row the weights by rank
    slots: Ints
    jobs: Ints
    custom: Ints | None  # [N_CUSTOM]; None: no rule is a plugin's, and nothing of this is compiled
    sizes: Ints | None  # [entries x blocks], as in `Worth`; None: likewise, no cache retains


class StepBatch(NamedTuple):
    """Steps to execute: their tasks, event by event, and what everything costs.

    A task is what an event may ask for: where widths depend on what is resident, that decides
    which of its *states* it is in, and perhaps it is none. Otherwise it has a single state.
    """

    kind_of_step: Ints  # [steps] its column of layer_ns
    layer_ns: Ints  # [layers, kinds of step]
    first_task: Ints  # [events + 2]: of the next batch's first event too
    entry: Ints  # [tasks], and those of that event
    width: Ints  # [tasks x states]
    seen: Ints  # [tasks x states]: when it appears first, in its event; by rank if one state
    bare: Ints  # [tasks]: tokens that skip the expert where it has no block
    taken: Ints  # [tasks] widths as they turned out
    kind_of_task: Ints  # [tasks x states] its row of piece_ns and of least_ns
    piece_ns: Ints  # [kinds, 1], or of blocks [first, last): [kinds, first x blocks + last - 1]
    least_ns: Ints  # [kinds, 1 or blocks]: see `crisp.sim.bounds.least_times`
    first_token: Ints  # [steps + 1]
    guess: npt.NDArray[np.int16]  # [tokens, rows, k], for the next row; no tokens if nobody asks
    first_routed: Ints  # [events + 2], of the next batch's first event too; none if nobody weighs
    routed: Ints  # [3, routed]: entries that events are routed to, their mean and largest weights


def machine(
    rules: Ints,
    load_ns: Ints,
    row_of_layer: Ints,
    start: StartingState,
    custom: Ints | None,
) -> Machine:
    """Return a machine on which nothing has happened."""
    experts, blocks = int(rules[EXPERTS]), int(rules[BLOCKS])
    rows, ahead = int(rules[ROWS]), start.anticipation
    entries = np.zeros((N_ENTRIES + (blocks if ahead else 0), rows * experts), np.int64)
    lists = np.zeros((3 * (rows + 1) if ahead else rows + 1, 1 + experts), np.int64)
    if ahead is not None:
        entries[N_ENTRIES:] = np.reshape(ahead.sizes, (blocks, -1))
        lists[2 * (rows + 1) : -1, : len(ahead.by_rank[0])] = ahead.by_rank
    entries[RESIDENT], entries[LAST], entries[MARK] = (
        start.resident or 0,
        -1,
        start.expert_tiers or 0,
    )
    if start.worth is not None:
        entries[EXPECTED] = entries[RECENT] = start.worth.expected
    parts = np.zeros((N_PARTS, len(start.capacity)), np.int64)
    parts[CAPACITY] = start.capacity
    parts[USED] = entries[RESIDENT].reshape(len(start.capacity), -1).sum(axis=1)
    now = np.zeros(N_NOW, np.int64)
    now[[EVENT, FLIGHT, LOAD_SLOT]] = -1
    now[STAGING], now[AHEAD_FREE] = STAGING_EXPERTS * blocks, blocks
    return Machine(
        rules,
        load_ns,
        row_of_layer,
        now,
        entries,
        parts,
        lists,
        np.zeros((N_SLOTS, experts), np.int64),
        np.zeros((N_JOBS, experts * blocks), np.int64),
        custom,
        None if start.worth is None else np.array(start.worth.sizes, np.int64),
    )
