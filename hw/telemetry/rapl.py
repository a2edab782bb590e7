"""RAPL: the energy counters of x86 processors, as Linux shows them under /sys/class/powercap.

Summed are the packages (zones ``intel-rapl:N`` called package...) and, where a package shows it,
its memory (``intel-rapl:N:M`` called dram), which is not in the package's figure. Left out is what
would count twice: core and uncore, which are parts of a package; psys, the whole platform, which
contains the packages; ``intel-rapl-mmio:N``, another way to the same counters. AMD's processors
use the same names.
"""

from __future__ import annotations

import re
import time
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

from crisp.hw.telemetry.counting import Counter, CounterWindow
from crisp.hw.telemetry.sampler import Sampled, SampleWindow, Unreadable

ROOT = Path("/sys/class/powercap")
INTERVAL = 0.5  # seconds between samples
UPDATE_NS = 1_000_000  # counters are renewed about so often
MOST_WATTS = 1000  # no package draws more: how soon a counter may begin anew, how fast it rises

_ZONE = re.compile(r"intel-rapl:\d+(:\d+)?")
_NEEDS_ROOT = (
    "to let everybody read it, until the next boot: "
    "sudo chmod a+r /sys/class/powercap/intel-rapl:*/energy_uj"
)
_ABSENT = (
    "on an x86 machine of one's own: sudo modprobe intel_rapl_msr; virtual machines and most "
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
        """The counter in µJ; `Unreadable` if there is none any more."""
        try:
            return int((self.path / "energy_uj").read_text("ascii"))
        except (OSError, ValueError) as error:
            raise _unreadable(error) from error


class Rapl(Sampled):
    """See `crisp.hardware.energy.Meter`. A thread reads often enough to see every counter begin
    anew.
    """

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
        """All counters that are summed, each of which can be read now."""
        try:
            zones = find_zones(self._root)
        except (OSError, ValueError) as error:
            raise _unreadable(error) from error
        if not zones:
            raise Unreadable(f"{self._root}: has no RAPL counters of a package", _ABSENT)
        for zone in zones:
            zone.read()
        counters = [
            # a package always draws; some memory has a counter that never moves
            Counter(zone.name, zone.read, (zone.span,), 1_000_000, MOST_WATTS, zone.package)
            for zone in zones
        ]
        return CounterWindow(_source, "energy counters", counters, UPDATE_NS, self)


def find_zones(root: Path) -> list[Zone]:
    """The counters that are summed, each of a part of the machine that no other counts.

    Raises OSError or ValueError for one that has no name or no end.
    """
    names = {
        path.name: (path / "name").read_text("ascii").strip()
        for path in (sorted(root.iterdir()) if root.is_dir() else ())
        if _ZONE.fullmatch(path.name)
    }
    packages = {zone for zone, name in names.items() if name.startswith("package")}
    chosen = []
    for zone, name in names.items():
        parent = zone.rpartition(":")[0]
        own = names[parent] + " " if parent in packages else ""
        if zone in packages or (own and name == "dram"):
            span = int((root / zone / "max_energy_range_uj").read_text("ascii"))
            chosen.append(Zone(own + name, root / zone, span, zone in packages))
    return chosen


def _source(names: list[str]) -> str:
    return f"RAPL {' + '.join(names)}"


def _unreadable(error: OSError | ValueError) -> Unreadable:
    if isinstance(error, PermissionError):
        return Unreadable(f"{error.filename}: permission denied", _NEEDS_ROOT)
    if isinstance(error, OSError):
        return Unreadable(f"{error.filename}: {error.strerror or error}", _ABSENT)
    return Unreadable(f"a counter is no number ({error})", _ABSENT)
