"""Look up the widths of the experts that a router chose: on the device, or on the host.

`WidthLookup`: the router's answer is sorted where it is, and for a policy that is a table of the
combination alone its widths are gathered from that table, which is on the device (paper, 4.2.4).
Both reach the host in one small copy; waiting for that copy is the only wait of a MoE layer.

`HostLookup`: the answer is in the host's memory as it is, and nothing is gained by a table there:
for one token the same by torch takes five times as long.
"""

from __future__ import annotations

import time
from collections.abc import Callable
from typing import Any, NamedTuple

import numpy as np
import numpy.typing as npt

from crisp.adapter import rank_by_weight
from crisp.errors import CrispError
from crisp.extras import import_extra
from crisp.model.spec import ModelSpec
from crisp.policy.widths.base import BoundWidths


class RouterChoice(NamedTuple):
    """A router's choice for n rows, each by descending weight; -1 and weight 0 at the end: none."""

    experts: npt.NDArray[np.int16]  # [n, k]
    weights: npt.NDArray[np.float32]  # [n, k]
    widths: npt.NDArray[np.int16] | None  # blocks [n, k]; None: the policy has no table
    guess: npt.NDArray[np.int16] | None  # [n, k]: of the next layer's router, if it was asked ahead


class HostLookup:
    """The lookup where the model computes in the host's memory; widths are the policy's to find."""

    def __init__(self, spec: ModelSpec) -> None:
        self._experts = spec.n_experts
        self.own_ns = 0  # time spent here so far

    def __call__(
        self, row: int, name: str, index: Any, weights: Any, heard: tuple[Any, Any] | None
    ) -> RouterChoice:
        """Return the choice of a layer's router, without widths: as `WidthLookup` does."""
        begin = time.perf_counter_ns()
        ids, ranked, _ = rank_by_weight(index, weights, self._experts, name)
        guess = None if heard is None else rank_by_weight(*heard, self._experts, name)[0]
        self.own_ns += time.perf_counter_ns() - begin
        return RouterChoice(ids, ranked, None, guess)


class WidthLookup:
    """The lookup for one model and one policy's widths, on a device."""

    def __init__(
        self,
        spec: ModelSpec,
        widths: BoundWidths,
        upload: Callable[[Any], Any],
        fetch: Callable[[Any], npt.NDArray[Any]],
    ) -> None:
        """upload, fetch: copy a tensor to the device, and back; fetch waits for the copy."""
        self._torch, self._fetch, self._experts = import_extra("torch"), fetch, spec.n_experts
        table = pair_table(spec, widths)
        self._table = None if table is None else upload(self._torch.from_numpy(table))
        self.own_ns = 0  # time spent here so far, without the waits

    def __call__(
        self, row: int, name: str, index: Any, weights: Any, heard: tuple[Any, Any] | None
    ) -> RouterChoice:
        """Return the choice of a layer's router, with widths, on the host.

        row: of the layer, counted among MoE layers; name: the layer's, for errors. index,
        weights [n, k]: the router's. heard: the same of the next layer's router, asked ahead.

        Raises CrispError for an expert that does not exist.
        """
        begin, torch = time.perf_counter_ns(), self._torch
        ids, ranked = self._ranked(index, weights)
        parts = [ids, ranked.view(torch.int32)]  # int32 [n, ...] each: they make one copy
        if self._table is not None:
            parts.append(self._widths(self._table[row], ids))
        if heard is not None:
            parts.append(self._ranked(*heard)[0])
        ends = np.cumsum([part.shape[1] for part in parts])
        packed = torch.cat(parts, 1)
        launched = time.perf_counter_ns()
        copied = self._fetch(packed)
        arrived = time.perf_counter_ns()
        chosen = self._unpack(np.split(copied, ends[:-1], 1), heard is not None)
        ids = chosen.experts
        if len(copied) and not -1 <= ids.min() <= ids.max() < self._experts:
            raise CrispError(
                f"{name}: chose expert {ids.max()} of {self._experts}; what that means is not "
                "understood"
            )
        self.own_ns += launched - begin + time.perf_counter_ns() - arrived
        return chosen

    def _ranked(self, index: Any, weights: Any) -> tuple[Any, Any]:
        """Return ids int32 [n, k] and weights float32 [n, k], by descending weight.

        As `crisp.adapter.rank_by_weight` on the host: ties by place, no expert (-1) at the end.
        """
        torch, w = self._torch, weights.float()
        absent = index == self._experts  # transformers' sentinel for "no expert"
        rank = w.masked_fill(absent, -torch.inf).argsort(dim=1, descending=True, stable=True)
        ids = index.masked_fill(absent, -1).gather(1, rank).to(torch.int32)
        return ids, w.masked_fill(absent, 0).gather(1, rank)

    def _widths(self, table: Any, ids: Any) -> Any:
        """Gather widths [n, k]: of each expert beside the row's first, of the first beside the
        second.
        """
        valid = ids.clamp(0, self._experts - 1).long()  # errors are reported on the host
        first, last = valid[:, :1], valid[:, 1:]
        second = (
            self._torch.where(ids[:, 1:2] < 0, first, last[:, :1]) if len(ids[0]) > 1 else first
        )
        pairs = self._torch.cat([table[first, second, 0], table[first, last, 1]], 1)
        return pairs.masked_fill(ids < 0, 0).to(self._torch.int32)

    def _unpack(self, parts: list[npt.NDArray[Any]], heard: bool) -> RouterChoice:
        """Return the parts of the copy in their own types."""
        ids, weights, *rest = parts
        widths = None if self._table is None else rest[0].astype(np.int16)
        guess = rest[-1].astype(np.int16) if heard else None
        floats = np.ascontiguousarray(weights).view(np.float32)
        return RouterChoice(ids.astype(np.int16), floats, widths, guess)


def pair_table(spec: ModelSpec, widths: BoundWidths) -> npt.NDArray[np.int16] | None:
    """Return a policy's widths as a table [MoE layers, a, b, 2]; None: they depend on more.

    The entries are the blocks of a and of b where a has most weight; on the diagonal those of a
    alone. The policy itself is called for all pairs, so there is no second copy of its rule.
    """
    if widths.table() is None:
        return None
    n, k = spec.n_experts, max(2, spec.top_k)
    pairs = np.full((n * n, k), -1, np.int16)
    pairs[:, 0], pairs[:, 1] = np.repeat(np.arange(n), n), np.tile(np.arange(n), n)
    pairs[pairs[:, 0] == pairs[:, 1], 1] = -1
    by_layer = [widths.widths(layer, pairs, None, None)[:, :2] for layer in spec.moe_layers]
    return np.stack(by_layer).reshape(len(spec.moe_layers), n, n, 2).astype(np.int16)
