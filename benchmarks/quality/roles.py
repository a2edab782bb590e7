"""Roles of experts: what masking one of a pair costs, and how well cheaper ways agree."""

from __future__ import annotations

from typing import Any

import numpy as np
import numpy.typing as npt

from benchmarks.quality.estimates import Figure, combined, conditional, difference, figure, grown
from benchmarks.quality.masking import most_frequent, pair_by_pair, without
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
    """Figure 4: roles decided on calibration text, cost of masking measured on held-out text."""
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
    """Figure 2: an expert that is dominant in some combinations and auxiliary in others, dropped
    from its layer; what the tokens of each combination lose.
    """
    first = _dominant(study)
    layer, expert = _two_faced(study, first)
    study.arrange(study.orders)
    experts, gains, windows = without(Ablation(study.loaded.model, study.heldout), layer, expert)
    anchored = experts[:, 0] == expert
    leads = {True: np.zeros(len(gains)), False: np.zeros(len(gains))}  # combinations of a token
    found: list[Figure] = []
    for partner in range(study.spec.n_experts):
        beside = (experts[:, 1:] == partner).any(1)
        own = np.where(anchored, beside, experts[:, 0] == partner)
        if partner == expert or not own.any():
            continue
        dominates = bool(first[layer, expert, partner] == expert)
        leads[dominates] += own
        if own.sum() >= LEAST:
            mean = conditional(gains, own.astype(np.float64), windows)
            found.append({
                "partner": partner,
                "tokens": int(own.sum()),
                "dominant": dominates,
                "increase": grown(mean),
            })  # fmt: skip
    found.sort(key=lambda one: -one["tokens"])
    shown = sorted(found[:SHOWN], key=lambda one: -one["increase"]["value"])
    return {
        "layer": layer,
        "expert": expert,
        "pairs": shown,
        "combinations": len(found),
        "difference": difference(gains, leads[True], leads[False], windows),
        "where_dominant": grown(conditional(gains, leads[True], windows)),
        "where_auxiliary": grown(conditional(gains, leads[False], windows)),
    }


def agreements(study: Study) -> Figure:
    """How close cheaper ways of telling roles are to one another, and what each costs."""
    spec, amounts = study.spec, study.amounts
    layers, n = len(spec.moe_layers), spec.n_experts
    every = len(KINDS)
    sources: dict[str, dict[int, Any]] = {"local": study.local(study.known)}
    cost: dict[str, dict[str, Any]] = {
        "by router weight": {"passes": 0, "tokens": study.known.tokens, "seconds": 0},
        "local": {"passes": 0, "tokens": study.known.tokens, "seconds": 0},
    }
    sources["by router weight"] = {k: _first(own) for k, own in study.known.layers.items()}
    methods: dict[str, tuple[Exact | Grouped, int]] = {"grouped": (ROLES, amounts.roles)}
    if study.pairs:
        methods["grouped, text of exact"] = (Grouped(), amounts.exact)
        methods["exact"] = (Exact(), amounts.exact)
    for name, (method, tokens) in methods.items():
        sources[name], seconds = study.roles(method, tokens)
        passes = layers * (n * (n - 1) if isinstance(method, Exact) else int(method.passes))
        cost[name] = {
            "method": spell_method(method), "passes": passes, "tokens": tokens * every, "seconds": seconds
        }  # fmt: skip
    whole = {name: study.everywhere(own) for name, own in sources.items()}
    known = {name: dominant(own) for name, own in whole.items()}
    for name in sources:
        cost[name]["heavier"] = _heavier(study, known[name])
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
    """At [i, j], how often i is the heavier one in the pair {i, j}, of the pair's tokens."""
    total = sums.anchored + sums.anchored.T
    share: npt.NDArray[np.float64] = np.divide(
        sums.anchored, total, out=np.full(total.shape, np.nan), where=total > 0
    )
    return share


def _heavier(study: Study, roles: npt.NDArray[np.int16]) -> float:
    """Share of events whose heavier expert is the dominant one, where roles are known."""
    same = known = 0
    n = study.spec.n_experts
    for layer, sums in study.known.layers.items():
        own = roles[layer]
        heavy = np.broadcast_to(np.arange(n)[:, None], own.shape)
        same += int(sums.anchored[own == heavy].sum())
        known += int(sums.anchored[own >= 0].sum())
    return same / known


def _dominant(study: Study) -> npt.NDArray[np.int16]:
    """[layers, E, E]: as measured, else the expert that is the heavier one more often."""
    measured = dominant(study.everywhere(study.increase))
    often = dominant(study.everywhere({k: _first(own) for k, own in study.known.layers.items()}))
    return np.where(measured >= 0, measured, often)


def _two_faced(study: Study, first: npt.NDArray[np.int16]) -> tuple[int, int]:
    """(layer, expert) with the most tokens in the rarer of its two roles."""
    counts = study.prepared.pair_counts
    counts = counts + counts.swapaxes(1, 2)
    own = first == np.arange(first.shape[1])[None, :, None]  # [layer, expert, partner]
    leads = (counts * own).sum(2)
    follows = (counts * (~own & (first >= 0))).sum(2)
    layer, expert = np.unravel_index(np.minimum(leads, follows).argmax(), leads.shape)
    return int(layer), int(expert)
