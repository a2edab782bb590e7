"""One policy, one set of windows: the model reads them with the policy attached."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

import numpy as np

from crisp.adapter import Attached, Tally, attach
from crisp.adapter.widths import Watch
from crisp.checkpoint.loading import Loaded
from crisp.checkpoint.windows import Windows
from crisp.model.spec import ModelSpec
from crisp.policy import Budget, Policy
from crisp.policy.widths.base import Tiered
from crisp.profile import Profile, tiers
from crisp.quality.measuring import BATCH, measure
from crisp.quality.report import Figures, Quality
from crisp.quality.scores import Scores
from crisp.quality.statistics import perplexity, ratio, retention
from crisp.quality.tasks import Tasks
from crisp.quality.tiers import TierCounts, by_tier
from crisp.statistics import LEVEL, RESAMPLES

_NO_BUDGET = "no budget was given: nothing was cached or loaded"
_NO_REFERENCE = "this is what the others are compared with"
_ONE_WINDOW = "there is a single window"


def evaluate(
    loaded: Loaded,
    windows: Windows,
    policy: Policy,
    profile: Profile | None = None,
    *,
    spec: ModelSpec | None = None,
    renormalize: bool = False,
    budget: Budget | None = None,
    reference: Scores | None = None,
    origin: Mapping[str, Any] | None = None,
    tasks: Tasks | None = None,
    batch: int = BATCH,
    seed: int = 0,
    progress: Callable[[int, int], None] = lambda done, total: None,
) -> Quality:
    """Read ``windows`` with ``policy`` attached to the model, and answer ``tasks``.

    reference: the scores of the full model on the same windows; None: this is that measurement.
    profile, spec, renormalize, budget: see `crisp.adapter.attach`; with a budget every token should
    be fed once (windows that do not overlap), one window after the other; where the cache is shared
    by all layers, one token after the other. origin: where the profile comes from, for the record.
    seed: of the resampled windows. Raises CrispError for what does not go together.
    """
    spec = spec or geometry(loaded)
    if budget is not None:
        batch = 1
    counts = None
    if isinstance(policy.width, Tiered) and profile is not None and reference is not None:
        table = tiers(profile, policy.width.alpha, policy.width.beta)
        counts = TierCounts(table, spec.moe_layers, windows)

    def attached(watch: Watch | None) -> Attached:
        return attach(
            loaded.model,
            policy,
            profile,
            spec=spec,
            renormalize=renormalize,
            budget=budget,
            watch=watch,
        )

    with attached(counts) as reading:
        singly = budget is not None and policy.cache.in_step
        scores = measure(loaded.model, windows, progress, batch=batch, singly=singly)
    answers = []
    if tasks is not None:
        with attached(None):
            answers = tasks.run(loaded, batch)
    whole = _figures(None, scores, reference, seed)
    costs = _costs(reading.tally, spec)
    return Quality(
        settings={
            "model": loaded.name,
            "revision": loaded.revision,
            "run": loaded.how,
            "policy": policy.to_dict(),
            "profile": profile and {"sha256": profile.digest(), **(origin or {})},
            "renormalize": renormalize,
            "budget": budget and _held(budget, spec, policy),
            "block": spec.block,
            "block_bytes": spec.block_bytes,
            "expert_blocks": spec.n_blocks,
            "texts": list(windows.dataset),
            "windows": len(windows.tokens),
            "window": windows.window,
            "stride": windows.stride,
            "tokens_fed": windows.fed,
            "batch": batch,
            "interval": f"percentile bootstrap over windows, {LEVEL} %, {RESAMPLES} resamples",
            "seed": seed,
        },
        whole=whole,
        costs=costs,
        unavailable=_reasons(whole, costs),
        by_text=[
            _figures(
                name,
                _of_text(scores, i),
                None if reference is None else _of_text(reference, i),
                seed,
            )
            for i, name in enumerate(windows.names)
        ],
        by_tier=[]
        if counts is None or reference is None
        else by_tier(counts.scored(), scores, reference, seed),
        scores=scores,
        tasks=answers,
    )


def geometry(loaded: Loaded, block: int | None = None) -> ModelSpec:
    """The model's geometry, with blocks of ``block`` neurons; CrispError if it is not read."""
    spec = loaded.spec or ModelSpec.from_config(loaded.model.config.to_dict())
    return spec.with_(block=block)


def _held(budget: Budget, spec: ModelSpec, policy: Policy) -> dict[str, Any]:
    """A budget as it was asked for, and what of it is used."""
    blocks = sum(budget.capacity(spec, policy.cache))
    return {
        "asked": budget.text,
        "blocks": blocks,
        "bytes": blocks * spec.block_bytes,
        "share": blocks / (spec.n_routed * spec.n_blocks),
    }


def _figures(text: str | None, scores: Scores, reference: Scores | None, seed: int) -> Figures:
    return Figures(
        text=text,
        tokens=len(scores.nll),
        perplexity=perplexity(scores, seed),
        ratio=None if reference is None else ratio(scores, reference, seed),
        retention=None if reference is None else retention(scores, reference, seed),
    )


def _of_text(scores: Scores, number: int) -> Scores:
    own = scores.text == number
    return Scores(*(np.asarray(values)[own] for values in vars(scores).values()))


def _costs(tally: Tally, spec: ModelSpec) -> dict[str, float | None]:
    """Bytes and counts a token that was fed. Bytes are as stored, in whatever type was computed."""
    rows, size = tally.rows, spec.block_bytes
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


def _reasons(whole: Figures, costs: dict[str, float | None]) -> dict[str, str]:
    reasons = {name: _NO_BUDGET for name, value in costs.items() if value is None}
    for name, value in whole.to_dict().items():
        if value is None and name != "text":
            reference = whole.ratio is None and not name.startswith("perplexity")
            reasons[name] = _NO_REFERENCE if reference else _ONE_WINDOW
    return reasons
