"""The evaluation of one policy: the model reads windows with the policy attached."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from crisp.adapter import AttachedPolicy, ExecutionTally, attach
from crisp.adapter.widths import Watch
from crisp.checkpoint.loading import LoadedModel
from crisp.model.spec import ModelSpec
from crisp.policy import Budget, Policy
from crisp.policy.cache import capacity_bytes
from crisp.policy.widths.base import Tiered
from crisp.profile import Profile, tiers
from crisp.progress import Progress, no_progress
from crisp.quality.report import Quality, QualityFigures
from crisp.quality.scores import Scores
from crisp.quality.scoring import BATCH, score_windows
from crisp.quality.statistics import perplexity, perplexity_ratio, retention
from crisp.quality.tasks import EvaluationTasks
from crisp.quality.tiers import TierCounts, quality_by_tier
from crisp.scheduler.untimed import NewReplay, Replay
from crisp.statistics import LEVEL, RESAMPLES
from crisp.text_windows import TokenWindows

_NO_BUDGET = "no budget was given: nothing was cached or loaded"
_NO_REFERENCE = "this is what the others are compared with"
_ONE_WINDOW = "there is a single window"


def evaluate(
    loaded: LoadedModel,
    windows: TokenWindows,
    policy: Policy,
    profile: Profile | None = None,
    *,
    spec: ModelSpec | None = None,
    renormalize: bool = False,
    budget: Budget | None = None,
    reference: Scores | None = None,
    origin: Mapping[str, Any] | None = None,
    tasks: EvaluationTasks | None = None,
    batch: int = BATCH,
    seed: int = 0,
    progress: Progress = no_progress,
    replay: NewReplay = Replay,
) -> Quality:
    """Read ``windows`` with ``policy`` attached to the model, and answer ``tasks``.

    reference: the scores of the full model on the same windows; None: this is that measurement.
    profile, spec, renormalize, budget, replay: see `crisp.adapter.attach`. With a budget every
    token should be fed once, so windows must not overlap; windows are then fed one by one, and
    tokens too where the cache is shared by all layers. origin: where the profile comes from, for
    the record. seed: of the resampled windows. Raises CrispError for arguments that do not go
    together.
    """
    spec = spec or geometry(loaded)
    if budget is not None:
        batch = 1
    counts = None
    if isinstance(policy.width, Tiered) and profile is not None and reference is not None:
        table = tiers(profile, policy.width.alpha, policy.width.beta)
        counts = TierCounts(table, spec.moe_layers, windows)

    def attached(watch: Watch | None) -> AttachedPolicy:
        return attach(
            loaded.model,
            policy,
            profile,
            spec=spec,
            renormalize=renormalize,
            budget=budget,
            watch=watch,
            replay=replay,
        )

    with attached(counts) as reading:
        singly = budget is not None and policy.cache.in_step
        scores = score_windows(loaded.model, windows, progress, batch=batch, singly=singly)
    answers = []
    if tasks is not None:
        with attached(None):
            answers = tasks.run(loaded, batch)
    whole = _quality_figures(None, scores, reference, seed)
    costs = _costs(reading.tally, spec)
    return Quality(
        settings={
            "model": loaded.name,
            "revision": loaded.revision,
            "run": loaded.how,
            "policy": policy.to_dict(),
            "profile": profile and {"sha256": profile.digest(), **(origin or {})},
            "renormalize": renormalize,
            "budget": budget and _describe_budget(budget, spec, policy),
            "block": spec.block,
            "block_bytes": spec.mean_block_bytes,
            "expert_blocks": spec.n_blocks,
            "texts": list(windows.dataset),
            "windows": len(windows.tokens),
            "window": windows.window,
            "stride": windows.stride,
            "tokens_fed": windows.n_fed,
            "batch": batch,
            "interval": f"percentile bootstrap over windows, {LEVEL} %, {RESAMPLES} resamples",
            "seed": seed,
        },
        whole=whole,
        costs=costs,
        unavailable=_reasons(whole, costs),
        by_text=[
            _quality_figures(
                name,
                scores.of_text(i),
                None if reference is None else reference.of_text(i),
                seed,
            )
            for i, name in enumerate(windows.names)
        ],
        by_tier=[]
        if counts is None or reference is None
        else quality_by_tier(counts.scored(), scores, reference, seed),
        scores=scores,
        tasks=answers,
    )


def geometry(loaded: LoadedModel, block: int | None = None) -> ModelSpec:
    """Return the model's geometry with blocks of ``block`` neurons; CrispError if unknown."""
    spec = loaded.spec or ModelSpec.from_config(loaded.model.config.to_dict())
    return spec.with_(block=block)


def _describe_budget(budget: Budget, spec: ModelSpec, policy: Policy) -> dict[str, Any]:
    """Return a budget as it was requested, and what of it is used."""
    capacity = budget.capacity(spec, policy.cache)
    blocks = sum(capacity)
    return {
        "asked": budget.text,
        "blocks": blocks,
        "bytes": capacity_bytes(spec, capacity),
        "share": blocks / (spec.n_routed * spec.n_blocks),
    }


def _quality_figures(
    text: str | None, scores: Scores, reference: Scores | None, seed: int
) -> QualityFigures:
    """Return the figures of one text (None: of all texts) with their intervals."""
    return QualityFigures(
        text=text,
        tokens=len(scores.nll),
        perplexity=perplexity(scores, seed),
        ratio=None if reference is None else perplexity_ratio(scores, reference, seed),
        retention=None if reference is None else retention(scores, reference, seed),
    )


def _costs(tally: ExecutionTally, spec: ModelSpec) -> dict[str, float | None]:
    """Return bytes and counts per token fed; bytes as stored, whatever type was computed in."""
    rows, size = tally.rows, spec.mean_block_bytes
    full = rows * len(spec.moe_layers) * spec.top_k * spec.n_blocks
    costs: dict[str, float | None] = {
        "bytes_touched_per_token": tally.touched * size / rows,
        "touched_share": tally.touched / full,
        "skipped_per_token": tally.skipped / rows,
        "tasks_per_token": None,
        "hit_rate": None,
        "partial_hit_rate": None,
        "bytes_loaded_per_token": None,
    }
    if tally.blocks_loaded is not None and tally.tasks:
        costs["tasks_per_token"] = tally.tasks / rows
        costs["hit_rate"] = (tally.hits or 0) / tally.tasks
        costs["partial_hit_rate"] = (tally.partial_hits or 0) / tally.tasks
        costs["bytes_loaded_per_token"] = tally.blocks_loaded * size / rows
    return costs


def _reasons(whole: QualityFigures, costs: dict[str, float | None]) -> dict[str, str]:
    """Return for each figure that is None the reason why."""
    reasons = {name: _NO_BUDGET for name, value in costs.items() if value is None}
    for name, value in whole.to_dict().items():
        if value is None and name != "text":
            reference = whole.ratio is None and not name.startswith("perplexity")
            reasons[name] = _NO_REFERENCE if reference else _ONE_WINDOW
    return reasons
