"""Figures of quality from scores, each with its interval (`crisp.statistics`)."""

from __future__ import annotations

import numpy as np
import numpy.typing as npt

from crisp.quality.scores import Scores
from crisp.statistics import Estimate, Floats, estimate, mean


def perplexity(scores: Scores, seed: int = 0) -> Estimate:
    """exp(mean negative log likelihood)."""
    return estimate(by_window(scores, scores.nll), _exp_of_mean, seed)


def ratio(scores: Scores, reference: Scores, seed: int = 0) -> Estimate:
    """Perplexity over the reference's on the same windows: 1.02 is a loss of 2 %."""
    return estimate(by_window(scores, increase(scores, reference)), _exp_of_mean, seed)


def retention(scores: Scores, reference: Scores, seed: int = 0) -> Estimate:
    """Share of tokens whose top prediction is the reference's (accuracy retention)."""
    return estimate(by_window(scores, kept(scores, reference)), mean, seed)


def increase(scores: Scores, reference: Scores) -> Floats:
    """By how much each token's negative log likelihood rose, in nats."""
    return np.subtract(scores.nll, reference.nll, dtype=np.float64)


def kept(scores: Scores, reference: Scores) -> Floats:
    """1 where the top prediction is the reference's, else 0."""
    return np.where(scores.top == reference.top, 1.0, 0.0)


def by_window(scores: Scores, values: npt.NDArray[np.floating]) -> Floats:
    """[windows, 2]: how many tokens each window has, and the sum of their ``values``."""
    _, place = np.unique(scores.window, return_inverse=True)
    return np.stack([np.bincount(place), np.bincount(place, values)], axis=1).astype(np.float64)


def _exp_of_mean(sums: Floats) -> Floats:
    return np.exp(mean(sums))
