"""What this machine's own meters say of its energy."""

from __future__ import annotations

from crisp.errors import CrispError
from crisp.hardware.energy import Meter
from crisp.hw.telemetry.ina3221 import Ina3221
from crisp.hw.telemetry.jtop import Jtop
from crisp.hw.telemetry.nvml import Nvml, uuids
from crisp.hw.telemetry.rapl import Rapl
from crisp.hw.telemetry.sampler import Unreadable


def meters() -> tuple[Meter, ...]:
    """All that can be asked for, readable here or not; each GPU has its own."""
    try:
        gpus = [Nvml(uuid) for uuid in uuids()]
    except Unreadable:
        gpus = []
    return (Rapl(), *(gpus or [Nvml()]), Ina3221(), Jtop())


def chosen(device: str) -> Meter:
    """The meter of a run on ``cpu``, ``cuda`` or ``unified``, readable here or not: of what does
    the work, and on a Jetson of the whole module, by its sensors themselves if they can be read.
    """
    if device == "cuda":
        return Nvml(_own_gpu())
    if device == "unified":
        sensors, service = Ina3221(), Jtop()
        if sensors.probe().reason is not None and service.probe().reason is None:
            return service
        return sensors
    return Rapl()


def _own_gpu() -> str | None:
    """Of several GPUs the UUID of the one that torch uses; None where there is no choice."""
    from crisp.extras import import_extra  # slow, and seldom needed

    try:
        if len(uuids()) < 2:
            return None
        cuda = import_extra("torch").cuda
    except (Unreadable, CrispError):
        return None
    if not cuda.is_available():
        return None
    return f"GPU-{cuda.get_device_properties(cuda.current_device()).uuid}"
