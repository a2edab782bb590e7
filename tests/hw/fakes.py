"""A device of threads and labels: it computes nothing, but knows what every slot should hold."""

from __future__ import annotations

import queue
import random
import threading
import time
from collections.abc import Callable, Sequence
from typing import Any

from crisp.hw.devices.batch import ExpertBatch
from crisp.hw.devices.protocol import BlockRange, Copy, Done

Label = tuple[int, int, int]  # row, expert, block


class FakeDevice:
    """Streams that take random times; a piece whose slots do not hold its blocks is a failure.

    The label of a slot is taken away when a copy into it begins and set when that ends, so a slot
    that is overwritten while it is still needed is found at either end of the computation.
    """

    name = "fake"
    host_memory = True

    def __init__(self, slots: int, seed: int = 0, slowest: float = 2e-4) -> None:
        self.labels: list[Label | None] = [None] * slots
        self.row = -1  # of the running event, for the label
        self.copies: list[Copy] = []
        self.summed: list[list[int]] = []  # the experts whose outputs were, event by event
        self._promised: list[Any] = []  # the next copies
        self.fail_at: int | None = None  # the copy, counted from 0, that fails
        self._random, self._slowest = random.Random(seed), slowest
        self._queues: list[queue.SimpleQueue[Any]] = [queue.SimpleQueue(), queue.SimpleQueue()]
        self._threads = [threading.Thread(target=self._serve, args=(q,), daemon=True)
                         for q in self._queues]  # fmt: skip
        for thread in self._threads:
            thread.start()

    def describe(self) -> dict[str, Any]:
        return {"name": self.name}

    def clock(self) -> int:
        return time.monotonic_ns()

    def place(self, hidden: Any) -> Any:
        return hidden

    def copy(self, request: Copy, done: Done) -> None:
        self._queues[0].put((lambda: self._copy(request), done))

    def compute(self, piece: BlockRange, done: Done) -> None:
        self._queues[1].put((lambda: self._compute(piece), done))

    def combine(
        self, batches: Sequence[ExpertBatch], rows: int
    ) -> Callable[[], list[tuple[int, Any]]]:
        self._drain(self._queues[1])
        self.summed.append([work.expert for work in batches])
        return lambda: [(work.expert, work.sums) for work in batches]

    def wait(self, condition: threading.Event, seconds: float) -> bool:
        return condition.wait(seconds)

    def check(self) -> None:
        assert all(thread.is_alive() for thread in self._threads)

    def synchronize(self) -> None:
        for own in self._queues:
            self._drain(own)

    @staticmethod
    def _drain(own: queue.SimpleQueue[Any]) -> None:
        over = threading.Event()
        own.put((lambda: None, lambda end, failure: over.set()))
        over.wait()

    def close(self) -> None:
        for own, thread in zip(self._queues, self._threads, strict=True):
            own.put(None)
            thread.join()

    def _serve(self, own: queue.SimpleQueue[Any]) -> None:
        while (item := own.get()) is not None:
            operation, done = item
            failure = None
            try:
                operation()
            except Exception as error:
                failure = error
            done(self.clock(), failure)

    def _pause(self) -> None:
        time.sleep(self._random.random() * self._slowest)

    def _copy(self, request: Copy) -> None:
        if len(self.copies) == self.fail_at:
            raise OSError("the disk is gone")
        self.copies.append(request)
        row, expert, first, slots, then = request
        wanted = [(row, expert, first, list(slots))]
        wanted += [
            (row, expert, block, [slot]) for block, slot in enumerate(then, first + len(slots))
        ]
        assert self._promised == wanted[: len(self._promised)], "others were to follow"
        self._promised = wanted[1:]
        for slot in [*slots, *then]:  # what follows may have begun too
            self.labels[slot] = None
        self._pause()
        for block, slot in enumerate(request.slots, request.first):
            self.labels[slot] = request.row, request.expert, block

    def _compute(self, piece: BlockRange) -> None:
        self._hold(piece)
        self._pause()
        self._hold(piece)
        work = piece.batch
        work.sums = (work.sums or []) + list(range(piece.first, piece.first + len(piece.slots)))

    def _hold(self, piece: BlockRange) -> None:
        for block, slot in enumerate(piece.slots, piece.first):
            label = self.labels[slot]
            assert label is not None, f"slot {slot} is empty or being overwritten"
            assert label[1:] == (piece.batch.expert, block), (label, piece.batch.expert, block)
            assert label[0] == piece.batch.hidden, "a block of another layer"


class FakeStore:
    """Says what a store of this geometry would; holds nothing."""

    dtype = "fp32"

    def __init__(self, spec: Any) -> None:
        self.spec = spec

    def check(self, spec: Any) -> None:
        assert spec.n_experts == self.spec.n_experts

    def describe(self) -> dict[str, Any]:
        return {"origin": "fake"}


class FakeOptions:
    """Opens the fake device, and shows it before it is used."""

    def __init__(self, seed: int = 0, shown: Callable[[FakeDevice], None] = lambda _: None) -> None:
        self._seed, self._shown = seed, shown

    def open(self, store: Any, slots: int) -> FakeDevice:
        device = FakeDevice(slots, self._seed)
        self._shown(device)
        return device
