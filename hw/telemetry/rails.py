"""Which of a Jetson's supply rails add up to the whole, for some are parts of others."""

from __future__ import annotations

from collections.abc import Collection

from crisp.hw.telemetry.sampler import Unreadable

# NVIDIA's Jetson Linux Developer Guide, "Software-Based Power Consumption Modeling". The first of
# which all are there holds.
TOTALS = (
    ("VDD_IN",),  # Orin Nano, Orin NX, Xavier NX: the module's input, which contains the others
    # AGX Orin. VDDQ_VDD2_1V8AO, its memory, is fed from VIN_SYS_5V0 and in its figure already.
    ("VDD_GPU_SOC", "VDD_CPU_CV", "VIN_SYS_5V0"),
    ("GPU", "CPU", "SOC", "CV", "VDDRQ", "SYS5V"),  # AGX Xavier
)


def inputs(rails: Collection[str]) -> tuple[str, ...]:
    """Those of the named rails whose sum is what the module draws.

    Raises `Unreadable` for rails of a board that is not known.
    """
    for total in TOTALS:
        if all(rail in rails for rail in total):
            return total
    found = ", ".join(sorted(rails)) or "none with a name"
    raise Unreadable(
        f"which rails make up the whole is not known for this board's: {found}",
        "known are " + "; ".join(" + ".join(total) for total in TOTALS),
    )
