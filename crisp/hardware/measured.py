"""Costs from measured tables: load by bytes, compute by blocks and rows, slow-downs when both run.

Between measured points times are linear. Beyond the last they go on along the last piece, but never
fall below the last point. All of it is exact (fractions) and rounded once, half up.
"""

from __future__ import annotations

from bisect import bisect_right
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from fractions import Fraction
from typing import Any

from crisp.errors import CrispError
from crisp.hardware.cost import Apart, half_up
from crisp.model.spec import ModelSpec


@dataclass(frozen=True)
class Geometry:
    """What a store's blocks look like; times are known for blocks like these only."""

    d_model: int
    block: int  # neurons
    matrices: int
    bits: Fraction  # stored, of a routed weight
    block_bytes: int
    dtype: str | None = None  # of a store; None: not known, as of a model
    activation: str | None = None  # likewise

    @classmethod
    def of(cls, spec: ModelSpec) -> Geometry:
        """That of a model's blocks."""
        return cls(spec.d_model, spec.block, spec.matrices, spec.bits, spec.block_bytes)


@dataclass(frozen=True)
class Curve:
    """Times at rising points, of a load by its bytes or of a layer by its rows."""

    at: tuple[int, ...]
    ns: tuple[Fraction, ...]

    def __call__(self, x: Fraction | int) -> Fraction:
        """The time at `x`; below the first point see `before`."""
        return self.before(x) if x < self.at[0] else _between(self.at, self.ns, x)

    def before(self, x: Fraction | int) -> Fraction:
        """Below the first point: down to what is left of a line through the first two at 0.

        That is the latency, at least 0 and at most the first time; a single point has none.
        """
        latency = Fraction(0)
        if len(self.at) > 1:
            line = self.ns[0] - _slope(self.at, self.ns, 0) * self.at[0]
            latency = min(max(Fraction(0), line), self.ns[0])
        return latency + (self.ns[0] - latency) * x / self.at[0]


@dataclass(frozen=True)
class Grid:
    """Times of a piece by its blocks and its rows; both begin at 1."""

    blocks: tuple[int, ...]
    rows: tuple[int, ...]
    ns: tuple[tuple[Fraction, ...], ...]  # [blocks][rows]

    def __call__(self, blocks: int, rows: Fraction | int) -> Fraction:
        """Bilinear; fewer than one row, on average over the blocks, cost as much as one."""
        rows = max(Fraction(1), Fraction(rows))
        return _between(self.blocks, [_between(self.rows, line, rows) for line in self.ns], blocks)


@dataclass(frozen=True)
class Tables:
    """What calibration measured on one machine with one kind of block. Times in ns.

    slow_load: how many times as long a load takes while compute is busy, at least 1; slow_compute:
    the same of a computation while the link is. spreads: interquartile range over median, by the
    name of the table; they are told and not used.
    """

    geometry: Geometry
    load: Curve
    compute: Grid
    layer: Curve
    slow_load: Fraction
    slow_compute: Fraction
    spreads: tuple[tuple[str, float], ...] = ()


@dataclass(frozen=True)
class MeasuredCost(Apart):
    """The cost protocol, from tables. Launches and the handing over to a stream are in them.

    A layer without routed experts costs nothing: what passes between two events is in the table.
    """

    spec: ModelSpec
    tables: Tables

    def load(self, n_bytes: int) -> int:
        return half_up(self.tables.load(n_bytes))

    def compute(self, first: int, last: int, row_neurons: int) -> int:
        rows = Fraction(row_neurons, self.spec.neurons(first, last))  # on average over the neurons
        return half_up(self.tables.compute(last - first, rows))

    def layer(self, layer: int, rows: int) -> int:
        return half_up(self.tables.layer(rows)) if layer in self.spec.moe_layers else 0

    def io_bound(self, n_bytes: int) -> float:
        """At the bandwidth of the largest measured load."""
        load = self.tables.load
        return float(n_bytes * load.ns[-1] / load.at[-1])


def measured_cost(tables: Tables, spec: ModelSpec, profile: str) -> MeasuredCost:
    """The costs of `spec`, whose blocks must be like those that were measured.

    profile: its name. Raises CrispError naming the first difference.
    """
    for name, expected in vars(Geometry.of(spec)).items():
        found = getattr(tables.geometry, name)
        if expected is not None and found != expected:
            raise CrispError(
                f"hardware profile {profile}: was calibrated with {name} {found}, but "
                f"{spec.name} has {expected}; calibrate with a store of {spec.name} in blocks of "
                f"{spec.block} neurons and {spec.bits} bits"
            )
    return MeasuredCost(spec, tables)


def check_store(tables: Tables, store: Mapping[str, Any], profile: str) -> None:
    """Raise CrispError if it is known that blocks of another kind than a store's were measured.

    store: what its index says; profile: its name. Sizes are for `measured_cost` to compare.
    """
    for key in ("dtype", "activation"):
        found, expected = getattr(tables.geometry, key), store.get(key)
        if None not in (found, expected) and found != expected:
            raise CrispError(
                f"hardware profile {profile}: was calibrated with {key} {found}, but the store has "
                f"{expected}; calibrate with that store"
            )


def _between(at: Sequence[int], ns: Sequence[Fraction], x: Fraction | int) -> Fraction:
    """The time at `x`, not below the first point."""
    if len(at) == 1:
        return ns[0]
    piece = min(bisect_right(at, x), len(at) - 1) - 1
    time = ns[piece] + _slope(at, ns, piece) * (x - at[piece])
    return time if x <= at[-1] else max(time, ns[-1])


def _slope(at: Sequence[int], ns: Sequence[Fraction], piece: int) -> Fraction:
    return (ns[piece + 1] - ns[piece]) / (at[piece + 1] - at[piece])
