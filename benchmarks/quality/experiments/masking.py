"""Masking: experts masked in one layer, and what that does to the loss, window by window."""

from __future__ import annotations

from collections.abc import Sequence
from itertools import groupby

import numpy as np
import numpy.typing as npt

from crisp.prepare.ablation import Ablation, AblationBatch
from crisp.profile import Profile

Floats = npt.NDArray[np.float64]
Pair = tuple[int, int, int]  # decoder layer and two experts


def most_frequent(profile: Profile, count: int) -> list[Pair]:
    """Return the ``count`` combinations of the whole model that occur most often."""
    flat = np.argsort(-profile.pair_counts, axis=None, kind="stable")[:count]
    places = zip(*np.unravel_index(flat, profile.pair_counts.shape), strict=True)
    return [(int(layer), int(i), int(j)) for layer, i, j in places]


def pair_by_pair(ablation: Ablation, pairs: Sequence[Pair]) -> tuple[Floats, Floats]:
    """Mask the experts of some pairs one by one, as the paper does; return (plain, gained).

    plain [windows, 2]: scored tokens and their loss; gained [windows, pairs, 2]: what the summed
    loss gains when the first, or the second, of the pair is masked for the pair's tokens.
    """
    by_layer = sorted(enumerate(pairs), key=lambda one: one[1][0])
    plain, gained = np.zeros((0, 2)), np.zeros((0, len(pairs), 2))
    for layer, group in groupby(by_layer, key=lambda one: one[1][0]):
        batches = ablation.plain(layer)
        plain = np.concatenate([_by_window(batch, batch.scored, batch.loss) for batch in batches])
        if not len(gained):
            gained = np.zeros((len(plain), len(pairs), 2))
        for place, (_, i, j) in group:
            for side, masked in enumerate((i, j)):
                gained[:, place, side] = np.concatenate(
                    [_gain(ablation, layer, batch, (i, j), masked) for batch in batches]
                )
    return plain, gained


def without(
    ablation: Ablation, layer: int, expert: int
) -> tuple[npt.NDArray[np.int64], Floats, npt.NDArray[np.int64]]:
    """Mask one expert of a layer for every token.

    Returns (experts [n, k], gain in loss [n], window [n]) of the scored tokens that were routed to
    it.
    """
    experts, gains, windows = [], [], []
    for batch in ablation.plain(layer):
        mask = batch.experts == expert
        change = ablation.masked(layer, batch, mask)
        routed = mask.any(1) & batch.scored
        experts.append(batch.experts[routed])
        gains.append(change[routed])
        windows.append(np.repeat(batch.windows, batch.ids.shape[1])[routed])
    return np.concatenate(experts), np.concatenate(gains), np.concatenate(windows)


def _gain(
    ablation: Ablation, layer: int, batch: AblationBatch, pair: tuple[int, int], masked: int
) -> Floats:
    """Return what the summed loss gains when one expert of the pair is masked: [windows]."""
    here = np.isin(batch.experts, pair)
    both = (here.sum(1) == 2) & here[:, 0]  # a combination is the anchor with another
    change = np.zeros(len(both))
    if both.any():
        change = ablation.masked(layer, batch, (batch.experts == masked) & both[:, None])
    return np.asarray(change.reshape(len(batch.windows), -1).sum(1))


def _by_window(batch: AblationBatch, scored: npt.NDArray[np.bool_], loss: Floats) -> Floats:
    """Return the scored tokens and their summed loss: [windows, 2]."""
    n = len(batch.windows)
    return np.stack(
        [scored.reshape(n, -1).sum(1), (loss * scored).reshape(n, -1).sum(1)], axis=1
    ).astype(np.float64)
