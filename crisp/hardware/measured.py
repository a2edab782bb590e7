"""Costs from calibration: load by bytes, compute by blocks and rows, slow-downs when both run.

Times are linear between measured points. Beyond the last point they continue along the last
segment, but never fall below its time. All of it is exact (fractions) and rounded once, half up.
"""

from __future__ import annotations

from bisect import bisect_right
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from fractions import Fraction
from typing import Any

from crisp.errors import CrispError
from crisp.hardware.cost import SeparateMemory, half_up
from crisp.model.spec import ModelSpec


@dataclass(frozen=True)
class BlockGeometry:
    """The shape of a store's blocks; measured times hold for blocks of this shape only."""

    d_model: int
    block: int  # neurons
    matrices: int
    bits: Fraction  # stored, of a routed weight
    block_bytes: int
    dtype: str | None = None  # of a store; None: not known, as of a model
    activation: str | None = None  # likewise

    @classmethod
    def of(cls, spec: ModelSpec) -> BlockGeometry:
        """Return the geometry of a model's blocks."""
        return cls(spec.d_model, spec.block, spec.matrices, spec.bits, spec.block_bytes)


@dataclass(frozen=True)
class TimeCurve:
    """Times at rising points: of a load by its bytes, or of a layer by its rows."""

    at: tuple[int, ...]
    ns: tuple[Fraction, ...]

    def __call__(self, x: Fraction | int) -> Fraction:
        """Return the time at `x`; for `x` below the first point see `before`."""
        return self.before(x) if x < self.at[0] else _between(self.at, self.ns, x)

    def before(self, x: Fraction | int) -> Fraction:
        """Return the time at `x` below the first point.

        It falls to a latency at 0, where the line through the first two points ends: at least 0, at
        most the first time; a single point has no latency.
        """
        latency = Fraction(0)
        if len(self.at) > 1:
            line = self.ns[0] - _slope(self.at, self.ns, 0) * self.at[0]
            latency = min(max(Fraction(0), line), self.ns[0])
        return latency + (self.ns[0] - latency) * x / self.at[0]


@dataclass(frozen=True)
class TimeGrid:
    """The times of a computation by its blocks and its rows; both begin at 1."""

    blocks: tuple[int, ...]
    rows: tuple[int, ...]
    ns: tuple[tuple[Fraction, ...], ...]  # [blocks][rows]

    def __call__(self, blocks: int, rows: Fraction | int) -> Fraction:
        """Return the time by bilinear interpolation.

        rows: on average over the blocks; fewer than one cost as much as one.
        """
        rows = max(Fraction(1), Fraction(rows))
        return _between(self.blocks, [_between(self.rows, line, rows) for line in self.ns], blocks)


@dataclass(frozen=True)
class MeasuredTables:
    """The times that calibration measured on one machine with one kind of block, in ns.

    slow_load: how many times as long a load takes while compute is busy, at least 1; slow_compute:
    the same of a computation while the link is. spreads: interquartile range over median, by the
    name of the table; they are reported, not used.
    """

    geometry: BlockGeometry
    load: TimeCurve
    compute: TimeGrid
    layer: TimeCurve
    slow_load: Fraction
    slow_compute: Fraction
    spreads: tuple[tuple[str, float], ...] = ()
    page_cache: TimeCurve | None = None  # of a load that the system's page cache holds


@dataclass(frozen=True)
class MeasuredCost(SeparateMemory):
    """The cost model from measured tables, which include launches and hand-overs to streams.

    A layer without routed experts costs nothing: what passes between two events is in the table.
    """

    spec: ModelSpec
    tables: MeasuredTables

    def load(self, n_bytes: int) -> int:
        return half_up(self.tables.load(n_bytes))

    def compute(self, first: int, last: int, row_neurons: int) -> int:
        rows = Fraction(row_neurons, self.spec.neurons(first, last))  # on average over the neurons
        return half_up(self.tables.compute(last - first, rows))

    def layer(self, layer: int, rows: int) -> int:
        return half_up(self.tables.layer(rows)) if layer in self.spec.moe_layers else 0

    def io_bound(self, n_bytes: int) -> float:
        """Return the time of `n_bytes` at the bandwidth of the largest measured load."""
        load = self.tables.load
        return float(n_bytes * load.ns[-1] / load.at[-1])


def measured_cost(tables: MeasuredTables, spec: ModelSpec, profile: str) -> MeasuredCost:
    """Return the costs of `spec`, whose blocks must be like those that were measured.

    profile: the name of the hardware profile. Raises CrispError naming the first difference.
    """
    if spec.layer_bits is not None:
        raise CrispError(
            f"hardware profile {profile}: was calibrated with blocks of one kind, but the layers "
            f"of {spec.name} are stored in different bits; give --bits, or a profile with rates"
        )
    for name, expected in vars(BlockGeometry.of(spec)).items():
        measured = getattr(tables.geometry, name)
        if expected is not None and measured != expected:
            raise CrispError(
                f"hardware profile {profile}: was calibrated with {name} {measured}, but "
                f"{spec.name} has {expected}; calibrate with a store of {spec.name} in blocks of "
                f"{spec.block} neurons and {spec.bits} bits"
            )
    return MeasuredCost(spec, tables)


def check_store(tables: MeasuredTables, store: Mapping[str, Any], profile: str) -> None:
    """Raise CrispError if the tables were measured with blocks of another kind than a store's.

    store: the content of its index; profile: the name of the hardware profile. What either leaves
    open is not compared; sizes are left to `measured_cost`.
    """
    for key in ("dtype", "activation"):
        measured, expected = getattr(tables.geometry, key), store.get(key)
        if None not in (measured, expected) and measured != expected:
            raise CrispError(
                f"hardware profile {profile}: was calibrated with {key} {measured}, but the store "
                f"has {expected}; calibrate with that store"
            )


def _between(at: Sequence[int], ns: Sequence[Fraction], x: Fraction | int) -> Fraction:
    """Return the time at `x`, which is not below the first point."""
    if len(at) == 1:
        return ns[0]
    piece = min(bisect_right(at, x), len(at) - 1) - 1
    time = ns[piece] + _slope(at, ns, piece) * (x - at[piece])
    return time if x <= at[-1] else max(time, ns[-1])


def _slope(at: Sequence[int], ns: Sequence[Fraction], piece: int) -> Fraction:
    """Return the slope of segment ``piece``, ns a unit."""
    return (ns[piece + 1] - ns[piece]) / (at[piece + 1] - at[piece])
