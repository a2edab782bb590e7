"""Which device runs, and how it is set up: all that is said of it before there is one."""

from __future__ import annotations

import os
from collections.abc import Callable
from dataclasses import dataclass, field
from importlib.util import find_spec
from typing import Any

from crisp.errors import CrispError, unknown_name
from crisp.extensions import describe_origins, find_name
from crisp.hw.devices.protocol import WAYS, Device
from crisp.hw.store.block_io import DIRECT, READS
from crisp.hw.store.reader import Store
from crisp.units import format_bytes

_MOST_THREADS = 1024


@dataclass(frozen=True)
class DeviceOptions:
    """A device by name, and its settings."""

    device: str = "cpu"
    threads: int | None = None  # that compute on a processor; None: one on each core
    link_limit: int | None = None  # bytes a second: an emulated slower link
    verify: bool = False  # every block that is read against its hash
    host_limit: int | None = None  # cuda: bytes of host memory for a copy of the weights
    loads_from: str | None = None  # unified: where weights come from; None: measured
    read: str = DIRECT  # cpu: the way of reading, of READS
    progress: Callable[[float], None] | None = field(default=None, compare=False)
    """Told the share of the weights that is read when a device opens."""

    def __post_init__(self) -> None:
        kind = self.kind
        for name, value in (
            ("threads", self.threads is not None),
            ("link-limit", self.link_limit is not None),
            ("verify", self.verify),
            ("host-limit", self.host_limit is not None),
            ("loads-from", self.loads_from is not None),
            ("read", self.read != DIRECT),
        ):
            if value and name not in kind.options:
                owner = next(device for device, other in DEVICES.items() if name in other.options)
                raise CrispError(f"--{name}: is of device {owner}, found {self.device}")
        if self.loads_from is not None and self.loads_from not in WAYS:
            raise unknown_name(self.loads_from, WAYS, "way of loading")
        if self.read not in READS:
            raise unknown_name(self.read, READS, "way of reading")
        if self.threads is not None and not 1 <= self.threads <= _MOST_THREADS:
            raise CrispError(
                f"threads {self.threads}: must be at least 1 and at most {_MOST_THREADS}"
            )
        if self.link_limit is not None and self.link_limit < 1:
            raise CrispError(f"link limit {self.link_limit}: must be at least 1 byte a second")

    @property
    def kind(self) -> DeviceKind:
        """How such a device is opened; CrispError for one that there is not."""
        return find_name(DEVICES, self.device, "device")

    @property
    def computing(self) -> int:
        """How many threads compute on a processor: all cores, if nobody says how many.

        A core more is never slower: see `crisp.hw.devices.cpu.kernels`, and docs/device.md.
        """
        return self.threads or min(_MOST_THREADS, len(os.sched_getaffinity(0)))

    def __str__(self) -> str:
        """In a few words."""
        words: list[str | None] = [self.device]
        if "threads" in self.kind.options:
            words.append(f"{self.computing} thread" + ("s" if self.computing > 1 else ""))
        if self.link_limit is not None:
            words.append(f"link limited to {format_bytes(self.link_limit)}/s")
        if self.host_limit is not None:
            words.append(f"at most {format_bytes(self.host_limit)} of host memory")
        words += [self.loads_from, "verifying" if self.verify else None]
        if self.read != DIRECT:
            words.append(f"{self.read} reads")
        return ", ".join(filter(None, words))

    def open(self, store: Store, slots: int) -> Device:
        """Open the device, with a pool of so many slots; to be closed."""
        device = self.kind.open(self, store, slots)
        if not callable(getattr(device, "describe", None)):
            raise CrispError(f"device {self.device}: opened {device!r}, expected a Device")
        return device

    def describe(self, device: Device) -> dict[str, Any]:
        """Return what a run's settings say of the device, and of the plugin it comes from."""
        origin = describe_origins([("device", self.device)])
        plugin = {"name": self.device, "plugins": origin} if origin else {}
        return device.describe() | plugin

    @property
    def torch_device(self) -> str:
        """Where a model runs whose experts this device has, as torch calls it."""
        return self.kind.torch


OpenDevice = Callable[[DeviceOptions, Store, int], Device]


@dataclass(frozen=True)
class DeviceKind:
    """A kind of device: the function that opens one, and which options it takes."""

    open: OpenDevice  # (options, store, slots) -> device
    torch: str  # where the rest of a model runs, as torch calls it
    options: tuple[str, ...]  # names of command options, without the dashes


def _open_cpu(options: DeviceOptions, store: Store, slots: int) -> Device:
    from crisp.hw.devices.cpu.device import CpuDevice

    return CpuDevice(
        store, slots, threads=options.computing, link_limit=options.link_limit,
        verify=options.verify, read=options.read,
    )  # fmt: skip


def _open_cuda(options: DeviceOptions, store: Store, slots: int) -> Device:
    from crisp.hw.devices.gpu.cuda import cuda
    from crisp.hw.devices.gpu.torch_cuda import TorchCuda

    return cuda(TorchCuda(), store, slots, host_limit=options.host_limit, progress=options.progress)


def _open_unified(options: DeviceOptions, store: Store, slots: int) -> Device:
    from crisp.hw.devices.gpu.torch_cuda import TorchCuda
    from crisp.hw.devices.gpu.unified import unified

    streams, way = TorchCuda(), options.loads_from
    if find_spec("triton") is None:  # what computes then does not reach host memory
        if way not in (None, "memory"):
            raise CrispError(f"--loads-from {way}: needs triton, which is not installed")
        way = "memory"
    return unified(streams, store, slots, way=way, progress=options.progress)


DEVICES: dict[str, DeviceKind] = {
    "cpu": DeviceKind(_open_cpu, "cpu", ("threads", "link-limit", "verify", "read")),
    "cuda": DeviceKind(_open_cuda, "cuda", ("host-limit",)),
    "unified": DeviceKind(_open_unified, "cuda", ("loads-from",)),
}
