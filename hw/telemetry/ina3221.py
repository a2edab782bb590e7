"""INA3221: the sensors of a Jetson's supply rails, as Linux shows them under /sys/class/hwmon.

Each folder whose ``name`` is ina3221 has up to three rails: ``inN_label`` its name, ``inN_input``
mV, ``currN_input`` mA. They need no service and, on a Jetson, no root.
"""

from __future__ import annotations

import re
import time
from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from pathlib import Path

from crisp.hw.telemetry.jetson_rails import module_input_rails
from crisp.hw.telemetry.sampler import PowerWindow, SampledMeter, SampleWindow, UnreadableMeter

ROOT = Path("/sys/class/hwmon")
INTERVAL = 0.05  # seconds between samples; a rail takes a millisecond or two over its bus

_LABEL = re.compile(r"in([123])_label")  # in7 is a sum of shunt voltages, not a rail
_ABSENT = "Jetsons have them, from JetPack 5 on under /sys/class/hwmon; other machines do not"
_LOCKED = "run as root, or let your user read it: sudo chmod a+r FILE, until the next boot"


@dataclass(frozen=True)
class Rail:
    """One supply rail, and the files of its voltage and current."""

    name: str
    millivolt: Path
    milliampere: Path

    def watts(self) -> float:
        """Return the power through it now in W; `UnreadableMeter` if it cannot be read."""
        return _number(self.millivolt) * _number(self.milliampere) / 1e6


class Ina3221(SampledMeter):
    """The meter of a Jetson's sensors; the rails that make up the whole are summed."""

    name = "INA3221"

    def __init__(
        self,
        root: Path = ROOT,
        interval: float = INTERVAL,
        clock: Callable[[], int] = time.monotonic_ns,
    ) -> None:
        """root: the folder of all sensors; interval: seconds; clock: ns."""
        super().__init__(interval, clock)
        self._root = root

    def open(self) -> SampleWindow:
        """Open a window on the rails that make up the whole, each of which can be read now."""
        rails = find_rails(self._root)
        if not rails:
            raise UnreadableMeter(f"{self._root}: has no INA3221 sensor with a named rail", _ABSENT)
        input_rails = [rails[name] for name in module_input_rails(rails)]
        watts = partial(_sum, input_rails)
        watts()
        source = f"{self.name} {' + '.join(rail.name for rail in input_rails)}"
        return PowerWindow(source, "voltage times current", watts, self)


def find_rails(root: Path) -> dict[str, Rail]:
    """Return all rails of all sensors by name; those without a label are left out."""
    rails = {}
    for folder in sorted(root.iterdir()) if root.is_dir() else ():
        if _text(folder / "name") != "ina3221":
            continue
        for label in sorted(folder.iterdir()):
            match = _LABEL.fullmatch(label.name)
            name = _text(label) if match else None
            if match and name and name != "NC":  # not connected
                rails[name] = Rail(
                    name, folder / f"in{match[1]}_input", folder / f"curr{match[1]}_input"
                )
    return rails


def _sum(rails: list[Rail]) -> float:
    return sum(rail.watts() for rail in rails)


def _text(path: Path) -> str | None:
    """Return a file's text; None if it cannot be read."""
    try:
        return path.read_text("utf-8").strip()
    except (OSError, ValueError):
        return None


def _number(path: Path) -> int:
    """Return the number in a file; `UnreadableMeter` if there is none."""
    try:
        return int(path.read_text("ascii"))
    except PermissionError as error:
        raise UnreadableMeter(
            f"{path}: permission denied", _LOCKED.replace("FILE", str(path))
        ) from error
    except OSError as error:
        raise UnreadableMeter(f"{path}: {error.strerror or error}") from error
    except ValueError as error:
        raise UnreadableMeter(f"{path}: is no number ({error})") from error
