"""Controls that are policies: skips that load as much as the paper's, and tiers at random."""

from __future__ import annotations

from dataclasses import dataclass, replace
from fractions import Fraction
from typing import ClassVar

import numpy as np

from benchmarks.quality.setting import Routes
from crisp.model.spec import ModelSpec
from crisp.policy.widths.base import Tiered, WidthTable
from crisp.policy.widths.skipping import Skip
from crisp.profile import Profile
from crisp.profile.tiers import sorted_tiers


def skip_to(target: float, routes: Routes) -> Skip:
    """Return the skipping policy that leaves ``target`` of all (token, expert)s.

    Each token's first expert always runs.
    """
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
        """Return the policy's own table, with other tiers."""
        alpha, beta = self.policy.alpha, self.policy.beta
        cuts = alpha.numerator, alpha.denominator, beta.numerator, beta.denominator
        by_tier = np.array([spec.n_blocks, *map(spec.width, (self.policy.warm, self.policy.cold))])
        random = np.random.default_rng(self.seed)
        tiered = self.policy.bind(spec, profile, ordered)
        blocks, (rows, columns) = tiered.blocks.copy(), np.triu_indices(spec.n_experts, 1)
        for layer in spec.moe_layers:
            counts = profile.pair_counts[layer, rows, columns]
            target = counts @ tiered.blocks[layer, rows, columns]
            near, best = np.inf, tiered.blocks[layer, rows, columns]
            for _ in range(self.draws):
                dealt = random.permutation(len(counts))
                drawn = np.empty(len(counts), np.int16)
                drawn[dealt] = by_tier[sorted_tiers(counts[dealt], *cuts)]
                off = abs(counts @ drawn - target) / max(1, counts.sum() * spec.n_blocks)
                if off < near:
                    near, best = off, drawn
                if near <= 0.01:
                    break
            blocks[layer, rows, columns] = blocks[layer, columns, rows] = best
        return replace(tiered, blocks=blocks)
