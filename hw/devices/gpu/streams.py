"""The protocol of streams and events that the gpu devices need: a small part of CUDA's.

Operations are *launched* on a stream: they begin when what was launched there before has ended, and
the call that launches them returns before that. An event that is recorded on a stream has happened
when all that was launched there before has ended; another stream can be made to wait for it, and so
can the host. Nothing else orders two streams, nor a stream and the host.

`crisp.hw.devices.gpu.torch_cuda` implements it with torch. The tests have another implementation,
which runs everything as late as it may.
"""

from __future__ import annotations

from collections.abc import Callable
from contextlib import AbstractContextManager
from typing import Any, Protocol


class StreamEvent(Protocol):
    """A point in a stream's sequence of operations."""

    def synchronize(self) -> None:
        """Wait until the stream has reached it, with the GIL released."""


class DeviceStreams(Protocol):
    """A GPU's streams and its memory."""

    @property
    def name(self) -> str:
        """The GPU's name."""

    def stream(self) -> Any:
        """Return a new stream."""

    def current(self) -> Any:
        """Return the stream that the caller's operations go to."""

    def on(self, stream: Any) -> AbstractContextManager[None]:
        """Make ``stream`` the caller's current stream within the block."""

    def launch(self, operation: Callable[..., None], *args: Any) -> None:
        """Launch ``operation(*args)``, which does device work only, on the current stream."""

    def record(self) -> StreamEvent:
        """Return an event at this point of the current stream."""

    def wait(self, event: StreamEvent) -> None:
        """Make all that is launched on the current stream from now on begin after the event."""

    def empty(self, *shape: int, dtype: str) -> Any:
        """Return an uninitialised tensor in device memory, which belongs to the current stream.

        dtype: torch's name. When the tensor is gone, its memory may be used again by what is
        launched later on the same stream. Raises DeviceError if there is no room.
        """

    def upload(self, numbers: Any) -> Any:
        """Launch a copy of a small array or host tensor to the device, and return the copy.

        The caller may change ``numbers`` at once. A tensor on the device is returned as it is.
        """

    def download(self, tensor: Any) -> tuple[Any, StreamEvent]:
        """Launch a copy of a small tensor to page-locked host memory; return (copy, its end)."""

    def register(self, memory: Any) -> str | None:
        """Page-lock a host tensor and map it for the device; return why not, if that fails."""

    def unregister(self, memory: Any) -> None:
        """Undo `register`, when no operation uses the memory any more."""

    def free_bytes(self) -> int:
        """Return how much device memory is free, in bytes."""
