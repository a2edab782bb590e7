"""Families of policies, the member of each that is chosen, and what the chosen ones do."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

from benchmarks.policies.reading import Bench, Reading, over
from benchmarks.quality.estimates import Figure, figure
from crisp.policy import Policy, named

BUDGETS = ("10%", "20%", "30%", "50%")
MARK = 0.036  # the loss that the paper states for Mixtral (its Figure 7)
SPARE = 0.75  # of the allowed loss is used where a policy is chosen: another text may lose more
_SHARES = (".9", ".8", ".75", ".7", ".6", ".5", ".4", ".3")
_SOME = (".75", ".6")


@dataclass(frozen=True)
class Family:
    """Policies that differ in one number."""

    name: str
    widths: Sequence[str]
    parts: dict[str, str] = field(default_factory=dict)
    base: str = "lru"

    def policy(self, width: str) -> Policy:
        """One of them."""
        return named(self.base, width=width, **self.parts)


_BY_BLOCK = {"unit": "block"}
FAMILIES = (
    Family("lru", ["full"]),
    Family("lru by block", ["full"], _BY_BLOCK),
    Family("crisp", ["tiered(.6,.9)"], base="crisp"),
    Family("tiered, other cuts", ["tiered(.3,.9)", "tiered(.3,.6)", "tiered(0,.8)"], base="crisp"),
    Family("uniform pruning", [f"uniform({share})" for share in (".9", ".8", ".7", ".6")]),
    Family("dropped experts", ["drop(.05)", "drop(.125)"]),
    Family("skipped by weight", [f"skip({share})" for share in (".1", ".2", ".3", ".5")]),
    Family(
        "skipped by contribution",
        [f"skip-contribution({share})" for share in (".1", ".2", ".3", ".5")],
    ),
    Family("resident", [f"resident({floor})" for floor in (".75", ".5", ".25", "0")], _BY_BLOCK),
    Family("contribution", [f"contribution({share})" for share in _SHARES], _BY_BLOCK),
    Family("worth", [f"contribution-resident({share})" for share in _SHARES], _BY_BLOCK),
    Family(
        "worth, lfu",
        [f"contribution-resident({share})" for share in _SOME],
        _BY_BLOCK | {"cache": "lfu"},
    ),
    Family(
        "worth, suffixes first",
        [f"contribution-resident({share})" for share in _SOME],
        _BY_BLOCK | {"cache": "suffix-lru"},
    ),
)


def results(bench: Bench, budgets: Sequence[str]) -> dict[str, Any]:
    """Return the results of one model, budget by budget."""
    return {"facts": bench.facts(), "budgets": [_at(bench, budget) for budget in budgets]}


def _at(bench: Bench, budget: str) -> dict[str, Any]:
    tuned: list[dict[str, Any]] = []
    readings: dict[tuple[str, str], Reading] = {}
    for family in FAMILIES:
        for width in family.widths:
            reading = bench.read(family.policy(width), budget, bench.tuning)
            readings[family.name, width] = reading
    full = readings["lru", "full"]
    crisp = readings["crisp", "tiered(.6,.9)"]
    for (name, width), reading in readings.items():
        losses = reading.losses(full)
        tuned.append(
            {
                "family": name,
                "width": width,
                "bytes": reading.bytes,
                "loss": figure(losses),
            }
        )
    crisp_loss = float(crisp.losses(full)[0])
    chosen = {"at crisp's loss": _best(tuned, crisp_loss), f"at {MARK:.1%}": _best(tuned, MARK)}
    bench.tell(f"budget {budget}: {len(tuned)} policies read")
    return {
        "budget": budget,
        "tuning": tuned,
        "heldout": {why: _reported(bench, budget, rows) for why, rows in chosen.items()},
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

    def read(name: str, width: str) -> Reading:
        return bench.read(by_name[name].policy(width), budget, bench.heldout)

    full, crisp = read("lru", "full"), read("crisp", "tiered(.6,.9)")
    reported = []
    for row in rows:
        reading = read(row["family"], row["width"])
        more: Figure = figure(reading.losses(full) - crisp.losses(full))
        reported.append(
            {
                "family": row["family"],
                "width": row["width"],
                "bytes": reading.bytes,
                "loss": reading.loss(full),
                "loss_above_crisp": more,
                "over_crisp": over(reading, crisp),
                "over_lru": over(reading, full),
            }
        )
    return reported
