"""A thread that runs operations and calls back: a stream, or the watcher of a GPU's stream."""

from __future__ import annotations

import sys
import threading
from collections.abc import Callable
from queue import SimpleQueue
from typing import Any

from crisp.hw.devices.protocol import Done
from crisp.hw.errors import DeviceError

_CHECK_SECONDS = 1.0  # between looks at whether the thread is alive
_JOIN_SECONDS = 10.0  # that an operation may take to end


class Worker:
    """A thread that runs one operation after the other, and calls back after each."""

    def __init__(self, name: str, clock: Callable[[], int]) -> None:
        self._clock, self._name = clock, name
        self._queue: SimpleQueue[tuple[Callable[[], None], Done] | None] = SimpleQueue()
        self._broken: BaseException | None = None
        self._thread = threading.Thread(target=self._serve, name=f"crisp-{name}", daemon=True)
        self._thread.start()

    def submit(self, operation: Callable[[], None], done: Done) -> None:
        """Queue an operation; its callback may submit the next one."""
        self._queue.put((operation, done))

    def run(self, operation: Callable[[], Any]) -> Any:
        """Run ``operation`` in the thread, wait for it, and return what it returns."""
        return self.begin(operation)()

    def begin(self, operation: Callable[[], Any]) -> Callable[[], Any]:
        """Queue ``operation``; return a function that waits for it and returns its result."""
        over, failures, results = threading.Event(), list[BaseException](), list[Any]()

        def done(_: int, failure: BaseException | None) -> None:
            failures.extend([failure] if failure else [])
            over.set()

        def answer() -> Any:
            while not over.wait(_CHECK_SECONDS):
                self.check()
            if failures:
                raise failures[0]
            return results[0]

        self.submit(lambda: results.append(operation()), done)
        return answer

    def check(self) -> None:
        """Raise DeviceError if the thread is dead."""
        if not self._thread.is_alive():
            why = f": {self._broken!r}" if self._broken else ""
            raise DeviceError(f"the {self._name} thread has ended{why}") from self._broken

    def close(self) -> None:
        """End the thread after its current operation; what was submitted later never runs.

        Raises DeviceError for a thread that does not end, as when the disk is gone: what it uses
        must stay. While another error is on its way, that one is raised again, with a note.
        """
        self._queue.put(None)
        if self._thread is threading.current_thread():
            return
        self._thread.join(_JOIN_SECONDS)
        if self._thread.is_alive():
            message = f"the {self._name} thread does not end, and is left behind"
            failure = sys.exception()
            if failure is None:
                raise DeviceError(message)
            failure.add_note(message)
            raise failure

    def _serve(self) -> None:
        try:
            while (item := self._queue.get()) is not None:
                perform(*item, self._clock)
        except BaseException as error:  # a callback failed: only `check` can report it
            self._broken = error


def perform(operation: Callable[[], None], done: Done, clock: Callable[[], int]) -> None:
    """Run an operation in this thread, and call back with what it failed with."""
    failure: BaseException | None = None
    try:
        operation()
    except BaseException as error:
        failure = error
    done(clock(), failure)
