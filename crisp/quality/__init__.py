"""What a policy costs in quality: perplexity, with intervals, beside the bytes it touches."""

from crisp.quality.evaluation import evaluate, geometry
from crisp.quality.measuring import measure
from crisp.quality.report import Figures, Quality, to_json
from crisp.quality.scores import Scores
from crisp.quality.statistics import perplexity, ratio, retention
from crisp.quality.tasks import Tasks, TaskScore
from crisp.quality.tiers import OfTier, TierCounts, by_tier
from crisp.statistics import Estimate

__all__ = [
    "Estimate",
    "Figures",
    "OfTier",
    "Quality",
    "Scores",
    "TaskScore",
    "Tasks",
    "TierCounts",
    "by_tier",
    "evaluate",
    "geometry",
    "measure",
    "perplexity",
    "ratio",
    "retention",
    "to_json",
]
