"""What a dry run prints."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import TYPE_CHECKING

from crisp.units import format_bytes

if TYPE_CHECKING:
    from crisp.model.spec import ModelSpec
    from crisp.run.case import Case


def dry_run_summary(cases: Iterable[tuple[str, Case]]) -> str:
    """Say that everything fits together, and the slots that each (name, case) takes."""
    lines = ["dry run: all of it fits together; no device was opened, nothing run or written"]
    for name, case in cases:
        slots = _describe_slots(case.spec, case.capacity(), case.policy.prefetch.active)
        lines.append(f"{name}: {slots}")
    return "\n".join(lines)


def _describe_slots(spec: ModelSpec, capacity: Sequence[int], prefetches: bool) -> str:
    from crisp.hw.devices.slots import slots_needed

    slots = slots_needed(spec, capacity, prefetches)
    return (
        f"a pool of {slots:,} blocks, {format_bytes(slots * spec.block_bytes)}: "
        f"{format_bytes(sum(capacity) * spec.block_bytes)} of budget, the rest for staging"
    )
