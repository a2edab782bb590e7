"""Quality by tier (paper, A.1): what becomes of the tokens whose combinations are COLD?

A routing event is one combination of one token in one layer: one for top-2, k - 1 for top-k, each
with the anchor. A scored token's events are those of the pass that predicts it, which is fed the
token before it.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import numpy as np
import numpy.typing as npt

from crisp.checkpoint.windows import Windows
from crisp.profile import COLD, HOT, WARM
from crisp.quality.scores import Scores
from crisp.quality.statistics import increase, kept
from crisp.statistics import Estimate, Floats, as_json, estimate, mean

NAMES = {HOT: "hot", WARM: "warm", COLD: "cold"}


class TierCounts:
    """Counts the events of every token that is fed, by tier: a `crisp.adapter.Watch`."""

    def __init__(
        self, tiers: npt.NDArray[np.uint8], layers: tuple[int, ...], windows: Windows
    ) -> None:
        """tiers [layers, experts, experts]; layers: the MoE layers; windows: what will be fed."""
        self._tiers, self._layers, self._windows = tiers, layers, windows
        self._fed = [0] * len(layers)
        self._counts = np.zeros((windows.fed, len(NAMES)), np.uint16)

    def __call__(
        self,
        which: int,
        experts: npt.NDArray[np.int16],
        weights: npt.NDArray[np.float16],
        widths: npt.NDArray[np.int16],
    ) -> None:
        """The next tokens of MoE layer number ``which``."""
        anchor, others = experts[:, :1], experts[:, 1:]
        found = self._tiers[self._layers[which]][anchor, others]  # [n, k - 1]
        present = (anchor >= 0) & (others >= 0)
        start = self._fed[which]
        self._fed[which] = end = start + len(experts)
        for tier in NAMES:
            self._counts[start:end, tier] += ((found == tier) & present).sum(1, dtype=np.uint16)

    def scored(self) -> npt.NDArray[np.int64]:
        """[scored tokens, tiers]: the events of each, in the order of `Scores`."""
        ends = np.cumsum([len(tokens) for tokens in self._windows.tokens])
        rows = [
            np.arange(end - fresh - 1, end - 1)
            for end, fresh in zip(ends.tolist(), self._windows.fresh, strict=True)
        ]
        return np.asarray(self._counts[np.concatenate(rows)], np.int64)


@dataclass(frozen=True)
class OfTier:
    """One tier's share of all events, the share of its events whose token keeps its top prediction,
    and the mean increase of those tokens' negative log likelihood in nats (None: no events).
    """

    tier: str
    events: int
    share: float | None
    retention: Estimate | None
    nll_increase: Estimate | None

    def to_dict(self) -> dict[str, Any]:
        """Safe for JSON."""
        own = {"tier": self.tier, "events": self.events, "share": self.share}
        figures = {"retention": self.retention, "nll_increase": self.nll_increase}
        return own | as_json(figures)


def by_tier(
    events: npt.NDArray[np.int64], scores: Scores, reference: Scores, seed: int = 0
) -> list[OfTier]:
    """HOT, WARM and COLD. events [scored tokens, tiers], as `TierCounts.scored` gives them."""
    all_events = int(events.sum())
    tokens = kept(scores, reference), increase(scores, reference)
    found = []
    for tier, name in NAMES.items():
        own = events[:, tier]
        n = int(own.sum())
        means = [
            estimate(_sums(scores, own, values), mean, seed) if n else None for values in tokens
        ]
        found.append(OfTier(name, n, n / all_events if all_events else None, *means))
    return found


def _sums(scores: Scores, events: npt.NDArray[np.int64], values: Floats) -> Floats:
    """[windows, 2]: events of each window, and the sum over them of their tokens' ``values``."""
    own = np.bincount(scores.window, events), np.bincount(scores.window, events * values)
    return np.stack(own, axis=1)
