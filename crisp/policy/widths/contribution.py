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
from typing import ClassVar

import numpy as np
import numpy.typing as npt

from crisp.errors import CrispError
from crisp.model.spec import ModelSpec
from crisp.policy.widths.base import WidthPolicy, Widths, weights_of
from crisp.profile import Profile

Floats = npt.NDArray[np.float64]
Bits = npt.NDArray[np.uint64]

MOST_BLOCKS = 64  # of an expert, where blocks are bits of a word


def width_on(resident: int, wanted: int) -> int:
    """What an expert runs at: all ``resident`` blocks, and those behind them while ``wanted``.

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
        weights: npt.NDArray[np.float16] | None,
        resident: Sequence[int] | None,
    ) -> Widths:
        """The leading blocks before the first that is not worth executing."""
        worth = _worth(self.leading[layer], self.thresholds[layer], experts, weights)
        widths: Widths = worth.sum(axis=2, dtype=np.int16)
        return widths

    def table(self) -> Widths | None:
        """None: the router's weight matters."""
        return None


class PrefixExtension:
    """Widths that are `width_on` of what is resident and of what is wanted."""

    residency = True

    def widths(
        self,
        layer: int,
        experts: npt.NDArray[np.int16],
        weights: npt.NDArray[np.float16] | None,
        resident: Sequence[int] | None,
    ) -> Widths:
        """All that is resident, and further blocks while they are wanted."""
        assert resident is not None
        rows = zip(experts.tolist(), self.wanted(layer, experts, weights).tolist(), strict=True)
        return np.array([row_on(ids, resident, own) for ids, own in rows], np.int16)

    @abstractmethod
    def wanted(
        self,
        layer: int,
        experts: npt.NDArray[np.int16],
        weights: npt.NDArray[np.float16] | None,
    ) -> Bits:
        """Blocks worth loading, as bits: [rows, k]."""

    def table(self) -> Widths | None:
        """None: residency matters."""
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
        weights: npt.NDArray[np.float16] | None,
    ) -> Bits:
        """Blocks whose weight x contribution reaches the threshold."""
        worth = _worth(self.contributions[layer], self.thresholds[layer], experts, weights)
        return as_bits(worth)


@dataclass(frozen=True)
class Contribution(WidthPolicy):
    """Blocks worth executing, a ``share`` of all: the leading ones before the first that is not."""

    profiled: ClassVar = True
    counted: ClassVar = True
    share: Fraction = Fraction(3, 4)

    def bind(self, spec: ModelSpec, profile: Profile, ordered: bool) -> ByContribution:
        """Thresholds for the share; CrispError without contributions or weights."""
        sizes = contributions(spec, profile, "contribution")
        return ByContribution(
            np.minimum.accumulate(sizes, axis=2), thresholds(profile, sizes, self.share)
        )


@dataclass(frozen=True)
class ContributionResident(WidthPolicy):
    """All that is resident runs; the same threshold decides what is worth loading."""

    profiled: ClassVar = True
    counted: ClassVar = True
    share: Fraction = Fraction(3, 4)

    def bind(self, spec: ModelSpec, profile: Profile, ordered: bool) -> ResidentThresholdWidths:
        """Thresholds as of `Contribution`, which does not look at what is resident."""
        check_blocks(spec, "contribution-resident")
        sizes = contributions(spec, profile, "contribution-resident")
        return ResidentThresholdWidths(sizes, thresholds(profile, sizes, self.share))


def contributions(spec: ModelSpec, profile: Profile, name: str) -> Floats:
    """The profile's, in the blocks of ``spec``: [layers, experts, blocks].

    They were measured for blocks of another number where the routing is one model's and the sizes
    are another's: an expert's contribution is then spread evenly within each of them.
    """
    if profile.contributions is None or profile.router_weights is None:
        raise CrispError(
            f"width {name}: asks what each block contributes, which only preparation measures; "
            "give the prepared model's --metadata"
        )
    own = profile.contributions.astype(np.float64)
    have, want = own.shape[2], spec.n_blocks
    if have == want:
        return own
    upto = np.concatenate([np.zeros((*own.shape[:2], 1)), np.cumsum(own, axis=2)], axis=2)
    places = np.linspace(0, have, want + 1)
    low = np.minimum(places.astype(np.int64), have - 1)
    ends = upto[:, :, low] + (upto[:, :, low + 1] - upto[:, :, low]) * (places - low)
    return np.diff(ends, axis=2)


def thresholds(profile: Profile, sizes: Floats, share: Fraction) -> Floats:
    """What weight x contribution must reach for ``share`` of a layer's blocks to: [layers].

    Counted over the profile's tokens: each expert as often as it was routed to, at the quantiles of
    its router weights.
    """
    assert profile.router_weights is not None
    leading = np.minimum.accumulate(sizes, axis=2)
    found = np.zeros(len(sizes))
    for layer, counts in enumerate(profile.expert_counts):
        worth = (
            profile.router_weights[layer].astype(np.float64)[:, :, None]
            * leading[layer][:, None, :]
        )
        often = np.broadcast_to(counts[:, None, None], worth.shape).ravel()
        falling = np.argsort(-worth.ravel(), kind="stable")
        upto = np.cumsum(often[falling])
        least = share * int(upto[-1])
        if not share:
            found[layer] = np.inf
        elif upto[-1]:
            place = int(np.searchsorted(upto, -(-least.numerator // least.denominator)))
            found[layer] = worth.ravel()[falling[place]]
    return found


def row_on(experts: Sequence[int], resident: Sequence[int], wanted: Sequence[int]) -> list[int]:
    """`width_on` of a token's experts."""
    return [
        width_on(resident[expert], bits) if expert >= 0 else 0
        for expert, bits in zip(experts, wanted, strict=True)
    ]


def as_bits(flags: npt.NDArray[np.bool_]) -> Bits:
    """Flags [..., blocks] as words [...], block b as bit b."""
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
    weights: npt.NDArray[np.float16] | None,
) -> npt.NDArray[np.bool_]:
    """Whether weight x size reaches the threshold: [rows, k, blocks]; sizes [experts, blocks]."""
    asked = weights_of("contribution", weights).astype(np.float64)[:, :, None]
    worth: npt.NDArray[np.bool_] = asked * sizes[np.maximum(experts, 0)] >= threshold
    return worth & (experts >= 0)[:, :, None]
