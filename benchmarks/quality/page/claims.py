"""The claims of the paper and of plain controls, held against our figures by rule.

A claim is about a difference with an interval: it is shown where the whole interval lies on the
claimed side, contradicted where it lies on the other, and open where it holds 0.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

Figure = dict[str, Any]
Results = Mapping[str, Any]
Find = Callable[[Results], Sequence[Figure] | None]
SHOWN, CONTRADICTED, OPEN, MIXED = "shown", "not shown: the opposite", "open", "in part"


@dataclass(frozen=True)
class Claim:
    """``find`` gives the differences (None: not applicable); all have to be of sign ``sign``."""

    section: str
    text: str
    paper: str  # where it says so; empty: a control that the paper does not have
    sign: int
    find: Find
    unit: str = "%"


def outcome(claim: Claim, figures: Sequence[Figure]) -> str:
    """Return one word for all ``figures``.

    >>> claim = Claim("", "", "", -1, lambda results: None)
    >>> outcome(claim, [{"value": -2.0, "interval": [-3, -1]}])
    'shown'
    >>> outcome(claim, [{"value": -2.0, "interval": [-3, 1]}])
    'open'
    >>> outcome(claim, [{"value": -2, "interval": [-3, -1]}, {"value": 2, "interval": [1, 3]}])
    'in part'
    """
    sides = {_side(figure, claim.sign) for figure in figures}
    return sides.pop() if len(sides) == 1 else MIXED


def tally(claim: Claim, figures: Sequence[Figure], side: str) -> int:
    """Count the figures that have the outcome ``side``."""
    return sum(_side(figure, claim.sign) == side for figure in figures)


def _side(figure: Figure, sign: int) -> str:
    low, high = sorted(sign * end for end in figure["interval"])
    if low > 0:
        return SHOWN
    return CONTRADICTED if high < 0 else OPEN


def _contrasts(experiment: str, *names: str) -> Find:
    def find(results: Results) -> Sequence[Figure] | None:
        contrasts = results[experiment]["contrasts"]
        figures = [contrasts[name] for name in names if name in contrasts]
        return figures or None

    return find


def _orders(*names: str) -> Find:
    def find(results: Results) -> Sequence[Figure]:
        contrasts = results["orders"]["uniform(.5)"]["contrasts"]
        return [contrasts[f"importance / {name}"] for name in names]

    return find


def _difference(experiment: str) -> Find:
    return lambda results: [results[experiment]["difference"]]


def _memory(kind: str) -> Find:
    return lambda results: [
        contrast
        for group in results["memory"]["groups"]
        for name, contrast in group["contrasts"].items()
        if name.startswith(kind)
    ]


def _moves(name: str, roles: str = "targets") -> Find:
    """One of the contrasts of every move from one kind of text to another."""

    def find(results: Results) -> Sequence[Figure] | None:
        targets = results["shift"][roles] or ()
        return [moved[name] for target in targets for moved in target["sources"].values()]

    return find


CLAIMS = (
    Claim("policies", "Tiered widths lose less than uniform 50 %", "Figure 7", -1,
          _contrasts("policies", "tiered / uniform 50 %")),
    Claim("policies", "Tiered widths lose less than EdgeMoE's bits", "Figure 7", -1,
          _contrasts("policies", "tiered / EdgeMoE, bits by frequency",
                     "tiered / EdgeMoE, bits by size of output")),
    Claim("policies", "Tiered widths lose less than 4 bits for every weight", "", -1,
          _contrasts("policies", "tiered / 4 bits everywhere")),
    Claim("orders", "At half the neurons, importance order beats random, original and magnitude",
          "Figure 12", -1, _orders("random", "original", "magnitude")),
    Claim("orders", "Importance order beats `output` order (importance times norm of the down row)",
          "", -1, _orders("output")),
    Claim("strategies", "Tiered widths lose less than all 50 % and than a single expert",
          "Figure 13", -1, _contrasts("strategies", "tiered / all 50 %", "tiered / single")),
    Claim("strategies", "A single expert loses more than all 50 %", "Figure 13", 1,
          _contrasts("strategies", "single / all 50 %")),
    Claim("strategies", "A single expert, each token's heavier one, loses less than all 50 %", "",
          -1, _contrasts("strategies", "single, roles by router weight / all 50 %")),
    Claim("strategies", "Asymmetric 100 + 50 loses less than all 75 %", "Table 4", -1,
          _contrasts("strategies", "asymmetric 100 + 50 / all 75 %")),
    Claim("strategies", "Asymmetric 100 + 50, each token's heavier expert dominant, loses less "
          "than all 75 %", "", -1,
          _contrasts("strategies", "asymmetric 100 + 50, roles by router weight / all 75 %")),
    Claim("strategies", "Tiers by frequency lose less than tiers at random with the same bytes", "",
          -1, _contrasts("strategies", "tiered / tiered, tiers at random")),
    Claim("strategies", "Tiers by frequency lose less than at random, each token's heavier expert "
          "dominant", "", -1,
          _contrasts("strategies", "tiered, roles by router weight / tiered, tiers at random, "
                     "roles by router weight")),
    Claim("strategies", "Measured roles lose less than the router's weight as the role "
          "(tiered, asymmetric, single)", "", -1,
          _contrasts("strategies", "tiered / tiered, roles by router weight",
                     "asymmetric 100 + 50 / asymmetric 100 + 50, roles by router weight",
                     "single / single, roles by router weight")),
    Claim("strategies", "Tiered widths lose less than skipping by router weight at their bytes"
          " (measured roles; router weight)",
          "", -1, _contrasts("strategies", "tiered / skip by router weight, bytes of tiered",
                             "tiered, roles by router weight / skip by router weight, "
                             "bytes of tiered")),
    Claim("strategies", "Tiered widths lose less than blocks by contribution at their bytes"
          " (measured roles; router weight)", "",
          -1, _contrasts("strategies", "tiered / block by contribution, bytes of tiered",
                         "tiered, roles by router weight / block by contribution, "
                         "bytes of tiered")),
    Claim("strategies", "All 75 % and 50 % lose less than blocks by contribution at their bytes",
          "", -1,
          _contrasts("strategies", "all 75 % / block by contribution, 75 %",
                     "all 50 % / block by contribution, 50 %")),
    Claim("strategies", "Dropping the weight of skipped experts loses less than giving it to the "
          "others (tiered, single)", "", -1,
          _contrasts("strategies", "tiered / tiered, renormalised",
                     "single / single, renormalised")),
    Claim("masking", "Masking the dominant expert costs more than masking the auxiliary",
          "Figure 4", 1, _difference("masking"), "PPL"),
    Claim("classes", "Uniform 50 % hurts tokens of frequent combinations most", "Figure 1", 1,
          _difference("classes"), "points"),
    Claim("expert", "An expert is missed where it is the dominant one", "Figure 2", 1,
          _difference("expert"), "nats"),
    Claim("tiers", "Under the tiered policy hot combinations keep more predictions than cold",
          "Figure 15", 1, _difference("tiers"), "points"),
    Claim("memory", "At the same bytes, tiered widths lose less than uniform ones", "Figure 9", -1,
          _memory("tiered / uniform")),
    Claim("memory", "At the same bytes, tiered widths lose less than dropped experts", "Figure 9",
          -1, _memory("tiered / dropped")),
    Claim("memory", "At the same bytes, tiered widths, each token's heavier expert dominant, lose "
          "less than uniform ones", "", -1, _memory("tiered by weight / uniform")),
    Claim("memory", "At the same bytes, tiered widths, each token's heavier expert dominant, lose "
          "less than dropped experts", "", -1, _memory("tiered by weight / dropped")),
    Claim("shift", "Metadata of other text loses more than the text's own", "Figure 16", 1,
          _moves("loss")),
    Claim("shift", "Metadata of other text loses more than the text's own, each token's heavier "
          "expert dominant", "", 1, _moves("loss", "by_weight")),
    Claim("shift", "A refresh (tiers and roles of the text, order of the other) loses less than "
          "none", "Figure 16", -1, _moves("refresh")),
    Claim("shift", "Tiers at random lose more than metadata of other text", "", 1,
          _moves("random")),
)  # fmt: skip
