"""What a device is: the protocol that the executor drives, and that cpu, cuda and unified fit.

A device has a pool of fixed slots of one block each, allocated once, and two streams. The *link*
copies blocks from the store into slots; *compute* works on slots. Each runs one operation at a
time, in a thread or on hardware of its own. An operation is handed over with a callback, its
*event* in the words of such streams: the stream calls it when the operation has ended, and by the
time it returns may have been given the next one.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any, NamedTuple, Protocol

import numpy.typing as npt

from crisp.hw.devices.batch import Work

WAYS = ("memory", "mapped", "disk")  # in which a unified device gets its blocks

Done = Callable[[int, BaseException | None], None]
"""``(end_ns, failure)``, called from the stream's own thread, once for every operation."""


class Copy(NamedTuple):
    """Blocks [first, first + len(slots)) of an expert, each into the slot named for it."""

    row: int  # of its layer, counted among MoE layers
    expert: int
    first: int
    slots: Sequence[int]
    then: int = -1  # the slot of the block behind these, where the next copy is that one alone


class Piece(NamedTuple):
    """Blocks [first, first + len(slots)) of one task, which lie in these slots, to be computed."""

    work: Work
    first: int
    slots: Sequence[int]


class Device(Protocol):
    """A block pool, a link stream, a compute stream and a clock."""

    @property
    def name(self) -> str:
        """``cpu``, ``cuda`` or ``unified``."""

    def describe(self) -> dict[str, Any]:
        """How it works here, safe for JSON: what a run's settings say of the device."""

    def clock(self) -> int:
        """Nanoseconds of a monotonic clock; the streams' ``end_ns`` are of the same one."""

    def place(self, hidden: Any) -> Any:
        """A caller's rows [n, d_model], in the type that experts take, as a `Work` has them."""

    def upload(self, tensor: Any) -> Any:
        """A host tensor on the device."""

    def fetch(self, tensor: Any) -> npt.NDArray[Any]:
        """A small tensor of the caller's on the host, when it is there."""

    def copy(self, request: Copy, done: Done) -> None:
        """Begin a copy on the idle link stream. A device may begin with what is said to follow, but
        calls back for it only when that has been asked for too.
        """

    def compute(self, piece: Piece, done: Done) -> None:
        """Begin a computation on the idle compute stream: adds to ``piece.work.sums``."""

    def combine(self, works: Sequence[Work], rows: int) -> Callable[[], Any]:
        """Begin to sum the experts' outputs with the router's weights.

        By ascending expert id, so that the result depends on no policy. Of all that was given to
        the compute stream before, whether that has ended or not. What is returned gives the sums,
        [rows, d_model] float32, which may be used as if they were there.
        """

    def check(self) -> None:
        """Raise DeviceError if a stream is dead, so that nobody waits for it for ever."""

    def synchronise(self) -> None:
        """Return when both streams are idle; DeviceError if a file that is read was written to."""

    def close(self) -> None:
        """Stop the streams after what they are at, and free the pool; more than once is fine."""
