"""Streams without a GPU, for the report's dry run: the processor does everything at once."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import torch


class Happened:
    """An event that has happened when it is recorded."""

    def __init__(self) -> None:
        self.at = time.perf_counter_ns()

    def synchronize(self) -> None:
        """No-op: it has happened."""


class Eager:
    """`crisp.hw.devices.gpu.streams.DeviceStreams` that run each operation when it is launched."""

    name = "none (dry run on the processor)"

    def stream(self) -> None:
        """Return the only stream."""

    def current(self) -> None:
        """Return the only stream."""

    @contextmanager
    def on(self, stream: None) -> Iterator[None]:
        """No-op: there is one stream."""
        yield

    def launch(self, operation: Callable[..., None], *args: Any) -> None:
        """Run the operation."""
        operation(*args)

    def record(self) -> Happened:
        """Return an event that has happened."""
        return Happened()

    def wait(self, event: Happened) -> None:
        """No-op: it has happened."""

    def empty(self, *shape: int, dtype: str) -> Any:
        """Allocate host memory."""
        return torch.empty(shape, dtype=getattr(torch, dtype))

    def upload(self, numbers: Any) -> Any:
        """Return the numbers as a tensor in host memory."""
        return numbers if torch.is_tensor(numbers) else torch.from_numpy(numbers)

    def download(self, tensor: Any) -> tuple[Any, Happened]:
        """Return the tensor itself: it is in host memory."""
        return tensor, self.record()

    def register(self, memory: Any) -> None:
        """No-op: nothing is page-locked."""

    def unregister(self, memory: Any) -> None:
        """No-op: nothing is page-locked."""

    def free_bytes(self) -> int:
        """Return a large number: the host refuses what is too much."""
        return 1 << 40
