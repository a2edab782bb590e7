"""Findings in words and figures, for the command line and the page."""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence

from crisp.reproduce.claims import AT_LEAST, AT_MOST, MORE
from crisp.reproduce.verdict import NEEDS_HARDWARE, NEEDS_MODEL, VERDICTS, Finding, PartFigures

NONE = "–"  # for a figure that there is not
_MARKS = {AT_LEAST: "≥ ", AT_MOST: "≤ ", MORE: "> "}
COLUMNS = {  # of a part, as it is headed -> where it stands
    "ours": "ours",
    "from the paper": "elsewhere",
    "at least": "least",
    "at most": "most",
}


def format_figure(value: float | None) -> str:
    """Format with three digits at most, without an exponent.

    >>> [format_figure(value) for value in (8.3, 1.0001, 228.506, 15045.5, 0.006144)]
    ['8.3', '1.00', '229', '15,046', '0.00614']
    """
    if value is None:
        return NONE
    if abs(value) >= 1000:
        return f"{value:,.0f}"
    short = f"{value:.3g}"
    return short if "." in short or abs(value) >= 10 else f"{value:.2f}"


def format_printed(finding: Finding, part: str) -> str:
    """Format a figure as the paper prints it, with its ``over`` or ``less than``."""
    return _MARKS.get(finding.claim.relation, "") + f"{finding.claim.values[part]:g}"


def used_columns(finding: Finding) -> list[str]:
    """Return the headings of COLUMNS for which any part has a figure."""
    return [
        head
        for head, name in COLUMNS.items()
        if any(getattr(figures, name) is not None for figures in finding.parts.values())
    ]


def format_column(figures: PartFigures, head: str) -> str:
    """Format a part's figure below a heading of COLUMNS."""
    value: float | None = getattr(figures, COLUMNS[head])
    return format_figure(value)


def format_verdict(finding: Finding) -> str:
    """Return the verdict; where it is about some parts only, which, and those of the others."""
    gravest = finding.gravest_parts
    if not gravest:
        return finding.verdict
    others = dict.fromkeys(
        verdict for part, verdict in finding.verdicts.items() if part not in gravest
    )
    rest = "; ".join(
        f"{verdict}: {', '.join(p for p, v in finding.verdicts.items() if v == verdict)}"
        for verdict in others
    )
    return f"{finding.verdict}: {', '.join(gravest)}; {rest}"


def count_verdicts(findings: Sequence[Finding]) -> dict[str, int]:
    """Count the claims that have each verdict."""
    counts = Counter(finding.verdict for finding in findings)
    return {verdict: counts[verdict] for verdict in VERDICTS}


def count_decided(findings: Sequence[Finding]) -> int:
    """Count the claims that could be decided here."""
    return sum(finding.verdict not in (NEEDS_HARDWARE, NEEDS_MODEL) for finding in findings)
