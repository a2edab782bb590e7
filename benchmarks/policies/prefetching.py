"""Prefetching for the policy saliency, simulated: what it brings, and what of that is used."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from typing import Any

from benchmarks.policies.hardware import SIZES
from crisp.policy import Policy, Prefetch
from crisp.profile import Profile
from crisp.run.setup import load_setup
from crisp.sim.experiment import run_case
from crisp.sim.hardware import hardware_profile

PREFETCHERS = ("none", "previous", "guess")
MACHINE = "rtx4090-pcie4"
METRICS = (
    "ms_per_token_mean", "bytes_per_token", "prefetch_useful_bytes", "prefetch_late_bytes",
    "prefetch_wasted_bytes", "tokens",
)  # fmt: skip


def simulate(
    name: str, profile: Profile, policies: Sequence[tuple[str, Policy]]
) -> list[dict[str, Any]]:
    """Return what a token takes with each prefetcher.

    The routing is the small model's, the sizes are those of `SIZES`. policies: by budget.
    """
    setup, machine = load_setup(f"{name}-docs", model=SIZES[name]), hardware_profile(MACHINE)
    found = []
    for budget, policy in policies:
        for prefetch in PREFETCHERS:
            case = setup.case(replace(policy, prefetch=Prefetch(prefetch)), budget)
            run = run_case(replace(case, profile=profile), machine, "fast")
            found.append(
                {"budget": budget, "prefetch": prefetch}
                | {metric: run.metrics[metric] or 0 for metric in METRICS}
            )
    return found
