"""The scores that routers give all experts, before anything is done to choose among them."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from typing import Any

import numpy as np
from numpy.typing import NDArray

from crisp.adapter.layout import ExpertLayout, MoeLayer
from crisp.errors import CrispError

_LOGITS = "router_logits"  # what transformers calls them
_FLOOR = 1e-30  # a share that was rounded to 0; its logarithm must be finite
_CLOSE = 1e-2  # of a sum of shares that may be bfloat16


@contextmanager
def observe_scores(
    model: Any, layout: ExpertLayout, observe: Callable[[int, Any], None]
) -> Iterator[None]:
    """Call ``observe(which, scores [n, experts])`` at every pass of an MoE layer's router.

    They are what transformers returns for ``output_router_logits``: the router's linear output,
    before softmax or sigmoid, selection bias, groups and top-k. Raises CrispError for a model that
    does not say where they are.
    """
    name = type(model).__name__
    places = _places(model)
    if not places:
        raise CrispError(f"{name}: does not say where its router's scores are; capture without")
    with ExitStack() as stack:
        for which, layer in enumerate(layout.layers):
            decoder_layer = model.get_submodule(f"{layout.stack}.{layer.index}")
            router, index = _router(name, layer, decoder_layer, places)

            def hook(
                _: Any, args: Any, output: Any, which: int = which, index: int = index
            ) -> None:
                scores = output[index] if isinstance(output, tuple) else output
                observe(which, scores.detach().reshape(-1, scores.shape[-1]))

            stack.callback(router.register_forward_hook(hook).remove)
        yield


def to_scores(values: Any, n_experts: int, name: str) -> NDArray[np.float16]:
    """Return a router's scores [n, experts] as a trace keeps them: logits, in float16.

    Where a model's router returns shares (none negative, their sum 1), their logarithms are taken:
    logits but for a number that all experts of a token have in common.
    """
    scores: NDArray[np.float32] = values.float().cpu().numpy()
    if scores.shape[-1] != n_experts:
        raise CrispError(f"{name}: its router scores {scores.shape[-1]} of {n_experts} experts")
    if len(scores) and scores.min() >= 0 and np.abs(scores.sum(axis=1) - 1).max() < _CLOSE:
        scores = np.log(np.maximum(scores, _FLOOR))
    with np.errstate(over="ignore"):
        halves = scores.astype(np.float16)
    if not np.isfinite(halves).all():
        raise CrispError(f"{name}: its router gives a score that is no finite float16")
    return halves


def _places(model: Any) -> dict[type, int]:
    """Return the classes whose output has the scores, and at which place in it.

    They are declared by the model, or by a text model inside it.
    """
    places: dict[type, int] = {}
    for module in model.modules():
        declared = getattr(module, "_can_record_outputs", None)
        recorders = declared.get(_LOGITS, ()) if isinstance(declared, dict) else ()
        for recorder in recorders if isinstance(recorders, list | tuple) else (recorders,):
            target = getattr(recorder, "target_class", recorder)
            if isinstance(target, type):
                places[target] = int(getattr(recorder, "index", 0) or 0)
    return places


def _router(
    name: str, layer: MoeLayer, decoder_layer: Any, places: dict[type, int]
) -> tuple[Any, int]:
    found = [
        (module, index)
        for module in decoder_layer.modules()
        for kind, index in places.items()
        if isinstance(module, kind)
    ]
    if len(found) != 1:
        raise CrispError(
            f"{name}: {layer.name} has {len(found)} routers beside it; one was expected, for its "
            "scores"
        )
    return found[0]
