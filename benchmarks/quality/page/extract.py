"""A few figures of docs/quality.json for the wheel, where `crisp reproduce` shows them."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from benchmarks.quality.page.claims import CLAIMS
from benchmarks.quality.page.tables import verdict

Figure = dict[str, Any]
EXTRACT = "crisp/reproduce/data/quality.json"
_KINDS = {"tiered": "tiered", "single": "tiered", "uniform": "uniform", "dropped": "dropping"}


def extract(content: Figure) -> Figure:
    """Return the figures, by model; shares are 0 to 1, an estimate is [value, low, high].

    A claim has the word that is said of it, and the figures it is said for.
    """
    return {
        "from": "docs/quality.json",
        "models": {model["name"]: _model(model["experiments"]) for model in content["models"]},
    }


def _model(experiments: Mapping[str, Any]) -> Figure:
    masking, tiers = experiments["masking"], experiments["tiers"]
    return {
        "claims": {
            claim.text: outcome.removeprefix("**").split("**: ")
            for claim in CLAIMS
            if claim.paper and (outcome := verdict(claim, experiments))
        },
        "policies": _rows(experiments["policies"]["rows"]),
        "orders": _rows(experiments["orders"]["uniform(.5)"]["rows"]),
        "strategies": _rows(experiments["strategies"]["rows"]),
        "masking": {
            part: _estimate(masking[part]) for part in ("dominant_cost", "auxiliary_cost", "ratio")
        },
        "classes": {row["class"]: _estimate(row["lost"]) for row in experiments["classes"]["rows"]},
        "expert": {
            part: _estimate(experiments["expert"][f"where_{part}"])
            for part in ("dominant", "auxiliary")
        },
        "tiers": {
            row["tier"]: {"share": row["share"], "kept": _estimate(row["retention"])}
            for row in tiers["rows"]
        },
        "cold": {row["auxiliary"]: _estimate(row["kept"]) for row in tiers["cold"]},
        "memory": [
            _stored(row)
            for group in experiments["memory"]["groups"]
            for row in group["rows"]
            if "router weight" not in row["label"]
        ],
        "shift": [
            {"of": source, "on": target["target"],
             **{what: {"kept": row["retention"]["value"], "bytes": row["share"]}
                for what, row in (("matched", target["matched"]),
                                  ("transferred", moved["transferred"]),
                                  ("refreshed", moved["refreshed"]))}}
            for target in experiments["shift"]["targets"]
            for source, moved in target["sources"].items()
        ],
    }  # fmt: skip


def _stored(row: Figure) -> Figure:
    """Return what is left to store, and what that loses; tiered widths still store everything."""
    kind = _KINDS[_first(row["label"])]
    stored = {"tiered": 1.0, "uniform": row["share"], "dropping": row.get("stored")}[kind]
    kept = _estimate(row["retention"])
    return {
        "kind": kind, "label": row["label"], "bytes": row["share"], "stored": stored,
        "increase": _estimate(row["increase"]), "kept": kept,
    }  # fmt: skip


def _rows(rows: Sequence[Figure]) -> Figure:
    return {
        row["label"]: {"bytes": row["share"], "increase": _estimate(row["increase"])}
        for row in rows
    }  # fmt: skip


def _estimate(figure: Figure) -> list[float]:
    return [figure["value"], *figure["interval"]]


def _first(label: str) -> str:
    """Return its first word: tiered, single, uniform or dropped."""
    return label.replace("(", " ").replace(",", " ").split()[0]
