"""The cost protocol: the time of loads and computations, and their traffic on a shared memory.

Every time is computed exactly (fractions) and rounded once, half up, to whole nanoseconds, so that
it can be reproduced by hand. Sizes in bytes count a block's stride in the store, padding included;
only arithmetic goes by neurons.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from fractions import Fraction
from functools import cached_property
from typing import Protocol

from crisp.model.spec import ModelSpec


class CostModel(Protocol):
    """The time of each activity when it runs alone, in ns; sizes are in bytes."""

    @property
    def memory_bandwidth(self) -> float | None:
        """Bytes per second that link and compute share; None where they share nothing."""

    def load(self, n_bytes: int) -> int:
        """Return the time of one request of `n_bytes` on the link."""

    def compute(self, first: int, last: int, row_neurons: int) -> int:
        """Return the time of blocks [first, last) of one task, computed at once.

        `row_neurons` is the sum, over the task's rows, of the neurons of these blocks that the row
        executes. It is one piece: launched once, whatever its blocks.
        """

    def layer(self, layer: int, rows: int) -> int:
        """Return the time of a layer without its routed experts, for `rows` tokens.

        That is attention and router, shared experts, or the dense FFN of a layer that is not MoE.
        """

    def load_traffic(self, n_bytes: int) -> int:
        """Return the bytes a load moves on the shared memory; 0 where nothing is shared."""

    def compute_traffic(self, first: int, last: int) -> int:
        """Return the bytes a computation of blocks [first, last) reads from the shared memory."""

    def layer_traffic(self, layer: int) -> int:
        """Return the bytes `layer` reads from the shared memory."""

    def io_bound(self, n_bytes: int) -> float:
        """Return the time of `n_bytes` at the link's full bandwidth, without latency."""


@dataclass(frozen=True)
class AnalyticCost:
    """The cost model from rates: times in ns, bandwidths in bytes/ns (= GB/s), `rate` in FLOP/ns.

    load    = latency + bytes / link
    compute = launch + max(bytes / memory, row_neurons * 2 * matrices * d_model / rate)
    layer   = launch + max(dense bytes / memory, rows * 2 * dense parameters / rate)

    The maximum is the roofline: an expert's weights stream from memory while they are used.
    """

    spec: ModelSpec
    link: Fraction | None  # None: weights are mapped, there is nothing to load
    latency: Fraction
    rate: Fraction
    launch: Fraction
    memory: Fraction
    shared: bool  # link and compute share `memory`
    copies: int  # times a loaded byte crosses the shared memory: read + write, or write only

    @property
    def memory_bandwidth(self) -> float | None:
        return float(self.memory * 10**9) if self.shared else None

    def load(self, n_bytes: int) -> int:
        return 0 if self.link is None else half_up(self.latency + n_bytes / self.link)

    def compute(self, first: int, last: int, row_neurons: int) -> int:
        slope, offset, divisor = self._arithmetic
        # the larger of two numbers, rounded, is the larger of both rounded
        return max(self._streaming[last - first], (slope * row_neurons + offset) // divisor)

    @cached_property
    def _streaming(self) -> list[int]:
        """The launch and the streaming of so many blocks, in ns: [n_blocks + 1]."""
        block = self.spec.block_bytes / self.memory
        return [half_up(self.launch + n * block) for n in range(self.spec.n_blocks + 1)]

    @cached_property
    def _arithmetic(self) -> tuple[int, int, int]:
        """(slope, offset, divisor): launch and arithmetic of n row neurons take
        (slope n + offset) // divisor ns, which is `half_up` of the exact time.
        """
        neuron = 2 * self.spec.matrices * self.spec.d_model / self.rate
        divisor = 2 * neuron.denominator * self.launch.denominator
        rounding = divisor * (self.launch + Fraction(1, 2))
        return int(divisor * neuron), int(rounding), divisor

    def layer(self, layer: int, rows: int) -> int:
        stream = self._dense_bytes(layer) / self.memory
        flops = 2 * self.spec.dense_params[layer] * rows
        return half_up(self.launch + max(stream, flops / self.rate))

    def load_traffic(self, n_bytes: int) -> int:
        return self.copies * n_bytes if self.shared and self.link is not None else 0

    def compute_traffic(self, first: int, last: int) -> int:
        return (last - first) * self.spec.block_bytes if self.shared else 0

    def layer_traffic(self, layer: int) -> int:
        return self._dense_bytes(layer) if self.shared else 0

    def io_bound(self, n_bytes: int) -> float:
        return 0.0 if self.link is None else float(n_bytes / self.link)

    def _dense_bytes(self, layer: int) -> int:
        return -(-self.spec.dense_params[layer] * self.spec.dtype_bits // 8)


class SeparateMemory:
    """A mixin for cost models whose link and compute share no memory."""

    memory_bandwidth = None

    def load_traffic(self, n_bytes: int) -> int:
        return 0

    def compute_traffic(self, first: int, last: int) -> int:
        return 0

    def layer_traffic(self, layer: int) -> int:
        return 0


@dataclass(frozen=True)
class TableCost(SeparateMemory):
    """The cost model from the measured times, in ns, of one whole expert and of one layer.

    Loading is linear in bytes, computing in blocks; the number of rows is ignored (the paper's
    Table 1 and Figure 5 are for one token). Where layers differ in size, the expert is one of
    average size.
    """

    spec: ModelSpec
    expert_load: Fraction
    expert_compute: Fraction
    layer_time: Fraction

    def load(self, n_bytes: int) -> int:
        return half_up(self.expert_load * n_bytes / self._expert_bytes())

    def compute(self, first: int, last: int, row_neurons: int) -> int:
        return half_up(self.expert_compute * (last - first) / self.spec.n_blocks)

    def layer(self, layer: int, rows: int) -> int:
        return half_up(self.layer_time)

    def io_bound(self, n_bytes: int) -> float:
        return float(self.expert_load * n_bytes / self._expert_bytes())

    def _expert_bytes(self) -> Fraction:
        return Fraction(self.spec.routed_bytes, self.spec.n_routed)


def costs_by_row(cost: CostModel, spec: ModelSpec) -> list[CostModel]:
    """Return the costs of computing in each MoE layer, whose experts may differ in bytes."""
    cost = getattr(cost, "disk", cost)  # a page cache changes nothing about computing
    if spec.layer_bits is None or not isinstance(cost, AnalyticCost):
        return [cost] * len(spec.moe_layers)
    return [replace(cost, spec=spec.at_layer(layer)) for layer in spec.moe_layers]


def half_up(x: Fraction) -> int:
    """Round to the nearest whole number; halves go up.

    >>> half_up(Fraction(5, 2)), half_up(Fraction(7, 3))
    (3, 2)
    """
    return (2 * x.numerator + x.denominator) // (2 * x.denominator)
