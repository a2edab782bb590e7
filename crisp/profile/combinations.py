"""The counts of every expert and every combination in a trace."""

from __future__ import annotations

import hashlib
from collections.abc import Iterator
from dataclasses import dataclass, fields, replace
from typing import Any

import numpy as np
import numpy.typing as npt

from crisp.model.spec import ModelSpec
from crisp.profile.router_weights import BINS, histogram, quantiles
from crisp.trace import RoutingTrace

Ints = npt.NDArray[np.int64]
_OPTIONAL = (
    "dominant", "router_weights", "contributions", "width_losses", "role_counts",
    "sensitivities", "rescaling", "magnitudes",
)  # fmt: skip
_CHUNK = 1 << 16  # rows counted at a time: a trace is never held in memory as int64


@dataclass(frozen=True, eq=False)
class Profile:
    """The counts of one trace, from which tiers, static residents and anchors follow."""

    expert_counts: Ints  # [layers, experts]: tokens routed to the expert
    pair_counts: Ints  # [layers, experts, experts]: combinations (i, j), at i < j only
    ordered: bool  # whether the trace says which expert of a token weighs most
    # [layers, experts, experts], symmetric: each pair's dominant expert as measured by ablation,
    # -1 where it was not and the router's weight decides. Decides for k = 2 only.
    dominant: npt.NDArray[np.int16] | None = None
    # [layers, experts, 32]: quantiles of the weights that the router gave to each expert
    router_weights: npt.NDArray[np.float16] | None = None
    # [layers, experts, blocks]: mean |activation| x |down| of each block, from preparation
    contributions: npt.NDArray[np.float32] | None = None
    # [layers, experts, 2, blocks + 1]: nats a token that an expert costs at each width, as the
    # anchor (0) and beside it (1), as preparation measures it; NaN: unknown
    width_losses: npt.NDArray[np.float32] | None = None
    # [layers, experts, 2]: the tokens of that measurement in which it had the role
    role_counts: Ints | None = None
    # [layers]: by how much a layer's missing contributions raise the loss, from preparation: the
    # square root of nats a token over the mean square of the sum of weight x contribution left out
    sensitivities: npt.NDArray[np.float32] | None = None
    # [layers, experts, blocks + 1]: what an expert's output is multiplied with where only so many
    # blocks are executed, from preparation; 1 at the full width
    rescaling: npt.NDArray[np.float32] | None = None
    # [layers, experts, d_model + 1]: what foretells an expert's magnitude from the layer's input,
    # and an intercept, from preparation; see `crisp.policy.magnitude`
    magnitudes: npt.NDArray[np.float16] | None = None

    @classmethod
    def from_trace(cls, trace: RoutingTrace) -> Profile:
        """Count all rows of ``trace``, both phases.

        A combination is an unordered pair of the token's anchor with another of its experts: for
        top-2 the pair, for top-k the k - 1 pairs with the anchor.
        """
        layers, n = trace.layers, trace.header.n_experts
        experts = np.zeros((layers, n), np.int64)
        for ids in _chunks(trace):
            for layer in range(layers):
                present = ids[:, layer][ids[:, layer] >= 0]
                experts[layer] += np.bincount(present, minlength=n)
        pairs = np.zeros((layers, n * n), np.int64)
        for ids in _chunks(trace):
            for layer in range(layers):
                chosen = ids[:, layer]  # [rows, k]
                first = anchors(chosen, experts[layer], trace.header.ordered)[:, None]
                pair = np.minimum(first, chosen) * n + np.maximum(first, chosen)
                others = (chosen >= 0) & (chosen != first)
                pairs[layer] += np.bincount(pair[others], minlength=n * n)
        return cls(
            experts,
            pairs.reshape(layers, n, n),
            trace.header.ordered,
            router_weights=_router_weights(trace),
        )

    @classmethod
    def empty(cls, spec: ModelSpec) -> Profile:
        """Return a profile without counts: enough for widths that look at none."""
        shape = (spec.n_layers, spec.n_experts)
        return cls(np.zeros(shape, np.int64), np.zeros((*shape, spec.n_experts), np.int64), True)

    def first_layers(self, n: int) -> Profile:
        """Return the counts of the first ``n`` layers."""
        kept: dict[str, Any] = {
            field.name: value[:n]
            for field in fields(self)
            if isinstance(value := getattr(self, field.name), np.ndarray)
        }
        return replace(self, **kept)

    def digest(self) -> str:
        """Return the SHA-256 of all that decides: profiles with one digest decide the same."""
        counts = self.expert_counts.tobytes() + self.pair_counts.tobytes()
        rest = b"".join(
            f"{name}{values.dtype}".encode() + values.tobytes()
            for name in _OPTIONAL
            if (values := getattr(self, name)) is not None
        )
        return hashlib.sha256(counts + bytes([self.ordered]) + rest).hexdigest()


def anchors(experts: Ints, counts: Ints, ordered: bool) -> Ints:
    """Return each row's anchor, its highest-weighted expert: the first where rows are ordered.

    Where they are not, the more frequent expert of the layer stands for it (ties: the lower id).
    experts [rows, k], -1 where absent; counts [experts] of this layer. Returns [rows].
    """
    best = experts[:, 0].copy()
    if not ordered:
        for column in range(1, experts.shape[1]):
            other = experts[:, column]
            present = (best >= 0) & (other >= 0)
            ahead = counts[np.where(present, other, 0)] - counts[np.where(present, best, 0)]
            better = present & ((ahead > 0) | ((ahead == 0) & (other < best)))
            best = np.where(better, other, best)
    return best


def _router_weights(trace: RoutingTrace) -> npt.NDArray[np.float16] | None:
    """Return the quantiles of each expert's router weights: [layers, experts, QUANTILES]."""
    if trace.weights is None:
        return None
    n = trace.header.n_experts
    counts = np.zeros((trace.layers, n, BINS), np.int64)
    for start in range(0, trace.rows, _CHUNK):
        rows = slice(start, start + _CHUNK)
        ids = trace.experts[rows].astype(np.int64)
        for layer in range(trace.layers):
            counts[layer] += histogram(ids[:, layer], trace.weights[rows, layer], n)
    return np.stack([quantiles(layer_counts) for layer_counts in counts])


def _chunks(trace: RoutingTrace) -> Iterator[Ints]:
    """Yield the trace's experts, some rows at a time: int64 [rows, layers, k]."""
    for start in range(0, trace.rows, _CHUNK):
        yield trace.experts[start : start + _CHUNK].astype(np.int64)
