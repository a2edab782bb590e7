"""The rules of a run by number, or one line about what the fast engine cannot do exactly."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

import numpy as np

from crisp.errors import CrispError
from crisp.model.spec import ModelSpec
from crisp.policy import Policy, eviction, order, prefetch
from crisp.scheduler.residency import StartingState
from crisp.sim.fast import state as at
from crisp.sim.fast.state import Ints, Machine, machine

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
    None: at.FIRST_SEEN,
    order.by_random_key: at.RANDOM_KEY,
    order.widest_first: at.WIDEST,
    order.narrowest_first: at.NARROWEST,
    order.resident_first: at.RESIDENT_FIRST,
    order.johnson: at.JOHNSON,
}
_PREFETCHERS = {
    (None, ""): at.NEVER,
    (prefetch.last_used, ""): at.PREVIOUS,
    (prefetch.predicted_experts, prefetch.ROUTER): at.GUESS,
    (prefetch.predicted_experts, prefetch.PROFILE): at.GUESS,
    (prefetch.predicted_experts, prefetch.FUTURE): at.PERFECT,
}
LONGEST = 1 << 62  # ns: sums stay within 64 bits


def machine_of(
    spec: ModelSpec,
    policy: Policy,
    start: StartingState,
    by_block: bool,
    load: Callable[[int], int],
    states: int,
) -> Machine:
    """Return a machine on which nothing has happened; the arguments are `EventScheduler`'s.

    load: ns of a request of so many bytes. states: of an expert, see
    `crisp.sim.fast.state.StepBatch`. Raises CrispError for a rule that is not among those above.
    """
    row_of_layer = np.full(spec.n_layers, -1, np.int64)
    row_of_layer[list(spec.moe_layers)] = np.arange(len(spec.moe_layers))
    for what, part in (("order", policy.order), ("cache", policy.cache)):
        if part.seed >= 1 << 62:
            raise refused(f"{what} random with a seed as large as {part.seed}")
    cache = policy.cache.rule
    if cache.oracle:
        raise refused(f"cache {policy.cache.name}")
    rules = np.zeros(at.N_RULES, np.int64)
    for place, value in {
        at.BY_BLOCK: by_block,
        at.SEQUENTIAL: policy.order.sequential,
        at.WHOLE: policy.cache.unit == "expert",
        at.RECENCY: _ARRAYS[cache.last],
        at.FREQUENCY: _ARRAYS[cache.count],
        at.DRAWN: cache.drawn,
        at.CACHE_SEED: policy.cache.seed,
        at.BY_PASS: cache.by_pass,
        at.SUFFIXES: cache.suffixes,
        at.TIMED: policy.order.rule.timed,
        at.SALIENT: policy.prefetch.rule.salient,
        at.ORDER_DRAWN: policy.order.rule.drawn,
        at.SEED: policy.order.seed,
        at.EXPERTS: spec.n_experts,
        at.BLOCKS: spec.n_blocks,
        at.ROWS: len(spec.moe_layers),
        at.STATES: states,
        at.PER_LAYER: len(start.capacity) == len(spec.moe_layers),
        at.PART_SIZE: spec.n_routed // len(start.capacity),
    }.items():
        rules[place] = value
    custom = _set_rules(rules, policy)
    if cache.retains:
        rules[at.VICTIM] = at.WORTH_LEAST
    load_ns = np.zeros((len(spec.moe_layers), spec.n_blocks + 2), np.int64)
    for row, size in enumerate(spec.row_block_bytes):
        for blocks in range(1, spec.n_blocks + 1):
            load_ns[row, blocks] = positive(load(blocks * size), "a load")
        load_ns[row, -1] = size
    return machine(rules, load_ns, row_of_layer, start, custom)


def positive(ns: int, what: str) -> int:
    """Return a cost as it is; one of 0 ns, which would end as it is chosen, is refused."""
    if ns < 1:
        raise refused(f"{what} that takes {ns} ns")
    return within(ns)


def within(ns: int) -> int:
    """Return a time, or the sum of all in a run, as it is; one too long is refused."""
    if ns >= LONGEST:
        raise refused("times that 64 bits cannot count")
    return ns


def refused(what: str) -> CrispError:
    """Return the error for what only the other engine can do."""
    return CrispError(f"engine fast: does not know {what}; use --engine simpy")


def _set_rules(rules: Ints, policy: Policy) -> Ints | None:
    """Note the functions that decide: built-in ones by number, a plugin's by their address.

    Returns the addresses, or None if there are none. Raises CrispError for a function that numba
    cannot compile.
    """
    from crisp.sim.fast import custom  # imports numba, for which others need not wait

    cache, cache_name = policy.cache.rule, f"cache {policy.cache.name}"
    fetch = policy.prefetch.rule
    # (function, known ones by number, place of the number, place of an address, what compiles it)
    groups: tuple[tuple[Any, Mapping[Any, int], int, int, Callable[[Any], Any]], ...] = (
        (cache.victim, _VICTIMS, at.VICTIM, at.VICTIM_AT,
         lambda rule: custom.victim_address(rule, cache_name)),
        (cache.used, _ON_USE, at.ON_USE, at.USE_AT,
         lambda rule: custom.use_address(rule, cache_name)),
        (cache.admitted, _ON_ENTRY, at.ON_ENTRY, at.ENTRY_AT,
         lambda rule: custom.entry_address(rule, cache_name)),
        (policy.order.rule.key, _ORDERS, at.ORDER, at.KEY_AT,
         lambda rule: custom.key_address(rule, f"order {policy.order.name}")),
        ((fetch.predict, fetch.source), _PREFETCHERS, at.PREFETCH, at.PREFETCH_AT,
         lambda rule: custom.prefetch_address(*rule, f"prefetch {policy.prefetch.name}")),
    )  # fmt: skip
    addresses = np.zeros(at.N_CUSTOM, np.int64)
    for function, numbers, place, address_place, compile_rule in groups:
        if function in numbers:
            rules[place] = numbers[function]
        else:
            rules[place], addresses[address_place] = at.CUSTOM, compile_rule(function).address
    return addresses if addresses.any() else None
