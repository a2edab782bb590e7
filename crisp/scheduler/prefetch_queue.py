"""The prefetch queue: blocks of predicted experts, loaded while the link has nothing urgent.

Predictions are for the next MoE layer. The predicted experts are protected until that layer's event
starts: none of them is evicted for another. What the budget cannot take waits in a staging buffer
of one expert.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

from crisp.model.spec import ModelSpec
from crisp.policy.anticipation import Anticipation, most_worth
from crisp.scheduler.predictions import Prediction
from crisp.scheduler.residency import PREDICTED, Eviction, Residency
from crisp.scheduler.tasks import Fetch


class ClaimedBlocks(NamedTuple):
    """The blocks of an expert that are there, or coming, when its event asks for it."""

    here: int  # leading blocks on the device
    staged: int  # blocks asked for that wait in staging, the late one included: now the event's
    late: Fetch | None  # a block asked for and still in flight


class PrefetchQueue:
    """The blocks to fetch next, and what became of those that were."""

    def __init__(
        self, spec: ModelSpec, store: Residency, anticipation: Anticipation | None
    ) -> None:
        """anticipation: what blocks are worth; None: all of what is predicted is fetched."""
        self._store, self._block_bytes = store, spec.row_block_bytes
        self._experts, self._blocks = spec.n_experts, spec.n_blocks
        self._sizes = None if anticipation is None else anticipation.sizes
        self._row, self._part = 0, 0  # the layer predicted for
        self._predicted: Sequence[int] = ()
        self._weights: Sequence[int] = ()  # of the predicted experts, where they matter
        self._free = spec.n_blocks  # staging
        self._staged = [0] * spec.n_routed  # by entry: blocks in staging, one in flight included
        self._fetched: dict[int, tuple[int, int]] = {}  # entry -> first block fetched, how many
        self._flight: Fetch | None = None
        self.useful_bytes = self.late_bytes = self.wasted_bytes = 0

    def predict(self, following: Prediction) -> None:
        """Queue the experts of the next event; drop what was not issued."""
        self._row, self._predicted, self._weights = following
        self._part = self._store.part_of_row[self._row]
        for expert in self._predicted:
            self._store.protect(self._row * self._experts + expert, self._part, PREDICTED)

    def next(self) -> Fetch | None:
        """Issue the next missing block of the first predicted expert that lacks one, or the missing
        block that is worth most, if there is a place for it.
        """
        resident, staged, base = self._store.resident, self._staged, self._row * self._experts
        if self._sizes is not None:
            entry = most_worth(
                self._predicted, self._weights, self._sizes, resident, staged, base, self._blocks
            )
            return None if entry < 0 else self._issue(entry, resident[entry] + staged[entry])
        for expert in self._predicted:
            entry = base + expert
            first = resident[entry] + staged[entry]
            if first < self._blocks:
                return self._issue(entry, first)
        return None

    def landed(self, load: Fetch) -> None:
        """Take note that the block in flight has arrived."""
        self._flight = None
        if load.unwanted:
            self._free += 1

    def claim(self, entry: int, width: int) -> ClaimedBlocks:
        """Claim the first ``width`` blocks of ``entry`` for the predicted event."""
        low = self._store.resident[entry]
        staged, self._staged[entry] = self._staged[entry], 0
        issued = low + staged
        flight = self._in_flight(entry)
        here = issued if flight is None else issued - 1
        taken = max(0, min(issued, width) - low) if staged else 0
        self._discard(entry, staged - taken)
        late = flight if here < width else None
        first, fetched = self._fetched.pop(entry, (0, 0))
        if fetched:
            useful = max(0, min(width, here) - first)
            size = self._block_bytes[entry // self._experts]
            self.useful_bytes += useful * size
            self.late_bytes += (late is not None) * size
            self.wasted_bytes += (fetched - useful - (late is not None)) * size
        return ClaimedBlocks(here, taken, late)

    def drop_rest(self) -> None:
        """Drop what the predicted event has not claimed: it was fetched in vain."""
        base = self._row * self._experts
        predicted = [base + expert for expert in self._predicted]
        self._store.release(predicted, self._part, PREDICTED)
        wasted = sum(fetched for _, fetched in self._fetched.values())
        self.wasted_bytes += wasted * self._block_bytes[self._row]
        for entry in predicted:
            self._discard(entry, self._staged[entry])
            self._staged[entry] = 0
        self._fetched.clear()

    def give_back(self, blocks: int) -> None:
        """Free claimed staging blocks, which every row has used."""
        self._free += blocks

    def _issue(self, entry: int, first: int) -> Fetch | None:
        store, part = self._store, self._part
        staged = self._staged[entry]
        evicted: Sequence[Eviction] = ()
        kept = not staged and store.admissible(part, 1)  # once staged, always: no hole in a prefix
        if kept:
            evicted = store.admit(entry, part, 1)
        elif self._free:
            self._free -= 1
            self._staged[entry] = staged + 1
        else:
            return None
        start, fetched = self._fetched.get(entry, (first, 0))
        self._fetched[entry] = start, fetched + 1
        expert = entry % self._experts
        self._flight = Fetch(self._row, expert, first, evicted, entry, staged=not kept)
        return self._flight

    def _in_flight(self, entry: int) -> Fetch | None:
        """Return the block of this entry that is in flight and wanted, if there is one."""
        flight = self._flight
        return flight if flight and flight.entry == entry and not flight.unwanted else None

    def _discard(self, entry: int, blocks: int) -> None:
        """Free staged blocks that nobody asked for; the one in flight goes when it arrives."""
        flight = self._in_flight(entry)
        if blocks and flight is not None and flight.staged:
            flight.unwanted = True
            blocks -= 1
        self._free += blocks
