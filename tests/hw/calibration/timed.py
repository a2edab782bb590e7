"""A device whose operations take the times that a test says."""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from fractions import Fraction
from typing import Any

from crisp.errors import CrispError
from crisp.hw.devices.batch import ExpertBatch
from crisp.hw.devices.protocol import BlockRange, Copy, Done

LOAD, COMPUTE = 0, 1


@dataclass
class TimedDevice:
    """Streams whose operations take given times, longer if the other stream is busy as they begin.

    Time is counted, not waited for: a thread ends whatever ends next.
    """

    load_ns: Callable[[int], int] = lambda blocks: 50_000 + 100_000 * blocks
    piece_ns: Callable[[int, int], int] = lambda blocks, rows: 10_000 + 20_000 * blocks * rows
    slow: tuple[Fraction, Fraction] = (Fraction(5, 4), Fraction(3, 2))
    fails: int = -1  # the operation that fails

    name = "cpu"
    host_memory = True

    def __post_init__(self) -> None:
        self._now = self._begun = 0
        self._pending: dict[int, tuple[int, Done]] = {}
        self._lock = threading.Condition(threading.RLock())
        self._open, self._held = True, False
        self.copies: list[Copy] = []
        self.pieces: list[BlockRange] = []
        self._thread = threading.Thread(target=self._run)
        self._thread.start()

    def clock(self) -> int:
        """Of who is about to begin something, time waits until they have."""
        with self._lock:
            self._held = threading.current_thread() is not self._thread
            return self._now

    def describe(self) -> dict[str, Any]:
        return {"name": "fake", "link_limit": None}

    def place(self, hidden: Any) -> Any:
        return hidden

    def copy(self, request: Copy, done: Done) -> None:
        self.copies.append(request)
        self._begin(LOAD, self.load_ns(len(request.slots)), done)

    def compute(self, piece: BlockRange, done: Done) -> None:
        self.pieces.append(piece)
        self._begin(COMPUTE, self.piece_ns(len(piece.slots), len(piece.batch.rows)), done)

    def combine(self, batches: Sequence[ExpertBatch], rows: int) -> Callable[[], None]:
        with self._lock:
            while COMPUTE in self._pending:
                self._lock.wait(1e-4)
            self._now += 1_000 * rows + 500 * len(batches)
        return lambda: None

    def synchronize(self) -> None:
        """Nobody waits here while something runs."""
        assert not self._pending

    def wait(self, condition: threading.Event, seconds: float) -> bool:
        return condition.wait(seconds)

    def check(self) -> None:
        if not self._thread.is_alive():
            raise CrispError("fake: the streams are dead")

    def _begin(self, stream: int, ns: int, done: Done) -> None:
        with self._lock:
            assert stream not in self._pending, "two operations on one stream"
            if 1 - stream in self._pending:
                ns = int(ns * self.slow[stream])
            self._pending[stream] = self._now + ns, done
            self._held = False
            self._lock.notify()

    def _run(self) -> None:
        with self._lock:
            while self._open:
                if self._held or not self._pending:
                    self._lock.wait()
                    continue
                stream = min(self._pending, key=lambda one: self._pending[one][0])
                self._now, done = self._pending.pop(stream)
                self._begun += 1
                failure = OSError("broken") if self._begun == self.fails else None
                done(self._now, failure)
                self._lock.wait(1e-5)  # let the other thread begin something

    def close(self) -> None:
        with self._lock:
            self._open = False
            self._lock.notify()
        self._thread.join()


@contextmanager
def opened(device: TimedDevice) -> Iterator[Any]:
    try:
        yield device
    finally:
        device.close()
