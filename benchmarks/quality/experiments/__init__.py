"""The experiments: everything that is measured of a model, by name, in the order of the page."""

from __future__ import annotations

from collections.abc import Callable

from benchmarks.quality.estimates import Figure
from benchmarks.quality.experiments import roles, shift, tiers, widths
from benchmarks.quality.study import Study

EXPERIMENTS: dict[str, Callable[[Study], Figure]] = {
    "policies": widths.policies,
    "orders": widths.neuron_orders,
    "strategies": widths.strategies,
    "masking": roles.masking,
    "classes": tiers.classes,
    "expert": roles.one_expert,
    "tiers": tiers.by_tier,
    "memory": tiers.same_memory,
    "shift": shift.transfers,
    "settling": shift.settling,
    "roles": roles.agreements,
}
