"""Verdicts: what is found, held against what is printed, by rule.

In this order: a figure that contradicts another of the paper's, or that no machine with the paper's
own costs could reach on either routing that bounds are taken over, does not follow. Else a machine
or a model that is not there is needed, where the claim is about one. Else what is found agrees with
it, or differs.
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
class Found:
    """What is known of one part of a claim, in the claim's unit."""

    ours: float | None = None  # computed or modelled here
    elsewhere: float | None = None  # what other figures or definitions of the paper make it
    least: float | None = None  # no less is possible with the paper's own costs
    most: float | None = None  # no more


@dataclass(frozen=True)
class Finding:
    """A claim with what was found of it."""

    claim: Claim
    parts: Mapping[str, Found]
    how: str  # where ours, elsewhere and the bounds come from
    figures: tuple[str, ...] = ()  # of the small models, for the parts of the claim
    shown: tuple[str, ...] = ()  # what the small models show of what it says

    @property
    def verdicts(self) -> dict[str, str]:
        """The verdict on each part."""
        return {part: judge(self.claim, part, found) for part, found in self.parts.items()}

    @property
    def verdict(self) -> str:
        """The gravest of its parts'."""
        return min(self.verdicts.values(), key=_GRAVEST.index)

    @property
    def gravest(self) -> tuple[str, ...]:
        """The parts that the verdict is about; none where it is about all."""
        own = tuple(part for part, verdict in self.verdicts.items() if verdict == self.verdict)
        return () if len(own) == len(self.parts) else own


def judge(claim: Claim, part: str, found: Found) -> str:
    """The verdict on one part.

    >>> claim = Claim("", "", "", "", "", "trace", {"a": 10.0})
    >>> judge(claim, "a", Found(ours=9.5)), judge(claim, "a", Found(ours=5.0))
    ('agrees', 'differs')
    >>> judge(claim, "a", Found(ours=5.0, most=8.0))
    'does not follow from the paper'
    """
    value = claim.values[part]
    slack = claim.within * abs(value)
    if found.elsewhere is not None and not claim.meets(found.elsewhere, value):
        return NOT_FOLLOWING
    if found.most is not None and value - slack > found.most:
        return NOT_FOLLOWING
    if found.least is not None and value + slack < found.least:
        return NOT_FOLLOWING
    if claim.by == HARDWARE:
        return NEEDS_HARDWARE
    if claim.by == MODEL:
        return NEEDS_MODEL
    if claim.by == PAPER:
        assert found.elsewhere is not None, claim.id
        return AGREES
    assert found.ours is not None, claim.id
    return AGREES if claim.meets(found.ours, value) else DIFFERS
