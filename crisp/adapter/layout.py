"""Where a transformers model keeps its routed experts, and how to intercept them."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from functools import partial
from typing import Any, NamedTuple

from crisp.adapter.alike import call_of, is_alike
from crisp.adapter.calls import Intercept, intercept_call, intercept_scaled_inputs
from crisp.errors import CrispError
from crisp.extensions import load_entry_points
from crisp.extras import import_extra

Handler = Callable[[int, Any, Any, Any, Callable[[], Any]], Any]
"""Computes the routed experts of one MoE layer in place of the model.

``handler(which, hidden [n, d], top_k_index [n, k], top_k_weights [n, k], run) -> output [n, d]``:
``which`` counts MoE layers only; ``run()`` computes what the model itself would have.
"""


@dataclass(frozen=True, eq=False)
class MoeLayer:
    """One MoE layer of a model."""

    index: int  # its place among all decoder layers
    name: str  # of the module of its routed experts
    block: Any  # the module of its router, experts and any shared ones; None: the layer itself is
    experts: Any  # the module of its routed experts, inside the block
    intercept: Intercept = intercept_call

    @property
    def scales_inputs(self) -> bool:
        """Whether the router's weight multiplies an expert's input instead of its output."""
        return self.intercept is intercept_scaled_inputs


@dataclass(frozen=True, eq=False)
class ExpertLayout:
    """Where a model's routed experts are."""

    n_layers: int  # decoder layers, dense ones too
    n_experts: int  # routed experts of an MoE layer
    layers: tuple[MoeLayer, ...]  # in order of execution
    stack: str  # name of the list of decoder layers, such as "model.layers"
    model: Any


FindExperts = Callable[[str, Any], Any]
"""``find(name, module) -> experts``: the module of the routed experts inside an MoE block.

None for every module that is not such a block.
"""
LAYOUTS: dict[str, FindExperts] = {}
"""Recognise experts that transformers does not reach through its interface; plugins add them."""


def expert_layout(model: Any) -> ExpertLayout:
    """Find the MoE layers of a decoder-only transformers model, or of a larger one's text part.

    Raises CrispError, naming the model's class, for anything else: encoder-decoders, models without
    routed experts or with several stacks that have some, and experts that are neither reached
    through transformers' common interface nor laid out like those that are.
    """
    who = f"{type(model).__name__} (model_type {model.config.model_type})"
    if getattr(model.config, "is_encoder_decoder", False):
        raise CrispError(
            f"{who}: is an encoder-decoder; a decoder-only language model was expected"
        )
    modules = dict(model.named_modules())
    names = [name for name, module in modules.items() if _has_common_interface(module)]
    names = names or _names_by_plugins(who, modules)
    names = names or [name for name, module in modules.items() if is_alike(module)]
    if not names:
        unknown = next((m for m in modules.values() if "Experts" in type(m).__name__), None)
        if unknown is not None:
            raise CrispError(
                f"{who}: its {type(unknown).__name__} does not use transformers' common experts "
                "interface and is not understood"
            )
        raise CrispError(f"{who}: has no routed experts; a Mixture-of-Experts model was expected")

    positions = {name: _position(name, modules) for name in names}
    stacks = {position.stack for position in positions.values() if position is not None}
    layers = []
    for name, position in positions.items():
        if position is None or len(stacks) > 1:
            raise CrispError(
                f"{who}: the place of {name} is not understood; "
                "an MoE block inside one list of decoder layers was expected"
            )
        block = None if position.without_block else modules[name.rpartition(".")[0]]
        layers.append(MoeLayer(position.layer, name, block, modules[name], call_of(modules[name])))
    if len({layer.index for layer in layers}) < len(layers):
        raise CrispError(f"{who}: has a layer with two groups of routed experts; one was expected")
    counts = {int(layer.experts.num_experts) for layer in layers}
    if len(counts) > 1:
        raise CrispError(
            f"{who}: its layers have {sorted(counts)} experts; one number was expected"
        )
    ordered = tuple(sorted(layers, key=lambda layer: layer.index))
    stack = stacks.pop()
    return ExpertLayout(len(modules[stack]), counts.pop(), ordered, stack, model)


def _names_by_plugins(who: str, modules: dict[str, Any]) -> list[str]:
    """Return the names of the expert modules that plugins recognise.

    Raises CrispError for one that is no part of the model.
    """
    load_entry_points()
    names = {id(module): name for name, module in modules.items()}
    experts_names = []
    for layout, find in LAYOUTS.items():
        for name, module in modules.items():
            experts = find(name, module)
            if experts is None:
                continue
            if id(experts) not in names:
                raise CrispError(f"{who}: layout {layout}: the experts of {name} are no module")
            experts_names.append(names[id(experts)])
    return experts_names


def _has_common_interface(module: Any) -> bool:
    """Return whether the module's class hands its forward to transformers' experts registry."""
    interface = import_extra("transformers.integrations.moe").ExpertsInterface
    cells = getattr(type(module).forward, "__closure__", None) or ()
    return any(isinstance(cell.cell_contents, interface) for cell in cells)


class _Position(NamedTuple):
    """The place of a module in the outermost list of layers around it."""

    stack: str  # name of the list
    layer: int  # which of its layers
    without_block: bool  # it hangs on the layer itself: no block that could be called alone


def _position(name: str, modules: dict[str, Any]) -> _Position | None:
    """Return the place of the module ``name``; None outside any list of layers."""
    parts = name.split(".")
    for depth in range(1, len(parts)):
        stack = ".".join(parts[:depth])
        if isinstance(modules[stack], import_extra("torch.nn").ModuleList):
            return _Position(stack, int(parts[depth]), depth + 2 == len(parts))
    return None


@contextmanager
def intercept_experts(layout: ExpertLayout, handler: Handler) -> Iterator[None]:
    """Let ``handler`` compute every routed-experts module within the block."""
    with ExitStack() as stack:
        for which, layer in enumerate(layout.layers):
            call = partial(handler, which)
            stack.enter_context(layer.intercept(layer.block, layer.experts, call))
        yield
