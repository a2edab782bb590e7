"""Which device runs, and how it is set up: all that is said of it before there is one."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field
from importlib.util import find_spec

from crisp.errors import CrispError, nearest
from crisp.hw.devices.protocol import WAYS, Device
from crisp.hw.store.reader import Store
from crisp.units import show_bytes

DEVICES = ("cpu", "cuda", "unified")
_MOST_THREADS = 1024


@dataclass(frozen=True)
class Options:
    """A device by name, and its settings."""

    device: str = "cpu"
    threads: int = 1  # that compute on a processor
    link_limit: int | None = None  # bytes a second: an emulated slower link
    verify: bool = False  # every block that is read against its hash
    host_limit: int | None = None  # cuda: bytes of host memory for a copy of the weights
    loads_from: str | None = None  # unified: where weights come from; None: measured
    progress: Callable[[float], None] | None = field(default=None, compare=False)
    """Told the share of the weights that is read when a device opens."""

    def __post_init__(self) -> None:
        if self.device not in DEVICES:
            raise nearest(self.device, DEVICES, "device")
        for name, value, devices in (
            ("threads", self.threads != 1, ("cpu",)),
            ("link-limit", self.link_limit is not None, ("cpu",)),
            ("verify", self.verify, ("cpu",)),
            ("host-limit", self.host_limit is not None, ("cuda",)),
            ("loads-from", self.loads_from is not None, ("unified",)),
        ):
            if value and self.device not in devices:
                raise CrispError(f"--{name}: is of device {devices[0]}, found {self.device}")
        if self.loads_from is not None and self.loads_from not in WAYS:
            raise nearest(self.loads_from, WAYS, "way of loading")
        if not 1 <= self.threads <= _MOST_THREADS:
            raise CrispError(
                f"threads {self.threads}: must be at least 1 and at most {_MOST_THREADS}"
            )
        if self.link_limit is not None and self.link_limit < 1:
            raise CrispError(f"link limit {self.link_limit}: must be at least 1 byte a second")

    def __str__(self) -> str:
        """In a few words."""
        if self.device != "cpu":
            limit = None if self.host_limit is None else show_bytes(self.host_limit)
            told = limit and f"at most {limit} of host memory", self.loads_from
            return ", ".join([self.device, *filter(None, told)])
        words = [self.device, f"{self.threads} thread" + ("s" if self.threads > 1 else "")]
        if self.link_limit is not None:
            words.append(f"link limited to {show_bytes(self.link_limit)}/s")
        return ", ".join([*words, *(["verifying"] if self.verify else [])])

    def open(self, store: Store, slots: int) -> Device:
        """The device, with a pool of so many slots; to be closed."""
        if self.device == "cpu":
            from crisp.hw.devices.cpu.device import CpuDevice

            return CpuDevice(
                store, slots, threads=self.threads, link_limit=self.link_limit, verify=self.verify
            )
        from crisp.hw.devices.gpu.torch_cuda import TorchCuda

        streams, how = TorchCuda(), self.progress
        if self.device == "cuda":
            from crisp.hw.devices.gpu.cuda import cuda

            return cuda(streams, store, slots, host_limit=self.host_limit, progress=how)
        from crisp.hw.devices.gpu.unified import unified

        way = self.loads_from
        if find_spec("triton") is None:  # what computes then does not reach host memory
            if way not in (None, "memory"):
                raise CrispError(f"--loads-from {way}: needs triton, which is not installed")
            way = "memory"
        return unified(streams, store, slots, way=way, progress=how)

    @property
    def torch_device(self) -> str:
        """Where a model runs whose experts this device has, as torch calls it."""
        return "cpu" if self.device == "cpu" else "cuda"
