"""Prefetching for the policy saliency, simulated: what it brings, and what of that is used."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from typing import Any

from benchmarks.policies.hardware import SIZES
from crisp.policy import Policy, Prefetch
from crisp.profile import Profile
from crisp.run.setup import load_setup
from crisp.sim.experiment import AUTO, run_case
from crisp.sim.hardware import hardware_profile

NONE, BEST, BOUND = "none", "saliency(guess)", "saliency(perfect)"
PREFETCHERS = (
    NONE, "previous", "guess", "frequent",
    "saliency(previous)", BEST, "saliency(frequent)", BOUND,
)  # fmt: skip
MACHINES = ("rtx4090-pcie4", "paper-table1", "jetson-agx-orin-32gb")
BYTES = ("useful", "late", "wasted")
METRICS = (
    "ms_per_token_mean", "bytes_per_token", *(f"prefetch_{what}_bytes" for what in BYTES), "tokens",
)  # fmt: skip


def simulate(
    name: str, profile: Profile, policies: Sequence[tuple[str, Policy]]
) -> list[dict[str, Any]]:
    """Return what a token takes with each prefetcher.

    The routing is the small model's, the sizes are those of `SIZES`. policies: by budget.
    """
    setup, found = load_setup(f"{name}-docs", model=SIZES[name]), []
    for machine in MACHINES:
        for budget, policy in policies:
            for prefetch in PREFETCHERS:
                case = setup.case(replace(policy, prefetch=Prefetch(prefetch)), budget)
                run = run_case(replace(case, profile=profile), hardware_profile(machine), AUTO)
                found.append(
                    {"machine": machine, "budget": budget, "prefetch": prefetch}
                    | {metric: run.metrics[metric] or 0 for metric in METRICS}
                )
    return found
