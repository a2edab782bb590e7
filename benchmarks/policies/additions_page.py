"""The section of docs/policies.md about additions to the policy saliency."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

from benchmarks.policies.additions import LOSS, SHARES
from benchmarks.policies.choosing import MARK
from benchmarks.policies.words import Row, kilobytes, percent, table, with_interval, with_times


def additions_section(models: Sequence[Row]) -> str:
    """Return the section about additions, built and not built."""
    built = [
        (model["name"], row, _without(model, row)) for model in models for row in model["built"]
    ]
    tried = [(model["name"], row) for model in models for row in model["tried"]]
    step = round(abs(float(SHARES["tiny-mixtral"][0]) - float(SHARES["tiny-mixtral"][1])), 3)
    return "\n\n".join(
        [
            "## Additions",
            "What is added to `saliency`, on the text that nothing was chosen on (`python "
            "benchmarks/policies --data DIR --additions`). `--magnitude predicted` multiplies the "
            "router's weight by what the layer's input foretells of the expert's size for this "
            f"token ([contract](contract.md)). Chosen for no more than {100 * MARK:.1f} % as "
            f"above, but on a finer grid of thresholds (steps of {step:g}), alike with and "
            f"without; the last column compares bytes at one loss, {100 * LOSS:.1f} %, between "
            "the points of that grid.",
            table(_BUILT, built),
            "What was tried and not built: bytes at the same loss, over those without it.",
            table(_TRIED, tried),
        ]
    )


def _without(model: Row, row: Row) -> Row:
    """Return the row of the same budget without magnitudes."""
    found: Row = next(one for one in model["built"] if one["budget"] == row["budget"])
    return found


def _change(factor: float) -> str:
    return f"{100 * (factor - 1):+z.1f} %"


_BUILT: dict[str, Callable[[Any], str]] = {
    "model": lambda line: line[0],
    "budget": lambda line: line[1]["budget"],
    "`--magnitude`": lambda line: line[1]["magnitude"],
    "`--width`": lambda line: f"`saliency({line[1]['share']})`",
    "kB a token": lambda line: kilobytes(line[1]),
    "loss": lambda line: with_interval(line[1]["loss"], percent),
    "times fewer than lru": lambda line: with_times(line[1]["over_lru"]),
    "bytes at one loss": lambda line: _change(line[1]["bytes_at_loss"] / line[2]["bytes_at_loss"]),
}
_TRIED: dict[str, Callable[[Any], str]] = {
    "model": lambda line: line[0],
    "budget": lambda line: line[1]["budget"],
    "addition": lambda line: line[1]["addition"],
    "bytes at one loss": lambda line: _change(line[1]["over"]),
}
