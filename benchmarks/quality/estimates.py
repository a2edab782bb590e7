"""Figures of many readings: each with an interval, each comparison on the same windows.

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
    """One policy's scores on some windows, and what it touched.

    share: expert bytes touched a token, of those at full width; bytes: the same in bytes.
    """

    scores: Scores
    share: float
    bytes: float
    touched: npt.NDArray[np.int64]  # [MoE layers, experts] blocks of each expert

    def of_text(self, number: int) -> Reading:
        """The part about one text; the bytes stay those of all."""
        own = self.scores.text == number
        parts = [np.asarray(values)[own] for values in vars(self.scores).values()]
        return replace(self, scores=Scores(*parts))


def row(label: str, reading: Reading, full: Reading, kinds: Mapping[int, str]) -> Figure:
    """What a table says of one policy: by kind of text, and the mean over the kinds.

    kinds: the name of each text number. ``nll_increase`` is the mean over the kinds of perplexity /
    full perplexity - 1; ``retention`` the mean share of tokens that keep their top prediction.
    """
    by_kind: dict[str, Figure] = {}
    ratios, keeps = [], []
    for seed, (number, kind) in enumerate(kinds.items()):
        own, reference = reading.of_text(number).scores, full.of_text(number).scores
        level = _with_resamples(by_window(own, own.nll), seed)
        ratio = np.exp(_with_resamples(by_window(own, nll_increase(own, reference)), seed)) - 1
        keep = _with_resamples(by_window(own, top_kept(own, reference)), seed)
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
    """Perplexity of ``a`` over that of ``b``, less 1: geometric mean over the kinds, paired."""
    logs = []
    for seed, number in enumerate(kinds):
        own, other = a.of_text(number).scores, b.of_text(number).scores
        logs.append(_with_resamples(by_window(own, nll_increase(own, other)), seed))
    return figure(np.exp(np.mean(logs, axis=0)) - 1)


def blend(readings: Sequence[Reading]) -> Reading:
    """One control under several seeds as one: the mean loss of every token (for `contrast`)."""
    scores = readings[0].scores
    nll = np.mean([one.scores.nll for one in readings], axis=0)
    return replace(
        readings[0],
        scores=replace(scores, nll=nll),
        share=float(np.mean([one.share for one in readings])),
        bytes=float(np.mean([one.bytes for one in readings])),
    )


def conditional(values: Floats, events: Floats, window: npt.NDArray[np.integer]) -> Figure:
    """Mean of tokens' ``values``, each counted as often as it has ``events``."""
    _, place = np.unique(window, return_inverse=True)
    sums = np.stack([np.bincount(place, events), np.bincount(place, events * values)], axis=1)
    return figure(_with_resamples(sums, 0))


def difference(values: Floats, a: Floats, b: Floats, window: npt.NDArray[np.integer]) -> Figure:
    """`conditional` mean over events ``a`` less that over events ``b``, on the same resamples."""
    _, place = np.unique(window, return_inverse=True)
    sums = np.stack([np.bincount(place, own) for own in (a, a * values, b, b * values)], axis=1)
    whole = combined(sums)
    return figure(whole[:, 1] / whole[:, 0] - whole[:, 3] / whole[:, 2])


def grown(mean: Figure) -> Figure:
    """A mean increase of the loss in nats as one of the perplexity."""
    low, high = np.expm1(mean["interval"]).tolist()
    return {"value": float(np.expm1(mean["value"])), "interval": [low, high]}


def average(rows: list[Figure], label: str) -> Figure:
    """The mean of several readings of one control under different seeds.

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
    """values: the figure itself, then its resamples."""
    low, high = np.nanpercentile(values[1:], [(100 - LEVEL) / 2, (100 + LEVEL) / 2]).tolist()
    return {"value": float(values[0]), "interval": [low, high]}


def combined(sums: Floats, seed: int = 0) -> Floats:
    """Sums [windows, q]: the total, then that of each resample of the windows: [1 + 1000, q]."""
    return np.concatenate([sums.sum(axis=0)[None], resample(sums, seed)])


def _with_resamples(sums: Floats, seed: int) -> Floats:
    """The mean of sums [windows, (n, total)], then that of each resample of the windows."""
    whole = combined(sums, seed)
    with np.errstate(divide="ignore", invalid="ignore"):
        return whole[:, 1] / whole[:, 0]


def rounded(value: Any, digits: int = 6) -> Any:
    """The same JSON value with ``digits`` significant digits in every number; NaN becomes null.

    >>> rounded({"a": [0.12345678, float("nan")], "b": 3})
    {'a': [0.123457, None], 'b': 3}
    """
    if isinstance(value, dict):
        return {key: rounded(own, digits) for key, own in value.items()}
    if isinstance(value, list | tuple):
        return [rounded(own, digits) for own in value]
    if isinstance(value, float | np.floating):
        return float(f"{value:.{digits}g}") if math.isfinite(value) else None
    return int(value) if isinstance(value, np.integer) else value
