"""Recording of what the routers of a model decide, forward pass by forward pass."""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from typing import Any

import numpy as np
from numpy.typing import NDArray

from crisp.adapter.layout import ExpertLayout, MoeLayer, expert_layout, intercept_experts
from crisp.adapter.magnitude import MagnitudePredictor, pick
from crisp.adapter.scores import observe_scores, to_scores
from crisp.errors import CrispError
from crisp.extras import import_extra

RouterOutputs = dict[int, tuple[Any, Any]]
"""MoE layer number -> (top_k_index [n, k], top_k_weights [n, k]), tensors on the device."""


def rank_by_weight(
    index: Any, weights: Any, n_experts: int, name: str
) -> tuple[NDArray[np.int16], NDArray[np.float32], NDArray[np.int64]]:
    """Sort what a router returned the way a trace has it: (experts, weights, rank), each [n, k].

    Experts by descending weight, equal ones by the router's own rank; -1 with weight 0, at the
    end, for an absent one. index [n, k], weights [n, k]: as the router returned them. rank: the
    column of ``index`` that each entry came from. name: the layer's, for errors.
    """
    ids, w = index.cpu().numpy(), weights.float().cpu().numpy()  # [n, k] each
    if ids.size and not 0 <= ids.min() <= ids.max() <= n_experts:
        raise CrispError(
            f"{name}: chose expert {ids.max()} of {n_experts}; what that means is not understood"
        )
    absent = ids == n_experts  # transformers' sentinel for "no expert"
    if (w[:, 1:] <= w[:, :-1]).all() and not absent.any():  # as most routers return them
        return ids.astype(np.int16), w.copy(), np.arange(w.shape[1])[None].repeat(len(w), 0)
    rank = np.argsort(np.where(absent, np.inf, -w), axis=1, kind="stable")
    ids = np.take_along_axis(np.where(absent, -1, ids), rank, 1)
    return ids.astype(np.int16), np.take_along_axis(np.where(absent, 0, w), rank, 1), rank


@dataclass(frozen=True, eq=False)
class RecordedRouting:
    """What the routers decided in one forward pass; n = batch * positions, batch-major.

    In each [layer, k] row of a token experts stand by descending weight, -1 for an absent one.
    """

    experts: NDArray[np.int16]  # [n, layers, k]
    weights: NDArray[np.float32]  # [n, layers, k] as the model combined with them, 0 where absent
    guess: NDArray[np.int16]  # [n, layers, k]: the look-ahead prediction, see `look_ahead`
    scores: NDArray[np.float16] | None = None  # [n, layers, experts]: see `observe_scores`
    magnitudes: NDArray[np.float16] | None = None  # [n, layers, k]: predicted, where asked for


class RoutingRecorder:
    """Collects the routing of the running forward pass; ``take`` returns it and starts anew."""

    def __init__(self, layout: ExpertLayout, predict: MagnitudePredictor | None = None) -> None:
        self.layout = layout
        self._routed: RouterOutputs = {}
        self._guessed: RouterOutputs = {}
        self._scores: dict[int, Any] = {}  # MoE layer number -> scores [n, experts]
        self._predict = predict
        self._predicted: dict[int, NDArray[np.float16]] = {}  # -> magnitudes [n, experts]

    def experts(self, which: int, hidden: Any, index: Any, weights: Any, run: Any) -> Any:
        """Record what the router chose, then compute what the model would have: the Handler."""
        self._record(self._routed, which, index, weights)
        if self._predict is not None:
            self._predicted[which] = self._predict.all(self.layout.layers[which].index, hidden)
        return run()

    def guess(self, which: int, index: Any, weights: Any) -> None:
        """Record what a router says about the input of the MoE block before its own."""
        self._record(self._guessed, which, index, weights)

    def scores(self, which: int, scores: Any) -> None:
        """Record the scores [n, experts] that a router gives all experts."""
        self._scores[which] = scores.clone()

    def take(self) -> RecordedRouting:
        """Return the routing since the last call, on the host."""
        missing = [x.name for i, x in enumerate(self.layout.layers) if i not in self._routed]
        if missing:
            raise CrispError(f"{missing[0]}: was not called in the forward pass; not understood")
        experts, weights = self._all_layers(self._routed)
        guess, _ = self._all_layers(self._guessed, experts.shape[2])
        scores = self._all_scores(len(experts)) if self._scores else None
        magnitudes = self._all_magnitudes(experts) if self._predict is not None else None
        self._routed, self._guessed, self._scores, self._predicted = {}, {}, {}, {}
        return RecordedRouting(experts, weights, guess, scores, magnitudes)

    def _all_scores(self, n: int) -> NDArray[np.float16]:
        """Return scores [n, layers, experts], 0 where a layer is not MoE."""
        n_experts = self.layout.n_experts
        scores = np.zeros((n, self.layout.n_layers, n_experts), np.float16)
        for which, layer in enumerate(self.layout.layers):
            given = self._scores.get(which)
            if given is None or len(given) != n:
                raise CrispError(
                    f"{layer.name}: its router did not score every token; capture without scores"
                )
            scores[:, layer.index] = to_scores(given, n_experts, layer.name)
        return scores

    def _all_magnitudes(self, experts: NDArray[np.int16]) -> NDArray[np.float16]:
        """Return the magnitudes of chosen experts [n, layers, k], 1 where there is none."""
        magnitudes = np.ones(experts.shape, np.float16)
        for which, predicted in self._predicted.items():
            layer = self.layout.layers[which].index
            magnitudes[:, layer] = pick(predicted, experts[:, layer])
        return magnitudes

    def _record(self, outputs: RouterOutputs, which: int, index: Any, weights: Any) -> None:
        if which in outputs:
            name = self.layout.layers[which].name
            raise CrispError(f"{name}: ran twice in one forward pass; once was expected")
        outputs[which] = (index.detach().clone(), weights.detach().clone())

    def _all_layers(
        self, outputs: RouterOutputs, k: int = 0
    ) -> tuple[NDArray[np.int16], NDArray[np.float32]]:
        """Return (experts, weights) [n, layers, k], padded where a layer has fewer than k."""
        k = max([k, *(index.shape[1] for index, _ in outputs.values())])
        n = next(iter(self._routed.values()))[0].shape[0]
        experts = np.full((n, self.layout.n_layers, k), -1, np.int16)
        weights = np.zeros((n, self.layout.n_layers, k), np.float32)
        for which, (index, weight) in outputs.items():
            layer = self.layout.layers[which]
            ids, w, _ = rank_by_weight(index, weight, self.layout.n_experts, layer.name)
            experts[:, layer.index, : ids.shape[1]] = ids
            weights[:, layer.index, : ids.shape[1]] = w
        return experts, weights


@contextmanager
def look_ahead(layout: ExpertLayout, predicted: Callable[[int, Any, Any], None]) -> Iterator[None]:
    """Ask every router but the first about the input of the MoE block before its own.

    Nothing is asked in a model without blocks that could be run alone (its experts hang on the
    decoder layers). Within the block, when an MoE block is about to run, ``predicted(which,
    top_k_index [n, k], top_k_weights [n, k])`` gets the answer of the router of the next MoE layer,
    number ``which``.
    """
    with ExitStack() as stack:
        for which, layer in enumerate(layout.layers[:-1], start=1):

            def ask_next(_: Any, args: Any, kwargs: Any, which: int = which) -> None:
                predicted(which, *_ask_router(layout.layers[which], args, kwargs))

            if layer.block is None:
                continue
            hook = layer.block.register_forward_pre_hook(ask_next, with_kwargs=True)
            stack.callback(hook.remove)
        yield


class _RouterAnswer(Exception):
    """Carries a router's decision out of its block; not an error."""

    def __init__(self, index: Any, weights: Any) -> None:
        super().__init__()
        self.index, self.weights = index, weights


def _ask_router(layer: MoeLayer, args: tuple[Any, ...], kwargs: dict[str, Any]) -> tuple[Any, Any]:
    """Return the router's (index, weights) [n, k] for an input of the block of ``layer``.

    The block runs on copies, as far as its experts, and with the hooks inside it disabled: those of
    transformers would otherwise take its router logits for real ones.
    """

    def raise_answer(_: Any, index: Any, weights: Any, __: Any) -> None:
        raise _RouterAnswer(index, weights)

    block = layer.block
    try:
        with (
            layer.intercept(block, layer.experts, raise_answer),
            import_extra("torch").no_grad(),
            _without_hooks(block),
        ):
            block.forward(*map(_copy, args), **{k: _copy(v) for k, v in kwargs.items()})
    except _RouterAnswer as answer:
        return answer.index, answer.weights
    raise CrispError(f"{layer.name}: its block does not call its experts; not understood")


def _copy(value: Any) -> Any:
    return value.clone() if hasattr(value, "clone") else value


@contextmanager
def _without_hooks(block: Any) -> Iterator[None]:
    """Disable the forward hooks of every module inside ``block``."""
    kinds = ("_forward_hooks", "_forward_pre_hooks")
    saved = [(module, kind, getattr(module, kind)) for module in block.modules() for kind in kinds]
    for module, kind, _ in saved:
        setattr(module, kind, OrderedDict())
    try:
        yield
    finally:
        for module, kind, hooks in saved:
            setattr(module, kind, hooks)


@contextmanager
def record_routing(
    model: Any, *, scores: bool = False, predict: MagnitudePredictor | None = None
) -> Iterator[RoutingRecorder]:
    """Record the routing of every forward pass of ``model``, and the look-ahead guess.

    scores: whether the scores of all experts are recorded, too (`observe_scores`). predict: what
    foretells magnitudes, which are recorded then.

    The guess for an MoE layer is what its router says about the input of the MoE block before it.
    Logits do not change by a bit. Raises CrispError for a model that is not understood (see
    `expert_layout`) or is in training mode, where routers may draw noise.
    """
    if model.training:
        raise CrispError(f"{type(model).__name__}: is in training mode; call model.eval() first")
    recorder = RoutingRecorder(expert_layout(model), predict)
    with ExitStack() as stack:
        stack.enter_context(intercept_experts(recorder.layout, recorder.experts))
        stack.enter_context(look_ahead(recorder.layout, recorder.guess))
        if scores:
            stack.enter_context(observe_scores(model, recorder.layout, recorder.scores))
        yield recorder
