"""The rules of a run by number, or one line about what the fast replay cannot do exactly."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np

from crisp.errors import CrispError
from crisp.hardware.profile import CostModel
from crisp.model.spec import ModelSpec
from crisp.policy import Policy, eviction
from crisp.sim.fast import state as at
from crisp.sim.fast.state import Machine, machine

_VICTIMS = {
    None: at.NOBODY,
    eviction.lru_victim: at.LRU,
    eviction.lfu_victim: at.LFU,
    eviction.lfru_victim: at.LFRU,
    eviction.suffix_lru_victim: at.SUFFIX_LRU,
    eviction.suffix_lfu_victim: at.SUFFIX_LFU,
}
_ON_USE = {
    None: at.NOTHING,
    eviction.count_use: at.COUNT_USE,
    eviction.promote: at.PROMOTE,
    eviction.use_current: at.USE_CURRENT,
}
_ON_ENTRY = {
    None: at.NOTHING,
    eviction.count_from_here: at.COUNT_FROM_HERE,
    eviction.stamp_entry: at.STAMP_ENTRY,
    eviction.on_probation: at.ON_PROBATION,
}
_ARRAYS = {"last": at.LAST, "count": at.COUNT, "mark": at.MARK, "stamp": at.STAMP}
_ORDERS = {
    "sequential": at.FIRST_SEEN,
    "fifo": at.FIRST_SEEN,
    "random": at.LOT,
    "widest": at.WIDEST,
    "narrowest": at.NARROWEST,
    "resident-first": at.RESIDENT_FIRST,
    "johnson": at.JOHNSON,
}
_PREFETCHERS = {
    "none": at.NEVER,
    "previous": at.PREVIOUS,
    "guess": at.GUESS,
    "frequent": at.GUESS,
    "perfect": at.PERFECT,
}
LONGEST = 1 << 62  # ns: sums stay within 64 bits


def machine_of(
    spec: ModelSpec,
    policy: Policy,
    capacity: Sequence[int],
    initial: Sequence[int] | None,
    warmth: Sequence[int] | None,
    by_block: bool,
    cost: CostModel,
    states: int,
) -> Machine:
    """A machine on which nothing has happened; the arguments are those of `EventScheduler`.

    states: of an expert, see `crisp.sim.fast.state.Batch`. Raises CrispError for a rule that is not
    among those above.
    """
    row_of_layer = np.full(spec.n_layers, -1, np.int64)
    row_of_layer[list(spec.moe_layers)] = np.arange(len(spec.moe_layers))
    for what, part in (("order", policy.order), ("cache", policy.cache)):
        if part.seed >= 1 << 62:
            raise refused(f"{what} random with a seed as large as {part.seed}")
    cache, named = policy.cache.rule, f"cache {policy.cache.name}"
    if cache.oracle:
        raise refused(named)
    rules = np.zeros(at.N_RULES, np.int64)
    for place, value in {
        at.BY_BLOCK: by_block,
        at.SEQUENTIAL: policy.order.sequential,
        at.WHOLE: policy.cache.unit == "expert",
        at.VICTIM: _number(named, cache.victim, _VICTIMS),
        at.ON_USE: _number(named, cache.used, _ON_USE),
        at.ON_ENTRY: _number(named, cache.admitted, _ON_ENTRY),
        at.RECENCY: _ARRAYS[cache.last],
        at.FREQUENCY: _ARRAYS[cache.count],
        at.DRAWN: cache.drawn,
        at.CACHE_SEED: policy.cache.seed,
        at.BY_PASS: cache.by_pass,
        at.SUFFIXES: cache.suffixes,
        at.ORDER: _number(f"order {policy.order.name}", policy.order.name, _ORDERS),
        at.SEED: policy.order.seed,
        at.PREFETCH: _number(
            f"prefetch {policy.prefetch.name}", policy.prefetch.name, _PREFETCHERS
        ),
        at.EXPERTS: spec.n_experts,
        at.BLOCKS: spec.n_blocks,
        at.ROWS: len(spec.moe_layers),
        at.STATES: states,
        at.PER_LAYER: len(capacity) == len(spec.moe_layers),
        at.PART_SIZE: spec.n_routed // len(capacity),
    }.items():
        rules[place] = value
    loads = [cost.load(blocks * spec.block_bytes) for blocks in range(1, spec.n_blocks + 1)]
    load_ns = np.array([0, *(positive(ns, "a load") for ns in loads)], np.int64)
    return machine(rules, load_ns, row_of_layer, capacity, initial, warmth)


def positive(ns: int, what: str) -> int:
    """A cost, as it is. One of 0 ns would end in the instant in which it is chosen."""
    if ns < 1:
        raise refused(f"{what} that takes {ns} ns")
    return within(ns)


def within(ns: int) -> int:
    """A time, as it is, or the sum of all in a run."""
    if ns >= LONGEST:
        raise refused("times that 64 bits cannot count")
    return ns


def refused(what: str) -> CrispError:
    """The error for what only the other engine can do."""
    return CrispError(f"engine fast: does not know {what}; use --engine simpy")


def _number(what: str, key: object, known: Mapping[Any, int]) -> int:
    if key not in known:
        raise refused(what)
    return known[key]
