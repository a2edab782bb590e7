"""NVML: the energy or power of a GPU, as NVIDIA's driver reports it, through nvidia-ml-py.

The first of three ways that the GPU supports is used: its energy counter (since Volta); its power
now, in the field NVML_FI_DEV_POWER_INSTANT (since Ampere); ``nvmlDeviceGetPowerUsage``, on recent
GPUs a mean of the last second, which blurs the ends of a window. All are of the board.

GPUs are named by UUID, because their numbers differ between NVML and CUDA.
"""

from __future__ import annotations

import importlib
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from functools import partial
from typing import Any

from crisp.hw.telemetry.counters import CounterWindow, EnergyCounter
from crisp.hw.telemetry.sampler import PowerWindow, SampledMeter, SampleWindow, UnreadableMeter

INTERVAL = 0.05  # seconds between samples
UPDATE_NS = 100_000_000  # counter and field are renewed every 10 to 100 ms
MEAN_NS = 1_000_000_000  # that the average power is a mean of
MOST_WATTS = 3000  # no GPU draws more
# Of the counter, in mJ: 64 bits by its type, but a driver may keep 32 of them.
SPANS = (2**32, 2**64)
POWER_INSTANT = 186  # NVML_FI_DEV_POWER_INSTANT, mW

# NVML's error codes (nvml.h)
NOT_SUPPORTED, NO_PERMISSION, FUNCTION_NOT_FOUND = 3, 4, 13
_TRY_NEXT = (NOT_SUPPORTED, NO_PERMISSION, FUNCTION_NOT_FOUND)  # the next way may work
_REMEDIES = {
    NOT_SUPPORTED: "this GPU has no meter; on a Jetson its sensors are read instead (INA3221)",
    NO_PERMISSION: "run as root, or let the administrator of this machine open it to you",
    6: "nvidia-smi -L lists the UUIDs there are",  # NOT_FOUND
    9: "load NVIDIA's driver: sudo modprobe nvidia",  # DRIVER_NOT_LOADED
    12: "install NVIDIA's driver; in a container: docker run --gpus all",  # LIBRARY_NOT_FOUND
    FUNCTION_NOT_FOUND: "install a newer driver",
    15: "restart the machine; dmesg | grep Xid says what happened",  # GPU_IS_LOST
    16: "restart the machine",  # RESET_REQUIRED
    18: "restart the machine: its driver was updated while loaded",  # LIB_RM_VERSION_MISMATCH
}
_NO_BINDING = "pip install nvidia-ml-py (or '.[gpu]' in the checkout)"
_OLD_BINDING = "pip uninstall nvidia-ml-py3 pynvml, then pip install nvidia-ml-py"
# What the meter calls and older bindings lack.
_CALLS = ("nvmlDeviceGetTotalEnergyConsumption", "nvmlDeviceGetFieldValues")


class Nvml(SampledMeter):
    """The meter of one GPU."""

    def __init__(
        self,
        uuid: str | None = None,
        interval: float = INTERVAL,
        clock: Callable[[], int] = time.monotonic_ns,
    ) -> None:
        """uuid: of the GPU; None: the only one there is. interval: seconds; clock: ns."""
        super().__init__(interval, clock)
        self.name = "NVML" if uuid is None else f"NVML {uuid}"
        self._uuid = uuid

    def open(self) -> SampleWindow:
        """Open a window on this GPU, by the best way that it supports."""
        nvml = _init_nvml()
        end = partial(_end, nvml)
        try:
            with _errors(nvml):
                return self._best(nvml, end)
        except UnreadableMeter:
            end()
            raise

    def _best(self, nvml: Any, end: Callable[[], None]) -> SampleWindow:
        """Return a window by the first way that can be read; ``end`` closes it."""
        handle = self._handle(nvml)
        gpu = f"NVML {nvml.nvmlDeviceGetName(handle)} ({nvml.nvmlDeviceGetUUID(handle)})"
        count = partial(_read, nvml, nvml.nvmlDeviceGetTotalEnergyConsumption, handle)
        instant = partial(_watts, nvml, partial(_instant, nvml), handle)
        average = partial(_watts, nvml, nvml.nvmlDeviceGetPowerUsage, handle)
        counter = EnergyCounter(gpu, count, SPANS, 1000, MOST_WATTS)
        method = "average power (mean of about a second)"
        ways: tuple[tuple[str, Callable[[], object], Callable[[], SampleWindow]], ...] = (
            (
                "energy counter", count,
                lambda: CounterWindow(
                    " + ".join, "energy counter", [counter], UPDATE_NS, self, end
                ),
            ),
            (
                "instant power", instant,
                lambda: PowerWindow(
                    gpu, f"instant power (field {POWER_INSTANT})", instant, self, UPDATE_NS, end
                ),
            ),
            (
                "average power", average,
                lambda: PowerWindow(gpu, method, average, self, MEAN_NS, end),
            ),
        )  # fmt: skip
        refused = []
        for _, read, window in ways:
            try:
                read()
            except _Refused as error:
                if error.code not in _TRY_NEXT:
                    raise
                refused.append(error)
                continue
            return window()
        reasons = "; ".join(
            f"{name}: {error.text}" for (name, *_), error in zip(ways, refused, strict=True)
        )
        raise UnreadableMeter(f"{gpu}: {reasons}", refused[-1].remedy)

    def _handle(self, nvml: Any) -> Any:
        if self._uuid is not None:
            return nvml.nvmlDeviceGetHandleByUUID(self._uuid)
        count = nvml.nvmlDeviceGetCount()
        if count != 1:
            raise UnreadableMeter(
                f"this machine has {count} NVIDIA GPUs, and which is meant was not said",
                "name it by its UUID; nvidia-smi -L lists them" if count else None,
            )
        return nvml.nvmlDeviceGetHandleByIndex(0)


def uuids() -> tuple[str, ...]:
    """Return the UUIDs of all GPUs; `UnreadableMeter` if NVML cannot be used."""
    nvml = _init_nvml()
    try:
        with _errors(nvml):
            return tuple(
                nvml.nvmlDeviceGetUUID(nvml.nvmlDeviceGetHandleByIndex(index))
                for index in range(nvml.nvmlDeviceGetCount())
            )
    finally:
        _end(nvml)


class _Refused(UnreadableMeter):
    """An error that NVML returned."""

    def __init__(self, error: Any) -> None:
        super().__init__(f"NVML: {error}", _REMEDIES.get(error.value))
        self.code, self.text = error.value, str(error)


def _init_nvml() -> Any:
    """Return the binding with NVML initialised; each call needs one of `_end`."""
    try:
        nvml = importlib.import_module("pynvml")
    except ImportError as error:
        raise UnreadableMeter(f"nvidia-ml-py cannot be imported: {error}", _NO_BINDING) from error
    lacking = [name for name in _CALLS if not hasattr(nvml, name)]
    if lacking:  # nvidia-ml-py3, the last of which is of 2018, or its copy pynvml
        where = getattr(nvml, "__file__", None) or "pynvml"
        raise UnreadableMeter(f"{where}: an old binding, without {lacking[0]}", _OLD_BINDING)
    with _errors(nvml):
        nvml.nvmlInit()
    return nvml


def _end(nvml: Any) -> None:
    """Shut NVML down."""
    with suppress(nvml.NVMLError):  # the GPU may be lost
        nvml.nvmlShutdown()


@contextmanager
def _errors(nvml: Any) -> Iterator[None]:
    """Turn NVML's errors within the block into `_Refused`."""
    try:
        yield
    except nvml.NVMLError as error:
        raise _Refused(error) from error


def _read(nvml: Any, read: Callable[[Any], int], handle: Any) -> int:
    """Read a number of a GPU."""
    with _errors(nvml):
        return read(handle)


def _watts(nvml: Any, read: Callable[[Any], int], handle: Any) -> float:
    """Read a power in mW and return it in W."""
    return _read(nvml, read, handle) / 1e3


def _instant(nvml: Any, handle: Any) -> int:
    """Return the power now in mW, from the field NVML_FI_DEV_POWER_INSTANT."""
    field = nvml.nvmlDeviceGetFieldValues(handle, [POWER_INSTANT])[0]
    if field.nvmlReturn:
        raise nvml.NVMLError(field.nvmlReturn)
    return int(field.value.uiVal)
