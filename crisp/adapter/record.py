"""Recording what the routers of a model decide, forward pass by forward pass."""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from typing import Any

import numpy as np
from numpy.typing import NDArray

from crisp.adapter.layout import Layout, MoeLayer, handling, layout, restore
from crisp.errors import CrispError
from crisp.extras import need


def ranked(
    index: Any, weights: Any, n_experts: int, name: str
) -> tuple[NDArray[np.int16], NDArray[np.float32], NDArray[np.int64]]:
    """What a router returned, as a trace has it: (experts, weights, rank), each [n, k].

    Experts by descending weight, equal ones by the router's own rank; -1 with weight 0, at the
    end, for none. rank: the column of ``index`` each came from. name: the layer's, for errors.
    """
    ids, w = index.cpu().numpy(), weights.float().cpu().numpy()
    if ids.size and not 0 <= ids.min() <= ids.max() <= n_experts:
        raise CrispError(
            f"{name}: chose expert {ids.max()} of {n_experts}; what that means is not understood"
        )
    absent = ids == n_experts  # transformers' sentinel for "no expert"
    rank = np.argsort(np.where(absent, np.inf, -w), axis=1, kind="stable")
    ids = np.take_along_axis(np.where(absent, -1, ids), rank, 1)
    return ids.astype(np.int16), np.take_along_axis(np.where(absent, 0, w), rank, 1), rank


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

    def experts(self, which: int, hidden: Any, index: Any, weights: Any, run: Any) -> Any:
        """The Handler: remember what the router chose, then compute as if nobody had looked."""
        self._note(self._real, which, index, weights)
        return run()

    def guess(self, which: int, index: Any, weights: Any) -> None:
        """What the router said about the input of the MoE block before; see `looking_ahead`."""
        self._note(self._ahead, which, index, weights)

    def take(self) -> Routing:
        """The routing since the last call, on the host."""
        missing = [x.name for i, x in enumerate(self.layout.layers) if i not in self._real]
        if missing:
            raise CrispError(f"{missing[0]}: was not called in the forward pass; not understood")
        experts, weights = self._dense(self._real)
        guess, _ = self._dense(self._ahead, experts.shape[2])
        self._real, self._ahead = {}, {}
        return Routing(experts, weights, guess)

    def _note(self, seen: dict[int, tuple[Any, Any]], which: int, index: Any, weights: Any) -> None:
        if which in seen:
            name = self.layout.layers[which].name
            raise CrispError(f"{name}: ran twice in one forward pass; once was expected")
        seen[which] = (index.detach().clone(), weights.detach().clone())

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
            ids, w, _ = ranked(index, weight, self.layout.n_experts, layer.name)
            experts[:, layer.index, : ids.shape[1]] = ids
            weights[:, layer.index, : ids.shape[1]] = w
        return experts, weights


@contextmanager
def looking_ahead(found: Layout, heard: Callable[[int, Any, Any], None]) -> Iterator[None]:
    """Let every router but the first be asked about the input of the MoE block before its own.

    When that block is about to run, ``heard(which, top_k_index, top_k_weights)`` is told the answer
    of the router of MoE layer ``which``.
    """
    with ExitStack() as undo:
        for which, layer in enumerate(found.layers[:-1], start=1):

            def ahead(_: Any, args: Any, kwargs: Any, which: int = which) -> None:
                heard(which, *_ask(found.layers[which], args, kwargs))

            hook = layer.block.register_forward_pre_hook(ahead, with_kwargs=True)
            undo.callback(hook.remove)
        yield


class _Answer(Exception):
    """A router has decided; not an error."""

    def __init__(self, index: Any, weights: Any) -> None:
        super().__init__()
        self.index, self.weights = index, weights


def _ask(layer: MoeLayer, args: tuple[Any, ...], kwargs: dict[str, Any]) -> tuple[Any, Any]:
    """What the router of ``layer`` says about an input of its block: (index, weights).

    The block runs on copies, as far as its experts, and with the hooks inside it silenced: those of
    transformers would otherwise take its router logits for real ones.
    """

    def answered(_: Any, index: Any, weights: Any) -> None:
        raise _Answer(index, weights)

    forward, block = layer.experts.__dict__.get("forward"), layer.block
    layer.experts.forward = answered
    try:
        with need("torch").no_grad(), _silenced(block):
            block.forward(*map(_copy, args), **{k: _copy(v) for k, v in kwargs.items()})
    except _Answer as answer:
        return answer.index, answer.weights
    finally:
        restore(layer.experts, forward)
    raise CrispError(f"{layer.name}: its block does not call its experts; not understood")


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
    with (
        handling(recorder.layout, recorder.experts),
        looking_ahead(recorder.layout, recorder.guess),
    ):
        yield recorder
