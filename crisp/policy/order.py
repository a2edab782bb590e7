"""Orders: which task of an event loads next, and which ready one computes next (paper, 3.4.2).

An order gives each task a key, smallest first, ties by first appearance. One ranking serves both
streams, so a schedule is fixed once the event's tasks and their residency are known.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from fractions import Fraction

from crisp.errors import CrispError

Key = tuple[int, int]
_PRIME, _FACTOR = 2**31 - 1, 48271  # Lehmer's generator: products stay within 64 bits


def widest_first(width: int, load_ns: int, compute_ns: int, lot: int) -> Key:
    """By requested width, the widest first: Algorithm 1 of the paper."""
    return -width, 0


def narrowest_first(width: int, load_ns: int, compute_ns: int, lot: int) -> Key:
    """By requested width, the narrowest first: the shortest processing time first (Smith, 1956)."""
    return width, 0


def resident_first(width: int, missing: int, compute_ns: int, lot: int) -> Key:
    """What is all here before what has to be loaded, as on HybriMoE's GPU (Zhong et al., 2025).

    There the experts with most tokens come first among equals; here those that appear first.
    """
    return int(missing > 0), 0


def johnson(width: int, load_ns: int, compute_ns: int, lot: int) -> Key:
    """Johnson's rule for the two-machine flow shop (1954): the shortest makespan of one event.

    Tasks whose load is shorter than their computation come first, by load; then the others, the
    longest computation first.
    """
    if load_ns < compute_ns:
        return 0, load_ns
    return 1, -compute_ns


def by_lot(width: int, load_ns: int, compute_ns: int, lot: int) -> Key:
    """By a number drawn for the task."""
    return lot, 0


def draw_lot(seed: int, event: int, place: int) -> int:
    """A number in [1, 2**31 - 2] from (seed, event, place): the same on every machine."""
    x = 1 + seed % (_PRIME - 1)
    for part in (event, place, 0):
        x = (x * _FACTOR + part) % _PRIME
        x = x * _FACTOR % _PRIME
        x = (x ^ (x >> 15)) * _FACTOR % _PRIME
    return x


@dataclass(frozen=True)
class Rule:
    """A key function of (width, load ns, compute ns, lot), and which of these it needs.

    Without times it is told the missing blocks in place of the load, and 0 for the computation.
    """

    key: Callable[[int, int, int, int], Key]
    timed: bool = False
    drawn: bool = False  # else the lot is 0


@dataclass(frozen=True)
class Order:
    """An order by name. ``sequential`` ranks like fifo but lets nothing overlap."""

    name: str
    seed: int = 0  # of random

    @property
    def sequential(self) -> bool:
        """Whether each task is loaded and computed before the next one is loaded."""
        return self.name == "sequential"

    @property
    def rule(self) -> Rule | None:
        """How tasks are ranked; None where first appearance decides."""
        return RULES[self.name]


RULES: dict[str, Rule | None] = {
    "sequential": None,
    "fifo": None,
    "random": Rule(by_lot, drawn=True),
    "widest": Rule(widest_first),
    "narrowest": Rule(narrowest_first),
    "resident-first": Rule(resident_first),
    "johnson": Rule(johnson, timed=True),
}


@dataclass(frozen=True)
class Drawn:
    """How ``random(seed)`` is spelled; without a seed it takes the run's."""

    seed: Fraction | None = None

    def __post_init__(self) -> None:
        if self.seed is not None and (self.seed.denominator != 1 or self.seed < 0):
            raise CrispError(f"random: the seed {self.seed} is not a whole number")
