"""A policy's quality, with everything it was measured under: as data, and as a file."""

from __future__ import annotations

import json
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from crisp import TOOL
from crisp.quality.scores import Scores
from crisp.quality.tasks import TaskScore
from crisp.quality.tiers import OfTier
from crisp.statistics import Estimate, as_json

VERSION = 1


@dataclass(frozen=True)
class Figures:
    """What is measured of all windows, and of those of each text. The last two compare with the
    reference on the same windows (None: there was none).
    """

    text: str | None  # its name; None: all texts
    tokens: int
    perplexity: Estimate
    ratio: Estimate | None  # perplexity over the reference's
    retention: Estimate | None  # share of tokens whose top prediction is the reference's

    def to_dict(self) -> dict[str, Any]:
        """Safe for JSON."""
        own = {"text": self.text, "tokens": self.tokens}
        return own | as_json(
            {"perplexity": self.perplexity, "ratio": self.ratio, "retention": self.retention}
        )


@dataclass(frozen=True, eq=False)
class Quality:
    """A measurement: ``settings`` is all it was made under.

    ``costs``: bytes and counts a token; one that could not be had is None, and ``unavailable`` says
    why. ``by_tier`` is empty for widths that know no tiers, and for the reference.
    """

    settings: dict[str, Any]
    whole: Figures
    costs: dict[str, float | None]
    unavailable: dict[str, str]
    by_text: list[Figures]
    by_tier: list[OfTier]
    scores: Scores
    tasks: list[TaskScore]

    def to_dict(self) -> dict[str, Any]:
        """Everything but the scores of single tokens, safe for JSON."""
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


def to_json(measured: Sequence[Quality]) -> str:
    """The text of a file: the reference first. The same measurement gives the same bytes."""
    content = {
        "version": VERSION,
        "tool": TOOL,
        "results": [quality.to_dict() for quality in measured],
    }
    return json.dumps(content, indent=1, allow_nan=False) + "\n"
