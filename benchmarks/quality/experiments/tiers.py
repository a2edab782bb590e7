"""Tiers: what uniform widths cost each, what each keeps, and other ways to the same bytes."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from fractions import Fraction
from hashlib import sha256
from typing import Any, Self

import numpy as np
import numpy.typing as npt

from benchmarks.quality.estimates import (
    Figure,
    Reading,
    conditional,
    contrast,
    difference,
    grown,
    row,
)
from benchmarks.quality.experiments import expert_controls
from benchmarks.quality.experiments.expert_controls import dropped
from benchmarks.quality.setting import KINDS, scored
from benchmarks.quality.study import TIERED, Study
from crisp.model.spec import ModelSpec
from crisp.profile import Profile, tiers
from crisp.quality.statistics import nll_increase, top_kept

CLASSES = ("top 10 %", "10 to 50 %", "bottom 50 %")
TIERS = ("hot", "warm", "cold")
SETTINGS = {
    "tiered(.6,.9)": TIERED,
    "tiered(0,1)": "tiered(alpha=0,beta=1)",
    "tiered(0,.5)": "tiered(alpha=0,beta=.5)",
    "single": "single",
}


def classes(study: Study) -> Figure:
    """Measure Figure 1: events by how frequent their combination is.

    Uniform 50 % for all of them, and for those of one class alone.
    """
    of = by_frequency(study.prepared.pair_counts)
    events = _events(study, of)
    half = study.read("uniform(.5)", study.orders)
    change, keep = (
        nll_increase(half.scores, study.full.scores),
        top_kept(half.scores, study.full.scores),
    )
    window, rows = study.full.scores.window, []
    for place, name in enumerate(CLASSES):
        class_events = events[:, place].astype(np.float64)
        alone = study.read(HalfOfClass(of, place, study.spec.n_blocks), study.orders)
        rows.append({
            "class": name,
            "share": float(class_events.sum() / events.sum()),
            "increase": grown(conditional(change, class_events, window)),
            "lost": _lost(conditional(keep, class_events, window)),
            "alone": row(name, alone, study.full, KINDS),
        })  # fmt: skip
    common, rare = (events[:, place].astype(np.float64) for place in (0, 2))
    return {"rows": rows, "difference": difference(1 - keep, common, rare, window)}


@dataclass(frozen=True, eq=False)
class HalfOfClass:
    """A width policy: half width for combinations of one class, full for all others.

    The anchor goes with its first combination.
    """

    classes: npt.NDArray[np.int64]  # [layers, E, E]
    narrow: int
    n_blocks: int
    residency = counted = False

    def bind(self, spec: ModelSpec, profile: Profile, ordered: bool) -> Self:
        """No-op: nothing is left to bind."""
        return self

    def table(self) -> None:
        """Return None: widths depend on more than a combination."""

    def __repr__(self) -> str:
        digest = sha256(self.classes.tobytes()).hexdigest()
        return f"HalfOfClass({self.narrow}, {self.n_blocks}, {digest[:16]})"

    def widths(self, layer: int, experts: Any, weights: Any, resident: Any) -> Any:
        """Return half or full width of each (token, expert): [rows, k]."""
        classes = self.classes[layer][experts[:, :1], experts]
        classes[:, 0] = classes[:, 1]
        widths = np.where(classes == self.narrow, -(-self.n_blocks // 2), self.n_blocks)
        return np.where(experts >= 0, widths, 0).astype(np.int16)


def by_frequency(pair_counts: npt.NDArray[np.int64]) -> npt.NDArray[np.int64]:
    """Return 0 for the top tenth of a layer's combinations, 1 to a half, 2 else: [layers, E, E].

    >>> counts = np.zeros((1, 3, 3), int)
    >>> counts[0, [0, 0, 1], [1, 2, 2]] = 5, 9, 1
    >>> by_frequency(counts)[0][np.triu_indices(3, 1)]
    array([1, 0, 2])
    """
    layers, n, _ = pair_counts.shape
    above = np.triu_indices(n, 1)
    m = len(above[0])
    result = np.full((layers, n, n), 2)
    for layer in range(layers):
        place = np.empty(m, np.int64)
        place[np.argsort(-pair_counts[layer][above], kind="stable")] = np.arange(m)
        result[layer][above] = np.where(place * 10 < m, 0, np.where(place * 2 < m, 1, 2))
        result[layer] = np.minimum(result[layer], result[layer].T)
    return result


def by_tier(study: Study) -> Figure:
    """Measure Figure 15: what tokens of each tier keep, by the width of Cold's auxiliary too."""
    events = _events(study, tiers(study.prepared, Fraction(3, 5), Fraction(9, 10)))
    full, window = study.full, study.full.scores.window
    readings = {
        "whole": study.read(TIERED, study.orders, study.prepared),
        "warm": study.read("tiered(.6,.9,.5,cold=1)", study.orders, study.prepared),
        "cold": study.read("tiered(.9,.9)", study.orders, study.prepared),
        "cold 50 %": study.read("tiered(.6,.9,.5,cold=.5)", study.orders, study.prepared),
    }

    def keeps(reading: Reading, tier: int) -> Figure:
        tier_events = events[:, tier].astype(np.float64)
        return conditional(top_kept(reading.scores, full.scores), tier_events, window)

    rows = []
    for place, name in enumerate(TIERS):
        alone = full if name == "hot" else readings[name]
        rows.append({
            "tier": name,
            "share": float(events[:, place].sum() / events.sum()),
            "retention": keeps(readings["whole"], place),
            "alone": keeps(alone, place),
            "alone_increase": row(name, alone, full, KINDS)["increase"],
        })  # fmt: skip
    cold = [
        {"auxiliary": width, "kept": keeps(narrowed, 2), **row(width, narrowed, full, KINDS)}
        for width, narrowed in (
            ("100 %", readings["warm"]),
            ("50 %", readings["cold 50 %"]),
            ("0 %", readings["whole"]),
        )
    ]
    hot, rare = (events[:, place].astype(np.float64) for place in (0, 2))
    tokens = top_kept(readings["whole"].scores, full.scores)
    return {"rows": rows, "cold": cold, "difference": difference(tokens, hot, rare, window)}


def same_memory(study: Study) -> Figure:
    """Measure Figure 9: tiered widths, uniform widths and dropped experts at matched bytes.

    Widths are matched by the bytes a token touches; dropping, which touches as many as before, by
    the bytes that are left to store.
    """
    spec, model, groups = study.spec, study.loaded.model, []
    worth = {
        "dropped, fewest activations": expert_controls.activations(study.sums),
        "dropped, least output": expert_controls.saliency(study.sums),
    }
    for name, width in SETTINGS.items():
        readings = {name: study.read(width, study.orders, study.prepared)}
        share = readings[name].share
        blocks = max(1, round(share * spec.n_blocks))
        uniform = Fraction(blocks * spec.block, spec.d_ff)
        label = f"uniform {100 * float(uniform):.3g} %"
        readings[label] = study.read(f"uniform({float(min(uniform, Fraction(1)))})", study.orders)
        keep = max(spec.top_k, round(share * spec.n_experts))
        for rule, values in worth.items():
            gone = expert_controls.least(values, spec.n_experts - keep)
            readings[rule] = _without(study, model, f"{rule} {keep}", gone)
        others = list(readings)[1:]
        if study.pairs:
            heavier = study.read(width, study.orders, study.by_weight)
            readings[f"{name}, roles by router weight"] = heavier
        rows = [row(other, reading, study.full, KINDS) for other, reading in readings.items()]
        for one in rows:
            if one["label"] in worth:
                one["stored"], one["kept"] = keep / spec.n_experts, keep
        groups.append({
            "setting": name,
            "rows": rows,
            "contrasts": {
                f"tiered / {kind}": contrast(readings[name], readings[other], KINDS)
                for kind, other in zip(("uniform", *worth), others, strict=True)
            }
            | {
                f"tiered by weight / {kind}": contrast(heavier, readings[other], KINDS)
                for kind, other in zip(("uniform", *worth), others, strict=True)
                if study.pairs
            },
        })  # fmt: skip
    return {"groups": groups}


def _without(
    study: Study, model: Any, name: str, gone: Mapping[int, npt.NDArray[np.bool_]]
) -> Reading:
    reading = study.read("full", study.orders, within=(name, lambda: dropped(model, gone)))
    for place, layer in enumerate(study.spec.moe_layers):
        if reading.touched[place][gone[layer]].any():
            raise RuntimeError(f"layer {layer}: a dropped expert was executed")
    return reading


def _events(study: Study, of: npt.NDArray[Any]) -> npt.NDArray[np.int64]:
    """Count each class's events in the full model's routing: [scored tokens, 3].

    of: the class of each combination, [layers, E, E].
    """
    study.arrange(study.orders)
    routes = study.routes(study.heldout)
    rows = scored(study.heldout)
    events = np.zeros((len(rows), 3), np.int64)
    for layer, ids in zip(study.spec.moe_layers, routes.ids, strict=True):
        chosen = ids[rows]  # [scored tokens, k]
        classes = of[layer][chosen[:, :1], chosen[:, 1:]]
        for place in range(3):
            events[:, place] += ((classes == place) & (chosen[:, 1:] >= 0)).sum(1)
    return events


def _lost(mean: Figure) -> Figure:
    low, high = mean["interval"]
    return {"value": 1 - mean["value"], "interval": [1 - high, 1 - low]}
