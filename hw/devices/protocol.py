"""The protocol of a device: what the executor drives, and what cpu, cuda and unified implement.

A device has a pool of fixed slots of one block each, allocated once, and two streams. The *link*
copies blocks from the store into slots; *compute* reads slots. Each stream runs one operation at a
time, in a thread or on hardware of its own. An operation is handed over with a callback, which the
stream calls when the operation has ended; the callback may hand over the next one. Who waits for a
callback does so by `Device.wait`.
"""

from __future__ import annotations

import threading
from collections.abc import Callable, Sequence
from typing import Any, NamedTuple, Protocol

import numpy.typing as npt

from crisp.hw.devices.batch import ExpertBatch

WAYS = ("memory", "mapped", "disk")  # where a unified device gets its blocks from

Done = Callable[[int, BaseException | None], None]
"""A callback ``(end_ns, failure)``: called once for every operation, in the stream's thread."""


class Copy(NamedTuple):
    """A copy of blocks [first, first + len(slots)) of an expert, each into its slot."""

    row: int  # of the expert's layer, counted among MoE layers
    expert: int
    first: int
    slots: Sequence[int]
    then: Sequence[int] = ()  # slots of the next blocks, if each is known to be the next copy


class BlockRange(NamedTuple):
    """Blocks [first, first + len(slots)) of one task, in these slots, to be computed at once."""

    batch: ExpertBatch
    first: int
    slots: Sequence[int]


class Device(Protocol):
    """A pool of blocks, a link stream, a compute stream and a clock."""

    @property
    def name(self) -> str:
        """The name by which it is asked for: ``cpu``, ``cuda`` or ``unified``."""

    @property
    def host_memory(self) -> bool:
        """Whether the caller's tensors, and those of `upload`, are in the host's memory."""

    def describe(self) -> dict[str, Any]:
        """Return the device's settings on this machine, safe for JSON: part of a run's settings."""

    def clock(self) -> int:
        """Return the nanoseconds of a monotonic clock, the one of the streams' ``end_ns``."""

    def place(self, hidden: Any) -> Any:
        """Return the caller's rows [n, d_model] as an `ExpertBatch` takes them.

        They come in the type that experts compute with.
        """

    def upload(self, tensor: Any) -> Any:
        """Return a host tensor as one on the device."""

    def fetch(self, tensor: Any) -> npt.NDArray[Any]:
        """Return a small tensor of the caller's as an array on the host; waits for it."""

    def copy(self, request: Copy, done: Done) -> None:
        """Begin a copy from the store into slots, on the idle link stream.

        A device may begin ``request.then`` too, but calls back for each only when that copy has
        been requested as well.
        """

    def compute(self, blocks: BlockRange, done: Done) -> None:
        """Begin a computation on the idle compute stream; it adds to ``blocks.batch.sums``."""

    def combine(self, batches: Sequence[ExpertBatch], rows: int) -> Callable[[], Any]:
        """Begin to sum the experts' outputs with the router's weights, by ascending expert id.

        So the result depends on no policy. It includes all that was given to the compute stream
        before, whether that has ended or not. Returns a function that gives the sums,
        [rows, d_model] float32; the device orders what uses them behind the summing.
        """

    def wait(self, condition: threading.Event, seconds: float) -> bool:
        """Wait until a callback has set the condition; False: it has not, for so many seconds.

        A device may call back, and compute, in the thread that waits.
        """

    def check(self) -> None:
        """Raise DeviceError if a stream is dead, so that nobody waits for it without end."""

    def synchronize(self) -> None:
        """Wait until both streams are idle; DeviceError if a file of the store was written to."""

    def close(self) -> None:
        """Stop the streams after their current operations and free the pool; idempotent."""
