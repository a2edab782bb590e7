"""Energy meters of this machine: RAPL, NVML, INA3221 and jtop, and the one of each device."""

from __future__ import annotations

from crisp.errors import CrispError
from crisp.hardware.energy import Meter
from crisp.hw.telemetry.ina3221 import Ina3221
from crisp.hw.telemetry.jtop import Jtop
from crisp.hw.telemetry.nvml import Nvml, uuids
from crisp.hw.telemetry.rapl import Rapl
from crisp.hw.telemetry.sampler import UnreadableMeter


def meters() -> tuple[Meter, ...]:
    """Return all meters that can be asked for, readable here or not; one for each GPU."""
    try:
        gpus = [Nvml(uuid) for uuid in uuids()]
    except UnreadableMeter:
        gpus = []
    return (Rapl(), *(gpus or [Nvml()]), Ina3221(), Jtop())


def meter_for(device: str) -> Meter:
    """Return the meter of a run on ``cpu``, ``cuda`` or ``unified``, readable here or not.

    It is that of the processor or GPU that computes; on a Jetson that of the whole module, by its
    sensors if they can be read, else by jtop.
    """
    if device == "cuda":
        return Nvml(_torch_gpu())
    if device == "unified":
        sensors, service = Ina3221(), Jtop()
        if sensors.probe().reason is not None and service.probe().reason is None:
            return service
        return sensors
    return Rapl()


def _torch_gpu() -> str | None:
    """Return the UUID of the GPU that torch uses, of several; None where there is no choice."""
    from crisp.extras import import_extra  # slow, and seldom needed

    try:
        if len(uuids()) < 2:
            return None
        cuda = import_extra("torch").cuda
    except (UnreadableMeter, CrispError):
        return None
    if not cuda.is_available():
        return None
    return f"GPU-{cuda.get_device_properties(cuda.current_device()).uuid}"
