"""Streams without a GPU: everything happens at once, on the processor. For the report's dry run."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import torch


class Happened:
    """An event that is over when it is recorded."""

    def __init__(self) -> None:
        self.at = time.perf_counter_ns()

    def synchronize(self) -> None:
        """It has."""


class Eager:
    """See `crisp.hw.devices.gpu.streams.DeviceStreams`."""

    name = "none (dry run on the processor)"

    def stream(self) -> None:
        """All are one."""

    def current(self) -> None:
        """The same."""

    @contextmanager
    def on(self, stream: None) -> Iterator[None]:
        """The same."""
        yield

    def launch(self, operation: Callable[..., None], *args: Any) -> None:
        """Done when it returns."""
        operation(*args)

    def record(self) -> Happened:
        """Now."""
        return Happened()

    def wait(self, event: Happened) -> None:
        """It has happened."""

    def empty(self, *shape: int, dtype: str) -> Any:
        """Host memory."""
        return torch.empty(shape, dtype=getattr(torch, dtype))

    def upload(self, numbers: Any) -> Any:
        """A tensor is there already."""
        return numbers if torch.is_tensor(numbers) else torch.from_numpy(numbers)

    def download(self, tensor: Any) -> tuple[Any, Happened]:
        """It is there already."""
        return tensor, self.record()

    def register(self, memory: Any) -> None:
        """Nothing is page-locked."""

    def unregister(self, memory: Any) -> None:
        """Nothing was."""

    def free_bytes(self) -> int:
        """As much as one likes: the host says no if it is too much."""
        return 1 << 40
