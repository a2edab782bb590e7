"""What a model's router chose, and the widths a policy gives it, on the host.

Everything is computed where the router's answer is: sorted, and, for a policy that is a table of
the combination alone, looked up in that table, which lies on the device (paper, 4.2.4). What comes
of it reaches the host in one small copy, and waiting for that is the only wait of a MoE layer.
"""

from __future__ import annotations

import time
from collections.abc import Callable
from typing import Any, NamedTuple

import numpy as np
import numpy.typing as npt

from crisp.errors import CrispError
from crisp.extras import import_extra
from crisp.model.spec import ModelSpec
from crisp.policy.widths.base import BoundWidths


class Chosen(NamedTuple):
    """Of each row, by descending weight; -1 and weight 0 at the end, for none."""

    experts: npt.NDArray[np.int16]  # [n, k]
    weights: npt.NDArray[np.float32]  # [n, k]
    widths: npt.NDArray[np.int16] | None  # blocks [n, k]; None: the policy has to be asked
    guess: npt.NDArray[np.int16] | None  # [n, k], where another router was heard


class Lookup:
    """Bound to a model and a policy's widths."""

    def __init__(
        self,
        spec: ModelSpec,
        widths: BoundWidths,
        upload: Callable[[Any], Any],
        fetch: Callable[[Any], npt.NDArray[Any]],
    ) -> None:
        """upload: a host tensor to the device; fetch: a device's tensor to the host, there when
        it returns.
        """
        self._torch, self._fetch, self._experts = import_extra("torch"), fetch, spec.n_experts
        table = pair_table(spec, widths)
        self._table = None if table is None else upload(self._torch.from_numpy(table))
        self.own_ns = 0  # spent here so far, but for the waits

    def __call__(
        self, row: int, name: str, index: Any, weights: Any, heard: tuple[Any, Any] | None
    ) -> Chosen:
        """row: of the layer, counted among MoE layers; name: the layer's, for errors. index,
        weights [n, k]: the router's. heard: the same of the next layer's router, asked ahead.

        Raises CrispError for an expert that there is not.
        """
        begin, torch = time.perf_counter_ns(), self._torch
        ids, ranked = self._ranked(index, weights)
        parts = [ids, ranked.view(torch.int32)]
        if self._table is not None:
            parts.append(self._widths(self._table[row], ids))
        if heard is not None:
            parts.append(self._ranked(*heard)[0])
        ends = np.cumsum([part.shape[1] for part in parts])
        packed = torch.cat(parts, 1)
        launched = time.perf_counter_ns()
        found = self._fetch(packed)
        there = time.perf_counter_ns()
        chosen = self._unpacked(np.split(found, ends[:-1], 1), heard is not None)
        if len(found) and not -1 <= chosen.experts.min() <= chosen.experts.max() < self._experts:
            raise CrispError(
                f"{name}: chose expert {chosen.experts.max()} of {self._experts}; what that means "
                "is not understood"
            )
        self.own_ns += launched - begin + time.perf_counter_ns() - there
        return chosen

    def _ranked(self, index: Any, weights: Any) -> tuple[Any, Any]:
        """ids int32 and weights float32 as `crisp.adapter.rank_by_weight` has them."""
        torch, w = self._torch, weights.float()
        absent = index == self._experts  # transformers' sentinel for "no expert"
        rank = w.masked_fill(absent, -torch.inf).argsort(dim=1, descending=True, stable=True)
        ids = index.masked_fill(absent, -1).gather(1, rank).to(torch.int32)
        return ids, w.masked_fill(absent, 0).gather(1, rank)

    def _widths(self, table: Any, ids: Any) -> Any:
        """The gather: each expert's width beside the row's first, the first's beside the second."""
        there = ids.clamp(0, self._experts - 1).long()  # what is none of them is told later
        first, last = there[:, :1], there[:, 1:]
        second = (
            self._torch.where(ids[:, 1:2] < 0, first, last[:, :1]) if len(ids[0]) > 1 else first
        )
        pairs = self._torch.cat([table[first, second, 0], table[first, last, 1]], 1)
        return pairs.masked_fill(ids < 0, 0).to(self._torch.int32)

    def _unpacked(self, parts: list[npt.NDArray[Any]], heard: bool) -> Chosen:
        ids, weights, *rest = parts
        widths = None if self._table is None else rest[0].astype(np.int16)
        guess = rest[-1].astype(np.int16) if heard else None
        own = np.ascontiguousarray(weights).view(np.float32)
        return Chosen(ids.astype(np.int16), own, widths, guess)


def pair_table(spec: ModelSpec, widths: BoundWidths) -> npt.NDArray[np.int16] | None:
    """[MoE layers, a, b, 2]: the blocks of a and of b where a has most weight; on the diagonal a's
    when it is alone. None: widths depend on something else.

    It is made by asking the policy for all pairs, so there is no second rule.
    """
    if widths.table() is None:
        return None
    n, k = spec.n_experts, max(2, spec.top_k)
    pairs = np.full((n * n, k), -1, np.int16)
    pairs[:, 0], pairs[:, 1] = np.repeat(np.arange(n), n), np.tile(np.arange(n), n)
    pairs[pairs[:, 0] == pairs[:, 1], 1] = -1
    asked = [widths.widths(layer, pairs, None, None)[:, :2] for layer in spec.moe_layers]
    return np.stack(asked).reshape(len(spec.moe_layers), n, n, 2).astype(np.int16)
