"""The reading of one policy in one budget by the real model: its loss, and its loads."""

from __future__ import annotations

import hashlib
import json
from collections.abc import Mapping
from dataclasses import dataclass
from fractions import Fraction
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt

from benchmarks.quality.estimates import Figure, combined, figure
from benchmarks.quality.setting import KINDS, Amounts, Tell
from benchmarks.quality.study import Study
from crisp.adapter import attach
from crisp.files import atomic
from crisp.model.spec import ModelSpec
from crisp.policy import Budget, Policy
from crisp.policy.widths.saliency import Saliency
from crisp.profile import Profile
from crisp.quality import Scores, score_windows
from crisp.quality.statistics import by_window, nll_increase
from crisp.sim.fast_replay import compiled_replay
from crisp.text_windows import TokenWindows

TUNING, HELDOUT = 1536, 4096  # tokens of each kind of text
Floats = npt.NDArray[np.float64]


@dataclass(frozen=True, eq=False)
class Reading:
    """The scores of some windows, and the blocks that were loaded while each was read."""

    scores: Scores
    blocks: npt.NDArray[np.int64]  # [windows]
    fed: int  # tokens
    block_bytes: int

    @property
    def bytes(self) -> float:
        """The bytes loaded a token."""
        return float(self.blocks.sum()) * self.block_bytes / self.fed

    def kinds(self) -> npt.NDArray[np.int64]:
        """Return the kind of text of each window: [windows]."""
        first = np.unique(self.scores.window, return_index=True)[1]
        return self.scores.text[first].astype(np.int64)

    def losses(self, full: Reading) -> Floats:
        """Return the mean over kinds of perplexity / full perplexity - 1, then of each resample."""
        ratios = []
        for seed, kind in enumerate(KINDS):
            scores, full_scores = (one.scores.of_text(kind) for one in (self, full))
            sums = combined(by_window(scores, nll_increase(scores, full_scores)), seed)
            ratios.append(np.expm1(sums[:, 1] / sums[:, 0]))
        return np.mean(ratios, axis=0)

    def by_kind(self, full: Reading) -> dict[str, Figure]:
        """Return perplexity / full perplexity - 1 of each kind of text, with its interval."""
        found = {}
        for seed, (kind, name) in enumerate(KINDS.items()):
            scores, full_scores = (one.scores.of_text(kind) for one in (self, full))
            sums = combined(by_window(scores, nll_increase(scores, full_scores)), seed)
            found[name] = figure(np.expm1(sums[:, 1] / sums[:, 0]))
        return found

    def loss(self, full: Reading) -> Figure:
        """Return the first of `losses`, with its interval."""
        return figure(self.losses(full))


def over(a: Reading, b: Reading) -> Figure:
    """Return bytes of ``a`` over those of ``b`` on the same windows, with its interval."""
    sums = 0.0
    for seed, kind in enumerate(KINDS):
        windows = a.kinds() == kind
        blocks = np.stack([a.blocks[windows], b.blocks[windows]], 1)  # [windows, 2]
        sums = sums + combined(blocks.astype(float), seed)
    assert isinstance(sums, np.ndarray)
    return figure(sums[:, 0] / sums[:, 1])


class Bench:
    """A small model with importance order, and texts to choose on and to report on."""

    def __init__(self, folder: Path, data: Path, work: Path, tell: Tell) -> None:
        self.study = Study(folder, data, work, Amounts(calibration=16384), tell)
        self.tell, self.spec = tell, self.study.spec
        self.tuning = self.study.windows("calibration", KINDS.values(), TUNING)
        self.heldout = self.study.windows("heldout", KINDS.values(), HELDOUT)
        self.profile = self.study.salient
        self.study.arrange(self.study.orders)

    def read(self, policy: Policy, budget: str, windows: TokenWindows) -> Reading:
        """Read the windows one after the other, each token of each layer an event.

        The cache starts empty. The reading is kept in the work folder.
        """
        decisive = policy.to_dict(), budget, self.profile.digest(), windows.dataset, windows.n_fed
        key = json.dumps(decisive)
        file = self.study.work / f"budget-{hashlib.sha256(key.encode()).hexdigest()[:20]}.npz"
        if not file.exists():
            model, upto = self.study.loaded.model, [0]
            with attach(
                model, policy, self.profile, spec=self.spec, budget=Budget.parse(budget),
                replay=compiled_replay,
            ) as attached:  # fmt: skip

                def note(done: int, total: int) -> None:
                    upto.append(attached.tally.blocks_loaded or 0)

                scores = score_windows(model, windows, note, batch=1)
            with atomic(file) as temporary, temporary.open("wb") as stream:
                np.savez(stream, blocks=np.diff(upto), **vars(scores))
        with np.load(file) as kept:
            parts = {name: kept[name] for name in kept.files}
        blocks = parts.pop("blocks")
        return Reading(Scores(**parts), blocks, windows.n_fed, self.spec.block_bytes)

    def facts(self) -> Mapping[str, Any]:
        """Return the conditions under which the figures of this model were measured."""
        return {
            "name": self.spec.name,
            "spec": self.spec.to_dict(),
            "weights": self.study.weights,
            "tuning_tokens": self.tuning.n_fed,
            "heldout_tokens": self.heldout.n_fed,
            "behind": behind(self.profile, self.spec),
            "full_bytes": len(self.spec.moe_layers) * self.spec.top_k * self.spec.expert_bytes,
        }


def behind(profile: Profile, spec: ModelSpec) -> float:
    """Return what share of the blocks that are worth loading lies behind one that is not.

    Of half of all blocks, over the profile's tokens. Those are what a prefix cannot load, and a set
    of blocks could.
    """
    bound = Saliency(Fraction(1, 2)).bind(spec, profile, True)
    assert profile.router_weights is not None
    worth = (
        profile.router_weights.astype(np.float64)[..., None] * bound.contributions[:, :, None, :]
    )  # [layers, experts, quantiles, blocks]
    wanted = worth >= bound.thresholds[:, None, None, None]
    often = profile.expert_counts[:, :, None, None]
    leading = np.logical_and.accumulate(wanted, axis=-1)
    return float(1 - (leading * often).sum() / (wanted * often).sum())
