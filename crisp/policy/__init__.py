"""Policies: widths, orders, caches, prefetchers, and the named combinations of them."""

from crisp.policy.cache import Budget, Cache, static_residents, warmth
from crisp.policy.order import Order
from crisp.policy.policy import NAMED, Policy, named
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
    "named",
    "static_residents",
    "warmth",
]
