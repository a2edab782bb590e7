"""Quality figures from scores, each with its interval (`crisp.statistics`)."""

from __future__ import annotations

import numpy as np
import numpy.typing as npt

from crisp.quality.scores import Scores
from crisp.statistics import Estimate, Floats, estimate, mean


def perplexity(scores: Scores, seed: int = 0) -> Estimate:
    """Return exp(mean negative log likelihood)."""
    return estimate(by_window(scores, scores.nll), _exp_of_mean, seed)


def perplexity_ratio(scores: Scores, reference: Scores, seed: int = 0) -> Estimate:
    """Return perplexity over the reference's on the same windows: 1.02 is a loss of 2 %."""
    return estimate(by_window(scores, nll_increase(scores, reference)), _exp_of_mean, seed)


def retention(scores: Scores, reference: Scores, seed: int = 0) -> Estimate:
    """Return the share of tokens whose top prediction is the reference's (accuracy retention)."""
    return estimate(by_window(scores, top_kept(scores, reference)), mean, seed)


def nll_increase(scores: Scores, reference: Scores) -> Floats:
    """Return by how much each token's negative log likelihood rose, in nats: [tokens]."""
    return np.subtract(scores.nll, reference.nll, dtype=np.float64)


def top_kept(scores: Scores, reference: Scores) -> Floats:
    """Return 1 where the top prediction is the reference's, else 0: [tokens]."""
    return np.where(scores.top == reference.top, 1.0, 0.0)


def by_window(scores: Scores, values: npt.NDArray[np.floating]) -> Floats:
    """Return [windows, 2]: tokens of each window, and the sum of their ``values`` [tokens]."""
    _, window = np.unique(scores.window, return_inverse=True)  # [tokens], from 0 without gaps
    return np.stack([np.bincount(window), np.bincount(window, values)], axis=1).astype(np.float64)


def _exp_of_mean(sums: Floats) -> Floats:
    return np.exp(mean(sums))
