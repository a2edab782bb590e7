"""The quality cost of a policy: perplexity, with intervals, beside the bytes it touches."""

from crisp.quality.evaluation import evaluate, geometry
from crisp.quality.report import Quality, QualityFigures, to_json
from crisp.quality.scores import Scores
from crisp.quality.scoring import score_windows
from crisp.quality.statistics import perplexity, perplexity_ratio, retention
from crisp.quality.tasks import EvaluationTasks, TaskScore
from crisp.quality.tiers import TierCounts, TierQuality, quality_by_tier
from crisp.statistics import Estimate

__all__ = [
    "Estimate",
    "EvaluationTasks",
    "Quality",
    "QualityFigures",
    "Scores",
    "TaskScore",
    "TierCounts",
    "TierQuality",
    "evaluate",
    "geometry",
    "perplexity",
    "perplexity_ratio",
    "quality_by_tier",
    "retention",
    "score_windows",
    "to_json",
]
