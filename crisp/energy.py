"""Energy: joules that always say where they come from."""

from __future__ import annotations

from dataclasses import dataclass

from crisp.hardware import HardwareProfile


@dataclass(frozen=True)
class States:
    """How long each combination of busy streams lasted, in ns."""

    idle: int
    link: int
    compute: int
    both: int

    @property
    def total(self) -> int:
        """The whole run."""
        return self.idle + self.link + self.compute + self.both


@dataclass(frozen=True)
class Energy:
    """Joules of a run: gross, and above what the idle machine would have drawn in that time."""

    gross_j: float
    net_j: float
    method: str
    source: str


def modelled(hardware: HardwareProfile, states: States) -> Energy | str:
    """Energy from the profile's power in each state; the reason, if it has no power figures."""
    power = hardware.power
    if power is None:
        return hardware.no_power or f"{hardware.name} has no power figures"
    watts_ns = (
        power.idle * states.idle
        + power.link * states.link
        + power.compute * states.compute
        + power.both * states.both
    )
    idle = power.idle * states.total
    return Energy(
        gross_j=watts_ns / 1e9,
        net_j=(watts_ns - idle) / 1e9,
        method="modelled: power of each state of the streams times its duration",
        source=f"hardware profile {hardware.name}",
    )
