"""A trace as the layer calls of an engine, and the lookups that each makes in its cache.

A call is one layer of one forward pass: of one decoded token, or of all tokens of a prompt
together. What is looked up is an *entry*: one expert of one layer (or one tensor of it).
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from itertools import pairwise

import numpy as np
import numpy.typing as npt

from crisp.errors import CrispError
from crisp.trace import DECODE, RoutingTrace

PROMPTS = ("whole", "by token")
LOOKUPS = ("expert", "row", "tensor")


@dataclass(frozen=True, eq=False)
class Calls:
    """The layer calls of a run, in order, and what each looks up.

    An entry is numbered layer by layer among MoE layers, as ``row * entries_per_layer + expert``.
    """

    entries: tuple[tuple[int, ...], ...]  # [calls]: looked up, in order
    last_used: tuple[tuple[int, ...], ...]  # [calls]: the same, each once, by its last appearance
    row: npt.NDArray[np.int32]  # [calls]: the layer, counted among MoE layers
    token: npt.NDArray[np.int32]  # [calls]: the decoded token, counted from 0; -1 of a prompt
    size: tuple[int, ...]  # [MoE layers]: bytes of one entry
    entries_per_layer: int
    pieces: int = 1  # entries that make up one expert

    @property
    def tokens(self) -> int:
        """The number of decoded tokens."""
        return int(self.token.max(initial=-1)) + 1

    @property
    def total_bytes(self) -> int:
        """The bytes of all experts of all layers."""
        return sum(self.size) * self.entries_per_layer

    @classmethod
    def from_trace(
        cls,
        trace: RoutingTrace,
        expert_bytes: Sequence[int],
        *,
        lookups: str = "expert",
        prompts: str = "whole",
        projections: int = 3,
    ) -> Calls:
        """Lay out a trace's calls; sequences follow one another.

        expert_bytes [layers]. lookups: ``expert`` looks up each distinct expert of a call once, by
        first appearance (token, then rank); ``row`` looks up those of each token for itself;
        ``tensor`` looks up the first of ``projections`` equal tensors of each distinct expert, then
        all second ones, and so on. prompts: ``whole`` is one call a layer, ``by token`` one a token
        and layer. Raises CrispError where an expert has no size.
        """
        n, moe = trace.header.n_experts, trace.moe_layers
        pieces = projections if lookups == "tensor" else 1
        size = tuple(expert_bytes[layer] // pieces for layer in moe)
        if 0 in size:
            raise CrispError(f"layer {moe[size.index(0)]}: its experts have 0 bytes")
        entries, last_used, rows, tokens = [], [], [], []
        for some, token in _passes(trace, prompts):
            block = trace.experts[some]
            for row, layer in enumerate(moe):
                routed = block[:, layer].ravel()
                routed = routed[routed >= 0]
                if not len(routed):
                    continue
                ids: list[int] = (routed.astype(np.int64) + row * n).tolist()
                once = list(dict.fromkeys(ids))
                last = list(dict.fromkeys(reversed(ids)))[::-1]
                if pieces > 1:
                    once, last = _split(once, pieces), _split(last, pieces)
                entries.append(tuple(ids if lookups == "row" else once))
                last_used.append(tuple(last))
                rows.append(row)
                tokens.append(token)
        return cls(
            tuple(entries),
            tuple(last_used),
            np.array(rows, np.int32),
            np.array(tokens, np.int32),
            size,
            n * pieces,
            pieces,
        )

    def starts(self) -> npt.NDArray[np.int64]:
        """Return where the lookups of each call begin among all, and where the last ends."""
        lengths = [len(call) for call in self.entries]
        return np.concatenate([[0], np.cumsum(lengths, dtype=np.int64)])


def _split(experts: Sequence[int], pieces: int) -> list[int]:
    """Return the tensors of some experts, projection by projection."""
    return [expert * pieces + piece for piece in range(pieces) for expert in experts]


def _passes(trace: RoutingTrace, prompts: str) -> Iterator[tuple[slice, int]]:
    """Yield (rows, decoded token or -1) of every forward pass."""
    _, starts, ends = trace.sequences()
    token = 0
    for start, end in zip(starts.tolist(), ends.tolist(), strict=True):
        decode = np.flatnonzero(trace.phase[start:end] == DECODE)
        cut = start + int(decode[0]) if len(decode) else end
        if prompts == "whole" and start < cut:
            yield slice(start, cut), -1
        elif start < cut:
            for first, last in pairwise(range(start, cut + 1)):
                yield slice(first, last), -1
        for row in range(cut, end):
            yield slice(row, row + 1), token
            token += 1
