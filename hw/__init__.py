"""Real hardware: expert stores, devices, the executor that drives them, meters and calibration.

The names below are the public interface; most are imported when they are first used.
"""

from importlib import import_module
from typing import TYPE_CHECKING, Any

from crisp.hw.devices.options import DeviceOptions
from crisp.hw.replay import replay
from crisp.hw.store.reader import Store

if TYPE_CHECKING:
    from crisp.hw.model.generate import generate
    from crisp.hw.model.resident import open_resident
    from crisp.hw.store.packing import pack
    from crisp.hw.telemetry.metered_command import find_meter, measure_command

_MODULES = {
    "find_meter": "crisp.hw.telemetry.metered_command",
    "generate": "crisp.hw.model.generate",
    "measure_command": "crisp.hw.telemetry.metered_command",
    "open_resident": "crisp.hw.model.resident",
    "pack": "crisp.hw.store.packing",
}
__all__ = [
    "DeviceOptions",
    "Store",
    "find_meter",
    "generate",
    "measure_command",
    "open_resident",
    "pack",
    "replay",
]


def __getattr__(name: str) -> Any:
    if name not in _MODULES:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    return getattr(import_module(_MODULES[name]), name)
