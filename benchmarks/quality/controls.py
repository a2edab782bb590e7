"""What the paper's policies are compared with: skips that load as much, tiers at random, bits."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, replace
from fractions import Fraction
from typing import ClassVar

import numpy as np
import numpy.typing as npt

from crisp.model.spec import ModelSpec
from crisp.policy.widths.base import Tiered, WidthTable
from crisp.policy.widths.skipping import Skip
from crisp.prepare.calibration import CalibrationSums
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


def skip_to(target: float, routes: Routes) -> Skip:
    """The share that leaves ``target`` of all (token, expert)s; each token's first always runs."""
    weights = routes.weights.astype(np.float64)
    beside = weights[..., 1:] / np.maximum(weights[..., :1], np.finfo(np.float64).tiny)
    k = weights.shape[2]
    left = float(np.clip((target * k - 1) / (k - 1), 0, 1))
    return Skip(Fraction(float(np.quantile(beside, 1 - left))))


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


def activations(calibration: CalibrationSums) -> dict[int, Floats]:
    """By layer, how many tokens each expert had."""
    return {layer: own.tokens.astype(np.float64) for layer, own in calibration.layers.items()}


def saliency(calibration: CalibrationSums) -> dict[int, Floats]:
    """By layer, mean norm of what each expert adds in its combinations, weight included."""
    return {
        layer: own.removed.sum(1) / np.maximum((own.anchored + own.anchored.T).sum(1), 1)
        for layer, own in calibration.layers.items()
    }
