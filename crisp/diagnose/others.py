"""CRISP's own caches and widths on the routing of a log, without a clock.

They keep the execution contract (docs/contract.md): a cache has whole slots, as many in each layer
where its scope is the layer, and what finds no room is used and not kept. A slot holds an expert of
its layer; so sizes that differ by layer are counted exactly.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from fractions import Fraction

import numpy as np

from crisp.diagnose.reads import Reads
from crisp.errors import CrispError
from crisp.model.spec import ModelSpec
from crisp.policy import Budget, Policy, named
from crisp.policy.cache import CACHES
from crisp.profile import Profile
from crisp.scheduler.untimed import Replay
from crisp.scheduler.workload import Workload, plan
from crisp.trace import DECODE, RoutingTrace

_BLOCKS, _BLOCK, _MATRICES = 8, 16, 3  # of an expert whose model is not known

# What loses quality is said to; how much, a log cannot tell.
WIDTHS = ("uniform(.75)", "uniform(.5)", "tiered", "single", "skip(.25)", "skip(.5)")


def stand_in_spec(trace: RoutingTrace, expert_bytes: Sequence[int]) -> ModelSpec:
    """Return a geometry for a log whose model is not known.

    Experts have 8 blocks and their mean size; nothing else means anything. expert_bytes [layers].
    """
    moe = trace.moe_layers
    mean = sum(expert_bytes[layer] for layer in moe) // len(moe)
    bits = Fraction(8 * max(1, mean), _BLOCKS * _BLOCK * _MATRICES)  # of a neuron's row
    d_model = max(1, math.ceil(bits / 16))
    return ModelSpec(
        name=trace.header.model or "the log's model",
        n_layers=trace.layers,
        moe_layers=moe,
        n_experts=trace.header.n_experts,
        top_k=trace.k,
        d_model=d_model,
        d_ff=_BLOCKS * _BLOCK,
        dtype_bits=16,
        bits=bits / d_model,
        matrices=_MATRICES,
        biases=False,
        dense_params=(0,) * trace.layers,
        block=_BLOCK,
        config_hash=None,
    )


def cache_policies() -> list[Policy]:
    """Return the caches of whole experts that know no future, each per layer.

    Without those that differ from another one across layers only, draw lots, or hold nothing.
    """
    names = [
        name
        for name, rule in CACHES.items()
        if not (rule.oracle or rule.needs_blocks or rule.drawn or rule.by_pass) and name != "none"
    ]
    return [named("lru", cache=name) for name in names]


def width_policies(trace: RoutingTrace) -> list[Policy]:
    """Return policies that execute less of some experts, over an LRU by block in each layer."""
    widths = [w for w in WIDTHS if trace.weights is not None or not w.startswith("skip")]
    return [named("lru", width=width, unit="block") for width in widths]


def run_policy(
    trace: RoutingTrace,
    spec: ModelSpec,
    expert_bytes: Sequence[int],
    policy: Policy,
    budget: int,
    aligned: int = 0,
) -> Reads:
    """Run a policy on a whole log, from an empty cache; expert_bytes [layers].

    Tiers and resident sets are counted in the log's first prompt, or in the first tenth of its
    tokens where it begins with none. aligned: bytes that each load reads besides.
    """
    total = sum(expert_bytes[layer] for layer in spec.moe_layers) * spec.n_experts
    share = min(Fraction(1), Fraction(budget, total))
    profile = Profile.from_trace(_counted(trace))
    cache = Replay(spec, policy, Budget(f"{budget}", share, None), profile)
    widths = policy.width.bind(spec, profile, trace.header.ordered)
    workload = Workload(trace, widths, guess=False)
    scheduler, token, step = cache.scheduler, -1, None
    calls: list[tuple[int, int, int, int, int]] = []
    before = np.zeros(3, np.int64)
    for event in workload.events(plan(trace, np.arange(trace.rows), 1, trace.rows)):
        if event.experts is None:
            continue
        decoded = event.step.phase == DECODE
        token += decoded and event.step is not step
        step = event.step
        cache.run(event.layer, workload.tasks(event, cache.resident))
        now = np.array([scheduler.tasks, scheduler.hits, scheduler.blocks_loaded], np.int64)
        tasks, hits, blocks = (now - before).tolist()
        before = now
        loads = tasks - hits
        size = expert_bytes[event.layer] * blocks // spec.n_blocks + loads * aligned
        calls.append((tasks, hits, size, loads, token if decoded else -1))
    lookups, hit, n_bytes, requests, tokens = np.array(calls, np.int64).T
    return Reads(lookups, hit, n_bytes, requests, tokens.astype(np.int32))


def _counted(trace: RoutingTrace) -> RoutingTrace:
    """Return the rows that a profile is counted in; CrispError for a log of one token."""
    first = int(np.argmax(trace.phase == DECODE))  # 0 also where nothing was decoded
    if first:
        return trace.select(slice(0, first))
    if trace.rows < 2:
        raise CrispError("a log of one token: there is nothing to compare")
    return trace.select(slice(0, max(1, trace.rows // 10)))
