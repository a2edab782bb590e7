"""Cache policies: what is admitted to the budget and what is evicted for it.

Rules are plain functions over the scheduler's arrays, indexed by entry (MoE layer x expert), and
written so that numba can compile them.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from fractions import Fraction

import numpy as np

from crisp.errors import CrispError
from crisp.model import ModelSpec
from crisp.profile import Profile
from crisp.units import exact, parse_bytes, show_bytes

Array = Sequence[int]
VictimRule = Callable[[Array, Array, Array, Array, int, int], int]


def lru_victim(resident: Array, held: Array, last: Array, count: Array, low: int, high: int) -> int:
    """The resident, unprotected entry in [low, high) used least recently; ties: the lowest."""
    best = -1
    for entry in range(low, high):
        if resident[entry] > 0 and held[entry] == 0 and (best < 0 or last[entry] < last[best]):
            best = entry
    return best


def lfu_victim(resident: Array, held: Array, last: Array, count: Array, low: int, high: int) -> int:
    """The one used in the fewest events since the start; ties: least recently, then the lowest."""
    best, least = -1, (0, 0)
    for entry in range(low, high):
        if resident[entry] > 0 and held[entry] == 0:
            use = count[entry], last[entry]
            if best < 0 or use < least:
                best, least = entry, use
    return best


def kept_blocks(missing: int, free: int, evictable: int, whole: bool) -> int:
    """How many of a load's missing blocks enter the budget; the rest is transient.

    ``whole`` (unit expert): all or none. Otherwise (unit block) the prefix that fits.
    """
    if missing <= free + evictable:
        return missing
    return 0 if whole else free + evictable


VICTIMS: dict[str, VictimRule | None] = {
    "none": None,
    "lru": lru_victim,
    "lfu": lfu_victim,
    "static": None,
}
SCOPES = ("layer", "global")
UNITS = ("expert", "block")


@dataclass(frozen=True)
class Cache:
    """A cache policy: its rule, the scope it chooses within, and the unit it moves."""

    name: str
    scope: str = "layer"
    unit: str = "expert"

    @property
    def victim(self) -> VictimRule | None:
        """Whom to evict; None where nothing is ever admitted."""
        return VICTIMS[self.name]


@dataclass(frozen=True)
class Budget:
    """Device memory for routed experts: an exact share of them, or bytes."""

    text: str
    share: Fraction | None
    n_bytes: int | None

    @classmethod
    def parse(cls, text: str) -> Budget:
        """``10%``, ``0.1``, ``4GB`` or ``512MiB``; CrispError if unreadable, 0, or above 100 %."""
        text = text.strip()
        what = f"budget '{text}'"
        if text[-1:].isalpha():
            budget = cls(text, None, parse_bytes(text, what))
        else:
            budget = cls(text, exact(text, what), None)
            if budget.share is not None and budget.share > 1:
                raise CrispError(f"{what}: above 100 %; write 10%, 0.1 or a size such as 4GB")
        if not (budget.share or budget.n_bytes or 0) > 0:
            raise CrispError(f"{what}: must be above 0")
        return budget

    def capacity(self, spec: ModelSpec, cache: Cache) -> list[int]:
        """Blocks each part of the cache may hold: one number a MoE layer, or one for all.

        Floored to whole units; scope ``layer`` gives the remainder to the first layers.
        """
        layers, n, blocks = len(spec.moe_layers), spec.n_experts, spec.n_blocks
        per_unit = blocks if cache.unit == "expert" else 1
        units = layers * n * blocks // per_unit
        if self.share is not None:
            units = int(self.share * units)
        else:
            held = (self.n_bytes or 0) // (per_unit * spec.block_bytes)
            if held > units:
                raise CrispError(
                    f"budget '{self.text}': more than all routed experts "
                    f"({show_bytes(spec.routed_bytes)}); write 100%"
                )
            units = held
        if cache.scope == "global":
            return [units * per_unit]
        each, more = divmod(units, layers)
        return [(each + (layer < more)) * per_unit for layer in range(layers)]


def static_residents(spec: ModelSpec, profile: Profile, cache: Cache, room: Array) -> list[int]:
    """Blocks of each entry that a static cache holds: the profile's most frequent experts.

    room: blocks per part, as `Budget.capacity` gives them. Full width, in falling order of count
    (ties: lowest layer, then id); at unit block the last one holds the prefix that still fits.
    """
    counts = profile.expert_counts[list(spec.moe_layers)]
    parts = counts if cache.scope == "layer" else counts.reshape(1, -1)
    residents: list[int] = []
    for part, free in zip(parts, room, strict=True):
        by_count = np.argsort(-part, kind="stable")
        held = np.zeros(len(part), np.int64)
        held[by_count] = np.clip(free - np.arange(len(part)) * spec.n_blocks, 0, spec.n_blocks)
        residents += held.tolist()
    return residents
