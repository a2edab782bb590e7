"""How a router's choice reaches the experts of its layer, and how that call is intercepted.

Nearly always it is a call of the experts' module with (hidden, index, weights). A family that does
it in another way has its own interception here.
"""

from __future__ import annotations

import inspect
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager
from typing import Any

from crisp.extras import import_extra

LayerHandler = Callable[[Any, Any, Any, Callable[[], Any]], Any]
"""``handler(hidden [n, d], top_k_index [n, k], top_k_weights [n, k], run) -> output [n, d]``:
``run()`` computes what the model itself would have."""

Intercept = Callable[[Any, Any, LayerHandler], AbstractContextManager[None]]
"""``intercept(block, experts, handler)``: within the block, ``handler`` computes the experts."""


@contextmanager
def replaced_forward(module: Any, forward: Callable[..., Any]) -> Iterator[None]:
    """Give ``module`` another forward within the block, and its own again afterwards."""
    before = module.__dict__.get("forward")  # None unless somebody replaced the class's
    module.forward = forward
    try:
        yield
    finally:
        del module.forward
        if before is not None:
            module.forward = before


@contextmanager
def intercept_call(_: Any, experts: Any, handler: LayerHandler) -> Iterator[None]:
    """Intercept a module that is called with hidden states, index and weights.

    An implementation set by ``model.set_experts_implementation`` stays set and is what ``run``
    calls; a forward somebody else put on the module (offloading hooks) is kept as well.
    """
    forward = experts.forward

    def call(*args: Any, **kwargs: Any) -> Any:
        if kwargs:
            args = inspect.signature(forward).bind(*args, **kwargs).args
        hidden, index, weights = args
        return handler(hidden, index, weights, lambda: forward(hidden, index, weights))

    with replaced_forward(experts, call):
        yield


@contextmanager
def intercept_scaled_inputs(block: Any, experts: Any, handler: LayerHandler) -> Iterator[None]:
    """Intercept Llama 4's experts, which compute every token that any of them may be for.

    Their input is every token once for each expert, times what its router gives that expert: 0 if
    it was not chosen. What comes out is summed over the experts. So what ``handler`` returns is put
    in the first expert's place, and zeros in the others'.
    """
    router, forward = block.router, experts.forward
    route = router.forward
    seen: list[Any] = []

    def remember(hidden: Any) -> Any:
        scores, logits = route(hidden)  # [n, experts] each
        seen[:] = [hidden, scores, logits]
        return scores, logits

    def compute(routed: Any) -> Any:
        hidden, scores, logits = seen
        n_experts, d = scores.shape[1], hidden.shape[-1]
        index = logits.topk(router.top_k, dim=1).indices  # [n, k]
        weights = scores.gather(1, index)

        def run() -> Any:
            return forward(routed).reshape(n_experts, -1, d).sum(dim=0)

        out = handler(hidden, index, weights, run)
        others = import_extra("torch").zeros_like(out).expand(n_experts - 1, -1, -1)
        return import_extra("torch").cat([out[None], others]).reshape(-1, d)

    with replaced_forward(router, remember), replaced_forward(experts, compute):
        yield
