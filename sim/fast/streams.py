"""Link and compute, from one step to the next: `crisp.sim.streams` without its processes.

At one instant all completions come first, then an event starts, then link and compute choose.
"""

from __future__ import annotations

from collections.abc import Callable

from crisp.errors import InvariantError
from crisp.policy import anticipation as crisp_anticipation
from crisp.policy import cache as crisp_cache
from crisp.policy import eviction as crisp_eviction
from crisp.policy import order as crisp_order
from crisp.policy import retention as crisp_retention
from crisp.scheduler import residency as crisp_residency
from crisp.sim import compiling
from crisp.sim.compiling import BARE, digest, inlined, kept
from crisp.sim.fast import (
    custom,
    orders,
    residency,
    retention,
    scheduler,
    state,
)
from crisp.sim.fast import (
    event_start as starting,
)
from crisp.sim.fast import (
    prefetch_queue as lookahead,
)
from crisp.sim.fast.event_start import access, choose, look_ahead
from crisp.sim.fast.orders import best_order, rank
from crisp.sim.fast.retention import retain
from crisp.sim.fast.scheduler import computed, loaded, next_compute, next_load, queue
from crisp.sim.fast.state import (
    AHEAD_ROW,
    ALONE,
    BLOCKS,
    BUSY,
    BY_BLOCK,
    BYTES_LOADED,
    COMPUTE_HIDDEN,
    COMPUTE_NS,
    ENDED,
    KIND,
    LAYER_HIDDEN,
    LAYER_NS,
    LEFT,
    LINK_NS,
    LOAD_BLOCKS,
    LOAD_SLOT,
    NEVER,
    ORDER_BOUND,
    PLACE,
    PREFETCH,
    ROW,
    ROWS,
    SINCE,
    SIZE,
    STARTED,
    STATES,
    TIME,
    UNTIL,
    Ints,
    Machine,
    StepBatch,
)

SOURCES = digest(
    (crisp_anticipation, crisp_cache, crisp_eviction, crisp_order, crisp_residency,
     crisp_retention, compiling, custom, lookahead, orders, residency, retention, scheduler,
     starting, state)
)  # fmt: skip


def _enclosing(sources: str) -> Callable[[Machine, StepBatch, Ints], None]:
    def run_batch(machine: Machine, batch: StepBatch, after: Ints) -> None:
        """Execute a batch."""
        sources  # noqa: B018  (enclosed: see `kept`)
        rules, load_ns, row_of_layer, now, entries, parts, lists, slots, jobs, custom, sizes = (
            machine
        )
        (
            kind_of_step, layer_ns, first_task, entry, width, seen, bare, taken,
            kind_of_task, piece_ns, least_ns, tokens, guess, first_routed, routed,
        ) = batch  # fmt: skip
        for step in range(after.shape[1]):
            for layer in range(len(row_of_layer)):
                ns, row = layer_ns[layer, kind_of_step[step]], row_of_layer[layer]
                if ns:
                    hidden = _work(rules, load_ns, now, entries, parts, lists, slots, ns, custom)
                    now[LAYER_HIDDEN] += hidden
                now[LAYER_NS] += ns
                now[ORDER_BOUND] += ns
                now[ALONE] += ns
                if row < 0:
                    continue
                event = step * rules[ROWS] + row
                first, following = first_task[event], first_task[event + 1]
                count = following - first
                if rules[STATES] > 1:
                    count = choose(
                        rules, now, entries, slots, entry, width, seen, bare, taken, first, count
                    )
                now[ROW], now[SIZE] = row, load_ns[row, -1]
                access(rules, now, entries, parts, slots, entry, width, row, first, count, custom)
                for slot in range(count):
                    slots[KIND, slot] = kind_of_task[slots[PLACE, slot]]
                retain(
                    rules, now, entries, parts, slots, sizes, first_routed, routed, event, row,
                    count,
                )  # fmt: skip
                if rules[PREFETCH] != NEVER:
                    look_ahead(
                        rules, now, entries, parts, lists, slots, entry, guess, row, count,
                        following, first_task[event + 2], tokens[step], tokens[step + 1],
                        first_routed, routed, event, custom,
                    )  # fmt: skip
                rank(rules, load_ns[row], now, slots, jobs, piece_ns, count, custom)
                best_order(rules, load_ns[row], now, slots, jobs, least_ns, count)
                queue(rules, now, slots, count)
                while now[LEFT]:
                    _piece(rules, load_ns, now, entries, parts, lists, slots, piece_ns, custom)
            in_flight = now[TIME] - now[SINCE] if now[BUSY] else 0
            after[0, step], after[1, step] = now[TIME], now[BYTES_LOADED]
            after[2, step], after[3, step] = now[COMPUTE_NS], now[LAYER_NS]
            after[4, step] = now[LINK_NS] + in_flight
            after[5, step] = now[COMPUTE_HIDDEN] + now[LAYER_HIDDEN]

    return kept(run_batch, **BARE)


@inlined
def _piece(
    rules: Ints, load_ns: Ints, now: Ints, entries: Ints, parts: Ints, lists: Ints, slots: Ints,
    piece_ns: Ints, custom: Ints | None
) -> None:  # fmt: skip
    """Compute the next piece of the event, as soon as there is one."""
    slot = next_compute(rules, now, slots)
    while slot < 0:
        _choose(rules, load_ns, now, entries, parts, lists, slots, custom)
        if now[BUSY] == 0:
            raise InvariantError("nothing can be loaded and nothing can be computed")
        _arrive(rules, now, slots)
        slot = next_compute(rules, now, slots)
    column = 0
    if rules[BY_BLOCK]:
        column = slots[ENDED, slot] * rules[BLOCKS] + slots[STARTED, slot] - 1
    ns = piece_ns[slots[KIND, slot], column]
    now[COMPUTE_HIDDEN] += _work(rules, load_ns, now, entries, parts, lists, slots, ns, custom)
    now[COMPUTE_NS] += ns
    computed(now, entries, parts, slots, slot)


@inlined
def _work(
    rules: Ints, load_ns: Ints, now: Ints, entries: Ints, parts: Ints, lists: Ints, slots: Ints,
    ns: int, custom: Ints | None
) -> int:  # fmt: skip
    """Compute for ``ns`` from now on; return how much of that the link is busy, too."""
    begin, end, hidden = now[TIME], now[TIME] + ns, 0
    while now[TIME] < end:  # what arrives at the end has arrived; the link chooses later
        _choose(rules, load_ns, now, entries, parts, lists, slots, custom)
        if now[BUSY] == 0:
            break
        hidden += min(end, now[UNTIL]) - max(begin, now[SINCE])
        if now[UNTIL] > end:
            break
        _arrive(rules, now, slots)
    now[TIME] = end
    return hidden


@inlined
def _choose(
    rules: Ints,
    load_ns: Ints,
    now: Ints,
    entries: Ints,
    parts: Ints,
    lists: Ints,
    slots: Ints,
    custom: Ints | None,
) -> None:
    """Begin what may be loaded now, if the link is free."""
    if now[BUSY] == 0 and next_load(rules, now, entries, parts, lists, slots, custom):
        now[BUSY], now[SINCE] = 1, now[TIME]
        row = now[AHEAD_ROW] if now[LOAD_SLOT] < 0 else now[ROW]
        now[UNTIL] = now[TIME] + load_ns[row, now[LOAD_BLOCKS]]
        now[BYTES_LOADED] += now[LOAD_BLOCKS] * load_ns[row, -1]


@inlined
def _arrive(rules: Ints, now: Ints, slots: Ints) -> None:
    """Advance to the time at which the link's load has arrived."""
    now[TIME], now[BUSY] = now[UNTIL], 0
    now[LINK_NS] += now[UNTIL] - now[SINCE]
    loaded(rules, now, slots)


run_batch = _enclosing(SOURCES)
"""run_batch(machine, batch, after) executes a batch.

after [6, steps]: when each step ends; the bytes issued until then; how long until then experts and
layers were computed, the link was busy, and both streams were; in ns from the start of the run."""
