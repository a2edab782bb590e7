"""Where a transformers model keeps its routed experts, and how to stand in for them."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from typing import Any

from crisp.errors import CrispError
from crisp.extras import need

Handler = Callable[[int, Any, Any, Any, Callable[[], Any]], Any]
"""``(which, hidden, top_k_index, top_k_weights, run) -> output [n, d]`` of the experts of MoE layer
number ``which`` (counted over MoE layers); ``run()`` computes what the model would have."""


@dataclass(frozen=True, eq=False)
class MoeLayer:
    """One MoE layer: its place among the decoder layers, its whole block (router, experts and any
    shared ones) and, inside that, the module of its routed experts.
    """

    index: int
    name: str
    block: Any
    experts: Any


@dataclass(frozen=True, eq=False)
class Layout:
    """Where a model's routed experts are: ``layers`` in order of execution."""

    n_layers: int
    n_experts: int
    layers: tuple[MoeLayer, ...]


def layout(model: Any) -> Layout:
    """The MoE layers of a decoder-only transformers model.

    Raises CrispError, naming the model's class, for anything else: encoder-decoders, models of
    images or sound, models without routed experts, and experts that transformers does not reach
    through its common interface.
    """
    who = f"{type(model).__name__} (model_type {model.config.model_type})"
    if getattr(model.config, "is_encoder_decoder", False):
        raise CrispError(
            f"{who}: is an encoder-decoder; a decoder-only language model was expected"
        )
    if model.config.get_text_config() is not model.config:
        raise CrispError(f"{who}: is more than a language model; one of text alone was expected")
    modules = dict(model.named_modules())
    names = [name for name, module in modules.items() if _common(module)]
    if not names:
        strange = next((m for m in modules.values() if "Experts" in type(m).__name__), None)
        if strange is not None:
            raise CrispError(
                f"{who}: its {type(strange).__name__} does not use transformers' common experts "
                "interface and is not understood"
            )
        raise CrispError(f"{who}: has no routed experts; a Mixture-of-Experts model was expected")

    lists = {name: _stack(name, modules) for name in names}
    stacks = {found[0] for found in lists.values() if found is not None}
    layers = []
    for name, found in lists.items():
        if found is None or len(stacks) > 1 or found[2]:
            raise CrispError(
                f"{who}: the place of {name} is not understood; "
                "an MoE block inside one list of decoder layers was expected"
            )
        layers.append(MoeLayer(found[1], name, modules[name.rpartition(".")[0]], modules[name]))
    if len({layer.index for layer in layers}) < len(layers):
        raise CrispError(f"{who}: has a layer with two groups of routed experts; one was expected")
    counts = {int(layer.experts.num_experts) for layer in layers}
    if len(counts) > 1:
        raise CrispError(
            f"{who}: its layers have {sorted(counts)} experts; one number was expected"
        )
    ordered = tuple(sorted(layers, key=lambda layer: layer.index))
    return Layout(len(modules[stacks.pop()]), counts.pop(), ordered)


def _common(module: Any) -> bool:
    """Whether this module's class hands its forward to an experts registry of transformers."""
    interface = need("transformers.integrations.moe").ExpertsInterface
    cells = getattr(type(module).forward, "__closure__", None) or ()
    return any(isinstance(cell.cell_contents, interface) for cell in cells)


def _stack(name: str, modules: dict[str, Any]) -> tuple[str, int, bool] | None:
    """The outermost list of layers around a module: its name, the position in it, and whether the
    experts hang on the layer itself, with no block in between that could be called alone.
    """
    parts = name.split(".")
    for depth in range(1, len(parts)):
        if isinstance(modules[".".join(parts[:depth])], need("torch.nn").ModuleList):
            return ".".join(parts[:depth]), int(parts[depth]), depth + 2 == len(parts)
    return None


@contextmanager
def handling(found: Layout, handler: Handler) -> Iterator[None]:
    """Let ``handler`` stand in for every routed-experts module; on leaving, all is as before.

    An implementation set by ``model.set_experts_implementation`` stays set and is what ``run``
    calls; a forward somebody else put on the module (offloading hooks) is kept as well.
    """
    with ExitStack() as undo:
        for which, layer in enumerate(found.layers):
            undo.callback(restore, layer.experts, layer.experts.__dict__.get("forward"))
            layer.experts.forward = _standing_in(which, layer.experts.forward, handler)
        yield


def _standing_in(which: int, forward: Callable[..., Any], handler: Handler) -> Callable[..., Any]:
    def stand_in(hidden: Any, index: Any, weights: Any) -> Any:
        return handler(which, hidden, index, weights, lambda: forward(hidden, index, weights))

    return stand_in


def restore(module: Any, forward: Callable[..., Any] | None) -> None:
    """Take away the forward put on a module; there was ``forward`` before, or none."""
    del module.forward
    if forward is not None:
        module.forward = forward
