"""Widths by what a block is worth to a token: router weight x the block's mean contribution.

A block's mean contribution is the sum over its neurons of mean |activation| x norm of the down row,
as `crisp prepare` measures it. Where that times the token's router weight reaches a threshold, the
block is worth its bytes. Each layer has its own threshold, such that the blocks worth executing are
the asked share of all that tokens are routed to, in the calibration text.
"""

from __future__ import annotations

from abc import abstractmethod
from collections.abc import Sequence
from dataclasses import dataclass
from fractions import Fraction
from typing import Any, ClassVar

import numpy as np
import numpy.typing as npt

from crisp.errors import CrispError
from crisp.model.spec import ModelSpec
from crisp.policy.widths.base import WidthPolicy, Widths, weights_of
from crisp.profile import Profile

Floats = npt.NDArray[np.float64]
Bits = npt.NDArray[np.uint64]
Ints = npt.NDArray[np.int64]

MOST_BLOCKS = 64  # of an expert, where blocks are bits of a word


def width_on(resident: int, wanted: int) -> int:
    """Return an expert's width: all ``resident`` blocks, and those behind them while ``wanted``.

    wanted: bit b says that block b is worth loading.

    >>> width_on(2, 0b11101), width_on(1, 0b11101), width_on(0, 0b1)
    (5, 1, 1)
    """
    width = resident
    while wanted >> width & 1:
        width += 1
    return width


@dataclass(frozen=True, eq=False)
class ByContribution:
    """Widths from thresholds; nothing that is resident matters."""

    leading: Floats  # [layers, experts, blocks]: the least contribution of a block and those before
    thresholds: Floats  # [layers]
    residency = False

    def widths(
        self,
        layer: int,
        experts: npt.NDArray[np.int16],
        weights: npt.NDArray[np.floating[Any]] | None,
        resident: Sequence[int] | None,
    ) -> Widths:
        """Return the number of blocks before the first that is not worth executing: [rows, k]."""
        worth = _worth(self.leading[layer], self.thresholds[layer], experts, weights)
        widths: Widths = worth.sum(axis=2, dtype=np.int16)
        return widths

    def table(self) -> Widths | None:
        """Return None: the router's weight matters."""
        return None


class PrefixExtension:
    """Widths that are `width_on` of what is resident and of what is wanted."""

    residency = True

    def widths(
        self,
        layer: int,
        experts: npt.NDArray[np.int16],
        weights: npt.NDArray[np.floating[Any]] | None,
        resident: Sequence[int] | None,
    ) -> Widths:
        """Return all resident blocks, and further ones while they are wanted: [rows, k]."""
        assert resident is not None
        rows = zip(experts.tolist(), self.wanted(layer, experts, weights).tolist(), strict=True)
        return np.array([row_on(ids, resident, bits) for ids, bits in rows], np.int16)

    @abstractmethod
    def wanted(
        self,
        layer: int,
        experts: npt.NDArray[np.int16],
        weights: npt.NDArray[np.floating[Any]] | None,
    ) -> Bits:
        """Return the blocks worth loading, as bits: [rows, k]."""

    def table(self) -> Widths | None:
        """Return None: residency matters."""
        return None


@dataclass(frozen=True, eq=False)
class ResidentThresholdWidths(PrefixExtension):
    """Widths from thresholds, on top of what is resident."""

    contributions: Floats  # [layers, experts, blocks]
    thresholds: Floats  # [layers]

    def wanted(
        self,
        layer: int,
        experts: npt.NDArray[np.int16],
        weights: npt.NDArray[np.floating[Any]] | None,
    ) -> Bits:
        """Return blocks whose weight x contribution reaches the threshold, as bits: [rows, k]."""
        worth = _worth(self.contributions[layer], self.thresholds[layer], experts, weights)
        return as_bits(worth)


@dataclass(frozen=True)
class Contribution(WidthPolicy):
    """The blocks before the first that is not worth executing; ``share``: worth it, of all."""

    profiled: ClassVar = True
    counted: ClassVar = True
    share: Fraction = Fraction(3, 4)

    def bind(self, spec: ModelSpec, profile: Profile, ordered: bool) -> ByContribution:
        """Set thresholds for the share; CrispError without contributions or weights."""
        sizes = contributions(spec, profile, "contribution")
        return ByContribution(
            np.minimum.accumulate(sizes, axis=2), thresholds(profile, sizes, self.share)
        )


@dataclass(frozen=True)
class ContributionResident(WidthPolicy):
    """All resident blocks, and those that the same threshold finds worth loading."""

    profiled: ClassVar = True
    counted: ClassVar = True
    share: Fraction = Fraction(3, 4)

    def bind(self, spec: ModelSpec, profile: Profile, ordered: bool) -> ResidentThresholdWidths:
        """Set the thresholds of `Contribution`, which does not look at what is resident."""
        check_blocks(spec, "contribution-resident")
        sizes = contributions(spec, profile, "contribution-resident")
        return ResidentThresholdWidths(sizes, thresholds(profile, sizes, self.share))


def contributions(spec: ModelSpec, profile: Profile, name: str) -> Floats:
    """Return the profile's contributions in the blocks of ``spec``: [layers, experts, blocks].

    They were measured for blocks of another number where the routing is one model's and the sizes
    are another's: an expert's contribution is then spread evenly within each of them.
    """
    if profile.contributions is None or profile.router_weights is None:
        raise CrispError(
            f"width {name}: asks what each block contributes, which only preparation measures; "
            "give the prepared model's --metadata"
        )
    return spread_blocks(profile.contributions.astype(np.float64), spec.n_blocks)


def spread_blocks(measured: Floats, blocks: int) -> Floats:
    """Return contributions [layers, experts, any number] in so many ``blocks`` of one size each."""
    have = measured.shape[2]
    if have == blocks:
        return measured
    upto = np.concatenate([np.zeros((*measured.shape[:2], 1)), np.cumsum(measured, axis=2)], axis=2)
    places = np.linspace(0, have, blocks + 1)
    low = np.minimum(places.astype(np.int64), have - 1)
    ends = upto[:, :, low] + (upto[:, :, low + 1] - upto[:, :, low]) * (places - low)
    return np.diff(ends, axis=2)


def thresholds(profile: Profile, sizes: Floats, share: Fraction) -> Floats:
    """Return the weight x contribution that ``share`` of each layer's blocks reach: [layers]."""
    layers = np.arange(len(sizes))[:, None]
    return np.array([least_worth(profile, sizes, share, layer) for layer in layers])


def least_worth(profile: Profile, sizes: Floats, share: Fraction, layers: Ints) -> float:
    """Return the weight x size that ``share`` of the blocks of some ``layers`` reach.

    Counted over the profile's tokens: each expert as often as it was routed to, at the quantiles of
    its router weights. sizes [layers, experts, blocks]; a block counts as the least of its own and
    those before it. Infinite for a share of 0.
    """
    assert profile.router_weights is not None
    if not share:
        return np.inf
    leading = np.minimum.accumulate(sizes[layers], axis=2)
    weights = profile.router_weights[layers].astype(np.float64)
    worth = weights[..., None] * leading[:, :, None, :]  # [layers, experts, quantiles, blocks]
    counts = profile.expert_counts[layers]
    often = np.broadcast_to(counts[..., None, None], worth.shape).ravel()
    falling = np.argsort(-worth.ravel(), kind="stable")
    upto = np.cumsum(often[falling])
    if not upto[-1]:
        return 0.0
    least = share * int(upto[-1])
    place = int(np.searchsorted(upto, -(-least.numerator // least.denominator)))
    return float(worth.ravel()[falling[place]])


def row_on(experts: Sequence[int], resident: Sequence[int], wanted: Sequence[int]) -> list[int]:
    """Return `width_on` of each of a token's experts."""
    return [
        width_on(resident[expert], bits) if expert >= 0 else 0
        for expert, bits in zip(experts, wanted, strict=True)
    ]


def as_bits(flags: npt.NDArray[np.bool_]) -> Bits:
    """Return flags [..., blocks] as words [...], block b as bit b."""
    powers = np.uint64(1) << np.arange(flags.shape[-1], dtype=np.uint64)
    words: Bits = np.where(flags, powers, np.uint64(0)).sum(axis=-1, dtype=np.uint64)
    return words


def check_blocks(spec: ModelSpec, name: str) -> None:
    """Raise CrispError for an expert of too many blocks."""
    if spec.n_blocks > MOST_BLOCKS:
        raise CrispError(
            f"width {name}: {spec.n_blocks} blocks an expert; at most {MOST_BLOCKS} were expected: "
            "choose a larger --block"
        )


def _worth(
    sizes: Floats,
    threshold: float,
    experts: npt.NDArray[np.int16],
    weights: npt.NDArray[np.floating[Any]] | None,
) -> npt.NDArray[np.bool_]:
    """Return whether weight x size [experts, blocks] reaches the threshold: [rows, k, blocks]."""
    router = weights_of("contribution", weights).astype(np.float64)[:, :, None]
    worth: npt.NDArray[np.bool_] = router * sizes[np.maximum(experts, 0)] >= threshold
    return worth & (experts >= 0)[:, :, None]
