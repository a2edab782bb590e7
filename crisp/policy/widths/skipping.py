"""Widths that leave experts out whole, and widths of what is resident without more loading.

Skipping by router weights is after Lu et al., Not All Experts are Equal (arXiv 2402.14800), 2024,
who take each layer's median ratio as the share; here it is given. They drop the experts whose
absence changes a layer's output least; `drop` those that the profile saw least.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from fractions import Fraction
from typing import Any, ClassVar

import numpy as np
import numpy.typing as npt

from crisp.model.spec import ModelSpec
from crisp.policy.widths.base import WidthPolicy, Widths, WidthTable, table_of, weights_of
from crisp.policy.widths.contribution import (
    Bits,
    Floats,
    PrefixExtension,
    check_blocks,
    contributions,
)
from crisp.profile import Profile, anchors


@dataclass(frozen=True, eq=False)
class Skipping:
    """Experts run in full, or not at all where they weigh too little beside their anchor."""

    blocks: int  # of an expert
    least: float  # of the anchor's worth
    worth: Floats  # [layers, experts]: of a router weight of 1
    counts: npt.NDArray[np.int64]  # [layers, experts]: finds anchors in unordered traces
    ordered: bool
    residency = False

    def widths(
        self,
        layer: int,
        experts: npt.NDArray[np.int16],
        weights: npt.NDArray[np.floating[Any]] | None,
        resident: Sequence[int] | None,
    ) -> Widths:
        """Return 0 where weight x worth is below ``least`` of the anchor's, which always runs."""
        ids = experts.astype(np.int64)
        there = ids >= 0
        worth = weights_of("skip", weights).astype(np.float64)  # [rows, k]
        worth = np.where(there, worth * self.worth[layer][np.maximum(ids, 0)], 0)
        is_anchor = ids == anchors(ids, self.counts[layer], self.ordered)[:, None]
        most = np.where(is_anchor, worth, 0).max(axis=1, keepdims=True)
        runs = there & (is_anchor | (worth >= self.least * most))
        return np.where(runs, self.blocks, 0).astype(np.int16)

    def table(self) -> Widths | None:
        """Return None: the router's weights matter."""
        return None


@dataclass(frozen=True)
class Skip(WidthPolicy):
    """An expert is skipped where its weight is below a ``share`` of its anchor's."""

    share: Fraction = Fraction(1, 2)

    def bind(self, spec: ModelSpec, profile: Profile, ordered: bool) -> Skipping:
        """Take all experts as worth the same."""
        counts = profile.expert_counts
        return Skipping(spec.n_blocks, float(self.share), np.ones(counts.shape), counts, ordered)


@dataclass(frozen=True)
class SkipContribution(WidthPolicy):
    """`Skip` with each weight times what its expert contributes on average."""

    profiled: ClassVar = True
    counted: ClassVar = True
    share: Fraction = Fraction(1, 2)

    def bind(self, spec: ModelSpec, profile: Profile, ordered: bool) -> Skipping:
        """Weigh by contributions; CrispError without them."""
        worth = contributions(spec, profile, "skip-contribution").sum(axis=2)
        return Skipping(spec.n_blocks, float(self.share), worth, profile.expert_counts, ordered)


@dataclass(frozen=True)
class Drop(WidthPolicy):
    """A ``share`` of each layer's experts never runs: those that the profile saw least."""

    profiled: ClassVar = True
    counted: ClassVar = True
    share: Fraction = Fraction(1, 4)

    def bind(self, spec: ModelSpec, profile: Profile, ordered: bool) -> WidthTable:
        """Drop a share rounded down to whole experts; ties: the higher id first."""
        kept = spec.n_experts - math.floor(self.share * spec.n_experts)
        widths = np.zeros(profile.expert_counts.shape, np.int16)
        most = np.argsort(-profile.expert_counts, axis=1, kind="stable")[:, :kept]
        np.put_along_axis(widths, most, np.int16(spec.n_blocks), axis=1)
        table = table_of(spec, profile, ordered, 0, widths[:, None, :])
        diagonal = np.arange(spec.n_experts)
        table.blocks[:, diagonal, diagonal] = widths
        return table


@dataclass(frozen=True, eq=False)
class ResidentFloorWidths(PrefixExtension):
    """The anchor in full; others at what is resident, but no less than a floor."""

    floor: int  # blocks
    blocks: int  # of an expert
    counts: npt.NDArray[np.int64]  # [layers, experts]: finds anchors in unordered traces
    ordered: bool

    def wanted(
        self,
        layer: int,
        experts: npt.NDArray[np.int16],
        weights: npt.NDArray[np.floating[Any]] | None,
    ) -> Bits:
        """Return the anchor's blocks, and others' below the floor, as bits: [rows, k]."""
        ids = experts.astype(np.int64)
        first = anchors(ids, self.counts[layer], self.ordered)[:, None]
        least = np.where(ids == first, self.blocks, self.floor)
        bits = [[(1 << blocks) - 1 for blocks in row] for row in least.tolist()]
        return np.array(bits, np.uint64).reshape(ids.shape)


@dataclass(frozen=True)
class ResidentFloor(WidthPolicy):
    """Auxiliary experts run at what is already on the device, at least at ``floor``."""

    floor: Fraction = Fraction(1, 2)

    def bind(self, spec: ModelSpec, profile: Profile, ordered: bool) -> ResidentFloorWidths:
        """Round the floor up to whole blocks."""
        check_blocks(spec, "resident")
        return ResidentFloorWidths(
            spec.width(self.floor), spec.n_blocks, profile.expert_counts, ordered
        )
