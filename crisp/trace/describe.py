"""The facts of a routing trace: its shape, how skewed it is, how it persists."""

from __future__ import annotations

import dataclasses
import math
from dataclasses import dataclass
from fractions import Fraction
from typing import Any, Protocol

import numpy as np
import numpy.typing as npt

from crisp.trace import RoutingTrace

TOP, BOTTOM = 25, 29  # percent of the combinations, as in the paper's Figure 3

Floats = npt.NDArray[np.float64]
Ints = npt.NDArray[np.int64]
_STEP = 1 << 12  # rows looked at together
_TIERS = (0, 1, 2)  # HOT, WARM, COLD


class Counts(Protocol):
    """The counts of experts and combinations: a `crisp.profile.Profile`."""

    @property
    def expert_counts(self) -> Ints:
        """Tokens routed to each expert: [layers, experts]."""

    @property
    def pair_counts(self) -> Ints:
        """Tokens of each combination: [layers, experts, experts], (i, j) at i < j only."""


class Tiering(Protocol):
    """The limits of the tiers and the width of WARM: a `crisp.policy.widths.base.Tiered`."""

    @property
    def alpha(self) -> Fraction:
        """The share of the activations that comes before the first WARM combination."""

    @property
    def beta(self) -> Fraction:
        """The share of the activations that comes before the first COLD combination."""

    @property
    def warm(self) -> Fraction:
        """The width of the second expert of a WARM combination."""


@dataclass(frozen=True)
class LayerFacts:
    """The facts of one MoE layer; shares are of its activations, 0 to 1, None where undefined."""

    layer: int
    top: float | None  # share of the most frequent TOP percent of all combinations
    bottom: float | None  # share of the least frequent BOTTOM percent
    entropy_bits: float  # of the experts' shares
    overlap: float | None  # experts shared with the previous decode token, as a share
    chance: float | None  # the same, were the tokens independent
    tier_combinations: tuple[float, float, float] | None  # HOT, WARM, COLD, of all combinations
    tier_activations: tuple[float, float, float] | None
    saving: float | None  # Eq. 4: of the bytes a token reads
    experts: tuple[float, ...]  # share of each expert, falling


@dataclass(frozen=True)
class Description:
    """The facts of a trace; ``layers`` has its MoE layers only."""

    header: dict[str, Any]
    digest: str  # of the tensors
    rows: int
    n_layers: int
    prefill: int
    decode: int
    sequences: int
    lengths: tuple[int, ...]  # rows of a sequence: least, quartiles, most
    first_positions: tuple[int, int]  # least, most
    weights: bool
    guess: bool
    token: bool
    scores: bool
    magnitudes: bool
    absent: int  # (row, MoE layer)s without an expert
    combinations: int  # possible pairs of experts
    max_entropy_bits: float
    tiers: dict[str, float]  # alpha, beta, warm
    layers: tuple[LayerFacts, ...]

    def mean(self, fact: str) -> float | None:
        """Return the mean over layers of one of their numbers; None where a layer has none."""
        values = [getattr(layer, fact) for layer in self.layers]
        return None if None in values else float(np.mean(values))

    def curve(self) -> Floats:
        """Return the share of activations the most frequent 1, 2, .. experts take: [experts].

        It is the mean over layers.
        """
        mean: Floats = np.cumsum([layer.experts for layer in self.layers], axis=1).mean(axis=0)
        return mean

    def to_dict(self) -> dict[str, Any]:
        """Return everything, safe for JSON."""
        facts = ("top", "bottom", "entropy_bits", "overlap", "chance", "saving")
        return {
            **dataclasses.asdict(self),
            "means": {fact: self.mean(fact) for fact in facts},
            "curve": self.curve().tolist(),
        }


def describe(
    trace: RoutingTrace, counts: Counts, tiers: npt.NDArray[np.uint8], tiering: Tiering
) -> Description:
    """Return the facts of ``trace``, from its counts and the tiers that these give.

    ``tiers`` is [layers, experts, experts]: 0 HOT, 1 WARM, 2 COLD (`crisp.profile.tiers`).
    """
    _, starts, ends = trace.sequences()
    lengths = np.quantile(ends - starts, (0, 0.25, 0.5, 0.75, 1), method="nearest")
    first = trace.position[starts]
    decode = int((trace.phase == 1).sum())
    return Description(
        header=dataclasses.asdict(trace.header),
        digest=trace.digest(),
        rows=trace.rows,
        n_layers=trace.layers,
        prefill=trace.rows - decode,
        decode=decode,
        sequences=len(starts),
        lengths=tuple(int(n) for n in lengths),
        first_positions=(int(first.min()), int(first.max())),
        weights=trace.weights is not None,
        guess=trace.guess is not None,
        token=trace.token is not None,
        scores=trace.scores is not None,
        magnitudes=trace.magnitudes is not None,
        absent=_count_absent(trace),
        combinations=math.comb(trace.header.n_experts, 2),
        max_entropy_bits=math.log2(trace.header.n_experts),
        tiers={name: float(getattr(tiering, name)) for name in ("alpha", "beta", "warm")},
        layers=_layers(trace, counts, tiers, tiering.warm),
    )


def _count_absent(trace: RoutingTrace) -> int:
    """Return how many (row, MoE layer)s have no expert."""
    layers = list(trace.moe_layers)
    return sum(
        int((trace.experts[start : start + _STEP, layers, 0] < 0).sum())
        for start in range(0, trace.rows, _STEP)
    )


def percent_of(percent: int, n: int) -> int:
    """Return ``percent`` of n in whole things, to the nearest (29 % of 28 are 8)."""
    return (percent * n + 50) // 100


def sorted_shares(counts: Ints) -> Floats:
    """Return the shares of counts in the last axis, falling; at least one count is not 0."""
    shares: Floats = -np.sort(-counts, axis=-1) / counts.sum(axis=-1, keepdims=True)
    return shares


def pair_shares(counts: Counts, layer: int) -> Floats | None:
    """Return the shares of all possible combinations of a layer, falling: [pairs].

    None where it has none (top-1).
    """
    pairs = counts.pair_counts[layer][np.triu_indices(counts.pair_counts.shape[1], 1)]
    return sorted_shares(pairs) if pairs.any() else None


def _layers(
    trace: RoutingTrace, counts: Counts, tiers: npt.NDArray[np.uint8], warm: Fraction
) -> tuple[LayerFacts, ...]:
    pairs = np.triu_indices(trace.header.n_experts, 1)
    n = len(pairs[0])
    overlap, chance = _overlap(trace)
    layers = []
    for layer in trace.moe_layers:
        shares = pair_shares(counts, layer)
        experts = sorted_shares(counts.expert_counts[layer])
        used = experts[experts > 0]
        facts: dict[str, Any] = dict.fromkeys(
            ("top", "bottom", "tier_combinations", "tier_activations", "saving")
        )
        if shares is not None:
            tokens, tier = counts.pair_counts[layer][pairs], tiers[layer][pairs]  # [pairs]
            taken = [int(tokens[tier == t].sum()) for t in _TIERS]
            # Eq. 4 for any k: every activation reads an expert, but the second of a combination
            # reads ``warm`` of it (WARM) or nothing (COLD).
            spared = taken[1] * (1 - warm) + taken[2]
            facts = {
                "top": float(shares[: percent_of(TOP, n)].sum()),
                "bottom": float(shares[n - percent_of(BOTTOM, n) :].sum()),
                "tier_combinations": tuple(float((tier == t).mean()) for t in _TIERS),
                "tier_activations": tuple(count / sum(taken) for count in taken),
                "saving": float(spared / int(counts.expert_counts[layer].sum())),
            }
        layers.append(
            LayerFacts(
                layer=layer,
                entropy_bits=float(0 - (used * np.log2(used)).sum()),
                overlap=None if np.isnan(overlap[layer]) else float(overlap[layer]),
                chance=None if np.isnan(chance[layer]) else float(chance[layer]),
                experts=tuple(experts.tolist()),
                **facts,
            )
        )
    return tuple(layers)


def _overlap(trace: RoutingTrace) -> tuple[Floats, Floats]:
    """Return the share of a decode token's experts that the one before had too, and by chance.

    Returns two arrays [layers], NaN where no decode token follows another. Were a token's experts
    independent of the last one's, and p[e] the share of these tokens that are routed to e, then e
    would be shared with probability p[e]^2: chance = sum(p^2) / sum(p), sum(p) = k.
    """
    layers, n = trace.layers, trace.header.n_experts
    shared, counts, tokens = np.zeros(layers), np.zeros(layers * n), 0
    offset = np.arange(layers)[:, None] * n
    for start in range(0, trace.rows - 1, _STEP):
        both = slice(start, start + _STEP + 1)
        sequence, phase = trace.sequence[both], trace.phase[both]
        follows = (sequence[1:] == sequence[:-1]) & (phase[1:] == 1) & (phase[:-1] == 1)
        before, after = trace.experts[both][:-1][follows], trace.experts[both][1:][follows]
        for rank in range(trace.k):
            same = (before == after[..., rank, None]) & (before >= 0)
            shared += same.sum(axis=(0, 2))
        flat = (after + offset)[after >= 0]
        counts += np.bincount(flat, minlength=layers * n)
        tokens += len(after)
    with np.errstate(invalid="ignore"):
        p = counts.reshape(layers, n) / tokens
        return shared / (p.sum(axis=1) * tokens), (p**2).sum(axis=1) / p.sum(axis=1)
