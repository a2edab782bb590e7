"""What is counted while a run goes on, whoever decides it."""

from __future__ import annotations

from typing import NamedTuple, Protocol


class Prefetched(Protocol):
    """Bytes of prefetched blocks, by what became of them."""

    @property
    def useful_bytes(self) -> int:
        """Blocks that were there when their event started, and asked for."""

    @property
    def late_bytes(self) -> int:
        """Blocks that were asked for while still in flight."""

    @property
    def wasted_bytes(self) -> int:
        """Blocks that nothing asked for in time."""


class FewestLoads(NamedTuple):
    """The least that any cache could have loaded: see `crisp.scheduler.belady_bound`.

    The two need not be of one run: where layers share a budget and their blocks differ in size, the
    bytes are those of so many of the smallest.
    """

    blocks: int
    n_bytes: int


class Decided(Protocol):
    """Counts of what has been decided so far, as an `EventScheduler` keeps them."""

    @property
    def done(self) -> bool:
        """Whether every task of the last event has been computed."""

    @property
    def event(self) -> int:
        """The number of the last event, from 0; -1: there was none."""

    @property
    def tasks(self) -> int:
        """Tasks of all events."""

    @property
    def hits(self) -> int:
        """Tasks all of whose blocks were resident."""

    @property
    def partial_hits(self) -> int:
        """Tasks some of whose blocks were."""

    @property
    def blocks_loaded(self) -> int:
        """Blocks of all requests, prefetches included."""

    @property
    def bytes_loaded(self) -> int:
        """Their bytes."""

    @property
    def ahead(self) -> Prefetched | None:
        """What became of prefetched blocks; None: the policy does not prefetch."""
