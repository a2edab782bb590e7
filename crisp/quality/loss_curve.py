"""The measurement of a loss curve: the model reads a text in each budget, at each threshold."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from fractions import Fraction

import numpy as np

from crisp.adapter import attach
from crisp.checkpoint.loading import LoadedModel
from crisp.errors import CrispError
from crisp.model.spec import ModelSpec
from crisp.policy import Budget, named
from crisp.policy.widths.saliency import Saliency
from crisp.profile import Profile
from crisp.profile.loss_curve import MOST, POLICY, LossCurve
from crisp.progress import Progress, no_progress
from crisp.quality.scores import Scores
from crisp.quality.scoring import score_windows
from crisp.quality.statistics import perplexity_ratio
from crisp.scheduler.untimed import NewReplay, Replay
from crisp.text_windows import TokenWindows

SHARES = tuple(Fraction(part, 20) for part in (3, 4, 5, 6, 7, 8, 9, 10, 11, 12, 14, 16, 18))
TOKENS = 12_288  # of the text, at most


def measure_loss_curve(
    loaded: LoadedModel,
    windows: TokenWindows,
    profile: Profile,
    spec: ModelSpec,
    budgets: Sequence[Fraction],
    progress: Progress = no_progress,
    replay: NewReplay = Replay,
) -> LossCurve:
    """Return the losses of policy saliency, in each of the rising ``budgets``, at each of `SHARES`.

    Every window is read once, one after the other, and a cache within the budget is followed
    through them. Shares below the first whose interval ends beyond `MOST` are not measured: they
    are written down as losing as much. progress: called with (readings done, in all).
    replay: what follows the cache.

    Raises CrispError for a single window, which has no interval.
    """
    if len(windows.tokens) < 2:
        raise CrispError("--loss-curve: a single window of text says nothing about other text")
    full = score_windows(loaded.model, windows)
    losses, highs = np.zeros((2, len(budgets), len(SHARES)))
    done, total = 0, len(budgets) * len(SHARES)
    for row, budget in enumerate(budgets):
        for place in range(len(SHARES))[::-1]:
            beyond = place + 1 < len(SHARES) and highs[row, place + 1] > MOST
            if beyond:
                losses[row, place], highs[row, place] = (
                    losses[row, place + 1],
                    highs[row, place + 1],
                )
            else:
                policy = replace(named(POLICY), width=Saliency(SHARES[place]))
                within = Budget(str(budget), budget, None)
                with attach(loaded.model, policy, profile, spec=spec, budget=within, replay=replay):
                    scores = score_windows(loaded.model, windows, batch=1)
                losses[row, place], highs[row, place] = loss_of(scores, full)
            done += 1
            progress(done, total)
    return LossCurve(len(full.nll), tuple(budgets), SHARES, losses, highs)


def loss_of(scores: Scores, full: Scores) -> tuple[float, float]:
    """Return the loss over all texts, and the upper end of the interval of the one that loses most.

    Other text may be more like that one than like their mean. A text of one window has no interval.
    """
    ratio = perplexity_ratio(scores, full)
    texts = [
        perplexity_ratio(scores.of_text(number), full.of_text(number))
        for number in np.unique(full.text).tolist()
    ]
    ends = [one.interval[1] for one in (ratio, *texts) if one.interval is not None]
    return ratio.value - 1, max(ends) - 1
