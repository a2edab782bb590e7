"""The rules of a run by number, or one line about what the fast replay cannot do exactly."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

import numpy as np

from crisp.errors import CrispError
from crisp.hardware import CostModel
from crisp.model import ModelSpec
from crisp.policy import Policy
from sim.fast import state as at
from sim.fast.state import Machine, machine

CACHES = {"none": at.NOBODY, "static": at.NOBODY, "lru": at.LRU, "lfu": at.LFU}
ORDERS = {
    "sequential": at.FIRST_SEEN,
    "fifo": at.FIRST_SEEN,
    "random": at.LOT,
    "widest": at.WIDEST,
    "johnson": at.JOHNSON,
}
PREFETCHERS = {"none": at.NEVER, "previous": at.PREVIOUS, "guess": at.GUESS}
LONGEST = 1 << 62  # ns: sums stay within 64 bits


def machine_of(
    spec: ModelSpec,
    policy: Policy,
    capacity: Sequence[int],
    initial: Sequence[int] | None,
    by_block: bool,
    cost: CostModel,
) -> Machine:
    """A machine on which nothing has happened; the arguments are those of `EventScheduler`.

    Raises CrispError for a rule that is not among those above.
    """
    row_of_layer = np.full(spec.n_layers, -1, np.int64)
    row_of_layer[list(spec.moe_layers)] = np.arange(len(spec.moe_layers))
    if policy.order.seed >= 1 << 62:
        raise refused(f"order random with a seed as large as {policy.order.seed}")
    rules = np.zeros(at.N_RULES, np.int64)
    for place, value in {
        at.BY_BLOCK: by_block,
        at.SEQUENTIAL: policy.order.sequential,
        at.WHOLE: policy.cache.unit == "expert",
        at.VICTIM: _number("cache", policy.cache.name, CACHES),
        at.ORDER: _number("order", policy.order.name, ORDERS),
        at.SEED: policy.order.seed,
        at.PREFETCH: _number("prefetch", policy.prefetch.name, PREFETCHERS),
        at.EXPERTS: spec.n_experts,
        at.BLOCKS: spec.n_blocks,
        at.ROWS: len(spec.moe_layers),
        at.PER_LAYER: len(capacity) == len(spec.moe_layers),
        at.PART_SIZE: spec.n_routed // len(capacity),
    }.items():
        rules[place] = value
    loads = [cost.load(blocks * spec.block_bytes) for blocks in range(1, spec.n_blocks + 1)]
    load_ns = np.array([0, *(positive(ns, "a load") for ns in loads)], np.int64)
    return machine(rules, load_ns, row_of_layer, capacity, initial or [0] * spec.n_routed)


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


def _number(what: str, name: str, known: Mapping[str, int]) -> int:
    if name not in known:
        raise refused(f"{what} {name}")
    return known[name]
