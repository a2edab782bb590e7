"""Findings in words and figures, for whatever shows them."""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence

from crisp.reproduce.claims import AT_LEAST, AT_MOST, MORE
from crisp.reproduce.verdict import NEEDS_HARDWARE, NEEDS_MODEL, VERDICTS, Finding, Found

NONE = "–"  # for what could not be had
_MARKS = {AT_LEAST: "≥ ", AT_MOST: "≤ ", MORE: "> "}
COLUMNS = {  # of a part, as it is headed -> where it stands
    "ours": "ours",
    "from the paper": "elsewhere",
    "at least": "least",
    "at most": "most",
}


def figure(value: float | None) -> str:
    """Three digits at most, no exponent.

    >>> figure(8.3), figure(1.0001), figure(228.506), figure(15045.5), figure(0.006144)
    ('8.3', '1.00', '229', '15,046', '0.00614')
    """
    if value is None:
        return NONE
    if abs(value) >= 1000:
        return f"{value:,.0f}"
    short = f"{value:.3g}"
    return short if "." in short or abs(value) >= 10 else f"{value:.2f}"


def printed_figure(finding: Finding, part: str) -> str:
    """As the paper prints it, with its ``over`` or ``less than``."""
    return _MARKS.get(finding.claim.relation, "") + f"{finding.claim.values[part]:g}"


def known(finding: Finding) -> list[str]:
    """Which of COLUMNS any part has."""
    return [
        head
        for head, name in COLUMNS.items()
        if any(getattr(found, name) is not None for found in finding.parts.values())
    ]


def column(found: Found, head: str) -> str:
    """A part's figure below a heading of COLUMNS."""
    value: float | None = getattr(found, COLUMNS[head])
    return figure(value)


def told(finding: Finding) -> str:
    """The verdict; where it is about some parts only, which, and what is said of the others."""
    own = finding.gravest
    if not own:
        return finding.verdict
    others = dict.fromkeys(verdict for part, verdict in finding.verdicts.items() if part not in own)
    rest = "; ".join(
        f"{verdict}: {', '.join(p for p, v in finding.verdicts.items() if v == verdict)}"
        for verdict in others
    )
    return f"{finding.verdict}: {', '.join(own)}; {rest}"


def tally(findings: Sequence[Finding]) -> dict[str, int]:
    """How many claims have each verdict."""
    counts = Counter(finding.verdict for finding in findings)
    return {verdict: counts[verdict] for verdict in VERDICTS}


def decided(findings: Sequence[Finding]) -> int:
    """How many could be decided here."""
    return sum(finding.verdict not in (NEEDS_HARDWARE, NEEDS_MODEL) for finding in findings)
