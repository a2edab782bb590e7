"""Roles of experts: what masking one of a pair costs, and how well cheaper methods agree."""

from __future__ import annotations

from typing import Any

import numpy as np
import numpy.typing as npt

from benchmarks.quality.estimates import Figure, combined, conditional, difference, figure, grown
from benchmarks.quality.experiments.masking import most_frequent, pair_by_pair, without
from benchmarks.quality.setting import KINDS
from benchmarks.quality.study import ROLES, Study
from crisp.prepare.ablation import Ablation
from crisp.prepare.calibration import LayerSums
from crisp.prepare.roles import Exact, Grouped, spell_method
from crisp.profile import dominant
from crisp.profile.roles import agreement

TOP = 20  # combinations, as in the paper's Figure 4
SHOWN = 12  # combinations of one expert
LEAST = 32  # tokens of a combination that is shown


def masking(study: Study) -> Figure:
    """Measure Figure 4: roles from calibration text, cost of masking on held-out text."""
    pairs = most_frequent(study.prepared, TOP)
    first = _dominant(study)
    text = study.windows("heldout", KINDS.values(), study.amounts.masking)
    study.arrange(study.orders)
    plain, gained = pair_by_pair(Ablation(study.loaded.model, text), pairs)
    swap = [first[layer, i, j] != i for layer, i, j in pairs]
    gained[:, swap] = gained[:, swap, ::-1]  # the dominant expert's first
    sums = combined(np.concatenate([plain, gained.reshape(len(plain), -1)], axis=1))
    tokens, loss, rest = sums[:, :1], sums[:, 1:2], sums[:, 2:]
    cost = np.exp(loss / tokens) * np.expm1(rest / tokens)  # [1 + resamples, pairs x 2]
    cost = cost.reshape(len(cost), len(pairs), 2)
    mean = cost.mean(axis=1)
    return {
        "tokens": int(plain[:, 0].sum()),
        "perplexity": figure(np.exp(loss / tokens)[:, 0]),
        "pairs": [
            {
                "layer": layer,
                "dominant": j if turned else i,
                "auxiliary": i if turned else j,
                "dominant_cost": figure(cost[:, place, 0]),
                "auxiliary_cost": figure(cost[:, place, 1]),
            }
            for place, ((layer, i, j), turned) in enumerate(zip(pairs, swap, strict=True))
        ],
        "dominant_cost": figure(mean[:, 0]),
        "auxiliary_cost": figure(mean[:, 1]),
        "difference": figure(mean[:, 0] - mean[:, 1]),
        "ratio": figure(mean[:, 0] / mean[:, 1]),
        "same": figure((cost[:, :, 0] > cost[:, :, 1]).mean(axis=1)),
    }


def one_expert(study: Study) -> Figure:
    """Measure Figure 2: what tokens lose when an expert is dropped from its layer.

    The expert is dominant in some combinations and auxiliary in others; each combination is
    reported.
    """
    first = _dominant(study)
    layer, expert = _two_faced(study, first)
    study.arrange(study.orders)
    experts, gains, windows = without(Ablation(study.loaded.model, study.heldout), layer, expert)
    anchored = experts[:, 0] == expert
    leads = {True: np.zeros(len(gains)), False: np.zeros(len(gains))}  # combinations of a token
    combinations: list[Figure] = []
    for partner in range(study.spec.n_experts):
        beside = (experts[:, 1:] == partner).any(1)
        tokens = np.where(anchored, beside, experts[:, 0] == partner)
        if partner == expert or not tokens.any():
            continue
        dominates = bool(first[layer, expert, partner] == expert)
        leads[dominates] += tokens
        if tokens.sum() >= LEAST:
            mean = conditional(gains, tokens.astype(np.float64), windows)
            combinations.append({
                "partner": partner,
                "tokens": int(tokens.sum()),
                "dominant": dominates,
                "increase": grown(mean),
            })  # fmt: skip
    combinations.sort(key=lambda one: -one["tokens"])
    shown = sorted(combinations[:SHOWN], key=lambda one: -one["increase"]["value"])
    return {
        "layer": layer,
        "expert": expert,
        "pairs": shown,
        "combinations": len(combinations),
        "difference": difference(gains, leads[True], leads[False], windows),
        "where_dominant": grown(conditional(gains, leads[True], windows)),
        "where_auxiliary": grown(conditional(gains, leads[False], windows)),
    }


def agreements(study: Study) -> Figure:
    """Measure how well cheaper methods of telling roles agree, and what each costs."""
    spec, amounts = study.spec, study.amounts
    layers, n = len(spec.moe_layers), spec.n_experts
    every = len(KINDS)
    sources: dict[str, dict[int, Any]] = {"local": study.local(study.sums)}
    cost: dict[str, dict[str, Any]] = {
        "by router weight": {"passes": 0, "tokens": study.sums.tokens, "seconds": 0},
        "local": {"passes": 0, "tokens": study.sums.tokens, "seconds": 0},
    }
    sources["by router weight"] = {k: _first(sums) for k, sums in study.sums.layers.items()}
    methods: dict[str, tuple[Exact | Grouped, int]] = {"grouped": (ROLES, amounts.roles)}
    if study.pairs:
        methods["grouped, text of exact"] = (Grouped(), amounts.exact)
        methods["exact"] = (Exact(), amounts.exact)
    for name, (method, tokens) in methods.items():
        sources[name], seconds = study.roles(method, tokens)
        passes = layers * (n * (n - 1) if isinstance(method, Exact) else int(method.passes))
        cost[name] = {
            "method": spell_method(method),
            "passes": passes,
            "tokens": tokens * every,
            "seconds": seconds,
        }
    whole = {name: study.everywhere(increase) for name, increase in sources.items()}
    dominants = {name: dominant(increase) for name, increase in whole.items()}
    for name in sources:
        cost[name]["heavier"] = _heavier(study, dominants[name])
    names = list(sources)
    return {
        "cost": cost,
        "agreement": [
            {"a": a, "b": b, **vars(agreement(whole[a], whole[b]))}
            for i, a in enumerate(names)
            for b in names[i + 1 :]
        ],
    }


def _first(sums: LayerSums) -> npt.NDArray[np.float64]:
    """Return, at [i, j], the share of the pair's tokens in which i is the heavier expert."""
    total = sums.anchored + sums.anchored.T
    share: npt.NDArray[np.float64] = np.divide(
        sums.anchored, total, out=np.full(total.shape, np.nan), where=total > 0
    )
    return share


def _heavier(study: Study, roles: npt.NDArray[np.int16]) -> float:
    """Return the share of events whose heavier expert is dominant, where roles are measured."""
    same = decided = 0
    n = study.spec.n_experts
    for layer, sums in study.sums.layers.items():
        layer_roles = roles[layer]
        heavy = np.broadcast_to(np.arange(n)[:, None], layer_roles.shape)
        same += int(sums.anchored[layer_roles == heavy].sum())
        decided += int(sums.anchored[layer_roles >= 0].sum())
    return same / decided


def _dominant(study: Study) -> npt.NDArray[np.int16]:
    """Return the dominant experts [layers, E, E]: as measured, else the more often heavier one."""
    measured = dominant(study.everywhere(study.increase))
    often = dominant(study.everywhere({k: _first(sums) for k, sums in study.sums.layers.items()}))
    return np.where(measured >= 0, measured, often)


def _two_faced(study: Study, first: npt.NDArray[np.int16]) -> tuple[int, int]:
    """Return the (layer, expert) with the most tokens in the rarer of its two roles."""
    counts = study.prepared.pair_counts
    counts = counts + counts.swapaxes(1, 2)
    dominates = first == np.arange(first.shape[1])[None, :, None]  # [layer, expert, partner]
    leads = (counts * dominates).sum(2)
    follows = (counts * (~dominates & (first >= 0))).sum(2)
    layer, expert = np.unravel_index(np.minimum(leads, follows).argmax(), leads.shape)
    return int(layer), int(expert)
