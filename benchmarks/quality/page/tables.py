"""Tables of the page, as Markdown."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any

from benchmarks.quality.page.claims import CONTRADICTED, MIXED, SHOWN, Claim, outcome, tally

Figure = dict[str, Any]


def markdown(head: Sequence[str], rows: Iterable[Sequence[str]], text: int = 1) -> str:
    """Return a table; the first ``text`` columns are text, the others numbers."""
    rule = "|---" * text + "|---:" * (len(head) - text) + "|"
    lines = ["| " + " | ".join(head) + " |", rule]
    return "\n".join([*lines, *("| " + " | ".join(row) + " |" for row in rows)])


def policies(rows: Sequence[Figure], paper: Mapping[str, str] | None = None) -> str:
    """Format rows of `benchmarks.quality.estimates.row`; paper: its figure by row."""
    kinds = list(rows[0]["by_kind"])
    head = ["", "bytes", "KB a token", *kinds, "increase", "predictions kept"]
    return markdown(
        head + (["paper"] if paper else []),
        ([*_policy(row, kinds), *([paper.get(row["label"], "")] if paper else [])] for row in rows),
    )


def _policy(row: Figure, kinds: Sequence[str]) -> list[str]:
    full = row["increase"]["value"] == 0 and row["retention"]["value"] == 1
    return [
        row["label"] + (f" (mean of {row['seeds']})" if "seeds" in row else ""),
        percent(row["share"]),
        f"{row['bytes'] / 1000:,.0f}",
        *(plus_minus(row["by_kind"][kind]["perplexity"]) for kind in kinds),
        "" if full else percents(row["increase"], sign=True),
        "" if full else plus_minus(row["retention"], percent),
    ]


def percent(value: float) -> str:
    """One decimal.

    >>> percent(0.5), percent(0.8931)
    ('50.0 %', '89.3 %')
    """
    return f"{100 * value:.1f} %"


def percents(figure: Figure, sign: bool = False, digits: int = 1) -> str:
    """Format a share with its interval, in per cent.

    >>> percents({"value": 0.076, "interval": [0.064, -0.01]}, sign=True)
    '+7.6 % (+6.4 to −1.0)'
    """
    value, low, high = (
        _signed(100 * x, sign, digits) for x in (figure["value"], *figure["interval"])
    )
    return f"{value} % ({low} to {high})"


def number(figure: Figure, digits: int = 2, sign: bool = False) -> str:
    """Format a figure with its interval."""
    value, low, high = (_signed(x, sign, digits) for x in (figure["value"], *figure["interval"]))
    return f"{value} ({low} to {high})"


def plus_minus(figure: Figure, show: Callable[[float], str] | None = None) -> str:
    """Format a figure and half the width of its interval.

    >>> plus_minus({"value": 18.681, "interval": [17.5, 19.9]})
    '18.7 ± 1.2'
    """
    low, high = figure["interval"]
    half = (high - low) / 2
    if show is None:
        return f"{figure['value']:.1f} ± {half:.1f}"
    return f"{show(figure['value']).removesuffix(' %')} ± {show(half)}"


def _signed(value: float, sign: bool, digits: int = 1) -> str:
    return f"{value:{'+' if sign else ''}z.{digits}f}".replace("-", "−")


def verdict(claim: Claim, results: Mapping[str, Any]) -> str | None:
    """Return a model's verdict on a claim: a word and the figure, or the range of several."""
    figures = claim.find(results)
    if not figures:
        return None
    word = outcome(claim, figures)
    if word == MIXED:
        for_it, against = (tally(claim, figures, side) for side in (SHOWN, CONTRADICTED))
        word = f"shown in {for_it} of {len(figures)}"
        word += f", the opposite in {against}" if against else ""
    if len(figures) == 1:
        return f"**{word}**: {_with_unit(figures[0], claim.unit)}"
    values = [figure["value"] for figure in figures]
    scale = {"%": 100, "points": 100}.get(claim.unit, 1)
    digits = 2 if max(map(abs, values)) < 0.05 else 1
    ends = " to ".join(_signed(scale * end, True, digits) for end in (min(values), max(values)))
    return f"**{word}**: {ends} {claim.unit}"


def _with_unit(figure: Figure, unit: str) -> str:
    if unit in ("%", "points"):
        # Small differences to another digit: what decides is on which side of 0 their ends are.
        digits = 2 if max(map(abs, figure["interval"])) < 0.05 else 1
        return percents(figure, sign=True, digits=digits).replace("%", unit)
    return number(figure, 3, sign=True).replace(" (", f" {unit} (")
