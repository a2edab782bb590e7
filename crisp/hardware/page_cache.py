"""The system's page cache between a disk and whoever reads it: what a load costs by what it holds.

It holds the blocks that were read last, as many as fit, whoever has them as well: a block may be in
the budget and here. The system's own cache differs: it goes by pages, and by more than recency.
"""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Sequence
from fractions import Fraction

from crisp.hardware.cost import CostModel, SeparateMemory, half_up
from crisp.hardware.measured import TimeCurve


class PageCacheCost(SeparateMemory):
    """The costs of a machine whose disk is read through a page cache; a run needs one of its own.

    What a request takes depends on those before it, so `request` is asked once for each, in the
    order in which they are issued. Orders that ask for the time of a load get that of the disk.
    """

    def __init__(
        self,
        disk: CostModel,
        cached: TimeCurve,
        byte_ns: Fraction,
        block_bytes: Sequence[int],
        capacity: int,
    ) -> None:
        """cached: ns of a request by its bytes, if all are in the page cache; byte_ns: of a byte at
        full bandwidth there. block_bytes: of each MoE layer. capacity: in bytes.
        """
        self.disk, self._cached, self._byte_ns = disk, cached, byte_ns
        self._block_bytes, self._capacity = block_bytes, capacity
        # (row, expert, block) -> its bytes, the least recent first
        self._blocks: OrderedDict[tuple[int, int, int], int] = OrderedDict()
        self._used = 0  # bytes
        self.read_bytes = self.cached_bytes = 0  # of all requests so far

    def request(self, row: int, expert: int, first: int, blocks: int) -> int:
        """Return the time of one request, and let the cache hold what it has read.

        Block by block: one that is held is the most recent now; another is read from the disk, and
        the least recent go until it fits. One that is larger than the cache is never held.
        """
        size, held = self._block_bytes[row], 0
        for key in ((row, expert, block) for block in range(first, first + blocks)):
            if key in self._blocks:
                held += size
                self._blocks.move_to_end(key)
            elif size <= self._capacity:
                self._blocks[key] = size
                self._used += size
                while self._used > self._capacity:
                    self._used -= self._blocks.popitem(last=False)[1]
        missing = blocks * size - held
        self.read_bytes += missing
        self.cached_bytes += held
        return self._time(held, missing)

    def least(self, row: int, blocks: int) -> int:
        """Return the time of one request at least, whichever of its blocks are held."""
        size = self._block_bytes[row]
        return min(self._time(held * size, (blocks - held) * size) for held in range(blocks + 1))

    def _time(self, held: int, missing: int) -> int:
        from_disk = self.disk.load(missing) if missing else 0
        return from_disk + (half_up(self._cached(held)) if held else 0)

    def load(self, n_bytes: int) -> int:
        return self.disk.load(n_bytes)

    def compute(self, first: int, last: int, row_neurons: int) -> int:
        return self.disk.compute(first, last, row_neurons)

    def layer(self, layer: int, rows: int) -> int:
        return self.disk.layer(layer, rows)

    def io_bound(self, n_bytes: int) -> float:
        """Return the time of all requests so far at full bandwidths, if ``n_bytes`` is theirs.

        Of other bytes nobody knows where they would be: they count as if the cache held them.
        """
        if n_bytes != self.read_bytes + self.cached_bytes:
            return float(n_bytes * self._byte_ns)
        return self.disk.io_bound(self.read_bytes) + float(self.cached_bytes * self._byte_ns)
