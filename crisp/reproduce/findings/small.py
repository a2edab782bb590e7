"""What the small models show of a claim about the quality of a large one."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any

from crisp.reproduce.claims import Claim
from crisp.reproduce.measured import quality_figures

Model = Mapping[str, Any]
_GROWTH = "growth of perplexity"
WEIGHTED = "tiered, roles by router weight"  # not measured pair by pair
_TIERS = {"Hot": "hot", "Warm": "warm", "Cold": "cold"}
_CLASSES = {"F1.hot": "top 10 %", "F1.medium": "10 to 50 %", "F1.cold": "bottom 50 %"}


def format_figures(claim: Claim) -> tuple[str, ...]:
    """Format what the small models have in place of the claim's figures: one line, or none."""
    if claim.id not in _FIGURES:
        return ()
    what, format_of = _FIGURES[claim.id]
    values = "; ".join(f"{name} {format_of(model)}" for name, model in quality_figures().items())
    return (f"{what}: {values}",)


def format_outcomes(claim: Claim) -> tuple[str, ...]:
    """Format whether the small models show what the claim says: a line for each part of it."""
    lines = []
    for text in claim.small:
        words = [
            f"{name}: {model['claims'][text][0]}"
            for name, model in quality_figures().items()
            if text in model["claims"]
        ]
        lines.append(f"{text}? {'; '.join(words)}")
    return tuple(lines)


def worst_move(model: Model, what: str) -> float:
    """Return the most points of predictions that metadata of another text loses.

    what: transferred, or refreshed.
    """
    return float(
        max(100 * (move["matched"]["kept"] - move[what]["kept"]) for move in model["shift"])
    )


def format_change(share: float) -> str:
    """Format a change with its sign.

    >>> format_change(0.0778), format_change(-0.006)
    ('+7.8 %', '−0.6 %')
    """
    return f"{100 * share:+.1f} %".replace("-", "−")


def _rows(section: str, labels: Sequence[str]) -> Callable[[Model], str]:
    return lambda model: " / ".join(
        format_change(model[section][label]["increase"][0]) if label in model[section] else "–"
        for label in labels
    )


def _lost(label: str) -> Callable[[Model], str]:
    return lambda model: f"{100 * model['classes'][label][0]:.1f} %"


def _masked(cost: str) -> Callable[[Model], str]:
    return lambda model: f"{model['masking'][cost][0]:.2f}"


def _moves(model: Model) -> str:
    return " / ".join(f"{worst_move(model, what):.1f}" for what in ("transferred", "refreshed"))


_FIGURES: dict[str, tuple[str, Callable[[Model], str]]] = {
    **{
        claim: ("predictions lost by tokens of such pairs", _lost(label))
        for claim, label in _CLASSES.items()
    },
    "F2.expert": (
        "growth of perplexity of tokens where it is dominant / auxiliary",
        lambda model: " / ".join(
            format_change(model["expert"][role][0]) for role in ("dominant", "auxiliary")
        ),
    ),
    **{
        f"F4.{role}": (
            f"perplexity added by masking the {role} expert",
            _masked(f"{role}_cost"),
        )
        for role in ("dominant", "auxiliary")
    },
    "F7.crisp": (
        f"{_GROWTH}, tiered / uniform 50 % / tiered with roles by the router's weight",
        _rows("policies", ("tiered", "uniform 50 %", WEIGHTED)),
    ),
    "F12.mixtral": (
        f"{_GROWTH}, in this order",
        _rows("orders", ("random", "original", "magnitude", "importance")),
    ),
    "F13.ppl": (
        f"{_GROWTH}, all 50 % / single / tiered",
        _rows("strategies", ("all 50 %", "single", "tiered")),
    ),
    "F15.retention": (
        "predictions kept, in this order",
        lambda model: " / ".join(
            f"{100 * model['tiers'][tier]['kept'][0]:.1f} %" for tier in _TIERS.values()
        ),
    ),
    "F16.transfer": ("points of predictions kept that are lost at worst, in this order", _moves),
    "T4.ppl": (
        f"{_GROWTH}, both 75 % / both 50 % / asymmetric",
        _rows("strategies", ("all 75 %", "all 50 %", "asymmetric 100 + 50")),
    ),
}  # fmt: skip
