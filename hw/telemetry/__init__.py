"""What this machine's own meters say of its energy."""

from __future__ import annotations

from crisp.energy import Meter
from hw.telemetry.rapl import Rapl


def meters() -> tuple[Meter, ...]:
    """All that can be asked for, readable here or not; the first is the processor's."""
    return (Rapl(),)
