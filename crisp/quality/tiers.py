"""Quality by tier (paper, A.1): what happens to the tokens whose combinations are COLD.

A routing event is one combination of one token in one layer: one for top-2, k - 1 for top-k, each
with the anchor. A scored token's events are those of the pass that predicts it, whose input is
the token before it.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import numpy as np
import numpy.typing as npt

from crisp.profile import COLD, HOT, WARM
from crisp.quality.scores import Scores
from crisp.quality.statistics import nll_increase, top_kept
from crisp.statistics import Estimate, Floats, as_json, estimate, mean
from crisp.text_windows import TokenWindows

NAMES = {HOT: "hot", WARM: "warm", COLD: "cold"}


class TierCounts:
    """Counts the events of every token that is fed, by tier: a `crisp.adapter.widths.Watch`."""

    def __init__(
        self, tiers: npt.NDArray[np.uint8], layers: tuple[int, ...], windows: TokenWindows
    ) -> None:
        """tiers uint8 [layers, experts, experts]; layers: the MoE layers; windows: to be fed."""
        self._tiers, self._layers, self._windows = tiers, layers, windows
        self._fed = [0] * len(layers)  # by MoE layer: tokens so far
        self._counts = np.zeros((windows.n_fed, len(NAMES)), np.uint16)

    def __call__(
        self,
        which: int,
        experts: npt.NDArray[np.int16],
        weights: npt.NDArray[np.float16],
        widths: npt.NDArray[np.int16],
    ) -> None:
        """Count the next tokens of MoE layer number ``which``; experts [n, k] by weight."""
        anchor, others = experts[:, :1], experts[:, 1:]
        tier_of = self._tiers[self._layers[which]][anchor, others]  # [n, k - 1]
        present = (anchor >= 0) & (others >= 0)
        start = self._fed[which]
        self._fed[which] = end = start + len(experts)
        for tier in NAMES:
            self._counts[start:end, tier] += ((tier_of == tier) & present).sum(1, dtype=np.uint16)

    def scored(self) -> npt.NDArray[np.int64]:
        """Return the events of each scored token, [tokens, tiers], in the order of `Scores`."""
        ends = np.cumsum([len(tokens) for tokens in self._windows.tokens])
        rows = [
            np.arange(end - scored - 1, end - 1)
            for end, scored in zip(ends.tolist(), self._windows.scored, strict=True)
        ]
        return np.asarray(self._counts[np.concatenate(rows)], np.int64)


@dataclass(frozen=True)
class TierQuality:
    """The quality of one tier's events; None where there are none."""

    tier: str
    events: int
    share: float | None  # of all events
    retention: Estimate | None  # share of its events whose token keeps its top prediction
    nll_increase: Estimate | None  # mean over its events, in nats

    def to_dict(self) -> dict[str, Any]:
        """Return a dict that is safe for JSON."""
        figures = {"retention": self.retention, "nll_increase": self.nll_increase}
        row = {"tier": self.tier, "events": self.events, "share": self.share}
        return row | as_json(figures)


def quality_by_tier(
    events: npt.NDArray[np.int64], scores: Scores, reference: Scores, seed: int = 0
) -> list[TierQuality]:
    """Return HOT, WARM and COLD; events [scored tokens, tiers] as of `TierCounts.scored`."""
    all_events = int(events.sum())
    tokens = top_kept(scores, reference), nll_increase(scores, reference)
    result = []
    for tier, name in NAMES.items():
        in_tier = events[:, tier]  # [scored tokens]
        n = int(in_tier.sum())
        means = [
            estimate(_sums(scores, in_tier, values), mean, seed) if n else None for values in tokens
        ]
        result.append(TierQuality(name, n, n / all_events if all_events else None, *means))
    return result


def _sums(scores: Scores, events: npt.NDArray[np.int64], values: Floats) -> Floats:
    """Return [windows, 2]: events of each window, and the sum over them of tokens' ``values``."""
    sums = np.bincount(scores.window, events), np.bincount(scores.window, events * values)
    return np.stack(sums, axis=1)
