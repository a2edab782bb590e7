"""Time operations on a device's streams, alone or while the other stream is busy.

Times are those that the executor records: from the moment before an operation is handed to its
stream to its end there.
"""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager

from crisp.hw.devices.protocol import Device, Done

Operation = Callable[[Done], None]
"""A function that hands an operation to its idle stream, with the callback it is given."""

_CHECK_SECONDS = 1.0  # seconds between looks at whether the streams are alive


class TimedChain:
    """Operations that run one after the other on one stream, and are timed."""

    def __init__(self, device: Device, make: Callable[[], Operation], handed: bool) -> None:
        """make: returns the next operation, of which only the handing over remains to be timed.

        handed: each operation is handed over by the thread that waits for the one before, as a
        computation is when its blocks have arrived; else by the stream's own callback, as most
        loads are.
        """
        self._device, self._make, self._handed = device, make, handed
        self._took: list[int] = []
        self._least = self._most = 0
        self._until: int | None = None
        self._since = 0
        self._ended, self._over = threading.Event(), threading.Event()
        self._failure: BaseException | None = None

    def measure(self, least: int, most: int, limit_ns: int) -> list[int]:
        """Return the times in ns of ``least`` to ``most`` operations.

        After the least, none begins later than ``limit_ns`` from now. Raises what the stream failed
        with.
        """
        self._until = self._device.clock() + limit_ns
        self._begin(least, most)
        self._wait()
        return self._took

    @contextmanager
    def running(self) -> Iterator[None]:
        """Run operations back to back, within the block."""
        self._until = None
        self._begin(0, 0)
        try:
            yield
        finally:
            self._until = 0  # no other one begins
            self._wait()

    def _begin(self, least: int, most: int) -> None:
        self._took, self._least, self._most = [], least, most
        self._over.clear()
        self._next()

    def _wait(self) -> None:
        while not self._over.is_set():
            if not self._device.wait(self._ended, _CHECK_SECONDS):
                self._device.check()
                continue
            self._ended.clear()
            if self._handed and not self._over.is_set():
                self._next()
        if self._failure is not None:
            raise self._failure

    def _next(self) -> None:
        begin = self._make()
        self._since = self._device.clock()
        begin(self._done)

    def _done(self, end: int, failure: BaseException | None) -> None:
        self._took.append(end - self._since)
        self._failure = failure
        if failure is not None or self._enough():
            self._over.set()
        elif not self._handed:
            self._next()
            return
        self._ended.set()

    def _enough(self) -> bool:
        if self._until is None:
            self._took.clear()  # the times of what only keeps a stream busy are not used
            return False
        late = self._device.clock() >= self._until
        return len(self._took) >= self._least and (late or len(self._took) == self._most)
