"""Width rules that the paper does not have, to compare with: plain ones, and tiers at random.

The plain rules look at the router's weights. Their thresholds are set on calibration text, to meet
a share of the full bytes; on other text they meet it nearly.
"""

from __future__ import annotations

import hashlib
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from typing import ClassVar, Self

import numpy as np
import numpy.typing as npt

from crisp.model import ModelSpec
from crisp.policy.width import Tiered, WidthTable
from crisp.prepare.calibration import Calibration
from crisp.profile import Profile
from crisp.profile.tiers import sorted_tiers

Shorts = npt.NDArray[np.int16]
Halves = npt.NDArray[np.float16]
Floats = npt.NDArray[np.float64]


@dataclass(frozen=True, eq=False)
class Routes:
    """What the routers said of some tokens, experts by descending weight (-1 absent)."""

    ids: Shorts  # [MoE layers, tokens, k]
    weights: Halves


class Rule:
    """A width policy that is bound already: it needs neither profile nor residency."""

    residency = counted = False

    def bind(self, spec: ModelSpec, profile: Profile, ordered: bool) -> Self:
        """Nothing is left to bind."""
        return self

    def table(self) -> None:
        """Widths depend on more than the combination."""


@dataclass(frozen=True)
class SkipByWeight(Rule):
    """An expert is skipped where its weight is below ``share`` of the token's first one's."""

    share: float
    n_blocks: int

    @classmethod
    def meeting(cls, target: float, routes: Routes, n_blocks: int) -> SkipByWeight:
        """The threshold that leaves ``target`` of all (token, expert)s, the first ones always."""
        relative, k = _relative(routes.weights)[..., 1:], routes.weights.shape[2]
        left = np.clip((target * k - 1) / (k - 1), 0, 1)
        cut = np.inf if left == 0 else float(np.quantile(relative, 1 - left))
        return cls(cut, n_blocks)

    def widths(
        self, layer: int, experts: Shorts, weights: Halves | None, resident: Sequence[int] | None
    ) -> Shorts:
        """Full or nothing."""
        assert weights is not None
        keep = _relative(weights) >= self.share
        keep[:, 0] = True
        return np.where(keep & (experts >= 0), self.n_blocks, 0).astype(np.int16)


@dataclass(frozen=True, eq=False)
class ByContribution(Rule):
    """A block runs where router weight times its mean contribution reaches its layer's threshold.

    The width is the leading blocks before the first that does not.
    """

    leading: Mapping[int, Floats]  # by layer [experts, blocks]: least contribution so far
    threshold: Mapping[int, float]

    @classmethod
    def meeting(
        cls, target: float, routes: Routes, contributions: Mapping[int, npt.NDArray[np.float32]]
    ) -> ByContribution:
        """Thresholds that leave ``target`` of all blocks in every layer."""
        leading = {
            layer: np.minimum.accumulate(own.astype(np.float64), axis=1)
            for layer, own in contributions.items()
        }
        threshold = {}
        for (layer, own), ids, weights in zip(
            leading.items(), routes.ids, routes.weights, strict=True
        ):
            size = weights.astype(np.float64)[..., None] * own[np.maximum(ids, 0)]
            threshold[layer] = float(np.quantile(size, 1 - target))
        return cls(leading, threshold)

    def __repr__(self) -> str:
        digest = hashlib.sha256()
        for layer, own in self.leading.items():
            digest.update(own.tobytes() + repr((layer, self.threshold[layer])).encode())
        return f"ByContribution({digest.hexdigest()[:16]})"

    def widths(
        self, layer: int, experts: Shorts, weights: Halves | None, resident: Sequence[int] | None
    ) -> Shorts:
        """Any number of blocks; for some tokens none at all."""
        assert weights is not None
        own = self.leading[layer][np.maximum(experts, 0)]  # [rows, k, blocks], falling
        runs = weights.astype(np.float64)[..., None] * own >= self.threshold[layer]
        return np.where(experts >= 0, runs.sum(2), 0).astype(np.int16)


@dataclass(frozen=True)
class DealtTiers:
    """The tiered policy with every layer's combinations in random order, cut at the same shares.

    A frequent combination at a cut would take its tier far beyond it; so orders are drawn until the
    layer touches as many bytes as with tiers by frequency, to a hundredth of a full expert's.
    """

    counted: ClassVar = True
    seed: int
    policy: Tiered
    draws: int = 1000  # then the nearest of them

    def bind(self, spec: ModelSpec, profile: Profile, ordered: bool) -> WidthTable:
        """As the policy's own, with other tiers."""
        alpha, beta = self.policy.alpha, self.policy.beta
        cuts = alpha.numerator, alpha.denominator, beta.numerator, beta.denominator
        by_tier = np.array([spec.n_blocks, *map(spec.width, (self.policy.warm, self.policy.cold))])
        random = np.random.default_rng(self.seed)
        own = self.policy.bind(spec, profile, ordered)
        blocks, (rows, columns) = own.blocks.copy(), np.triu_indices(spec.n_experts, 1)
        for layer in spec.moe_layers:
            counts = profile.pair_counts[layer, rows, columns]
            wanted = counts @ own.blocks[layer, rows, columns]
            near, best = np.inf, own.blocks[layer, rows, columns]
            for _ in range(self.draws):
                dealt = random.permutation(len(counts))
                drawn = np.empty(len(counts), np.int16)
                drawn[dealt] = by_tier[sorted_tiers(counts[dealt], *cuts)]
                off = abs(counts @ drawn - wanted) / max(1, counts.sum() * spec.n_blocks)
                if off < near:
                    near, best = off, drawn
                if near <= 0.01:
                    break
            blocks[layer, rows, columns] = blocks[layer, columns, rows] = best
        return replace(own, blocks=blocks)


def _relative(weights: Halves) -> npt.NDArray[np.float32]:
    wide = weights.astype(np.float32)
    return wide / np.maximum(wide[..., :1], np.finfo(np.float32).tiny)


def bits_by_rank(worth: Mapping[int, Floats]) -> dict[int, npt.NDArray[np.int64]]:
    """EdgeMoE's widths of weights: by layer, 8 bits for the best quarter of experts, 2 for the
    worst quarter, 4 for the others. worth [experts], larger is better.
    """
    bits = {}
    for layer, own in worth.items():
        place, quarter = np.empty(len(own), np.int64), len(own) // 4
        place[np.argsort(-own, kind="stable")] = np.arange(len(own))
        bits[layer] = np.where(place < quarter, 8, np.where(place < len(own) - quarter, 4, 2))
    return bits


def least(worth: Mapping[int, Floats], gone: int) -> dict[int, npt.NDArray[np.bool_]]:
    """By layer, True at the ``gone`` experts of least worth."""
    found = {}
    for layer, own in worth.items():
        found[layer] = np.zeros(len(own), bool)
        found[layer][np.argsort(own, kind="stable")[:gone]] = True
    return found


def activations(calibration: Calibration) -> dict[int, Floats]:
    """By layer, how many tokens each expert had."""
    return {layer: own.tokens.astype(np.float64) for layer, own in calibration.layers.items()}


def saliency(calibration: Calibration) -> dict[int, Floats]:
    """By layer, mean norm of what each expert adds in its combinations, weight included."""
    return {
        layer: own.removed.sum(1) / np.maximum((own.anchored + own.anchored.T).sum(1), 1)
        for layer, own in calibration.layers.items()
    }
