"""Families of policies, the member of each that is chosen, and what the chosen ones do."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from decimal import Decimal
from fractions import Fraction
from typing import Any

import numpy as np

from benchmarks.policies.reading import Bench, Reading, over
from benchmarks.quality.estimates import Figure, figure
from crisp.policy import Budget, Policy, named
from crisp.policy.widths.saliency import Saliency
from crisp.profile.loss_curve import LossCurve, parse_loss
from crisp.quality.loss_curve import loss_of

BUDGETS = ("10%", "20%", "30%", "50%")
MARK = 0.036  # the loss that the paper states for Mixtral (its Figure 7)
LITTLE = 0.018  # half of it
SPARE = 0.75  # of the allowed loss is used where a policy is chosen: another text may lose more
ASKED = ("1%", "2%", "4%")
"""Losses that are asked for."""
_SHARES = (".8", ".7", ".6", ".55", ".5", ".45", ".4", ".35", ".3", ".25", ".2")
_CUTS = ("tiered(.6,.9)", "tiered(.3,.9)", "tiered(.3,.6)", "tiered(0,.8)")
_BY_BLOCK = {"unit": "block"}
_RETAINED = _BY_BLOCK | {"cache": "saliency"}
_MEASURED = {"rescale": "measured"}


@dataclass(frozen=True)
class Family:
    """Policies that differ in one number, which one of their parts has."""

    name: str
    values: Sequence[str]  # of the part
    parts: dict[str, str] = field(default_factory=dict)
    base: str = "lru"
    part: str = "width"

    def policy(self, value: str) -> Policy:
        """One of them."""
        return named(self.base, **{**self.parts, self.part: value})


def _of(rule: str, values: Sequence[str]) -> list[str]:
    return [f"{rule}({value})" for value in values]


SALIENCY = "saliency"
FAMILIES = (
    Family("lru", ["full"]),
    Family("lru by block", ["full"], _BY_BLOCK),
    Family("crisp", ["tiered(.6,.9)"], base="crisp"),
    Family("tiered, other cuts", _CUTS[1:], base="crisp"),
    Family("tiered, retained", _CUTS, _RETAINED, base="crisp"),
    Family("tiered, retained and rescaled", _CUTS, _RETAINED | _MEASURED, base="crisp"),
    Family("uniform pruning", _of("uniform", (".9", ".8", ".7", ".6"))),
    Family("dropped experts", _of("drop", (".05", ".125"))),
    Family("skipped by weight", _of("skip", (".1", ".2", ".3", ".5"))),
    Family("skipped by contribution", _of("skip-contribution", (".1", ".2", ".3", ".5"))),
    Family("resident", _of("resident", (".75", ".5", ".25", "0")), _BY_BLOCK),
    Family("contribution", _of("contribution", _SHARES[:7]), _BY_BLOCK),
    Family("contribution-resident", _of("contribution-resident", _SHARES), _BY_BLOCK),
    Family("one threshold", _of("saliency", _SHARES), _BY_BLOCK),
    Family("one threshold, rescaled", _of("saliency", _SHARES), _BY_BLOCK | _MEASURED),
    Family("one threshold, retained", _of("saliency", _SHARES), _RETAINED),
    Family(
        "a threshold a layer, retained and rescaled",
        _of("contribution-resident", _SHARES),
        _RETAINED | _MEASURED,
    ),
    Family(SALIENCY, _of("saliency", _SHARES), base="saliency"),
    Family(
        "saliency, cache-prior(.5)",
        _of("saliency", _SHARES),
        {"routing": "cache-prior(.5)"},
        base="saliency",
    ),
    Family(
        "cache-prior",
        _of("cache-prior", (".25", ".5", "1", "2")),
        _BY_BLOCK,
        part="routing",
    ),
    Family("substitute", _of("substitute", (".9", ".7", ".5", ".3")), _BY_BLOCK, part="routing"),
    Family("skip-missing", _of("skip-missing", ("1", "2", "3")), _BY_BLOCK, part="routing"),
)
STEPS = ("contribution-resident", "one threshold", "one threshold, rescaled", SALIENCY)
"""Families from one of which to the next a single part changes."""


def results(bench: Bench, budgets: Sequence[str]) -> dict[str, Any]:
    """Return the results of one model, budget by budget."""
    return {"facts": bench.facts(), "budgets": [_at(bench, budget) for budget in budgets]}


def _at(bench: Bench, budget: str) -> dict[str, Any]:
    tuned: list[dict[str, Any]] = []
    readings: dict[tuple[str, str], Reading] = {}
    for family in FAMILIES:
        for value in family.values:
            reading = bench.read(family.policy(value), budget, bench.tuning)
            readings[family.name, value] = reading
    full = readings["lru", "full"]
    crisp = readings["crisp", "tiered(.6,.9)"]
    for (name, value), reading in readings.items():
        losses = reading.losses(full)
        tuned.append(
            {
                "family": name,
                "value": value,
                "bytes": reading.bytes,
                "loss": figure(losses),
            }
        )
    crisp_loss = float(crisp.losses(full)[0])
    chosen = {
        "at crisp's loss": _best(tuned, crisp_loss),
        f"at {MARK:.1%}": _best(tuned, MARK),
        f"at {LITTLE:.1%}": _best(tuned, LITTLE),
    }
    bench.tell(f"budget {budget}: {len(tuned)} policies read")
    return {
        "budget": budget,
        "tuning": tuned,
        "promises": _promises(
            bench,
            budget,
            {value: one for (name, value), one in readings.items() if name == SALIENCY},
            full,
        ),
        "heldout": {why: _reported(bench, budget, rows) for why, rows in chosen.items()},
    }


def _promises(
    bench: Bench, budget: str, readings: dict[str, Reading], tuned_on: Reading
) -> list[dict[str, Any]]:
    """Return what came of losses that were asked for, on text on which nothing was measured.

    readings: of `SALIENCY` on the text to choose on, by width; tuned_on: the full model's there.
    """
    rows = sorted(
        (
            Fraction(Decimal(value.partition("(")[2].strip(")"))),
            loss_of(one.scores, tuned_on.scores),
        )
        for value, one in readings.items()
    )
    share = Budget.parse(budget).share
    assert share is not None
    curve = LossCurve(
        bench.tuning.n_scored,
        (share,),
        tuple(worth_it for worth_it, _ in rows),
        np.array([[loss for _, (loss, _) in rows]]),
        np.array([[high for _, (_, high) in rows]]),
    )
    full = bench.read(named("lru"), budget, bench.heldout)
    found = []
    for asked in ASKED:
        promise = curve.promise(share, parse_loss(asked))
        policy = replace(named(SALIENCY), width=Saliency(promise.share))
        reading = bench.read(policy, budget, bench.heldout)
        found.append(
            {
                "asked": asked,
                "share": float(promise.share),
                "loss": promise.loss,
                "high": promise.high,
                "over_lru": over(reading, full),
                "heldout": reading.by_kind(full),
            }
        )
    return found


def policies_at(budget: dict[str, Any]) -> dict[str, Policy]:
    """Return, by family, the policies of a budget that were chosen for the largest loss."""
    by_name = {family.name: family for family in FAMILIES}
    return {
        row["family"]: by_name[row["family"]].policy(row["value"])
        for row in budget["heldout"][f"at {MARK:.1%}"]
    }


def _best(tuned: list[dict[str, Any]], most: float) -> list[dict[str, Any]]:
    """Return each family's policy that loads least on the text to choose on.

    Considered are those whose interval of the loss ends well below ``most``; `crisp` always.
    """
    rows = []
    for family in FAMILIES:
        allowed = [
            row
            for row in tuned
            if row["family"] == family.name
            and (row["loss"]["interval"][1] <= SPARE * most or family.name == "crisp")
        ]
        if allowed:
            rows.append(min(allowed, key=lambda row: float(row["bytes"])))
    return rows


def _reported(bench: Bench, budget: str, rows: list[dict[str, Any]]) -> list[dict[str, Any]]:
    """Return the chosen policies on text on which nothing was chosen."""
    by_name = {family.name: family for family in FAMILIES}

    def read(name: str, value: str) -> Reading:
        return bench.read(by_name[name].policy(value), budget, bench.heldout)

    full, crisp = read("lru", "full"), read("crisp", "tiered(.6,.9)")
    by_block = read("lru by block", "full")
    reported = []
    for row in rows:
        reading = read(row["family"], row["value"])
        more: Figure = figure(reading.losses(full) - crisp.losses(full))
        reported.append(
            {
                "family": row["family"],
                "value": row["value"],
                "bytes": reading.bytes,
                "loss": reading.loss(full),
                "loss_above_crisp": more,
                "over_crisp": over(reading, crisp),
                "over_lru": over(reading, full),
                "over_lru_by_block": over(reading, by_block),
            }
        )
    return reported
