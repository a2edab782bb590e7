"""One pass over the calibration text, and all that preparation needs added up on the way.

Paper, section 4.1: how often combinations occur (stage 1) and how large every neuron's activation
is (stage 2). Beside them the size of what each expert adds to a token, for the cheapest way of
telling roles apart. The model computes what it would have computed, to the bit.
"""

from __future__ import annotations

import zipfile
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, fields
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from crisp.adapter import Experts, MoeLayer, execute, handling, layout, ranked
from crisp.checkpoint.windows import Windows
from crisp.errors import CrispError
from crisp.extras import need
from crisp.files import atomic
from crisp.profile.router_weights import BINS, histogram

Ints = NDArray[np.int64]
Floats = NDArray[np.float64]

BATCH_TOKENS = 4096  # of one forward pass, where windows are shorter than that
SAVE_EVERY = 32  # windows from one saved state to the next
_ENTRIES = 1 << 16  # activations turned into float64 at a time: they stay in the cache


@dataclass(eq=False)
class LayerSums:
    """What has been added up about one MoE layer of E experts."""

    activation: Floats  # [E, d_ff]: sum of |activation| over the tokens routed to each expert
    tokens: Ints  # [E]: how many these are
    anchored: Ints  # [E, E]: tokens whose anchor is i and that have j beside it
    # [E, E]: over the tokens of pair {i, j}, sum of the norm of what expert i adds, weight included
    removed: Floats
    weighted: Ints  # [E, BINS]: how often its router weight was of each size

    @classmethod
    def empty(cls, n_experts: int, d_ff: int) -> LayerSums:
        """Before the first token."""
        square = (n_experts, n_experts)
        return cls(
            activation=np.zeros((n_experts, d_ff)),
            tokens=np.zeros(n_experts, np.int64),
            anchored=np.zeros(square, np.int64),
            removed=np.zeros(square),
            weighted=np.zeros((n_experts, BINS), np.int64),
        )

    @property
    def importance(self) -> Floats:
        """Mean |activation| of each neuron (paper, Eq. 2): [E, d_ff], 0 where no token came."""
        return self.activation / np.maximum(self.tokens, 1)[:, None]

    @property
    def pair_counts(self) -> Ints:
        """Tokens of each combination (i, j), at i < j only: [E, E]."""
        return np.triu(self.anchored + self.anchored.T, 1)

    def run(self, experts: Experts, hidden: Any, index: Any, weights: Any) -> Any:
        """The experts' output [n, d_model] at full width, and their sums with these tokens in them.

        hidden [n, d_model], index and weights [n, k] as the router returned them. Raises CrispError
        for NaN or infinite values: named by the expert they come from, or by the layer's input.
        """
        torch = need("torch")
        if not bool(torch.isfinite(hidden).all()):
            raise CrispError(f"{experts.name}: its input is not finite; {_BEFORE}")
        sizes = np.zeros((hidden.shape[0], experts.n_experts))  # norm of each expert's output

        def neurons(expert: int, activation: Any) -> None:
            self.activation[expert] += _finite(experts, expert, _magnitude(activation))

        def outputs(expert: int, tokens: Any, output: Any) -> None:
            norm = torch.linalg.vector_norm(output.detach().float(), dim=1)
            sizes[tokens.cpu().numpy(), expert] = _finite(experts, expert, norm)

        result = execute(experts, hidden, index, weights, watch=neurons, watch_output=outputs)
        ids, w, _ = ranked(index, weights, experts.n_experts, experts.name)
        self.weighted += histogram(ids.astype(np.int64), w.astype(np.float16), len(self.tokens))
        self._count(ids.astype(np.int64), w * np.take_along_axis(sizes, np.maximum(ids, 0), 1))
        return result

    def _count(self, ids: Ints, added: Floats) -> None:
        """Count experts and combinations: ids [n, k] by descending weight, -1 absent."""
        n = len(self.tokens)
        self.tokens += np.bincount(ids[ids >= 0], minlength=n)
        first, other = np.broadcast_arrays(ids[:, :1], ids[:, 1:])
        present = other >= 0
        first, other = first[present], other[present]
        pair, turned = first * n + other, other * n + first
        anchor = np.broadcast_to(added[:, :1], present.shape)[present]
        self.anchored += np.bincount(pair, minlength=n * n).reshape(n, n)
        self.removed += np.bincount(pair, anchor, n * n).reshape(n, n)
        self.removed += np.bincount(turned, added[:, 1:][present], n * n).reshape(n, n)


_BEFORE = "something in front of it is damaged"


def _magnitude(activation: Any) -> Any:
    """Sum of |activation| [rows, neurons] over rows, in float64: [neurons]."""
    rows = max(1, _ENTRIES // activation.shape[1])
    wide = need("torch").float64
    parts = [part.abs().sum(0, dtype=wide) for part in activation.detach().split(rows)]
    return sum(parts[1:], parts[0])


def _finite(experts: Experts, expert: int, values: Any) -> NDArray[Any]:
    found: NDArray[Any] = values.cpu().numpy()
    if not np.isfinite(found).all():
        raise CrispError(
            f"{experts.name}: expert {expert} gives values that are not finite from an input that "
            "is; NaN or infinite weights?"
        )
    return found


@dataclass(eq=False)
class Calibration:
    """The sums of all MoE layers, by their place among the decoder layers."""

    layers: dict[int, LayerSums]
    windows: int = 0  # how many have been read
    tokens: int = 0  # that were fed

    @property
    def unreached(self) -> list[tuple[int, int]]:
        """(layer, expert) of every expert that no token was routed to."""
        return [
            (layer, int(expert))
            for layer, sums in self.layers.items()
            for expert in np.flatnonzero(sums.tokens == 0)
        ]

    def save(self, path: str | Path) -> None:
        """Write everything to one ``.npz`` file, whole or not at all."""
        arrays = {
            f"{layer}.{name.name}": getattr(sums, name.name)
            for layer, sums in self.layers.items()
            for name in fields(LayerSums)
        }
        with atomic(path) as temporary, temporary.open("wb") as file:
            np.savez(file, read=np.array([self.windows, self.tokens]), **arrays)

    @classmethod
    def load(cls, path: str | Path) -> Calibration:
        """Raises CrispError for a file that is not whole or not one of these."""
        try:
            with np.load(path, allow_pickle=False) as file:
                layers = sorted({int(name.partition(".")[0]) for name in file if "." in name})
                names = [name.name for name in fields(LayerSums)]
                sums = {
                    layer: LayerSums(**{name: file[f"{layer}.{name}"] for name in names})
                    for layer in layers
                }
                windows, tokens = file["read"].tolist()
        except (OSError, ValueError, KeyError, EOFError, zipfile.BadZipFile) as error:
            raise CrispError(f"{path}: is no saved calibration: {error}") from error
        return cls(sums, windows, tokens)


def calibrate(
    model: Any,
    windows: Windows,
    progress: Callable[[int, int], None] = lambda done, total: None,
    state: Calibration | None = None,
    save: Callable[[Calibration], None] | None = None,
) -> Calibration:
    """Read all ``windows`` with ``model`` once and add up what its experts do.

    progress: told (tokens read, tokens in all). state: sums to go on from, as ``save`` was given
    them: every 32 windows or so. Going on gives what reading in one go gives, to the bit.
    Raises CrispError for a model not understood, a state of another model, and damaged weights.
    """
    found = layout(model)
    experts = [Experts.of(layer) for layer in found.layers]
    if state is None:
        state = Calibration(
            {
                layer.index: LayerSums.empty(one.n_experts, one.d_ff)
                for layer, one in zip(found.layers, experts, strict=True)
            }
        )
    _check(state, found.layers, experts)
    sums = [state.layers[layer.index] for layer in found.layers]

    def handler(which: int, hidden: Any, index: Any, weights: Any, _: Any) -> Any:
        return sums[which].run(experts[which], hidden, index, weights)

    saved = state.windows
    with need("torch").inference_mode(), handling(found, handler):
        for batch in batches(windows.tokens, state.windows):
            ids = tensor(batch, model)
            model.base_model(input_ids=ids, use_cache=False)  # the head is of no interest
            state.windows += len(batch)
            state.tokens += ids.numel()
            progress(state.tokens, windows.fed)
            if save is not None and state.windows - saved >= SAVE_EVERY:
                save(state)
                saved = state.windows
    return state


def batches(tokens: Sequence[Ints], first: int = 0) -> Iterator[list[Ints]]:
    """Windows from ``first`` on, as many neighbours of equal length together as make a batch."""
    while first < len(tokens):
        length = len(tokens[first])
        last = min(len(tokens), first + max(1, BATCH_TOKENS // length))
        end = next((i for i in range(first, last) if len(tokens[i]) != length), last)
        yield list(tokens[first:end])
        first = end


def tensor(batch: Sequence[Ints], model: Any) -> Any:
    """Token ids [windows, length] where the model takes them."""
    return need("torch").from_numpy(np.stack(batch).astype(np.int64)).to(model.device)


def _check(state: Calibration, layers: Sequence[MoeLayer], experts: Sequence[Experts]) -> None:
    own = {
        layer.index: (one.n_experts, one.d_ff) for layer, one in zip(layers, experts, strict=True)
    }
    held = {layer: sums.activation.shape for layer, sums in state.layers.items()}
    if own != held:
        raise CrispError(
            f"the saved calibration is of another model: its layers have experts and neurons "
            f"{held}, expected {own}"
        )
