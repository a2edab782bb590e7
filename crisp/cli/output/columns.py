"""Lay out figures in columns of plain text that stays readable in a pipe."""

from __future__ import annotations

from collections.abc import Sequence
from math import floor, log10

DASH = "–"  # for what could not be had


def format_numbers(values: Sequence[float | None], decimals: int | None = None) -> list[str]:
    """Format one column, with decimals for three digits of the smallest value (at most four)."""
    sizes = [abs(value) for value in values if value]
    if decimals is None:
        decimals = min(4, max(0, 2 - floor(log10(min(sizes))))) if sizes else 1
    return [DASH if value is None else f"{value:,.{decimals}f}" for value in values]


def align_columns(
    headings: Sequence[str], columns: Sequence[Sequence[str]], text: int
) -> list[str]:
    """Return lines of columns two spaces apart: the first ``text`` to the left, others right."""
    widths = [max(map(len, (h, *cells))) for h, cells in zip(headings, columns, strict=True)]
    lines = []
    for cells in (headings, *zip(*columns, strict=True)):
        padded = [
            cell.ljust(width) if place < text else cell.rjust(width)
            for place, (cell, width) in enumerate(zip(cells, widths, strict=True))
        ]
        lines.append("  ".join(padded).rstrip())
    return lines
