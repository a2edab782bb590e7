"""A policy's widths, executed by the real model."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from types import TracebackType
from typing import Any, cast

import numpy as np
from numpy.typing import NDArray

from crisp.adapter.experts import Experts, execute
from crisp.adapter.layout import Layout, handling, layout
from crisp.adapter.record import ranked
from crisp.errors import CrispError
from crisp.extras import need
from crisp.model.spec import ModelSpec
from crisp.policy import Budget, Policy
from crisp.policy.widths.base import ResidencyWidths
from crisp.policy.widths.contribution import row_on
from crisp.profile import Profile
from crisp.scheduler.untimed import Replay
from crisp.scheduler.workload import union

Watch = Callable[[int, NDArray[np.int16], NDArray[np.float16], NDArray[np.int16]], None]
"""``(which, experts [n, k] by descending weight, weights [n, k], widths [n, k] in blocks)``."""


@dataclass
class Tally:
    """What has been executed since the policy was attached; n rows make n * layers events."""

    rows: int = 0  # tokens fed
    touched: int = 0  # blocks, summed over every (token, layer, expert)
    skipped: int = 0  # (token, layer, expert)s of width 0
    tasks: int | None = None  # the rest: of the budget's cache, None without one
    hits: int | None = None
    partial_hits: int | None = None
    blocks_loaded: int | None = None


class Attached:
    """A model that executes a policy's widths until it is detached; see `attach`."""

    def __init__(
        self,
        model: Any,
        policy: Policy,
        profile: Profile | None,
        spec: ModelSpec | None,
        renormalize: bool,
        budget: Budget | None,
        watch: Watch | None,
    ) -> None:
        found = layout(model)
        if spec is None:
            spec = ModelSpec.from_config(model.config.to_dict())
        self._experts = [Experts.of(layer) for layer in found.layers]
        _check(found, self._experts, spec)
        if profile is None and policy.width.counted:
            raise CrispError(
                f"policy {policy.name}: width {policy.width_name} needs counts of combinations"
            )
        counts = profile or Profile.empty(spec)
        self.spec, self.policy, self.tally = spec, policy, Tally()
        self._names = [layer.name for layer in found.layers]
        self._layers = [layer.index for layer in found.layers]
        self._widths = policy.width.bind(spec, counts, True)
        self._replay = None if budget is None else Replay(spec, policy, budget, counts)
        if self._replay is None and self._widths.residency:
            raise CrispError(
                f"policy {policy.name}: its widths depend on what is resident; give a budget"
            )
        self._renormalize, self._watch = renormalize, watch
        self._upto = np.array([spec.neurons(0, b) for b in range(spec.n_blocks + 1)])
        self._handling = handling(found, self._run)
        self._handling.__enter__()

    def detach(self) -> None:
        """Make the model as it was; more than once does no harm."""
        self._handling.__exit__(None, None, None)

    def __enter__(self) -> Attached:
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        self.detach()

    def _run(self, which: int, hidden: Any, index: Any, weights: Any, _: Any) -> Any:
        """The Handler: widths from the policy, then the experts at those widths."""
        torch = need("torch")
        experts = self._experts[which]
        with torch.no_grad():
            ids, w, rank = ranked(index, weights, experts.n_experts, self._names[which])
            half = w.astype(np.float16)  # as a trace has them: both decide alike
            blocks = self._blocks(self._layers[which], ids, half)
            self._count(which, ids, blocks)
            if self._watch is not None:
                self._watch(which, ids, half, blocks)
            neurons = np.empty(rank.shape, np.int64)
            np.put_along_axis(neurons, rank, self._upto[blocks], 1)
        asked = torch.from_numpy(neurons).to(index.device)
        if self._renormalize:
            weights = redistribute(weights, asked > 0)
        return execute(experts, hidden, index, weights, asked)

    def _blocks(
        self, layer: int, ids: NDArray[np.int16], weights: NDArray[np.float16]
    ) -> NDArray[np.int16]:
        """Widths [n, k]; with a budget, row by row through its cache: each row is an event."""
        replay = self._replay
        if replay is None:
            return self._widths.widths(layer, ids, weights, None)
        if replay.in_step and len(ids) > 1:
            raise CrispError(
                f"scope global or cache random: {len(ids)} tokens were fed at once, but what is "
                "resident depends on the order of layers; feed one at a time"
            )
        if not self._widths.residency:
            found = self._widths.widths(layer, ids, weights, None)
            for own, asked in zip(ids.tolist(), found.tolist(), strict=True):
                replay.run(layer, union([own], [asked]))
            return found
        wanted = cast(ResidencyWidths, self._widths).wanted(layer, ids, weights).tolist()
        widths = []
        for own, bits in zip(ids.tolist(), wanted, strict=True):
            widths.append(row_on(own, replay.resident(layer), bits))
            replay.run(layer, union([own], widths[-1:]))
        return np.array(widths, np.int16)

    def _count(self, which: int, ids: NDArray[np.int16], blocks: NDArray[np.int16]) -> None:
        tally = self.tally
        tally.rows += len(ids) if which == 0 else 0
        tally.touched += int(blocks.sum(dtype=np.int64))
        tally.skipped += int(((blocks == 0) & (ids >= 0)).sum())
        if self._replay is not None:
            scheduler = self._replay.scheduler
            tally.tasks, tally.hits = scheduler.tasks, scheduler.hits
            tally.partial_hits = scheduler.partial_hits
            tally.blocks_loaded = scheduler.blocks_loaded


def attach(
    model: Any,
    policy: Policy,
    profile: Profile | None = None,
    *,
    spec: ModelSpec | None = None,
    renormalize: bool = False,
    budget: Budget | None = None,
    watch: Watch | None = None,
) -> Attached:
    """Let ``model`` execute every routed (token, expert) at the width ``policy`` gives it.

    At once, until `Attached.detach` or the end of a ``with`` block. Shared experts and everything
    else stay untouched; at full width the logits are those of transformers' ``eager`` experts, to
    the bit on a CPU in float32.

    profile: counts of combinations, for widths that need them. spec: the model's geometry, where
    another block than the default, or a family CRISP does not read; default: from its config.
    renormalize: give the weight of skipped experts to the token's others (the paper is silent;
    default: it is dropped). budget: replay the policy's cache, each token of each layer an event in
    the order in which they are fed: for widths that look at residency, and to count loads.

    Raises CrispError for a model, a spec or a policy that do not go together.
    """
    return Attached(model, policy, profile, spec, renormalize, budget, watch)


def redistribute(weights: Any, kept: Any) -> Any:
    """Weights [n, k] with those of skipped experts given to the token's others, in proportion.

    A token that keeps none gets zeros.

    >>> import torch
    >>> redistribute(torch.tensor([[.6, .2, .2]]), torch.tensor([[True, True, False]]))
    tensor([[0.7500, 0.2500, 0.0000]])
    """
    own = weights * kept
    total, left = weights.sum(1, keepdim=True), own.sum(1, keepdim=True)
    scaled = own * (total / left).nan_to_num(0, 0, 0)
    # Where nothing was skipped nothing may change, not even by rounding.
    return need("torch").where(kept.all(1, keepdim=True), weights, scaled)


def _check(found: Layout, experts: list[Experts], spec: ModelSpec) -> None:
    """Raise CrispError unless the geometry is the model's."""
    layers = tuple(layer.index for layer in found.layers)
    for what, own, said in (
        ("layers", found.n_layers, spec.n_layers),
        ("MoE layers", layers, spec.moe_layers),
        ("experts a layer", found.n_experts, spec.n_experts),
        ("neurons of an expert", experts[0].d_ff, spec.d_ff),
    ):
        if own != said:
            raise CrispError(f"model {spec.name}: has {own} {what}, its geometry says {said}")
