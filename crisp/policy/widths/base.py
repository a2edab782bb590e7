"""Width policies: how many leading blocks of each expert a token executes (paper, 3.3.3).

Every policy here is a table of the combination alone: the width of an expert given the token's
anchor, or the pair's measured dominant expert. That one itself stands on the diagonal. Policies
that look at more stand in modules of their own; `crisp.policy.widths.names` knows them all by name.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Sequence
from dataclasses import dataclass
from fractions import Fraction
from typing import Any, ClassVar, Protocol

import numpy as np
import numpy.typing as npt

from crisp.errors import CrispError
from crisp.model.spec import ModelSpec
from crisp.profile import COLD, HOT, WARM, Profile, anchors, tiers

Widths = npt.NDArray[np.int16]


class BoundWidths(Protocol):
    """A width policy bound to a model and a profile: pure and vectorised."""

    @property
    def residency(self) -> bool:
        """Whether widths depend on what is resident; if not, ``resident`` may be None."""

    def widths(
        self,
        layer: int,
        experts: npt.NDArray[np.int16],
        weights: npt.NDArray[np.floating[Any]] | None,
        resident: Sequence[int] | None,
    ) -> Widths:
        """Return the blocks of each (token, expert): [rows, k] int16, 0 = skipped.

        experts [rows, k], -1 = absent; weights [rows, k], the router's, where the trace has them,
        times magnitudes where those are asked for (`crisp.policy.magnitude`);
        resident [experts], blocks of each on the device.
        """

    def table(self) -> Widths | None:
        """Return the widths [layers, anchor, expert] if the policy looks at nothing else."""


class ResidencyWidths(BoundWidths, Protocol):
    """A bound policy that looks at residency: `contribution.width_on` of ``wanted``."""

    def wanted(
        self,
        layer: int,
        experts: npt.NDArray[np.int16],
        weights: npt.NDArray[np.floating[Any]] | None,
    ) -> npt.NDArray[np.uint64]:
        """Return the blocks of each (token, expert) that are worth loading, as bits: [rows, k]."""


@dataclass(frozen=True, eq=False)
class WidthTable:
    """A policy that is a table of the combination alone."""

    blocks: Widths  # [layers, dominant, expert]; on the diagonal the dominant expert's own
    counts: npt.NDArray[np.int64]  # [layers, experts]: finds anchors in unordered traces
    ordered: bool
    dominant: npt.NDArray[np.int16] | None  # [layers, experts, experts]: measured roles, for k = 2
    residency = False

    def widths(
        self,
        layer: int,
        experts: npt.NDArray[np.int16],
        weights: npt.NDArray[np.floating[Any]] | None,
        resident: Sequence[int] | None,
    ) -> Widths:
        """Look widths up; neither weights nor residency matter."""
        ids = experts.astype(np.int64)
        first = anchors(ids, self.counts[layer], self.ordered)
        if self.dominant is not None and ids.shape[1] == 2:
            first = dominants(ids, first, self.dominant[layer])
        return table_widths(ids, first, self.blocks[layer])

    def table(self) -> Widths | None:
        """Return the whole policy, which a device may keep resident."""
        return self.blocks


def dominants(
    experts: npt.NDArray[np.int64], first: npt.NDArray[np.int64], measured: npt.NDArray[np.int16]
) -> npt.NDArray[np.int64]:
    """Return each pair's dominant expert [rows]: as measured, else the anchor ``first`` [rows].

    experts [rows, 2], -1 = absent; measured [E, E], -1 where the pair was not.
    """
    both = (experts[:, 0] >= 0) & (experts[:, 1] >= 0)
    pair = np.where(both[:, None], experts, 0)
    dominant = np.where(both, measured[pair[:, 0], pair[:, 1]], -1)  # [rows]
    return np.where(dominant >= 0, dominant, first)


def table_widths(
    experts: npt.NDArray[np.int64], first: npt.NDArray[np.int64], table: Widths
) -> Widths:
    """Look up the width of each (token, expert): [rows, k].

    experts [rows, k], -1 = absent; first [rows]: the anchors, or dominant experts; table [E, E].
    """
    rows, k = experts.shape
    flat = first.repeat(k) * table.shape[1] + experts.ravel()
    widths = table.ravel()[np.maximum(flat, 0)]
    return np.where(experts.ravel() < 0, 0, widths).astype(np.int16).reshape(rows, k)


@dataclass(frozen=True)
class WidthPolicy(ABC):
    """A rule that gives a width to every (token, expert).

    Its fields are its parameters: shares between 0 and 1, as exact fractions.
    """

    profiled: ClassVar[bool] = False
    """Whether widths come from a profile: its counts, or its measured roles."""
    counted: ClassVar[bool] = False
    """Whether they cannot do without its counts."""

    def __post_init__(self) -> None:
        """Raise CrispError unless every parameter is between 0 and 1."""
        for name, value in vars(self).items():
            if not 0 <= value <= 1:
                raise CrispError(f"width parameter {name}: {float(value):g} is not between 0 and 1")

    @abstractmethod
    def bind(self, spec: ModelSpec, profile: Profile, ordered: bool) -> BoundWidths:
        """Return the policy for one model; ordered: whether the trace sorts experts by weight."""


class CheckedWidths:
    """Bound widths of a plugin: what they return is checked before anything uses it."""

    def __init__(self, name: str, bound: Any, spec: ModelSpec) -> None:
        """Raise CrispError unless ``bound`` has the members of `BoundWidths`."""
        for member in ("widths", "table"):
            if not callable(getattr(bound, member, None)):
                raise CrispError(f"width {name}: bind returned {bound!r}, which has no {member}()")
        self._name, self._bound, self._blocks = name, bound, spec.n_blocks
        self.residency = bool(getattr(bound, "residency", False))
        if callable(getattr(bound, "wanted", None)):
            self.wanted = self._wanted

    def widths(
        self,
        layer: int,
        experts: npt.NDArray[np.int16],
        weights: npt.NDArray[np.floating[Any]] | None,
        resident: Sequence[int] | None,
    ) -> Widths:
        """Return the plugin's widths [rows, k]; CrispError for what no width can be."""
        widths = self._checked(
            self._bound.widths(layer, experts.copy(), weights, resident), experts.shape
        )
        if (widths[experts < 0] != 0).any():
            raise CrispError(f"width {self._name}: gives blocks to an expert that is absent")
        return widths.astype(np.int16)

    def table(self) -> Widths | None:
        """Return the plugin's table [layers, anchor, expert], or None."""
        table = self._bound.table()
        if table is None:
            return None
        return self._checked(table, np.shape(table)).astype(np.int16)

    def _wanted(
        self,
        layer: int,
        experts: npt.NDArray[np.int16],
        weights: npt.NDArray[np.floating[Any]] | None,
    ) -> npt.NDArray[np.uint64]:
        """Return the plugin's blocks worth loading, as bits: [rows, k]."""
        bits = self._bound.wanted(layer, experts.copy(), weights)
        most = (1 << self._blocks) - 1
        return self._checked(bits, experts.shape, most).astype(np.uint64)

    def _checked(
        self, values: Any, shape: tuple[int, ...], most: int | None = None
    ) -> npt.NDArray[Any]:
        """Return an array as it is; CrispError unless it is whole numbers from 0 to ``most``."""
        most = self._blocks if most is None else most
        if not isinstance(values, np.ndarray):
            raise CrispError(
                f"width {self._name}: returned {type(values).__name__}, expected an array "
                f"{list(shape)} of whole numbers"
            )
        if values.shape != shape or values.dtype.kind not in "iu":
            raise CrispError(
                f"width {self._name}: returned {values.dtype} {list(values.shape)}, expected "
                f"whole numbers {list(shape)}"
            )
        if values.size and not 0 <= int(values.min()) <= int(values.max()) <= most:
            wrong = values[(values < 0) | (values > most)].flat[0]
            raise CrispError(f"width {self._name}: returned {wrong}, expected 0 to {most}")
        return values


@dataclass(frozen=True)
class Full(WidthPolicy):
    """Every expert at full width."""

    def bind(self, spec: ModelSpec, profile: Profile, ordered: bool) -> WidthTable:
        """Give all blocks, whatever the combination."""
        return table_of(spec, profile, ordered, spec.n_blocks, spec.n_blocks)


@dataclass(frozen=True)
class Uniform(WidthPolicy):
    """Every expert at the same share of its neurons (uniform pruning)."""

    share: Fraction = Fraction(1, 2)

    def __post_init__(self) -> None:
        super().__post_init__()
        if not self.share:
            raise CrispError("width 'uniform(0)': nothing would be executed; give a share above 0")

    def bind(self, spec: ModelSpec, profile: Profile, ordered: bool) -> WidthTable:
        """Give the share, rounded up to whole blocks."""
        blocks = spec.width(self.share)
        return table_of(spec, profile, ordered, blocks, blocks)


@dataclass(frozen=True)
class Single(WidthPolicy):
    """The dominant expert alone; the others are skipped."""

    profiled: ClassVar = True

    def bind(self, spec: ModelSpec, profile: Profile, ordered: bool) -> WidthTable:
        """Give full width to the anchor, nothing to the rest."""
        return table_of(spec, profile, ordered, spec.n_blocks, 0)


@dataclass(frozen=True)
class Tiered(WidthPolicy):
    """Auxiliary experts by tier: HOT full, WARM at ``warm``, COLD at ``cold`` (0 skips them)."""

    profiled: ClassVar = True
    counted: ClassVar = True
    alpha: Fraction = Fraction(3, 5)
    beta: Fraction = Fraction(9, 10)
    warm: Fraction = Fraction(1, 2)
    cold: Fraction = Fraction(0)

    def __post_init__(self) -> None:
        super().__post_init__()
        if self.alpha > self.beta:
            raise CrispError("width tiered: alpha must not be above beta")

    def bind(self, spec: ModelSpec, profile: Profile, ordered: bool) -> WidthTable:
        """Give widths by the tier of the pair (anchor, expert); the anchor stays full."""
        by_tier = np.zeros(3, np.int16)
        by_tier[[HOT, WARM, COLD]] = spec.n_blocks, spec.width(self.warm), spec.width(self.cold)
        other = by_tier[tiers(profile, self.alpha, self.beta)]
        return table_of(spec, profile, ordered, spec.n_blocks, other)


def table_of(
    spec: ModelSpec, profile: Profile, ordered: bool, anchor: int, other: int | Widths
) -> WidthTable:
    """Return a table of ``anchor`` blocks on the diagonal and ``other`` off it (or as it says)."""
    layers, n = profile.expert_counts.shape
    blocks = np.empty((layers, n, n), np.int16)
    blocks[:] = other
    blocks[:, np.arange(n), np.arange(n)] = anchor
    return WidthTable(blocks, profile.expert_counts, ordered, profile.dominant)


def weights_of(name: str, weights: npt.NDArray[np.floating[Any]] | None) -> npt.NDArray[np.float16]:
    """Return the router's weights [rows, k]; CrispError where the trace has none."""
    if weights is None:
        raise CrispError(f"width {name}: asks for the router's weights, and the trace has none")
    return weights
