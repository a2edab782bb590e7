"""Figures from scores, each with its interval.

Windows are resampled with replacement (a bootstrap), so that tokens of one window, which are not
independent of one another, stay together. Every figure is a function of sums over windows: only a
few sums of each window are resampled. One seed draws the same windows for every figure and every
policy, and a comparison takes differences within a window first, so it is paired.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

import numpy as np
import numpy.typing as npt

from crisp.quality.scores import Scores

Floats = npt.NDArray[np.float64]
RESAMPLES = 1000
LEVEL = 95  # per cent, of an interval
_AT_ONCE = 100  # resamples: a large matrix of draws would be slower, not faster


@dataclass(frozen=True)
class Estimate:
    """A figure and its interval: the percentiles of its value over resampled windows (None where
    there is a single window, which says nothing of others).
    """

    value: float
    interval: tuple[float, float] | None


def as_json(figures: Mapping[str, Estimate | None]) -> dict[str, Any]:
    """Each figure under its name, and its interval under name_interval; null where there is none.

    >>> as_json({"retention": Estimate(0.5, (0.4, 0.6))})
    {'retention': 0.5, 'retention_interval': [0.4, 0.6]}
    """
    fields: dict[str, Any] = {}
    for name, figure in figures.items():
        fields[name] = figure and figure.value
        fields[f"{name}_interval"] = figure and figure.interval and list(figure.interval)
    return fields


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


def estimate(sums: Floats, figure: Callable[[Floats], Floats], seed: int) -> Estimate:
    """A figure of sums [windows, q]; ``figure`` maps [..., q] to [...].

    Resamples in which it has no value (a rare tier that was not drawn) are left out.
    """
    value = float(figure(sums.sum(axis=0)))
    if len(sums) < 2:
        return Estimate(value, None)
    with np.errstate(divide="ignore", invalid="ignore"):
        drawn = figure(resampled(sums, seed))
    low, high = np.nanpercentile(drawn, [(100 - LEVEL) / 2, (100 + LEVEL) / 2]).tolist()
    return Estimate(value, (low, high))


def resampled(sums: Floats, seed: int) -> Floats:
    """The sums of 1,000 resamples of the windows: [1000, q]."""
    draw, n = np.random.default_rng(seed), len(sums)
    often = (draw.multinomial(n, np.full(n, 1 / n), _AT_ONCE) for _ in range(RESAMPLES // _AT_ONCE))
    return np.concatenate([times @ sums for times in often])


def mean(sums: Floats) -> Floats:
    """[..., (n, total)] -> [...]."""
    return sums[..., 1] / sums[..., 0]


def _exp_of_mean(sums: Floats) -> Floats:
    return np.exp(mean(sums))
