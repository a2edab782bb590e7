"""Execution of a policy's widths by a real model."""

from __future__ import annotations

from collections.abc import Callable
from contextlib import ExitStack
from dataclasses import dataclass
from types import TracebackType
from typing import Any

import numpy as np
from numpy.typing import NDArray

from crisp.adapter.experts import Experts, execute
from crisp.adapter.layout import ExpertLayout, expert_layout, intercept_experts
from crisp.adapter.magnitude import predictor
from crisp.adapter.record import rank_by_weight
from crisp.adapter.routing import replace_choice, router_scores
from crisp.errors import CrispError
from crisp.extras import import_extra
from crisp.model.spec import ModelSpec
from crisp.policy import Budget, Policy
from crisp.policy.magnitude import weighed
from crisp.policy.rescaling import factors, rescaling
from crisp.profile import Profile
from crisp.scheduler.untimed import NewReplay, Replay, RowReplay

Watch = Callable[[int, NDArray[np.int16], NDArray[np.float16], NDArray[np.int16]], None]
"""Called with ``(which, experts [n, k] by descending weight, weights [n, k], widths [n, k] in
blocks)`` before MoE layer number ``which`` computes."""


@dataclass
class ExecutionTally:
    """Counts of what a model has executed since a policy was attached.

    The last four are those of the budget's cache, and None without a budget.
    """

    rows: int = 0  # tokens fed; each is one event in every MoE layer
    touched: int = 0  # blocks executed, summed over every (token, layer, expert)
    skipped: int = 0  # (token, layer, expert)s of width 0
    tasks: int | None = None
    hits: int | None = None
    partial_hits: int | None = None
    blocks_loaded: int | None = None


class AttachedPolicy:
    """A policy attached to a model, which executes its widths until `detach`; see `attach`."""

    def __init__(
        self,
        model: Any,
        policy: Policy,
        profile: Profile | None,
        spec: ModelSpec | None,
        renormalize: bool,
        budget: Budget | None,
        watch: Watch | None,
        replay: NewReplay,
    ) -> None:
        layout = expert_layout(model)
        if spec is None:
            spec = ModelSpec.from_config(model.config.to_dict())
        self._experts = [Experts.of(layer) for layer in layout.layers]
        _check(layout, self._experts, spec)
        if profile is None and policy.width.counted:
            raise CrispError(
                f"policy {policy.name}: width {policy.width_name} needs counts of combinations"
            )
        counts = profile or Profile.empty(spec)
        self.spec, self.policy, self.tally = spec, policy, ExecutionTally()
        self._names = [layer.name for layer in layout.layers]
        self._layers = [layer.index for layer in layout.layers]
        self._widths = policy.width.bind(spec, counts, True)
        self._rescaling = rescaling(spec, counts) if policy.rescales else None
        check_rescaling(policy, layout)
        self._magnitudes = predictor(policy, spec, counts)
        self._replay: RowReplay | None = None
        if budget is not None:  # routing rules are asked row by row, in Python
            follow: NewReplay = Replay if policy.routing.active else replay
            self._replay = follow(spec, policy, budget, counts)
        if self._replay is None and self._widths.residency:
            raise CrispError(
                f"policy {policy.name}: its widths depend on what is resident; give a budget"
            )
        if self._replay is None and policy.routing.active:
            raise CrispError(
                f"policy {policy.name}: its routing depends on what is resident; give a budget"
            )
        self._routing = router_scores(layout, policy, spec, counts)
        self._renormalize, self._watch = renormalize, watch
        self._neurons = np.array([spec.neurons(0, b) for b in range(spec.n_blocks + 1)])
        with ExitStack() as stack:
            stack.enter_context(intercept_experts(layout, self._run))
            if self._routing is not None:
                stack.enter_context(self._routing.observed())
            self._interception = stack.pop_all()

    def detach(self) -> None:
        """Restore the model; calling this again has no effect."""
        self._interception.__exit__(None, None, None)

    def __enter__(self) -> AttachedPolicy:
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        self.detach()

    def _run(self, which: int, hidden: Any, index: Any, weights: Any, _: Any) -> Any:
        """Ask the policy for widths and execute the experts at those widths: the Handler."""
        torch = import_extra("torch")
        experts = self._experts[which]
        with torch.no_grad():
            ids, w, rank = rank_by_weight(index, weights, experts.n_experts, self._names[which])
            half = w.astype(np.float16)  # the type of weights in a trace: the same decisions
            if self._routing is None:
                blocks = self._blocks(self._layers[which], ids, half, hidden)  # [n, k]
            else:
                before = ids
                ids, half, blocks = self._choose(which, ids, half)
                self.tally.skipped += int((before >= 0).sum() - (ids >= 0).sum())
                index, weights = replace_choice(
                    index, weights, rank, before, ids, half, experts.n_experts
                )
            self._count(which, ids, blocks)
            if self._watch is not None:
                self._watch(which, ids, half, blocks)
            by_rank = np.empty(rank.shape, np.int64)  # [n, k] in the router's columns
            np.put_along_axis(by_rank, rank, self._neurons[blocks], 1)
            factor = None
            if self._rescaling is not None:
                factor = np.ones(rank.shape, np.float32)  # [n, k] in the router's columns
                of_rank = factors(self._rescaling[self._layers[which]], ids, blocks)
                np.put_along_axis(factor, rank, of_rank, 1)
        neurons = torch.from_numpy(by_rank).to(index.device)
        if self._renormalize:
            weights = redistribute(weights, neurons > 0)
        if factor is not None:
            weights = weights * torch.from_numpy(factor).to(weights)
        return execute(experts, hidden, index, weights, neurons)

    def _blocks(
        self, layer: int, ids: NDArray[np.int16], weights: NDArray[np.float16], hidden: Any
    ) -> NDArray[np.int16]:
        """Return widths [n, k] in blocks.

        With a budget rows pass through its cache one by one: each is an event of its own. hidden
        [n, d_model]: the layer's input.
        """
        replay, magnitudes = self._replay, None
        if self._magnitudes is not None:
            magnitudes = self._magnitudes.of(layer, hidden, ids)
        if replay is None:
            worth = weights if magnitudes is None else weighed(weights, magnitudes)
            return self._widths.widths(layer, ids, worth, None)
        _check_order(replay, len(ids))
        return replay.rows(layer, ids, weights, self._widths, magnitudes)

    def _choose(
        self, which: int, ids: NDArray[np.int16], weights: NDArray[np.float16]
    ) -> tuple[NDArray[np.int16], NDArray[np.float16], NDArray[np.int16]]:
        """Return experts, weights and widths [n, k] after the routing rule, row by row."""
        replay, routing, layer = self._replay, self._routing, self._layers[which]
        assert isinstance(replay, Replay)
        assert routing is not None
        _check_order(replay, len(ids))
        scores = routing.take(which, len(ids))
        ids, weights, blocks = ids.copy(), weights.copy(), np.zeros(ids.shape, np.int16)
        for place in range(len(ids)):
            row, resident = slice(place, place + 1), replay.resident(layer)
            ids[row], weights[row] = routing.choose(
                which, scores[row], ids[row], weights[row], resident
            )
            blocks[row] = replay.rows(layer, ids[row], weights[row], self._widths)
        return ids, weights, blocks

    def _count(self, which: int, ids: NDArray[np.int16], blocks: NDArray[np.int16]) -> None:
        tally = self.tally
        tally.rows += len(ids) if which == 0 else 0
        tally.touched += int(blocks.sum(dtype=np.int64))
        tally.skipped += int(((blocks == 0) & (ids >= 0)).sum())
        if self._replay is not None:
            counts = self._replay.counts
            tally.tasks, tally.hits = counts.tasks, counts.hits
            tally.partial_hits, tally.blocks_loaded = counts.partial_hits, counts.blocks_loaded


def attach(
    model: Any,
    policy: Policy,
    profile: Profile | None = None,
    *,
    spec: ModelSpec | None = None,
    renormalize: bool = False,
    budget: Budget | None = None,
    watch: Watch | None = None,
    replay: NewReplay = Replay,
) -> AttachedPolicy:
    """Make ``model`` execute every routed (token, expert) at the width ``policy`` gives it.

    This takes effect at once and lasts until `AttachedPolicy.detach` or the end of a ``with``
    block. Shared experts and everything else stay untouched; at full width the logits are those of
    transformers' ``eager`` experts, to the bit on a CPU in float32.

    profile: counts of combinations, for widths that need them. spec: the model's geometry, needed
    for a block other than the default and for a family CRISP does not read; None: from its config.
    renormalize: give the weight of skipped experts to the token's others (the paper is silent;
    default: it is dropped). budget: replay the policy's cache, each token of each layer an event in
    the order in which they are fed: for widths that look at residency, and to count loads. watch:
    called with the routing and the widths of every layer, see `Watch`. replay: what follows the
    cache.

    Raises CrispError for a model, a spec or a policy that do not go together.
    """
    return AttachedPolicy(model, policy, profile, spec, renormalize, budget, watch, replay)


def redistribute(weights: Any, kept: Any) -> Any:
    """Return weights [n, k], those of skipped experts given to the token's others in proportion.

    kept: bool [n, k]. A token that keeps no expert gets zeros.

    >>> import torch
    >>> redistribute(torch.tensor([[.6, .2, .2]]), torch.tensor([[True, True, False]]))
    tensor([[0.7500, 0.2500, 0.0000]])
    """
    remaining = weights * kept  # [n, k]
    before, after = weights.sum(1, keepdim=True), remaining.sum(1, keepdim=True)  # [n, 1]
    scaled = remaining * (before / after).nan_to_num(0, 0, 0)
    # Where nothing was skipped nothing may change, not even by rounding.
    return import_extra("torch").where(kept.all(1, keepdim=True), weights, scaled)


def check_rescaling(policy: Policy, layout: ExpertLayout) -> None:
    """Raise CrispError for a policy that rescales where router weights are not of outputs."""
    if policy.rescales and any(layer.scales_inputs for layer in layout.layers):
        raise CrispError(
            f"policy {policy.name}: rescales experts' outputs, but router weights of this model "
            "multiply their inputs; --rescale none was expected"
        )


def _check_order(replay: RowReplay, rows: int) -> None:
    """Raise CrispError for several rows in a layer where the order of layers matters."""
    if replay.in_step and rows > 1:
        raise CrispError(
            f"scope global or cache random: {rows} tokens were fed at once, but what is "
            "resident depends on the order of layers; feed one at a time"
        )


def _check(layout: ExpertLayout, experts: list[Experts], spec: ModelSpec) -> None:
    """Raise CrispError unless ``spec`` is the geometry of the model."""
    layers = tuple(layer.index for layer in layout.layers)
    for what, in_model, in_spec in (
        ("layers", layout.n_layers, spec.n_layers),
        ("MoE layers", layers, spec.moe_layers),
        ("experts a layer", layout.n_experts, spec.n_experts),
        ("neurons of an expert", experts[0].d_ff, spec.d_ff),
    ):
        if in_model != in_spec:
            raise CrispError(
                f"model {spec.name}: has {in_model} {what}, its geometry says {in_spec}"
            )
