"""Estimates from many readings: each with an interval, each comparison on the same windows.

Windows are resampled within each kind of text, so that every resample has all kinds in it; one seed
draws the same windows for every reading, and a comparison takes differences within windows first.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

import numpy as np
import numpy.typing as npt

from crisp.quality import Scores
from crisp.quality.statistics import by_window, nll_increase, top_kept
from crisp.statistics import LEVEL, resample

Floats = npt.NDArray[np.float64]
Figure = dict[str, Any]  # {"value": float, "interval": [low, high]}


@dataclass(frozen=True, eq=False)
class Reading:
    """The scores of one policy on some windows, and the blocks it touched.

    share: expert bytes touched a token, of those at full width; bytes: the same in bytes.
    """

    scores: Scores
    share: float
    bytes: float
    touched: npt.NDArray[np.int64]  # [MoE layers, experts] blocks of each expert

    def of_text(self, number: int) -> Reading:
        """Return the part about one text; the bytes stay those of all."""
        rows = self.scores.text == number
        parts = [np.asarray(values)[rows] for values in vars(self.scores).values()]
        return replace(self, scores=Scores(*parts))


def row(label: str, reading: Reading, full: Reading, kinds: Mapping[int, str]) -> Figure:
    """Return a table's row for one policy: by kind of text, and the mean over the kinds.

    kinds: the name of each text number. ``nll_increase`` is the mean over the kinds of perplexity /
    full perplexity - 1; ``retention`` the mean share of tokens that keep their top prediction.
    """
    by_kind: dict[str, Figure] = {}
    ratios, keeps = [], []
    for seed, (number, kind) in enumerate(kinds.items()):
        scores, reference = reading.of_text(number).scores, full.of_text(number).scores
        level = _with_resamples(by_window(scores, scores.nll), seed)
        ratio = (
            np.exp(_with_resamples(by_window(scores, nll_increase(scores, reference)), seed)) - 1
        )
        keep = _with_resamples(by_window(scores, top_kept(scores, reference)), seed)
        by_kind[kind] = {"perplexity": figure(np.exp(level)), "increase": figure(ratio)}
        ratios.append(ratio)
        keeps.append(keep)
    return {
        "label": label,
        "share": reading.share,
        "bytes": reading.bytes,
        "by_kind": by_kind,
        "increase": figure(np.mean(ratios, axis=0)),
        "retention": figure(np.mean(keeps, axis=0)),
    }


def contrast(a: Reading, b: Reading, kinds: Mapping[int, str]) -> Figure:
    """Return perplexity of ``a`` over that of ``b``, less 1: geometric mean over kinds, paired."""
    logs = []
    for seed, number in enumerate(kinds):
        scores, other = a.of_text(number).scores, b.of_text(number).scores
        logs.append(_with_resamples(by_window(scores, nll_increase(scores, other)), seed))
    return figure(np.exp(np.mean(logs, axis=0)) - 1)


def blend(readings: Sequence[Reading]) -> Reading:
    """Return one control under several seeds as one: each token's mean loss (for `contrast`)."""
    scores = readings[0].scores
    nll = np.mean([one.scores.nll for one in readings], axis=0)
    return replace(
        readings[0],
        scores=replace(scores, nll=nll),
        share=float(np.mean([one.share for one in readings])),
        bytes=float(np.mean([one.bytes for one in readings])),
    )


def conditional(values: Floats, events: Floats, window: npt.NDArray[np.integer]) -> Figure:
    """Return the mean of tokens' ``values``, each counted as often as it has ``events``."""
    _, place = np.unique(window, return_inverse=True)
    sums = np.stack([np.bincount(place, events), np.bincount(place, events * values)], axis=1)
    return figure(_with_resamples(sums, 0))


def difference(values: Floats, a: Floats, b: Floats, window: npt.NDArray[np.integer]) -> Figure:
    """Return the `conditional` mean over events ``a`` less that over ``b``, paired."""
    _, place = np.unique(window, return_inverse=True)
    parts = (a, a * values, b, b * values)
    sums = np.stack([np.bincount(place, weights) for weights in parts], axis=1)
    whole = combined(sums)
    return figure(whole[:, 1] / whole[:, 0] - whole[:, 3] / whole[:, 2])


def grown(mean: Figure) -> Figure:
    """Return a mean increase of the loss in nats as one of the perplexity."""
    low, high = np.expm1(mean["interval"]).tolist()
    return {"value": float(np.expm1(mean["value"])), "interval": [low, high]}


def average(rows: list[Figure], label: str) -> Figure:
    """Return the mean of several readings of one control under different seeds.

    Intervals become the range of the seeds: that is what varies here.
    """

    def over(pick: Any) -> Figure:
        values = [pick(one)["value"] for one in rows]
        return {"value": float(np.mean(values)), "interval": [min(values), max(values)]}

    kinds = rows[0]["by_kind"]
    return {
        "label": label,
        "share": float(np.mean([one["share"] for one in rows])),
        "bytes": float(np.mean([one["bytes"] for one in rows])),
        "by_kind": {
            kind: {
                name: over(lambda one, kind=kind, name=name: one["by_kind"][kind][name])
                for name in ("perplexity", "increase")
            }
            for kind in kinds
        },
        "increase": over(lambda one: one["increase"]),
        "retention": over(lambda one: one["retention"]),
        "seeds": len(rows),
    }


def figure(values: Floats) -> Figure:
    """Return a figure with its interval; values: the figure itself, then its resamples."""
    low, high = np.nanpercentile(values[1:], [(100 - LEVEL) / 2, (100 + LEVEL) / 2]).tolist()
    return {"value": float(values[0]), "interval": [low, high]}


def combined(sums: Floats, seed: int = 0) -> Floats:
    """Return the total of sums [windows, q], then of each resample of windows: [1 + 1000, q]."""
    return np.concatenate([sums.sum(axis=0)[None], resample(sums, seed)])


def _with_resamples(sums: Floats, seed: int) -> Floats:
    """Return the mean of sums [windows, (n, total)], then that of each resample: [1 + 1000]."""
    whole = combined(sums, seed)
    with np.errstate(divide="ignore", invalid="ignore"):
        return whole[:, 1] / whole[:, 0]


def rounded(value: Any, digits: int = 6) -> Any:
    """Return the JSON value with ``digits`` significant digits in every number; NaN: null.

    >>> rounded({"a": [0.12345678, float("nan")], "b": 3})
    {'a': [0.123457, None], 'b': 3}
    """
    if isinstance(value, dict):
        return {key: rounded(item, digits) for key, item in value.items()}
    if isinstance(value, list | tuple):
        return [rounded(item, digits) for item in value]
    if isinstance(value, float | np.floating):
        return float(f"{value:.{digits}g}") if math.isfinite(value) else None
    return int(value) if isinstance(value, np.integer) else value
