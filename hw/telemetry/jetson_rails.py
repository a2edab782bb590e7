"""Which of a Jetson's supply rails add up to what it draws, since some contain others."""

from __future__ import annotations

from collections.abc import Collection

from crisp.hw.telemetry.sampler import UnreadableMeter

# NVIDIA's Jetson Linux Developer Guide, "Software-Based Power Consumption Modeling". The first set
# of which a board has all rails holds.
TOTALS = (
    ("VDD_IN",),  # Orin Nano, Orin NX, Xavier NX: the module's input, which contains the others
    # AGX Orin. VDDQ_VDD2_1V8AO, its memory, is fed from VIN_SYS_5V0 and in its figure already.
    ("VDD_GPU_SOC", "VDD_CPU_CV", "VIN_SYS_5V0"),
    ("GPU", "CPU", "SOC", "CV", "VDDRQ", "SYS5V"),  # AGX Xavier
)


def module_input_rails(rails: Collection[str]) -> tuple[str, ...]:
    """Return those of the named rails whose sum is what the module draws.

    Raises `UnreadableMeter` for rails of an unknown board.
    """
    for total in TOTALS:
        if all(rail in rails for rail in total):
            return total
    names = ", ".join(sorted(rails)) or "none with a name"
    raise UnreadableMeter(
        f"which rails make up the whole is not known for this board's: {names}",
        "known are " + "; ".join(" + ".join(total) for total in TOTALS),
    )
