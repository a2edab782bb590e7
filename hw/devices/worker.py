"""A thread that does what it is given, and calls back: a stream, or what watches one."""

from __future__ import annotations

import sys
import threading
from collections.abc import Callable
from queue import SimpleQueue
from typing import Any

from crisp.hw.devices.protocol import Done
from crisp.hw.errors import DeviceError

_PATIENCE = 1.0  # seconds between looks at whether a thread is alive
_FAREWELL = 10.0  # seconds that an operation may take to end


class Worker:
    """A thread that does one operation after the other, and calls back after each."""

    def __init__(self, name: str, clock: Callable[[], int]) -> None:
        self._clock, self._name = clock, name
        self._queue: SimpleQueue[tuple[Callable[[], None], Done] | None] = SimpleQueue()
        self._broken: BaseException | None = None
        self._thread = threading.Thread(target=self._serve, name=f"crisp-{name}", daemon=True)
        self._thread.start()

    def submit(self, operation: Callable[[], None], done: Done) -> None:
        """Begin an operation; the callback may submit the next."""
        self._queue.put((operation, done))

    def run(self, operation: Callable[[], Any]) -> Any:
        """Do something in its thread, when it is idle, and wait for what it returns."""
        return self.begin(operation)()

    def begin(self, operation: Callable[[], Any]) -> Callable[[], Any]:
        """Do something in its thread, when it is idle. What is returned here waits for it."""
        over, failures, found = threading.Event(), list[BaseException](), list[Any]()

        def done(_: int, failure: BaseException | None) -> None:
            failures.extend([failure] if failure else [])
            over.set()

        def answer() -> Any:
            while not over.wait(_PATIENCE):
                self.check()
            if failures:
                raise failures[0]
            return found[0]

        self.submit(lambda: found.append(operation()), done)
        return answer

    def check(self) -> None:
        """Raise DeviceError if the thread is dead."""
        if not self._thread.is_alive():
            why = f": {self._broken!r}" if self._broken else ""
            raise DeviceError(f"the {self._name} thread has ended{why}") from self._broken

    def close(self) -> None:
        """End the thread after what it is at; what was submitted after that is never done.

        Raises DeviceError for a thread that does not end, as when the disk is gone: what it uses
        must stay. While something else fails, that is raised again, with a note.
        """
        self._queue.put(None)
        if self._thread is threading.current_thread():
            return
        self._thread.join(_FAREWELL)
        if self._thread.is_alive():
            told = f"the {self._name} thread does not end, and is left behind"
            failure = sys.exception()
            if failure is None:
                raise DeviceError(told)
            failure.add_note(told)
            raise failure

    def _serve(self) -> None:
        try:
            while (item := self._queue.get()) is not None:
                operation, done = item
                failure: BaseException | None = None
                try:
                    operation()
                except BaseException as error:
                    failure = error
                done(self._clock(), failure)
        except BaseException as error:  # a callback failed: nobody can be told but by `check`
            self._broken = error
