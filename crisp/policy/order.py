"""Orders: which task of an event loads next, and which ready one computes next (paper, 3.4.2).

An order gives each task a key, smallest first, ties by first appearance. One ranking serves both
streams, so a schedule is fixed once the event's tasks and their residency are known.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from dataclasses import dataclass
from fractions import Fraction

import numpy as np

from crisp.errors import CrispError
from crisp.extensions import find_name

Key = tuple[int, int]
_PRIME, _FACTOR = 2**31 - 1, 48271  # Lehmer's generator: products stay within 64 bits


def widest_first(width: int, load_ns: int, compute_ns: int, random_key: int) -> Key:
    """Rank by requested width, the widest first: Algorithm 1 of the paper."""
    return -width, 0


def narrowest_first(width: int, load_ns: int, compute_ns: int, random_key: int) -> Key:
    """Rank by requested width, the narrowest first: shortest processing time (Smith, 1956)."""
    return width, 0


def resident_first(width: int, missing: int, compute_ns: int, random_key: int) -> Key:
    """Rank what is all here before what must be loaded, as HybriMoE (Zhong et al., 2025) does.

    There the experts with most tokens come first among equals; here those that appear first.
    """
    return int(missing > 0), 0


def johnson(width: int, load_ns: int, compute_ns: int, random_key: int) -> Key:
    """Rank by Johnson's rule for the two-machine flow shop (1954): the event's least makespan.

    Tasks whose load is shorter than their computation come first, by load; then the others, the
    longest computation first.
    """
    if load_ns < compute_ns:
        return 0, load_ns
    return 1, -compute_ns


def by_random_key(width: int, load_ns: int, compute_ns: int, random_key: int) -> Key:
    """Rank by a number drawn for the task."""
    return random_key, 0


def hash_key(seed: int, event: int, place: int) -> int:
    """Return a number in [1, 2**31 - 2] drawn from (seed, event, place), the same everywhere."""
    x = 1 + seed % (_PRIME - 1)
    for part in (event, place, 0):
        x = (x * _FACTOR + part) % _PRIME
        x = x * _FACTOR % _PRIME
        x = (x ^ (x >> 15)) * _FACTOR % _PRIME
    return x


@dataclass(frozen=True)
class OrderRule:
    """An order: the key function that ranks an event's tasks, and which arguments it needs.

    The key function gets (width, load ns, compute ns, random key), all whole numbers. Without
    ``timed``, the missing blocks stand in the place of the load, and 0 in that of the computation.
    """

    key: Callable[[int, int, int, int], Key] | None  # None: first appearance decides
    timed: bool = False
    drawn: bool = False  # else the random key is 0
    overlaps: bool = True  # False: each task is loaded and computed before the next one is loaded


ORDERS: dict[str, OrderRule] = {
    "sequential": OrderRule(None, overlaps=False),
    "fifo": OrderRule(None),
    "random": OrderRule(by_random_key, drawn=True),
    "widest": OrderRule(widest_first),
    "narrowest": OrderRule(narrowest_first),
    "resident-first": OrderRule(resident_first),
    "johnson": OrderRule(johnson, timed=True),
}


@dataclass(frozen=True)
class Order:
    """An order by name."""

    name: str
    seed: int = 0  # of an order that draws

    @property
    def rule(self) -> OrderRule:
        """How tasks are ranked."""
        return find_name(ORDERS, self.name, "order")

    @property
    def sequential(self) -> bool:
        """Whether each task is loaded and computed before the next one is loaded."""
        return not self.rule.overlaps


def check_keys(name: str, keys: Iterable[object]) -> None:
    """Raise CrispError unless every key of a plugin's order is a pair of whole numbers."""
    for key in keys:
        if not (
            isinstance(key, tuple)
            and len(key) == 2
            and all(isinstance(part, (int, np.integer)) for part in key)
        ):
            raise CrispError(f"order {name}: returned {key!r}, expected a pair of whole numbers")


@dataclass(frozen=True)
class Drawn:
    """The parameter of a rule that draws, as in ``random(7)``; None: the run's seed."""

    seed: Fraction | None = None

    def __post_init__(self) -> None:
        if self.seed is not None and (self.seed.denominator != 1 or self.seed < 0):
            raise CrispError(f"the seed {self.seed} is not a whole number")
