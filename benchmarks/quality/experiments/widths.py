"""Widths: the paper's policies, neuron orders and strategies, and plain rules beside them."""

from __future__ import annotations

from collections.abc import Mapping
from fractions import Fraction
from typing import Any

import numpy as np

from benchmarks.quality.estimates import Figure, Reading, average, blend, contrast, row
from benchmarks.quality.experiments import expert_controls, policy_controls
from benchmarks.quality.experiments.expert_controls import quantized
from benchmarks.quality.setting import KINDS
from benchmarks.quality.study import TIERED, Study
from crisp.policy.widths.base import Tiered
from crisp.policy.widths.contribution import Contribution
from crisp.prepare.roles import Exact, Grouped

SEEDS = (0, 1, 2)
STRIDE = 128  # of the headline table: the standard sliding window
ASYMMETRIC = "tiered(alpha=0,beta=1,warm=.5)"
AT_RANDOM = "tiered, tiers at random"
ORDERS = ("original", "magnitude", "importance", "output")


def policies(study: Study) -> Figure:
    """Measure Figure 7, every token but a window's first seen after 128 others or more."""
    text = study.windows("heldout", KINDS.values(), study.amounts.heldout, STRIDE)
    model, orders = study.loaded.model, study.orders
    experts = study.spec.n_experts

    def read(width: str, **how: Any) -> Reading:
        return study.read(width, orders, study.prepared, windows=text, **how)

    def coarse(name: str, bits: Mapping[int, Any]) -> Reading:
        return read("full", within=(name, lambda: quantized(model, bits)), bits=bits)

    frequent = expert_controls.bits_by_rank(expert_controls.activations(study.sums))
    salient = expert_controls.bits_by_rank(expert_controls.saliency(study.sums))
    flat = {
        wide: {layer: np.full(experts, wide) for layer in study.spec.moe_layers} for wide in (8, 4)
    }
    readings = {
        "full": read("full"),
        "uniform 50 %": read("uniform(.5)"),
        "EdgeMoE, bits by frequency": coarse("frequent", frequent),
        "EdgeMoE, bits by size of output": coarse("salient", salient),
        "8 bits everywhere": coarse("8 bits", flat[8]),
        "4 bits everywhere": coarse("4 bits", flat[4]),
        "tiered": read(TIERED),
    }
    if study.pairs:
        readings["tiered, roles by router weight"] = study.read(
            TIERED, orders, study.by_weight, windows=text
        )
    tiered = readings["tiered"]
    return _table(readings, readings["full"]) | {
        "stride": STRIDE,
        "mean_bits": {
            name: float(np.mean([layer_bits.mean() for layer_bits in bits.values()]))
            for name, bits in (("by frequency", frequent), ("by size of output", salient))
        },
        "contrasts": {
            f"tiered / {name}": contrast(tiered, readings[name], KINDS)
            for name in readings
            if name != "tiered"
        },
    }


def neuron_orders(study: Study) -> Figure:
    """Measure Figure 12: all experts at half, and at three quarters, of their neurons."""
    names = [*(f"random({seed})" for seed in SEEDS), *ORDERS]
    tables = {}
    for width in ("uniform(.5)", "uniform(.75)"):
        readings = {name: study.read(width, study.order(name, study.sums)) for name in names}
        rows = [row(name, reading, study.full, KINDS) for name, reading in readings.items()]
        drawn = [readings[f"random({seed})"] for seed in SEEDS]
        tables[width] = {
            "rows": [average(rows[: len(SEEDS)], "random"), *rows[len(SEEDS) :]],
            "contrasts": {
                f"importance / {name}": contrast(readings["importance"], reading, KINDS)
                for name, reading in [("random", blend(drawn)), *readings.items()]
                if name in ("random", "original", "magnitude", "output")
            },
        }
    return tables


def strategies(study: Study) -> Figure:
    """Measure Figure 13 and Table 4, and plain rules at the same bytes."""
    orders, prepared = study.orders, study.prepared
    readings = {
        "full": study.full,
        "all 75 %": study.read("uniform(.75)", orders),
        "all 50 %": study.read("uniform(.5)", orders),
    }
    skips = []
    for name, width in (
        ("single", "single"),
        ("asymmetric 100 + 50", ASYMMETRIC),
        ("tiered", TIERED),
    ):
        readings[name] = study.read(width, orders, prepared)
        if name != "asymmetric 100 + 50":
            skips.append(name)
            readings[f"{name}, renormalised"] = study.read(
                width, orders, prepared, renormalize=True
            )
    paper = list(readings)
    tiered = readings["tiered"]
    random = {
        f"{AT_RANDOM}{roles}": [
            study.read(policy_controls.DealtTiers(seed, Tiered()), orders, profile)
            for seed in SEEDS
        ]
        for roles, profile in (("", prepared), (", roles by router weight", study.by_weight))
        if study.pairs or not roles
    }
    if study.pairs:
        sources = roles_of(study)
        for name, increase in sources.items():
            if name == "grouped":
                continue  # these are the rows above
            profile = study.profile(study.sums, increase)
            for policy, width in (("tiered", TIERED), ("asymmetric 100 + 50", ASYMMETRIC)):
                readings[f"{policy}, roles {name}"] = study.read(width, orders, profile)
            readings[f"single, roles {name}"] = study.read("single", orders, profile)
    rules = {"bytes of tiered": tiered.share, "75 %": 0.75, "50 %": 0.5}
    for name, target in rules.items():
        skip, block = policy_controls.skip_to(target, study.routed), Contribution(Fraction(target))
        readings[f"skip by router weight, {name}"] = study.read(skip, orders, prepared)
        readings[f"skip by router weight, {name}, renormalised"] = study.read(
            skip, orders, prepared, renormalize=True
        )
        readings[f"block by contribution, {name}"] = study.read(block, orders, study.weighed)
    rows = [row(name, reading, study.full, KINDS) for name, reading in readings.items()]
    for place, (name, dealt) in enumerate(random.items(), start=len(paper)):
        each = [row("", reading, study.full, KINDS) for reading in dealt]
        rows.insert(place, average(each, name))
        readings[name] = blend(dealt)
    return {"paper_rows": paper, "rows": rows, "contrasts": _contrasts(readings)}


def roles_of(study: Study) -> dict[str, dict[int, Any] | None]:
    """Return the roles by each method, by layer [E, E], cheapest first; None: by router weight."""
    return {
        "by router weight": None,
        "local": study.local(study.sums),
        "grouped": study.increase,
        "exact": study.roles(Exact(), study.amounts.exact)[0],
        "grouped, text of exact": study.roles(Grouped(), study.amounts.exact)[0],
    }


def _contrasts(readings: Mapping[str, Reading]) -> dict[str, Figure]:
    pairs = [
        ("tiered", "all 50 %"),
        ("tiered", "single"),
        ("tiered", AT_RANDOM),
        ("tiered, roles by router weight", f"{AT_RANDOM}, roles by router weight"),
        ("tiered", "tiered, roles by router weight"),
        ("tiered", "tiered, renormalised"),
        ("tiered", "skip by router weight, bytes of tiered"),
        ("tiered, roles by router weight", "skip by router weight, bytes of tiered"),
        ("tiered", "block by contribution, bytes of tiered"),
        ("tiered, roles by router weight", "block by contribution, bytes of tiered"),
        ("single", "all 50 %"),
        ("single", "single, renormalised"),
        ("single", "single, roles by router weight"),
        ("asymmetric 100 + 50", "all 75 %"),
        ("asymmetric 100 + 50, roles by router weight", "all 75 %"),
        ("single, roles by router weight", "all 50 %"),
        ("asymmetric 100 + 50", "all 50 %"),
        ("asymmetric 100 + 50", "asymmetric 100 + 50, roles by router weight"),
        ("asymmetric 100 + 50", "skip by router weight, 75 %"),
        ("asymmetric 100 + 50", "block by contribution, 75 %"),
        ("all 50 %", "block by contribution, 50 %"),
        ("all 50 %", "skip by router weight, 50 %"),
        ("all 75 %", "block by contribution, 75 %"),
    ]
    return {
        f"{a} / {b}": contrast(readings[a], readings[b], KINDS)
        for a, b in pairs
        if {a, b} <= set(readings)
    }


def _table(readings: Mapping[str, Reading], full: Reading) -> Figure:
    return {"rows": [row(name, reading, full, KINDS) for name, reading in readings.items()]}
