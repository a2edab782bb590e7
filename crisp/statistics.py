"""Confidence intervals: a bootstrap over windows of text, and Student's t over repeated runs.

The bootstrap resamples windows with replacement, so that the tokens of a window, which are not
independent of one another, stay together. Every figure is a function of sums over windows, so only
a few sums of each window are resampled. One seed draws the same windows for every figure and every
policy, and a comparison takes differences within a window first, so it is paired.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from statistics import fmean, stdev
from typing import Any

import numpy as np
import numpy.typing as npt

Floats = npt.NDArray[np.float64]
RESAMPLES = 1000
LEVEL = 95  # per cent, of a bootstrap interval
CONFIDENCE = 0.95  # of a Student's t interval
_AT_ONCE = 100  # resamples: a large matrix of draws would be slower, not faster


@dataclass(frozen=True)
class Estimate:
    """A figure and its bootstrap interval: percentiles of the figure over resampled windows.

    The interval is None where there is a single window, which says nothing about others.
    """

    value: float
    interval: tuple[float, float] | None


def as_json(figures: Mapping[str, Estimate | None]) -> dict[str, Any]:
    """Return each figure by name, its interval under name_interval; null where there is none.

    >>> as_json({"retention": Estimate(0.5, (0.4, 0.6))})
    {'retention': 0.5, 'retention_interval': [0.4, 0.6]}
    """
    fields: dict[str, Any] = {}
    for name, figure in figures.items():
        fields[name] = figure and figure.value
        fields[f"{name}_interval"] = figure and figure.interval and list(figure.interval)
    return fields


def estimate(sums: Floats, figure: Callable[[Floats], Floats], seed: int) -> Estimate:
    """Estimate a figure of sums [windows, q]; ``figure`` maps sums [..., q] to values [...].

    Resamples in which the figure is NaN (a rare tier that was not drawn) are left out.
    """
    value = float(figure(sums.sum(axis=0)))
    if len(sums) < 2:
        return Estimate(value, None)
    with np.errstate(divide="ignore", invalid="ignore"):
        drawn = figure(resample(sums, seed))
    low, high = np.nanpercentile(drawn, [(100 - LEVEL) / 2, (100 + LEVEL) / 2]).tolist()
    return Estimate(value, (low, high))


def resample(sums: Floats, seed: int) -> Floats:
    """Return the sums of 1,000 resamples of the windows: [windows, q] -> [1000, q]."""
    draw, n = np.random.default_rng(seed), len(sums)
    often = (draw.multinomial(n, np.full(n, 1 / n), _AT_ONCE) for _ in range(RESAMPLES // _AT_ONCE))
    return np.concatenate([times @ sums for times in often])


def mean(sums: Floats) -> Floats:
    """Return total / n of sums [..., (n, total)]: [...]."""
    return sums[..., 1] / sums[..., 0]


@dataclass(frozen=True)
class Interval:
    """The mean of ``n`` values and its half-width; None: a single value has no interval."""

    mean: float
    half_width: float | None
    n: int

    @property
    def share(self) -> float | None:
        """The half-width as a share of the mean; None where either is missing or the mean is 0."""
        if self.half_width is None or not self.mean:
            return None
        return self.half_width / abs(self.mean)


def interval(values: Sequence[float]) -> Interval:
    """Return the mean's 95 % interval, for values that are independent and about normal.

    >>> round(interval([9.0, 10.0, 11.0]).half_width, 3)  # 4.303 / sqrt(3)
    2.484
    """
    n = len(values)
    half = t_quantile(n - 1) * stdev(values) / math.sqrt(n) if n > 1 else None
    return Interval(fmean(values), half, n)


def t_quantile(freedom: int) -> float:
    """Return Student's t that 95 % of the values lie within, on both sides of 0.

    With t = sqrt(freedom) tan(angle) the share within is a finite sum in the angle's sine and
    cosine (Abramowitz and Stegun, 26.7.3 and 26.7.4), which grows with the angle: bisect for the
    angle.
    """
    low, high = 0.0, math.pi / 2
    while (middle := (low + high) / 2) not in (low, high):
        low, high = (middle, high) if _within(middle, freedom) < CONFIDENCE else (low, middle)
    return math.sqrt(freedom) * math.tan(low)


def _within(angle: float, freedom: int) -> float:
    """Return the share of Student's t between -sqrt(freedom) tan(angle) and the same above 0."""
    odd = freedom % 2
    term, total = (math.cos(angle) if odd else 1.0), 0.0
    for factor in range(2 if odd else 1, freedom, 2):
        total += term
        term *= math.cos(angle) ** 2 * factor / (factor + 1)
    total *= math.sin(angle)
    return 2 / math.pi * (angle + total) if odd else total
