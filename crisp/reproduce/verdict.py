"""Verdicts: the figures found, held against the printed ones by rule.

In this order: a figure that contradicts another of the paper's, or that no machine with the paper's
own costs could reach on either routing that bounds are taken over, does not follow. Else a missing
machine or model is needed, where the claim is about one. Else the figure found agrees with the
printed one, or differs.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

from crisp.reproduce.claims import HARDWARE, MODEL, PAPER, Claim

AGREES = "agrees"
DIFFERS = "differs"
NOT_FOLLOWING = "does not follow from the paper"
NEEDS_HARDWARE = "needs hardware"
NEEDS_MODEL = "needs a model we do not have"
VERDICTS = (AGREES, DIFFERS, NOT_FOLLOWING, NEEDS_HARDWARE, NEEDS_MODEL)
_GRAVEST = (NOT_FOLLOWING, DIFFERS, NEEDS_HARDWARE, NEEDS_MODEL, AGREES)


@dataclass(frozen=True)
class PartFigures:
    """The figures found for one part of a claim, in the claim's unit."""

    ours: float | None = None  # computed or modelled here
    elsewhere: float | None = None  # what it follows to be from other figures of the paper
    least: float | None = None  # no less is possible with the paper's own costs
    most: float | None = None  # no more


@dataclass(frozen=True)
class Finding:
    """A claim with the figures found for its parts."""

    claim: Claim
    parts: Mapping[str, PartFigures]
    how: str  # where ours, elsewhere and the bounds come from
    figures: tuple[str, ...] = ()  # of the small models, for the parts of the claim
    shown: tuple[str, ...] = ()  # what the small models show of what it says

    @property
    def verdicts(self) -> dict[str, str]:
        """The verdict on each part."""
        return {part: judge(self.claim, part, figures) for part, figures in self.parts.items()}

    @property
    def verdict(self) -> str:
        """The gravest verdict of the parts."""
        return min(self.verdicts.values(), key=_GRAVEST.index)

    @property
    def gravest_parts(self) -> tuple[str, ...]:
        """The parts with the gravest verdict; none where all parts have it."""
        parts = tuple(part for part, verdict in self.verdicts.items() if verdict == self.verdict)
        return () if len(parts) == len(self.parts) else parts


def judge(claim: Claim, part: str, figures: PartFigures) -> str:
    """Return the verdict on one part.

    >>> claim = Claim("", "", "", "", "", "trace", {"a": 10.0})
    >>> judge(claim, "a", PartFigures(ours=9.5)), judge(claim, "a", PartFigures(ours=5.0))
    ('agrees', 'differs')
    >>> judge(claim, "a", PartFigures(ours=5.0, most=8.0))
    'does not follow from the paper'
    """
    value = claim.values[part]
    slack = claim.within * abs(value)
    if figures.elsewhere is not None and not claim.meets(figures.elsewhere, value):
        return NOT_FOLLOWING
    if figures.most is not None and value - slack > figures.most:
        return NOT_FOLLOWING
    if figures.least is not None and value + slack < figures.least:
        return NOT_FOLLOWING
    if claim.by == HARDWARE:
        return NEEDS_HARDWARE
    if claim.by == MODEL:
        return NEEDS_MODEL
    if claim.by == PAPER:
        assert figures.elsewhere is not None, claim.id
        return AGREES
    assert figures.ours is not None, claim.id
    return AGREES if claim.meets(figures.ours, value) else DIFFERS
