"""Words and numbers of docs/policies.md."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

Row = dict[str, Any]


def table(columns: dict[str, Callable[[Any], str]], rows: Sequence[Any]) -> str:
    """Return a Markdown table: a column for each function of a row."""
    lines = ["| " + " | ".join(columns) + " |", "|" + "---|" * len(columns)]
    lines += ["| " + " | ".join(show(row) for show in columns.values()) + " |" for row in rows]
    return "\n".join(lines)


def kilobytes(row: Row) -> str:
    """Return a row's bytes in kB."""
    return f"{row['bytes'] / 1e3:,.0f}"


def loss_of_row(row: Row) -> str:
    """Return a row's loss."""
    return percent(row["loss"]["value"])


def with_interval(figure: Row, show: Callable[[float], str]) -> str:
    """Return a figure with its interval."""
    low, high = figure["interval"]
    return f"{show(figure['value'])} [{show(low)}, {show(high)}]"


def times_fewer(ratio: Row) -> str:
    """Return a ratio of bytes as how many times fewer they are."""
    return f"{1 / ratio['value']:.2f}"


def with_times(ratio: Row) -> str:
    """Return the same with its interval."""
    low, high = (1 / end for end in reversed(ratio["interval"]))
    return f"{times_fewer(ratio)} [{low:.2f}, {high:.2f}]"


def percent(value: float) -> str:
    """Return a share in per cent."""
    return f"{100 * value:z.1f} %"


def points(value: float) -> str:
    """Return a difference of shares in points."""
    return f"{100 * value:+z.1f}"


def plain(value: float) -> str:
    """Return a number with two decimals."""
    return f"{value:.2f}"
