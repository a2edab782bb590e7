"""A stream without a thread of its own: its operations are run by whoever waits."""

from __future__ import annotations

import threading
from collections.abc import Callable
from queue import Empty, SimpleQueue
from typing import Any

from crisp.hw.devices.protocol import Done
from crisp.hw.devices.worker import perform


class Pump:
    """Runs one operation after the other in the thread that waits, and calls back after each.

    The caller of an event has nothing to do until its experts are computed. What it computes itself
    is not handed over to another thread and back, 30 to 100 us each time; and nobody else's pool of
    threads (torch's) meets ours on the same core.
    """

    def __init__(self, clock: Callable[[], int]) -> None:
        self._clock = clock
        self._queue: SimpleQueue[tuple[Callable[[], None], Done] | None] = SimpleQueue()

    def submit(self, operation: Callable[[], None], done: Done) -> None:
        """Queue an operation; its callback may submit the next one."""
        self._queue.put((operation, done))

    def wake(self) -> None:
        """Let whoever waits look at its condition: a callback elsewhere may have set it."""
        self._queue.put(None)

    def wait(self, condition: threading.Event, seconds: float) -> bool:
        """Run operations until the condition is set; False: none came for that many seconds."""
        while not condition.is_set():
            try:
                item = self._queue.get(timeout=seconds)
            except Empty:
                return condition.is_set()
            if item is not None:
                perform(*item, self._clock)
        return True

    def begin(self, operation: Callable[[], Any]) -> Callable[[], Any]:
        """Return a function that runs what was submitted before, then ``operation``, and returns
        its result.
        """

        def answer() -> Any:
            while not self._queue.empty():
                item = self._queue.get()
                if item is not None:
                    perform(*item, self._clock)
            return operation()

        return answer
