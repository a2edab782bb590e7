"""Streams that run everything as late as they may, in an order that is drawn.

What is launched waits until somebody waits for an event behind it; then operations of all streams
are run one at a time, any that may run, until the event has happened. Memory is host memory, full
of ones (NaN in every type of number) until something is written there.
"""

from __future__ import annotations

import random
import threading
from collections import deque
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

from crisp.hw.errors import DeviceError


class FakeEvent:
    def __init__(self, streams: FakeStreams, stream: deque[Any]) -> None:
        self._streams, self.stream, self.happened = streams, stream, False

    def synchronize(self) -> None:
        self._streams.until(self)


class FakeStreams:
    """See `crisp.hw.devices.gpu.streams.DeviceStreams`."""

    name = "a GPU that is not there"

    def __init__(self, seed: int, room: int = 1 << 40) -> None:
        self._random, self._lock, self._room = random.Random(seed), threading.RLock(), room
        self._streams: list[deque[Any]] = []
        self._caller, self._own = self.stream(), threading.local()
        self._there: set[int] = set()  # addresses of device memory
        self._kept: list[Any] = []  # so that addresses stay theirs
        self.registered: list[Any] = []
        self.refused: str | None = None  # why memory cannot be page-locked
        self.ran = 0

    def stream(self) -> deque[Any]:
        self._streams.append(deque())
        return self._streams[-1]

    def current(self) -> deque[Any]:
        found: deque[Any] = getattr(self._own, "stream", self._caller)
        return found

    @contextmanager
    def on(self, stream: deque[Any]) -> Iterator[None]:
        before, self._own.stream = self.current(), stream
        try:
            yield
        finally:
            self._own.stream = before

    def launch(self, operation: Callable[..., None], *args: Any) -> None:
        with self._lock:
            self.current().append((operation, args))

    def record(self) -> FakeEvent:
        with self._lock:
            event = FakeEvent(self, self.current())
            self.current().append(event)
            return event

    def wait(self, event: FakeEvent) -> None:
        with self._lock:
            self.current().append((None, event))

    def empty(self, *shape: int, dtype: str) -> Any:
        import torch

        size = torch.empty(shape, dtype=getattr(torch, dtype), device="meta").nbytes
        if size > self._room:
            raise DeviceError("cuda: out of memory")
        made = torch.full((size,), 0xFF, dtype=torch.uint8).view(getattr(torch, dtype)).view(shape)
        self._kept.append(made)
        self._there.add(made.data_ptr())
        return made

    def upload(self, numbers: Any) -> Any:
        import torch

        own = numbers if torch.is_tensor(numbers) else torch.from_numpy(numbers)
        if own.data_ptr() in self._there:
            return own
        made = self.empty(*own.shape, dtype=str(own.dtype).removeprefix("torch."))
        self.launch(made.copy_, own.clone())
        return made

    def download(self, tensor: Any) -> tuple[Any, FakeEvent]:
        import torch

        found = torch.full((tensor.nbytes,), 0xFF, dtype=torch.uint8).view(tensor.dtype)
        found = found.view(tensor.shape)
        self.launch(found.copy_, tensor)
        return found, self.record()

    def register(self, memory: Any) -> str | None:
        if self.refused is None:
            self.registered.append(memory)
        return self.refused

    def unregister(self, memory: Any) -> None:
        self.registered = [own for own in self.registered if own is not memory]

    def free_bytes(self) -> int:
        return self._room

    def read(self, tensor: Any) -> Any:
        """What a caller finds there who has waited for its own stream, and for nothing else."""
        found: list[Any] = []
        self.launch(lambda: found.append(tensor.clone()))
        self.record().synchronize()
        return found[0]

    def until(self, event: FakeEvent) -> None:
        with self._lock:
            while not event.happened:
                ready = [own for own in self._streams if own and self._may_run(own[0])]
                assert ready, "streams that wait for each other"
                # mostly what is waited for, so that the others stay as late as they may
                late = self._random.random() < 0.7 and event.stream in ready
                own = event.stream if late else self._random.choice(ready)
                self._run(own.popleft())

    @staticmethod
    def _may_run(operation: Any) -> bool:
        if isinstance(operation, FakeEvent):
            return True
        return operation[0] is not None or operation[1].happened

    def _run(self, operation: Any) -> None:
        self.ran += 1
        if isinstance(operation, FakeEvent):
            operation.happened = True
        elif operation[0] is not None:
            operation[0](*operation[1])
