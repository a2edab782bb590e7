"""Meeting a transformers model: its MoE layers found, and what their routers decide recorded.

One place serves every family. Transformers keeps the routed experts of a layer in one module whose
forward is ``(hidden [n, d], top_k_index [n, k], top_k_weights [n, k])`` and which looks its
implementation up in a common registry. Standing in front of that forward, we see exactly what the
router returned, and the implementation that was set runs unchanged behind us.
"""

from __future__ import annotations

import importlib
from collections import OrderedDict
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from typing import Any

import numpy as np
from numpy.typing import NDArray

from crisp.errors import CrispError

Handler = Callable[[int, Any, Any, Any, Callable[[], Any]], Any]
"""``(which, hidden, top_k_index, top_k_weights, run) -> output [n, d]`` of the experts of MoE layer
number ``which`` (counted over MoE layers); ``run()`` computes what the model would have."""


def need(module: str) -> Any:
    """A module of the extra ``hf``; CrispError names the extra when it is not installed."""
    try:
        return importlib.import_module(module)
    except ImportError as error:
        top = module.partition(".")[0]
        raise CrispError(
            f"{top} is needed and not installed: pip install '.[hf]' in the checkout ({error})"
        ) from error


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
def attach(found: Layout, handler: Handler) -> Iterator[None]:
    """Let ``handler`` stand in for every routed-experts module; on leaving, all is as before.

    An implementation set by ``model.set_experts_implementation`` stays set and is what ``run``
    calls; a forward somebody else put on the module (offloading hooks) is kept as well.
    """
    with ExitStack() as undo:
        for which, layer in enumerate(found.layers):
            undo.callback(_restore, layer.experts, layer.experts.__dict__.get("forward"))
            layer.experts.forward = _standing_in(which, layer.experts.forward, handler)
        yield


def _standing_in(which: int, forward: Callable[..., Any], handler: Handler) -> Callable[..., Any]:
    def stand_in(hidden: Any, index: Any, weights: Any) -> Any:
        return handler(which, hidden, index, weights, lambda: forward(hidden, index, weights))

    return stand_in


def _restore(module: Any, forward: Callable[..., Any] | None) -> None:
    del module.forward
    if forward is not None:
        module.forward = forward


@dataclass(frozen=True, eq=False)
class Routing:
    """What the routers decided in one forward pass; n = batch * positions, batch-major.

    ``experts`` and ``guess`` [n, layers, k] int16, each row by descending weight, -1 for absent;
    ``weights`` [n, layers, k] float32 as the model combined with them, 0 where absent.
    """

    experts: NDArray[np.int16]
    weights: NDArray[np.float32]
    guess: NDArray[np.int16]


class Recorder:
    """Collects the routing of the forward pass that runs; ``take`` returns it and starts anew."""

    def __init__(self, found: Layout) -> None:
        self.layout = found
        self._real: dict[int, tuple[Any, Any]] = {}
        self._ahead: dict[int, tuple[Any, Any]] = {}
        self._guessing = False

    def experts(self, which: int, hidden: Any, index: Any, weights: Any, run: Any) -> Any:
        """The Handler: remember what the router chose, then compute as if nobody had looked."""
        seen = self._ahead if self._guessing else self._real
        if which in seen:
            name = self.layout.layers[which].name
            raise CrispError(f"{name}: ran twice in one forward pass; once was expected")
        seen[which] = (index.detach().clone(), weights.detach().clone())
        return hidden.new_zeros(hidden.shape) if self._guessing else run()

    def guess(self, which: int, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
        """Ask the router of MoE layer ``which`` about the input of the MoE block before it.

        The block runs on copies, with experts that return zeros, and with the hooks inside it
        silenced: those of transformers would otherwise take its router logits for real ones.
        """
        block = self.layout.layers[which].block
        self._guessing = True
        try:
            with need("torch").no_grad(), _silenced(block):
                block.forward(*map(_copy, args), **{k: _copy(v) for k, v in kwargs.items()})
        finally:
            self._guessing = False

    def take(self) -> Routing:
        """The routing since the last call, on the host."""
        missing = [x.name for i, x in enumerate(self.layout.layers) if i not in self._real]
        if missing:
            raise CrispError(f"{missing[0]}: was not called in the forward pass; not understood")
        experts, weights = self._dense(self._real)
        guess, _ = self._dense(self._ahead, experts.shape[2])
        self._real, self._ahead = {}, {}
        return Routing(experts, weights, guess)

    def _dense(
        self, seen: dict[int, tuple[Any, Any]], k: int = 0
    ) -> tuple[NDArray[np.int16], NDArray[np.float32]]:
        """Rows of all layers; a layer with fewer experts a token than the widest is padded."""
        k = max([k, *(index.shape[1] for index, _ in seen.values())])
        n = next(iter(self._real.values()))[0].shape[0]
        experts = np.full((n, self.layout.n_layers, k), -1, np.int16)
        weights = np.zeros((n, self.layout.n_layers, k), np.float32)
        for which, (index, weight) in seen.items():
            layer = self.layout.layers[which]
            ids, w = index.cpu().numpy(), weight.float().cpu().numpy()
            if ids.size and not 0 <= ids.min() <= ids.max() <= self.layout.n_experts:
                raise CrispError(
                    f"{layer.name}: chose expert {ids.max()} of {self.layout.n_experts}; "
                    "what that means is not understood"
                )
            absent = ids == self.layout.n_experts  # transformers' sentinel for "no expert"
            ids, w = np.where(absent, -1, ids), np.where(absent, 0, w)
            # Descending weight, absent ones last, equal ones by the router's own rank.
            rank = np.argsort(np.where(absent, np.inf, -w), axis=1, kind="stable")
            experts[:, layer.index, : ids.shape[1]] = np.take_along_axis(ids, rank, 1)
            weights[:, layer.index, : ids.shape[1]] = np.take_along_axis(w, rank, 1)
        return experts, weights


def _copy(value: Any) -> Any:
    return value.clone() if hasattr(value, "clone") else value


@contextmanager
def _silenced(block: Any) -> Iterator[None]:
    """No forward hook of any module inside ``block`` fires."""
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
def recording(model: Any) -> Iterator[Recorder]:
    """Record the routing of every forward pass of ``model``, and the look-ahead guess.

    The guess for an MoE layer is what its router says about the input of the MoE block before it.
    Logits do not change by a bit. Raises CrispError for a model that is not understood (see
    ``layout``) or is in training mode, where routers may draw noise.
    """
    if model.training:
        raise CrispError(f"{type(model).__name__}: is in training mode; call model.eval() first")
    recorder = Recorder(layout(model))
    with attach(recorder.layout, recorder.experts), ExitStack() as undo:
        for which, layer in enumerate(recorder.layout.layers[:-1], start=1):

            def ahead(_: Any, args: Any, kwargs: Any, which: int = which) -> None:
                recorder.guess(which, args, kwargs)

            hook = layer.block.register_forward_pre_hook(ahead, with_kwargs=True)
            undo.callback(hook.remove)
        yield recorder
