"""The report of a policy's quality with its settings, as data and as a JSON file."""

from __future__ import annotations

import json
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from crisp.quality.scores import Scores
from crisp.quality.tasks import TaskScore
from crisp.quality.tiers import TierQuality
from crisp.statistics import Estimate, as_json
from crisp.version import TOOL

VERSION = 1


@dataclass(frozen=True)
class QualityFigures:
    """The quality figures of one text, or of all of them.

    The last two compare with the reference on the same windows; None: there was no reference.
    """

    text: str | None  # its name; None: all texts
    tokens: int  # scored
    perplexity: Estimate
    ratio: Estimate | None  # perplexity over the reference's
    retention: Estimate | None  # share of tokens whose top prediction is the reference's

    def to_dict(self) -> dict[str, Any]:
        """Return a dict that is safe for JSON."""
        figures = {"perplexity": self.perplexity, "ratio": self.ratio, "retention": self.retention}
        return {"text": self.text, "tokens": self.tokens} | as_json(figures)


@dataclass(frozen=True, eq=False)
class Quality:
    """The result of one evaluation."""

    settings: dict[str, Any]  # everything the measurement was made under
    whole: QualityFigures  # of all texts
    costs: dict[str, float | None]  # bytes and counts per token; None: not available
    unavailable: dict[str, str]  # why a figure is None
    by_text: list[QualityFigures]
    by_tier: list[TierQuality]  # empty for widths without tiers, and for the reference
    scores: Scores
    tasks: list[TaskScore]

    def to_dict(self) -> dict[str, Any]:
        """Return everything but the scores of single tokens, safe for JSON."""
        whole = self.whole.to_dict()
        del whole["text"]
        return {
            "settings": self.settings,
            "metrics": whole | self.costs,
            "unavailable": self.unavailable,
            "by_text": [figures.to_dict() for figures in self.by_text],
            "by_tier": [row.to_dict() for row in self.by_tier],
            "tasks": [score.to_dict() for score in self.tasks],
        }


def to_json(qualities: Sequence[Quality]) -> str:
    """Return the text of a quality file, the reference first; equal results give equal bytes."""
    content = {
        "version": VERSION,
        "tool": TOOL,
        "results": [quality.to_dict() for quality in qualities],
    }
    return json.dumps(content, indent=1, allow_nan=False) + "\n"
