"""Markov chains over the expert pairs of a layer, fitted to two statistics of real routing."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt
import pyarrow as pa
import pyarrow.csv

from crisp.errors import CrispError, reason_of

Floats = npt.NDArray[np.float64]
Ints = npt.NDArray[np.int64]

_COLUMNS = ("layer", "i", "j", "count", "i_first")
_ROUNDS = 5000  # of fitting, at most
_CLOSE = 1e-9  # share at which fitting stops


@dataclass(frozen=True)
class PairChain:
    """The routing of one MoE layer as a Markov chain over its pairs of experts."""

    pairs: npt.NDArray[np.int16]  # [pairs, 2]: i < j
    share: Floats  # [pairs]: of tokens, in the long run
    first: Floats  # [pairs]: how often i is the first choice
    flow: Floats  # [pairs, pairs]: share of (token, next token) that are (p, q); symmetric
    miss: float  # greatest error of the shares of tokens with 0, 1 and 2 experts in common


def read_chains(pairs: Path, persistence: Path) -> dict[int, PairChain]:
    """Read the statistics of each MoE layer from two CSV files and fit its chain.

    ``pairs``: columns layer, i, j, count, i_first: how often the pair (i, j), i < j, was routed to,
    and how often i was the first choice. ``persistence``: column layer, then the shares of tokens
    that have 0, 1 and 2 experts in common with the token before.
    """
    table = _read_columns(pairs)
    if tuple(table) != _COLUMNS:
        raise CrispError(f"{pairs}: columns {', '.join(table)}; expected {', '.join(_COLUMNS)}")
    for name, column in table.items():
        if column.dtype.kind != "i" or (column < 0).any():
            raise CrispError(f"{pairs}: column {name}: expected whole numbers, none negative")
    layer, i, j, count, i_first = table.values()
    for bad, what in (
        (i >= j, "i is not below j"),
        (j > np.iinfo(np.int16).max, "an expert's number is too large"),
        (i_first > count, "i_first is above count"),
    ):
        if bad.any():
            raise CrispError(f"{pairs}: line {int(bad.argmax()) + 2}: {what}")
    targets = _read_targets(persistence)
    if set(targets) != set(layer.tolist()):
        odd = min(set(targets) ^ set(layer.tolist()))
        raise CrispError(f"{pairs} and {persistence}: layer {odd} is in one of them only")
    chains = {}
    for number, target in sorted(targets.items()):
        used = (layer == number) & (count > 0)
        experts = np.stack([i[used], j[used]], axis=1).astype(np.int16)  # [pairs, 2]
        if not len(experts) or len(np.unique(experts, axis=0)) < len(experts):
            what = "a pair occurs twice" if len(experts) else "has no counts"
            raise CrispError(f"{pairs}: layer {number}: {what}")
        try:
            chains[number] = fit_chain(experts, count[used], i_first[used], target)
        except CrispError as error:
            raise CrispError(f"{persistence}: layer {number}: {error}") from None
    return chains


def fit_chain(
    pairs: npt.NDArray[np.int16], count: Ints, i_first: Ints, target: Floats
) -> PairChain:
    """Fit the chain nearest to independent draws that keeps the pairs' and the overlaps' shares.

    Of all symmetric flows F[p, q] with row sums share[p] and mass target[c] on the (p, q) that have
    c experts in common, it is the one of least divergence from share[p] * share[q], found by
    iterative proportional fitting: scale each class, then rows and columns, until nothing changes.
    The rows come last, so the pairs' shares hold even if no flow has these overlaps; ``miss`` says
    by how much they are missed.

    pairs [pairs, 2]; count, i_first [pairs]; target [3], sums to 1.
    """
    share = count / count.sum()
    member = np.zeros((len(pairs), int(pairs.max()) + 1))
    member[np.arange(len(pairs))[:, None], pairs] = 1
    common = (member @ member.T).astype(np.int8)
    masks = [common == c for c in range(3)]
    flow = np.outer(share, share)
    miss = np.inf
    for _ in range(_ROUNDS):
        for mask, wanted in zip(masks, target, strict=True):
            mass = flow[mask].sum()
            flow[mask] *= wanted / mass if mass > 0 else 0
        _scale_to_sums(flow, share)
        last, miss = miss, _overlap_error(flow, masks, target)
        if miss < _CLOSE or abs(last - miss) < _CLOSE * miss:
            break
    off = np.inf
    for _ in range(_ROUNDS):
        off = _scale_to_sums(flow, share)
        if off < _CLOSE:
            break
    if not off < _CLOSE:
        raise CrispError("no order of these pairs has such shares of experts in common")
    return PairChain(pairs, share, i_first / count, flow, _overlap_error(flow, masks, target))


def _scale_to_sums(flow: Floats, share: Floats) -> float:
    """Scale rows and columns alike towards the sums ``share``; return how far off they were."""
    sums = flow.sum(axis=1)
    scale = np.sqrt(share / np.maximum(sums, np.finfo(np.float64).tiny))
    flow *= scale[:, None] * scale
    return float(np.abs(sums - share).max())


def _overlap_error(flow: Floats, masks: list[npt.NDArray[np.bool_]], target: Floats) -> float:
    """Return the greatest error of the shares of flow with 0, 1 and 2 experts in common."""
    sums = np.array([flow[mask].sum() for mask in masks])
    return float(np.abs(sums - target).max())


def _read_targets(path: Path) -> dict[int, Floats]:
    """Return the shares [3] of tokens with 0, 1 and 2 experts in common, by layer."""
    table = _read_columns(path)
    layer, *shares = table.values()
    if len(shares) != 3 or next(iter(table)) != "layer" or layer.dtype.kind != "i":
        raise CrispError(
            f"{path}: expected the column layer and the shares of 0, 1 and 2 in common"
        )
    try:
        target = np.stack(shares, axis=1).astype(np.float64)
    except ValueError:
        raise CrispError(f"{path}: a share is not a number") from None
    good = (target >= 0).all(axis=1) & (np.abs(target.sum(axis=1) - 1) < 0.01)
    if not good.all():
        line = int(good.argmin()) + 2
        raise CrispError(f"{path}: line {line}: three shares that sum to 1 were expected")
    if len(np.unique(layer)) < len(layer):
        raise CrispError(f"{path}: a layer occurs twice")
    rounded = target / target.sum(axis=1, keepdims=True)
    return dict(zip(layer.tolist(), rounded, strict=True))


def _read_columns(path: Path) -> dict[str, npt.NDArray[Any]]:
    """Return the columns of a small CSV file, by name."""
    if not path.is_file():
        raise CrispError(f"{path}: no such file")
    try:
        table = pa.csv.read_csv(path)
    except pa.ArrowException as error:
        raise CrispError(f"{path}: {reason_of(error)}") from error
    if not table.num_rows:
        raise CrispError(f"{path}: holds no rows")
    return {name: table.column(name).to_numpy() for name in table.column_names}
