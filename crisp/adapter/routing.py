"""Routing rules inside a real model: its routers' scores, and another choice than theirs."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import numpy as np
from numpy.typing import NDArray

from crisp.adapter.layout import ExpertLayout, intercept_experts
from crisp.adapter.record import rank_by_weight
from crisp.adapter.scores import observe_scores, to_scores
from crisp.errors import CrispError
from crisp.extras import import_extra
from crisp.model.spec import ModelSpec
from crisp.policy import Policy
from crisp.policy.routing.rules import BoundRouting, RoutingRule
from crisp.policy.routing.weighing import Weighing, understand
from crisp.profile import Profile

_ASKED = 256  # random inputs that each router is asked about, to see how it weighs


class RouterScores:
    """A routing rule, and the scores of the running pass's routers."""

    def __init__(self, layout: ExpertLayout, bound: BoundRouting) -> None:
        self._layout, self._bound = layout, bound
        self._scores: dict[int, Any] = {}  # MoE layer number -> [n, experts], until it is asked for

    @contextmanager
    def observed(self) -> Iterator[None]:
        """Take note of all scores, within the block."""
        with observe_scores(self._layout.model, self._layout, self._note):
            yield

    def _note(self, which: int, scores: Any) -> None:
        self._scores[which] = scores.clone()  # what comes next may work in place

    def take(self, which: int, rows: int) -> NDArray[np.float16]:
        """Return the scores [rows, experts] of MoE layer number ``which``, as a trace has them."""
        layer, given = self._layout.layers[which], self._scores.pop(which, None)
        if given is None or len(given) != rows:
            raise CrispError(f"{layer.name}: its router did not score every token; not understood")
        return to_scores(given, self._layout.n_experts, layer.name)

    def choose(
        self,
        which: int,
        scores: NDArray[np.float16],
        experts: NDArray[np.int16],
        weights: NDArray[np.float16],
        resident: list[int],
    ) -> tuple[NDArray[np.int16], NDArray[np.float16]]:
        """Return the experts used and their weights, see `BoundRouting.choose`."""
        layer = self._layout.layers[which].index
        return self._bound.choose(layer, scores, experts, weights, resident)


def router_scores(
    layout: ExpertLayout, policy: Policy, spec: ModelSpec, profile: Profile
) -> RouterScores | None:
    """Return a policy's routing rule bound to a model; None: it leaves the choice to the router.

    Raises CrispError for a model whose routers give no scores, cannot be asked alone or weigh in no
    known way.
    """
    rule = policy.routing
    if not isinstance(rule, RoutingRule):
        return None
    weighings = _ask_routers(layout, f"routing {policy.routing_name}")
    return RouterScores(layout, BoundRouting(rule, spec, profile, weighings))


def replace_choice(
    index: Any,
    weights: Any,
    rank: NDArray[np.int64],
    before: NDArray[np.int16],
    used: NDArray[np.int16],
    used_weights: NDArray[np.float16],
    n_experts: int,
) -> tuple[Any, Any]:
    """Return a router's (index, weights) [n, k] with other experts in the rows that changed.

    rank, before [n, k]: as `rank_by_weight` returned them; used, used_weights [n, k]: in the same
    order. All other rows are untouched.
    """
    changed = (used != before).any(axis=1)
    if not changed.any():
        return index, weights
    torch = import_extra("torch")
    by_column, weight_of = np.empty(rank.shape, np.int64), np.empty(rank.shape, np.float32)
    np.put_along_axis(by_column, rank, np.where(used < 0, n_experts, used).astype(np.int64), 1)
    np.put_along_axis(weight_of, rank, used_weights.astype(np.float32), 1)
    rows = torch.from_numpy(changed)[:, None].to(index.device)
    return (
        torch.where(rows, torch.from_numpy(by_column).to(index), index),
        torch.where(rows, torch.from_numpy(weight_of).to(weights), weights),
    )


def _ask_routers(layout: ExpertLayout, who: str) -> dict[int, Weighing]:
    """Return how each layer's router weighs, from its answers to random inputs."""
    torch, model = import_extra("torch"), layout.model
    answers: dict[int, tuple[Any, Any]] = {}
    scores: dict[int, Any] = {}

    def note(which: int, hidden: Any, index: Any, weights: Any, _: Any) -> Any:
        answers[which] = index.clone(), weights.clone()
        return torch.zeros_like(hidden)

    def note_scores(which: int, given: Any) -> None:
        scores[which] = given.clone()

    random = torch.Generator().manual_seed(0)
    inputs = torch.randn(1, _ASKED, model.config.get_text_config().hidden_size, generator=random)
    inputs = inputs.to(model.device, model.dtype)
    weighings = {}
    with (
        torch.inference_mode(),
        intercept_experts(layout, note),
        observe_scores(model, layout, note_scores),
    ):
        for which, layer in enumerate(layout.layers):
            try:
                if layer.block is not None:
                    layer.block(inputs.clone())
            except TypeError:  # asks for more than hidden states
                answers.pop(which, None)
            if which not in answers or which not in scores:
                raise CrispError(f"{who}: the router of {layer.name} cannot be asked alone")
            ids, w, _ = rank_by_weight(*answers[which], layout.n_experts, layer.name)
            halves = to_scores(scores[which], layout.n_experts, layer.name)
            weighings[layer.index] = understand(halves, ids, w.astype(np.float16), who)
    return weighings
