"""RAPL: the energy counters of x86 processors, as Linux shows them under /sys/class/powercap.

Summed are the packages (zones ``intel-rapl:N`` called package...) and, where a package shows it,
its memory (``intel-rapl:N:M`` called dram), which is not in the package's figure. Left out is what
would count twice: core and uncore, which are parts of a package; psys, the whole platform, which
contains the packages; ``intel-rapl-mmio:N``, another way to the same counters. AMD's processors
use the same names.
"""

from __future__ import annotations

import re
import threading
import time
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path

from crisp.energy import Probe, Reading

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
        """The counter in µJ; OSError or ValueError if it cannot be read."""
        return int((self.path / "energy_uj").read_text("ascii"))


@dataclass
class _Window:
    """What has been read since a start; times in ns, energies in µJ."""

    zones: list[Zone] = field(default_factory=list)
    values: list[int] = field(default_factory=list)
    reason: str | None = None
    gained: list[int] = field(default_factory=list)
    samples: int = 0
    first: int = 0
    last: int = 0
    longest: int = 0  # from one sample to the next
    slowest: int = 0  # sample: how long it took to read all zones


class Rapl:
    """See `crisp.energy.Meter`. A thread reads often enough to see every counter begin anew."""

    name = "RAPL"

    def __init__(
        self,
        root: Path = ROOT,
        interval: float = INTERVAL,
        clock: Callable[[], int] = time.monotonic_ns,
    ) -> None:
        """root: the folder of the zones; interval: seconds; clock: ns."""
        self._root, self._interval, self._clock = root, interval, clock
        self._window = _Window()
        self._ended = threading.Event()
        self._thread: threading.Thread | None = None

    def probe(self) -> Probe:
        """Whether every counter can be read now."""
        try:
            zones = find_zones(self._root)
            for zone in zones:
                zone.read()
        except PermissionError as error:
            return Probe(self.name, f"{error.filename}: permission denied", _NEEDS_ROOT)
        except (OSError, ValueError) as error:
            return Probe(self.name, _told(error), _ABSENT)
        if not zones:
            return Probe(self.name, f"{self._root}: has no RAPL counters of a package", _ABSENT)
        return Probe(_source(zones))

    def start(self) -> None:
        """Begin a window."""
        self._window = _Window(reason=self.probe().reason)
        if self._window.reason is not None:
            return
        try:
            zones = find_zones(self._root)
        except (OSError, ValueError) as error:
            self._window.reason = _told(error)
            return
        self._window.zones, self._window.gained = zones, [0] * len(zones)
        self.sample()
        self._ended.clear()
        self._thread = threading.Thread(target=self._serve, name="crisp-rapl", daemon=True)
        self._thread.start()

    def stop(self) -> Reading:
        """End the window."""
        if self._thread is not None:
            self._ended.set()
            self._thread.join()
            self._thread = None
            self.sample()
        own = self._window
        counted = [zone for zone, gain in zip(own.zones, own.gained, strict=True) if gain]
        for zone in own.zones:  # a package always draws; some memory has a counter that never moves
            if own.reason is None and zone.package and zone not in counted:
                own.reason = f"{zone.name}: its counter did not move, so it counts nothing here"
        length = own.last - own.first
        joules = None if own.reason is not None else sum(own.gained) / 1e6
        blurred = 2 * (UPDATE_NS + own.slowest)  # at the ends
        zones = own.zones if joules is None else counted
        return Reading(
            joules=joules,
            reason=own.reason,
            source=_source(zones) if zones else self.name,
            method=f"energy counters, read every {self._interval:g} s, "
            f"at most {own.longest / 1e9:.3g} s apart",
            samples=own.samples,
            window_ns=length,
            uncertainty_j=joules * blurred / length if joules is not None and length else None,
        )

    def sample(self) -> None:
        """Read all counters once and add what they have gained."""
        own = self._window
        if own.reason is not None:
            return
        before = self._clock()
        try:
            values = [zone.read() for zone in own.zones]
        except (OSError, ValueError) as error:
            own.reason = f"a counter was lost during the run: {_told(error)}"
            return
        now = self._clock()
        own.slowest = max(own.slowest, now - before)
        if own.samples:
            own.longest = max(own.longest, now - own.last)
            most = MOST_WATTS * (now - own.last + own.slowest + UPDATE_NS) / 1e3
            for place, zone in enumerate(own.zones):
                old, new = own.values[place], values[place]
                gain = new - old if new >= old else new + zone.span - old
                if own.longest / 1e9 > zone.span / 1e6 / MOST_WATTS:
                    own.reason = (
                        f"{zone.name}: was not read for {own.longest / 1e9:.3g} s, in which it may "
                        "have begun anew more than once"
                    )
                    return
                if gain > most:
                    own.reason = (
                        f"{zone.name}: rose by {gain / 1e6:.3g} J in {(now - own.last) / 1e9:.3g} "
                        "s, more than a processor draws: its counter was set back"
                    )
                    return
                own.gained[place] += gain
        else:
            own.first = now
        own.values, own.last = values, now
        own.samples += 1

    def _serve(self) -> None:
        while not self._ended.wait(self._interval):
            self.sample()


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


def _source(zones: list[Zone]) -> str:
    return f"RAPL {' + '.join(zone.name for zone in zones)}"


def _told(error: OSError | ValueError) -> str:
    if isinstance(error, OSError):
        return f"{error.filename}: {error.strerror or error}"
    return f"a counter is no number ({error})"
