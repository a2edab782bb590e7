"""Which expert of a pair is dominant: what masking either of the two costs (paper, 3.3.2).

``exact`` is the paper's method: one pair, one expert, one pass. ``grouped`` gets all pairs of a
layer from a few passes: each pass masks one expert of a random share of the tokens, and every
token's loss is charged to its own pair. ``local`` needs no pass: it takes the size of what would be
removed. ``weight`` measures nothing and goes by the router's weight, token by token.

A combination is a token's anchor with another of its experts (for top-2 the pair). What is masked
adds nothing to its token, and its weight is given to no other expert.
"""

from __future__ import annotations

from collections.abc import Callable, Container, Iterator, Sequence
from dataclasses import dataclass, fields
from fractions import Fraction
from typing import Any

import numpy as np

from crisp.errors import CrispError
from crisp.policy.spelling import build, show
from crisp.prepare.ablation import Ablation, AblationBatch, Flags
from crisp.prepare.calibration import CalibrationSums, Floats, Ints
from crisp.progress import Progress, no_progress
from crisp.text_windows import TokenWindows

LEAST_SHARE = Fraction(1, 1000)  # every token is given a place in k / share passes
MOST = 1_000_000  # passes, tokens, seeds


@dataclass(frozen=True)
class Exact:
    """Perplexity with the expert masked for every token of the pair, minus that without."""

    least: Fraction = Fraction(16)  # tokens a pair must have

    def __post_init__(self) -> None:
        _check(self)


@dataclass(frozen=True)
class Grouped:
    """The increase of `Exact`, estimated from the losses of the masked tokens alone.

    In each pass ``share`` of the tokens have one expert masked. Over k / share passes every token
    has each of its k experts masked once, in an order drawn from the seed.
    """

    passes: Fraction = Fraction(8)
    share: Fraction = Fraction(1, 4)
    seed: Fraction = Fraction(0)
    least: Fraction = Fraction(16)  # masked tokens, of each of the two experts

    def __post_init__(self) -> None:
        _check(self)


@dataclass(frozen=True)
class Local:
    """Mean norm of what the expert adds to a token of the pair, weight included."""

    least: Fraction = Fraction(16)

    def __post_init__(self) -> None:
        _check(self)


@dataclass(frozen=True)
class Weight:
    """No measurement: the expert with the larger router weight is dominant, token by token."""


RoleMethod = Exact | Grouped | Local | Weight
ROLE_METHODS: dict[str, Callable[..., RoleMethod]] = {
    "exact": Exact,
    "grouped": Grouped,
    "local": Local,
    "weight": Weight,
}


def read_method(text: str) -> RoleMethod:
    """Parse a method's spelling: ``exact``, ``grouped(passes=16,share=0.25)``, ``local``, ..."""
    return build(text, ROLE_METHODS, "roles")


def spell_method(method: RoleMethod) -> str:
    """Return the spelling that `read_method` parses to ``method``.

    >>> spell_method(read_method("grouped(16)"))
    'grouped(passes=16,share=0.25,seed=0,least=16)'
    """
    return show(next(name for name, kind in ROLE_METHODS.items() if kind is type(method)), method)


def _check(method: Any) -> None:
    """Raise CrispError unless every parameter of ``method`` is in its range."""
    for name in (field.name for field in fields(method)):
        value: Fraction = getattr(method, name)
        if name == "share":
            if not LEAST_SHARE <= value <= 1:
                raise CrispError(
                    f"roles: share {float(value):g}: {float(LEAST_SHARE):g} to 1 was expected"
                )
        elif value.denominator != 1 or not (name != "seed") <= value <= MOST:
            raise CrispError(
                f"roles: {name} {float(value):g}: a whole number up to {MOST} was expected"
            )


def local_increases(method: Local, calibration: CalibrationSums) -> dict[int, Floats]:
    """Return for each layer [E, E]: at [i, j] the mean size of what expert i adds in pair {i, j}.

    NaN where the pair has fewer tokens than ``method`` needs.
    """
    result = {}
    for layer, sums in calibration.layers.items():
        counts = sums.anchored + sums.anchored.T
        enough = counts >= int(method.least)
        result[layer] = np.divide(
            sums.removed, counts, out=np.full(counts.shape, np.nan), where=enough
        )
    return result


def measure_increases(
    method: Exact | Grouped,
    model: Any,
    windows: TokenWindows,
    skip: Container[int] = (),
    progress: Progress = no_progress,
) -> Iterator[tuple[int, Floats]]:
    """Yield (layer, increase [E, E]) of every MoE layer that is not in ``skip``.

    At [i, j], i and j in either order: how much the perplexity of ``windows`` grows when expert i
    is masked for the tokens of pair {i, j} in this layer; NaN where too few tokens were seen. The
    grouped method assumes their mean loss increase d for all of the pair's n of N scored tokens:
    perplexity times (exp(n d / N) - 1). Raises CrispError for a model not understood.
    """
    ablation = Ablation(model, windows)
    layers = [layer for layer in ablation.layers if layer not in skip]
    for place, layer in enumerate(layers):
        batches = ablation.plain(layer)

        def advance(done: int, total: int, place: int = place) -> None:
            progress(place * total + done, len(layers) * total)

        measure = _exact if isinstance(method, Exact) else _grouped
        yield layer, measure(method, ablation, layer, batches, advance)  # type: ignore[arg-type]


def _exact(
    method: Exact,
    ablation: Ablation,
    layer: int,
    batches: Sequence[AblationBatch],
    progress: Progress,
) -> Floats:
    """Return the increases [E, E] of one layer from two runs for each pair."""
    n = ablation.n_experts
    result = np.full((n, n), np.nan)
    pairs = [(i, j) for i in range(n) for j in range(i + 1, n)]
    for done, (i, j) in enumerate(pairs, start=1):
        masks = [_of_pair(batch.experts, i, j) for batch in batches]
        tokens = sum(
            int((mask.any(1) & batch.scored).sum())
            for mask, batch in zip(masks, batches, strict=True)
        )
        if tokens >= method.least:
            for expert, other in ((i, j), (j, i)):
                gained = 0.0
                for mask, batch in zip(masks, batches, strict=True):
                    if mask.any():
                        masked = mask & (batch.experts == expert)
                        gained += float(ablation.masked(layer, batch, masked).sum())
                result[expert, other] = gained
        progress(done, len(pairs))
    return _perplexity_increase(result, batches)


def _of_pair(experts: Ints, i: int, j: int) -> Flags:
    """Return where experts i and j stand in tokens that are routed to the pair: [n, k]."""
    anchor = experts[:, :1]
    either: Flags = (experts == i) | (experts == j)  # [n, k]
    both: Flags = (either.sum(1, keepdims=True) == 2) & ((anchor == i) | (anchor == j))  # [n, 1]
    return either & both


def _grouped(
    method: Grouped,
    ablation: Ablation,
    layer: int,
    batches: Sequence[AblationBatch],
    progress: Progress,
) -> Floats:
    """Return the increases [E, E] of one layer from ``method.passes`` runs for all pairs."""
    n = ablation.n_experts
    gained, masked, tokens = np.zeros((n, n)), np.zeros((n, n)), np.zeros((n, n))
    passes = int(method.passes)
    draws = [_slots(method, layer, batch) for batch in batches]
    for batch in batches:
        tokens += _charge(batch.experts, batch.experts >= 0, batch.scored.astype(np.float64), n)
    for done in range(passes):
        for batch, slots in zip(batches, draws, strict=True):
            mask = np.arange(batch.experts.shape[1]) == slots[:, done, None]
            mask &= (batch.experts >= 0) & batch.scored[:, None]
            change = ablation.masked(layer, batch, mask)
            gained += _charge(batch.experts, mask, change, n)
            masked += _charge(batch.experts, mask, np.ones(len(change)), n)
        progress(done + 1, passes)
    enough = masked >= int(method.least)
    mean = np.divide(gained, masked, out=np.full((n, n), np.nan), where=enough)
    return _perplexity_increase(mean * tokens, batches)


def _slots(method: Grouped, layer: int, batch: AblationBatch) -> Ints:
    """Draw the column to mask in each pass, int64 [n, passes]; k and above mask nothing."""
    k = batch.experts.shape[1]
    period = max(k, round(k / method.share))
    rounds = -(-int(method.passes) // period)
    length = batch.ids.shape[1]
    drawn = []
    for window in batch.windows.tolist():
        random = np.random.default_rng([int(method.seed), layer, window])
        slots = np.tile(np.arange(period), (length, rounds, 1))
        drawn.append(random.permuted(slots, axis=2).reshape(length, -1))
    return np.concatenate(drawn)


def _charge(experts: Ints, mask: Flags, amount: Floats, n: int) -> Floats:
    """Return sums [n, n]: at [i, j] the ``amount`` of tokens with i masked in the pair {i, j}.

    experts and mask [tokens, k], amount [tokens]. A token whose anchor is masked counts for each of
    its pairs.
    """
    first, other = np.broadcast_arrays(experts[:, :1], experts[:, 1:])
    amounts = np.broadcast_to(amount[:, None], other.shape)  # [tokens, k - 1]
    anchor = (other >= 0) & mask[:, :1]
    beside = (other >= 0) & mask[:, 1:]
    sums = np.zeros(n * n)
    sums += np.bincount((first * n + other)[anchor], amounts[anchor], n * n)
    sums += np.bincount((other * n + first)[beside], amounts[beside], n * n)
    return sums.reshape(n, n)


def _perplexity_increase(gained: Floats, batches: Sequence[AblationBatch]) -> Floats:
    """Return by how much perplexity grows when the text's summed loss grows by ``gained``."""
    count = sum(int(batch.scored.sum()) for batch in batches)
    loss = sum(float(batch.loss[batch.scored].sum()) for batch in batches)
    increase: Floats = np.exp(loss / count) * np.expm1(gained / count)
    return increase
