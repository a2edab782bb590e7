"""What is counted while a run goes on, whoever decides it."""

from __future__ import annotations

from typing import Protocol


class Prefetched(Protocol):
    """Blocks that were prefetched, by what became of them."""

    @property
    def useful(self) -> int:
        """There when their event started, and asked for."""

    @property
    def late(self) -> int:
        """Asked for, and still in flight."""

    @property
    def wasted(self) -> int:
        """The others."""


class Decided(Protocol):
    """What has been decided so far: an `EventScheduler` knows it."""

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
    def ahead(self) -> Prefetched | None:
        """None: the policy does not prefetch."""
