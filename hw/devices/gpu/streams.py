"""Streams and events as CUDA has them: the little of it that the gpu devices stand on.

Operations are *launched* on a stream: they begin when what was launched there before has ended,
and the call that launches them returns before that. An event that is recorded on a stream has
happened when all that was launched there before has ended; another stream can be made to wait for
it, and so can the host. Nothing else orders two streams, nor a stream and the host.

`crisp.hw.devices.gpu.torch_cuda` is the real one. The tests have another, which runs everything as
late as it may.
"""

from __future__ import annotations

from collections.abc import Callable
from contextlib import AbstractContextManager
from typing import Any, Protocol


class Event(Protocol):
    """A point in a stream."""

    def synchronize(self) -> None:
        """Return when it has happened; Python's lock is free meanwhile."""


class Streams(Protocol):
    """A device's streams, and its memory."""

    @property
    def name(self) -> str:
        """What the device is called."""

    def stream(self) -> Any:
        """A new stream."""

    def current(self) -> Any:
        """The stream that the caller's own operations go to."""

    def on(self, stream: Any) -> AbstractContextManager[None]:
        """Within the block the caller's operations go to ``stream``."""

    def launch(self, operation: Callable[..., None], *args: Any) -> None:
        """Launch ``operation(*args)`` on the current stream: all it does is device work."""

    def record(self) -> Event:
        """An event at this point of the current stream."""

    def wait(self, event: Event) -> None:
        """What the current stream is given from now on begins after the event."""

    def empty(self, *shape: int, dtype: str) -> Any:
        """A tensor in device memory, of the current stream: what is in it is not known.

        dtype: torch's name. When it is let go, its memory may be used again by what is launched
        later on the same stream. Raises DeviceError if there is no room.
        """

    def upload(self, numbers: Any) -> Any:
        """Launch a copy of a small array or host tensor to the device, and return that; the numbers
        may be changed at once. What is there already is returned as it is.
        """

    def download(self, tensor: Any) -> tuple[Any, Event]:
        """Launch a copy of a small tensor to page-locked host memory: (that, when it is there)."""

    def register(self, memory: Any) -> str | None:
        """Page-lock a tensor of host memory, and let the device reach it; why not, if it fails."""

    def unregister(self, memory: Any) -> None:
        """Undo it, when no operation uses the memory any more."""

    def free_bytes(self) -> int:
        """Device memory that can be had."""
