"""The caps of a comparison, and what a contestant is told to hold in memory under each.

Caps are the least that CRISP runs in, its code being in memory as well, and that plus shares of the
experts' bytes. CRISP is told a budget, accelerate how many layers it keeps.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

from crisp.errors import CrispError

SHARES = (0.0, 0.25, 0.5, 0.75, 1.0)
SMALLEST = 1_000_000
"""Bytes of CRISP's smallest budget: less than a block in each layer, so that nothing is kept."""
STEP = 32_000_000
_STEPS = 16


def without_experts(result: Mapping[str, Any], held: int) -> int:
    """Return the bytes that a process took, memory and code, beside ``held`` bytes of experts."""
    return int(result["RssAnon"]) + int(result["code"]) - held


def least_cap(base: int, runs_in: Callable[[int], bool]) -> int:
    """Return the first of ``base``, ``base`` + STEP, ... that CRISP runs in, with SMALLEST."""
    for step in range(_STEPS):
        if runs_in(base + step * STEP):
            return base + step * STEP
    raise CrispError(f"CRISP does not run in {base + _STEPS * STEP:,} bytes")


def caps(least: int, expert_bytes: int) -> list[int]:
    """Return the caps in bytes: ``least``, and the shares of the experts' bytes above it."""
    return [least + round(share * expert_bytes) for share in SHARES]


def crisp_budget(cap: int, least: int) -> int:
    """Return the budget in bytes that CRISP is given under a cap: all that is above ``least``."""
    return SMALLEST + cap - least


def resident_layers(cap: int, base: int, layer_bytes: int) -> int:
    """Return how many layers accelerate is told to keep in memory under a cap.

    base: what its process takes with none in memory but the one that it has just loaded.
    """
    return max(0, (cap - base - STEP) // layer_bytes)
