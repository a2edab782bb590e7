"""RAPL: the energy counters of x86 processors, as Linux shows them under /sys/class/powercap.

The packages (zones ``intel-rapl:N`` called package...) are summed and, where a package shows it,
its memory (``intel-rapl:N:M`` called dram), which is not in the package's figure. Zones that would
count twice are left out: core and uncore, which are parts of a package; psys, the whole platform,
which contains the packages; ``intel-rapl-mmio:N``, another way to the same counters. AMD's
processors use the same names.
"""

from __future__ import annotations

import re
import time
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

from crisp.hw.telemetry.counters import CounterWindow, EnergyCounter
from crisp.hw.telemetry.sampler import SampledMeter, SampleWindow, UnreadableMeter

ROOT = Path("/sys/class/powercap")
INTERVAL = 0.5  # seconds between samples
UPDATE_NS = 1_000_000  # counters are renewed about so often
MOST_WATTS = 1000  # no package draws more, which bounds how fast a counter overflows and rises

_ZONE = re.compile(r"intel-rapl:\d+(:\d+)?")
_NEEDS_ROOT = (
    "to let everybody read it, until the next boot: "
    "sudo chmod a+r /sys/class/powercap/intel-rapl:*/energy_uj"
)
_ABSENT = (
    "on an x86 machine of your own: sudo modprobe intel_rapl_msr; virtual machines and most "
    "containers have none"
)


@dataclass(frozen=True)
class Zone:
    """One counter, which starts again at 0 after ``span`` µJ."""

    name: str
    path: Path
    span: int
    package: bool  # else its memory

    def read(self) -> int:
        """Return the counter in µJ; `UnreadableMeter` if it has gone."""
        try:
            return int((self.path / "energy_uj").read_text("ascii"))
        except (OSError, ValueError) as error:
            raise _unreadable(error) from error


class Rapl(SampledMeter):
    """The meter of the processor's energy counters; its thread sees every counter overflow."""

    name = "RAPL"

    def __init__(
        self,
        root: Path = ROOT,
        interval: float = INTERVAL,
        clock: Callable[[], int] = time.monotonic_ns,
    ) -> None:
        """root: the folder of the zones; interval: seconds; clock: ns."""
        super().__init__(interval, clock)
        self._root = root

    def open(self) -> SampleWindow:
        """Open a window on all counters that are summed, each of which can be read now."""
        try:
            zones = find_zones(self._root)
        except (OSError, ValueError) as error:
            raise _unreadable(error) from error
        if not zones:
            raise UnreadableMeter(f"{self._root}: has no RAPL counters of a package", _ABSENT)
        for zone in zones:
            zone.read()
        counters = [
            # a package always draws power; some memory has a counter that never moves
            EnergyCounter(zone.name, zone.read, (zone.span,), 1_000_000, MOST_WATTS, zone.package)
            for zone in zones
        ]
        return CounterWindow(_source, "energy counters", counters, UPDATE_NS, self)


def find_zones(root: Path) -> list[Zone]:
    """Return the counters that are summed, each of a part of the machine that no other counts.

    Raises OSError or ValueError for one without a name or a range.
    """
    names = {
        path.name: (path / "name").read_text("ascii").strip()
        for path in (sorted(root.iterdir()) if root.is_dir() else ())
        if _ZONE.fullmatch(path.name)
    }
    packages = {zone for zone, name in names.items() if name.startswith("package")}
    zones = []
    for zone, name in names.items():
        parent = zone.rpartition(":")[0]
        prefix = names[parent] + " " if parent in packages else ""
        if zone in packages or (prefix and name == "dram"):
            span = int((root / zone / "max_energy_range_uj").read_text("ascii"))
            zones.append(Zone(prefix + name, root / zone, span, zone in packages))
    return zones


def _source(names: list[str]) -> str:
    return f"RAPL {' + '.join(names)}"


def _unreadable(error: OSError | ValueError) -> UnreadableMeter:
    """Return an error of the file system as one of the meter, with a remedy."""
    if isinstance(error, PermissionError):
        return UnreadableMeter(f"{error.filename}: permission denied", _NEEDS_ROOT)
    if isinstance(error, OSError):
        return UnreadableMeter(f"{error.filename}: {error.strerror or error}", _ABSENT)
    return UnreadableMeter(f"a counter is no number ({error})", _ABSENT)
