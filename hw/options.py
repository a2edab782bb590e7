"""Which device runs, and how it is set up: all that is said of it before there is one."""

from __future__ import annotations

from dataclasses import dataclass

from crisp.errors import CrispError, nearest
from crisp.units import show_bytes
from hw.device import Device
from hw.store import Store

DEVICES = ("cpu",)


@dataclass(frozen=True)
class Options:
    """A device by name, and its settings."""

    device: str = "cpu"
    threads: int = 1  # that compute on a processor
    link_limit: int | None = None  # bytes a second: an emulated slower link
    verify: bool = False  # every block that is read against its hash

    def __post_init__(self) -> None:
        if self.device not in DEVICES:
            raise nearest(self.device, DEVICES, "device")
        if self.threads < 1:
            raise CrispError(f"threads {self.threads}: must be at least 1")
        if self.link_limit is not None and self.link_limit < 1:
            raise CrispError(f"link limit {self.link_limit}: must be at least 1 byte a second")

    def __str__(self) -> str:
        """In a few words."""
        words = [self.device, f"{self.threads} thread" + ("s" if self.threads > 1 else "")]
        if self.link_limit is not None:
            words.append(f"link limited to {show_bytes(self.link_limit)}/s")
        return ", ".join([*words, *(["verifying"] if self.verify else [])])

    def open(self, store: Store, slots: int) -> Device:
        """The device, with a pool of so many slots; to be closed."""
        from hw.cpu import CpuDevice

        return CpuDevice(
            store, slots, threads=self.threads, link_limit=self.link_limit, verify=self.verify
        )
