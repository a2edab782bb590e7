"""Where a scheduler is put together: what a policy's parts need before the first event."""

from __future__ import annotations

from collections.abc import Sequence

from crisp.hardware.profile import CostModel
from crisp.model.spec import ModelSpec
from crisp.policy import Policy
from crisp.policy.anticipation import anticipation
from crisp.policy.cache import expert_tiers, static_residents
from crisp.policy.retention import block_sizes, expected_weights
from crisp.profile import Profile
from crisp.scheduler.oracle import Future
from crisp.scheduler.residency import StartingState, Worth
from crisp.scheduler.scheduler import EventScheduler


def starting_state(
    spec: ModelSpec, policy: Policy, profile: Profile, capacity: Sequence[int]
) -> StartingState:
    """Return what a policy begins with whose cache has so many blocks in each part."""
    cache, rule = policy.cache, policy.cache.rule
    return StartingState(
        capacity,
        static_residents(spec, profile, cache, capacity) if rule.preloaded else None,
        expert_tiers(spec, profile) if rule.tiered else None,
        Worth(expected_weights(spec, profile), block_sizes(spec, profile))
        if rule.retains
        else None,
        anticipation(spec, policy, profile) if policy.prefetch.rule.salient else None,
    )


def new_scheduler(
    spec: ModelSpec,
    policy: Policy,
    profile: Profile,
    capacity: Sequence[int],
    *,
    granularity: str,
    cost: CostModel | None,
    future: Future | None = None,
) -> EventScheduler:
    """Return a scheduler that has seen nothing yet; the arguments are those of `EventScheduler`.

    profile: what initial residency and tiers are counted from, where the cache asks for them.
    """
    start = starting_state(spec, policy, profile, capacity)
    return EventScheduler(spec, policy, start, granularity=granularity, cost=cost, future=future)
