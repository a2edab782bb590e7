"""Sections of docs/policies.md: losses asked for, and real routing."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

from benchmarks.policies.choosing import ASKED, SPARE
from benchmarks.policies.words import Row, percent, plain, table, times_fewer
from crisp.profile.loss_curve import parse_loss


def kept(models: Sequence[Row], asked: str | None = None) -> tuple[int, int]:
    """Return in how many cells a loss that was asked for was kept, of how many.

    A cell is a kind of text in a budget. asked: this loss alone.
    """
    cells = [
        figure["value"] <= parse_loss(promise["asked"])
        for model in models
        for at in model["budgets"]
        for promise in at["promises"]
        if asked in (None, promise["asked"])
        for figure in promise["heldout"].values()
    ]
    return sum(cells), len(cells)


def worst(models: Sequence[Row]) -> float:
    """Return by how much a loss was above what was asked for, at the most; 0: nowhere."""
    beyond = [
        figure["value"] - float(parse_loss(promise["asked"]))
        for model in models
        for at in model["budgets"]
        for promise in at["promises"]
        for figure in promise["heldout"].values()
    ]
    return max(0.0, *beyond)


def promised_section(models: Sequence[Row]) -> str:
    """Return the section about losses that were asked for."""
    within, cells = kept(models)
    by_loss = ", ".join("{} of {} at {}".format(*kept(models, asked), asked) for asked in ASKED)
    head = (
        "## A loss asked for\n\n`--loss` takes the threshold whose loss on the text to choose on "
        "ends, by the interval of the kind that loses most, at "
        f"{SPARE:.0%} of what is asked for. On the other text, kind by "
        f"kind, the loss was within what was asked in {within} of {cells} cells ({by_loss}), and "
        f"{100 * worst(models):.1f} points beyond it at the worst. In "
        "the table the loss of each kind, those above in bold, and how many times fewer bytes than "
        "`lru` by experts are loaded."
    )
    lines = [
        [model["facts"]["name"], at["budget"], promise]
        for model in models
        for at in model["budgets"]
        for promise in at["promises"]
    ]
    columns: dict[str, Callable[[Any], str]] = {
        "model": lambda line: line[0],
        "budget": lambda line: line[1],
        "asked": lambda line: line[2]["asked"],
        "`--width`": lambda line: f"`saliency({line[2]['share']:g})`",
        "on the text to choose on": lambda line: (
            f"{percent(line[2]['loss'])}, at most {percent(line[2]['high'])}"
        ),
        **{
            kind: lambda line, kind=kind: _against(line[2], kind)  # type: ignore[misc]
            for kind in models[0]["budgets"][0]["promises"][0]["heldout"]
        },
        "times fewer": lambda line: times_fewer(line[2]["over_lru"]),
    }
    return f"{head}\n\n{table(columns, lines)}"


def _against(promise: Row, kind: str) -> str:
    value = promise["heldout"][kind]["value"]
    shown = percent(value)
    return shown if value <= parse_loss(promise["asked"]) else f"**{shown}**"


def real_section(rows: Sequence[Row]) -> str:
    """Return the section about routing of models whose weights are not at hand."""
    head = (
        "## Real routing without weights\n\nWhat a block contributes and how sensitive a layer is "
        "only the model itself can say, so nothing here says how much of a large model may be left "
        "out, nor at what loss. What routing alone tells: with everything at full width, the "
        "cache of saliency goes by router weight (gpt-oss-20b, whose trace was recorded), or by "
        "frequency alone (Mixtral 8x7B, of which counts of pairs and their persistence are "
        f"published, from which a trace is drawn). MB a token over {rows[0]['tokens']:,} tokens, "
        "unit block; *fewest*: what no cache could be below (Belady)."
    )
    caches = [name for name in rows[0] if name not in ("trace", "budget", "tokens")]
    columns: dict[str, Callable[[Any], str]] = {
        "trace": lambda row: row["trace"],
        "budget": lambda row: row["budget"],
        **{
            name: lambda row, name=name: f"{row[name] / 1e6:,.0f}"  # type: ignore[misc]
            for name in caches
        },
        "saliency over lru": lambda row: plain(row["saliency"] / row["lru"]),
    }
    return f"{head}\n\n{table(columns, rows)}"
