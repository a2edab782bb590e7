"""Policies: widths, orders, caches, prefetchers, and the named combinations of them."""

from crisp.policy.cache import Budget, Cache, expert_tiers, static_residents
from crisp.policy.order import Order
from crisp.policy.policy import NAMED, Policy, named, policy_name
from crisp.policy.prefetch import Prefetch
from crisp.policy.widths.base import BoundWidths, WidthPolicy

__all__ = [
    "NAMED",
    "BoundWidths",
    "Budget",
    "Cache",
    "Order",
    "Policy",
    "Prefetch",
    "WidthPolicy",
    "expert_tiers",
    "named",
    "policy_name",
    "static_residents",
]
