"""The section of docs/policies.md about additions to the policy saliency."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

from benchmarks.policies.additions import LOSS, SHARES
from benchmarks.policies.choosing import MARK
from benchmarks.policies.words import (
    Row,
    kilobytes,
    percent,
    table,
    times_fewer,
    with_interval,
    with_times,
)


def additions_section(models: Sequence[Row]) -> str:
    """Return the section about additions, built and not built."""
    built = [
        (model["name"], row, _without(model, row)) for model in models for row in model["built"]
    ]
    tried = [(model["name"], row) for model in models for row in model["tried"]]
    first, second = (float(share) for share in SHARES["tiny-mixtral"][:2])
    step = f"{first - second:.3f}".lstrip("0")
    return "\n\n".join(
        [
            "## Additions",
            "What is added to `saliency`, on the text that nothing was chosen on (`python "
            "benchmarks/policies --data DIR --additions`). `--magnitude predicted` multiplies the "
            "router's weight by what the layer's input foretells of the expert's size for this "
            f"token ([contract](contract.md)). Chosen for no more than {100 * MARK:.1f} % as "
            f"above, but on a finer grid of thresholds (steps of {step}), alike with and "
            f"without; the last column compares bytes at one loss, {100 * LOSS:.1f} %, between "
            "the points of that grid.",
            table(_BUILT, built),
            "What was tried and not built: bytes at the same loss, over those without it.",
            table(_TRIED, tried),
            "The last is what two precisions in one cache could spare (SliceMoE caches slices of "
            "bits, and loads the lower ones only where a miss budget allows it: Choi et al., "
            "[arXiv 2512.12990](https://arxiv.org/abs/2512.12990); its hardware and its "
            "quantisation were not built).",
        ]
    )


def foretold(models: Sequence[Row], name: str) -> list[str]:
    """Return a line that says what predicted magnitudes come to in a model; none: not measured."""
    found = [
        f"{times_fewer(row['over_lru'])} times fewer than `lru` at a {row['budget']} budget, at a "
        f"loss of {with_interval(row['loss'], percent)}"
        for model in models
        for row in model["built"]
        if model["name"] == name and row["magnitude"] != "none"
    ]
    return [f"  With `--magnitude predicted` ([below](#additions)) {'; '.join(found)}."] * bool(
        found
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
    "bytes at one loss": lambda line: (
        "–" if line[1] is line[2] else _change(line[1]["bytes_at_loss"] / line[2]["bytes_at_loss"])
    ),
}
_TRIED: dict[str, Callable[[Any], str]] = {
    "model": lambda line: line[0],
    "budget": lambda line: line[1]["budget"],
    "addition": lambda line: line[1]["addition"],
    "bytes at one loss": lambda line: _change(line[1]["over"]),
}
