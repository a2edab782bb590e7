"""Calibration: one pass over a text, and the sums that preparation needs from it.

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

from crisp.adapter import (
    Experts,
    MoeLayer,
    execute,
    expert_layout,
    intercept_experts,
    rank_by_weight,
)
from crisp.errors import CrispError
from crisp.extras import import_extra
from crisp.files import atomic
from crisp.profile.router_weights import BINS, histogram
from crisp.progress import Progress, no_progress
from crisp.text_windows import TokenWindows

Ints = NDArray[np.int64]
Floats = NDArray[np.float64]

BATCH_TOKENS = 4096  # tokens of one forward pass, where windows are shorter than that
SAVE_EVERY = 32  # windows from one saved state to the next
_ENTRIES = 1 << 16  # activations converted to float64 at a time: they stay in the cache


@dataclass(eq=False)
class LayerSums:
    """What calibration has added up about one MoE layer of E experts."""

    activation: Floats  # [E, d_ff]: sum of |activation| over the tokens routed to each expert
    tokens: Ints  # [E]: tokens routed to each expert
    anchored: Ints  # [E, E]: tokens whose anchor is i and that have j beside it
    # [E, E]: over the tokens of pair {i, j}, sum of the norm of what expert i adds, weight included
    removed: Floats
    weighted: Ints  # [E, BINS]: how often its router weight was of each size
    squares: Floats  # [d_model]: sum of the squares of the experts' input, over all tokens

    @classmethod
    def empty(cls, n_experts: int, d_ff: int, d_model: int) -> LayerSums:
        """Return the sums before the first token."""
        square = (n_experts, n_experts)
        return cls(
            activation=np.zeros((n_experts, d_ff)),
            tokens=np.zeros(n_experts, np.int64),
            anchored=np.zeros(square, np.int64),
            removed=np.zeros(square),
            weighted=np.zeros((n_experts, BINS), np.int64),
            squares=np.zeros(d_model),
        )

    @property
    def importance(self) -> Floats:
        """Mean |activation| of each neuron (paper, Eq. 2): [E, d_ff], 0 if no token was routed."""
        return self.activation / np.maximum(self.tokens, 1)[:, None]

    @property
    def input_moments(self) -> Floats:
        """Mean square of each number of the experts' input, over the mean of all: [d_model]."""
        mean = self.squares.mean()
        return self.squares / mean if mean > 0 else np.ones_like(self.squares)

    @property
    def pair_counts(self) -> Ints:
        """Number of tokens of each combination (i, j), at i < j only: [E, E]."""
        return np.triu(self.anchored + self.anchored.T, 1)

    def run(self, experts: Experts, hidden: Any, index: Any, weights: Any) -> Any:
        """Return the experts' output [n, d_model] at full width, and add these tokens to the sums.

        hidden [n, d_model]; index and weights [n, k]: as the router returned them. Raises
        CrispError, naming the expert or the layer's input, for NaN or infinite values.
        """
        torch = import_extra("torch")
        if not bool(torch.isfinite(hidden).all()):
            raise CrispError(f"{experts.name}: its input is not finite; {_DAMAGED_BEFORE}")
        sizes = np.zeros((hidden.shape[0], experts.n_experts))  # [n, E]: norm of each output

        def add_activation(expert: int, activation: Any) -> None:
            self.activation[expert] += _finite(experts, expert, _magnitude(activation))

        def keep_size(expert: int, tokens: Any, output: Any) -> None:
            norm = torch.linalg.vector_norm(output.detach().float(), dim=1)
            sizes[tokens.cpu().numpy(), expert] = _finite(experts, expert, norm)

        self.squares += _sum_of_squares(hidden)
        result = execute(
            experts, hidden, index, weights, watch=add_activation, watch_output=keep_size
        )
        ids, w, _ = rank_by_weight(index, weights, experts.n_experts, experts.name)
        self.weighted += histogram(ids.astype(np.int64), w.astype(np.float16), len(self.tokens))
        self._count(ids.astype(np.int64), w * np.take_along_axis(sizes, np.maximum(ids, 0), 1))
        return result

    def _count(self, ids: Ints, added: Floats) -> None:
        """Count experts and combinations, and add up sizes by combination.

        ids [n, k] by descending weight, -1 absent; added [n, k]: norm of what each expert adds.
        """
        n = len(self.tokens)
        self.tokens += np.bincount(ids[ids >= 0], minlength=n)
        first, other = np.broadcast_arrays(ids[:, :1], ids[:, 1:])
        present = other >= 0
        first, other = first[present], other[present]
        pair, reverse = first * n + other, other * n + first  # indices into [E * E]
        anchor = np.broadcast_to(added[:, :1], present.shape)[present]
        self.anchored += np.bincount(pair, minlength=n * n).reshape(n, n)
        self.removed += np.bincount(pair, anchor, n * n).reshape(n, n)
        self.removed += np.bincount(reverse, added[:, 1:][present], n * n).reshape(n, n)


_DAMAGED_BEFORE = "something in front of it is damaged"


def _magnitude(activation: Any) -> Any:
    """Return the sum of |activation| [rows, neurons] over rows, in float64: [neurons]."""
    rows = max(1, _ENTRIES // activation.shape[1])
    wide = import_extra("torch").float64
    parts = [part.abs().sum(0, dtype=wide) for part in activation.detach().split(rows)]
    return sum(parts[1:], parts[0])


def _sum_of_squares(hidden: Any) -> Floats:
    """Return the sum of squares [rows, d_model] over rows, in float64: [d_model]."""
    rows, total = max(1, _ENTRIES // hidden.shape[1]), np.zeros(hidden.shape[1])
    for part in hidden.detach().split(rows):
        total += part.double().square().sum(0).cpu().numpy()
    return total


def _finite(experts: Experts, expert: int, values: Any) -> NDArray[Any]:
    """Return ``values`` on the host; CrispError, naming the expert, if any is not finite."""
    array: NDArray[Any] = values.cpu().numpy()
    if not np.isfinite(array).all():
        raise CrispError(
            f"{experts.name}: expert {expert} gives values that are not finite from an input that "
            "is; NaN or infinite weights?"
        )
    return array


@dataclass(eq=False)
class CalibrationSums:
    """The sums of all MoE layers, and how much text is in them."""

    layers: dict[int, LayerSums]  # by place among the decoder layers
    windows: int = 0  # read so far
    tokens: int = 0  # read so far

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
    def load(cls, path: str | Path) -> CalibrationSums:
        """Read what `save` wrote; CrispError for a file that is damaged or another."""
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
    windows: TokenWindows,
    progress: Progress = no_progress,
    state: CalibrationSums | None = None,
    save: Callable[[CalibrationSums], None] | None = None,
) -> CalibrationSums:
    """Read all ``windows`` with ``model`` once and add up what its experts do.

    progress: called with (tokens read, tokens in all). save: called with the sums about every 32
    windows. state: sums that ``save`` was given, to resume from; the result is the same to the bit
    as without an interruption. Raises CrispError for a model not understood, a state of another
    model, and damaged weights.
    """
    layout = expert_layout(model)
    experts = [Experts.of(layer) for layer in layout.layers]
    if state is None:
        state = CalibrationSums(
            {
                layer.index: LayerSums.empty(
                    layer_experts.n_experts, layer_experts.d_ff, layer_experts.d_model
                )
                for layer, layer_experts in zip(layout.layers, experts, strict=True)
            }
        )
    _check(state, layout.layers, experts)
    sums = [state.layers[layer.index] for layer in layout.layers]

    def handler(which: int, hidden: Any, index: Any, weights: Any, _: Any) -> Any:
        return sums[which].run(experts[which], hidden, index, weights)

    saved_windows = state.windows
    with import_extra("torch").inference_mode(), intercept_experts(layout, handler):
        for batch in batch_windows(windows.tokens, state.windows):
            ids = to_token_ids(batch, model)
            model.base_model(input_ids=ids, use_cache=False)  # without its head
            state.windows += len(batch)
            state.tokens += ids.numel()
            progress(state.tokens, windows.n_fed)
            if save is not None and state.windows - saved_windows >= SAVE_EVERY:
                save(state)
                saved_windows = state.windows
    return state


def batch_windows(tokens: Sequence[Ints], first: int = 0) -> Iterator[list[Ints]]:
    """Yield windows from ``first`` on, in batches of neighbours of equal length."""
    while first < len(tokens):
        length = len(tokens[first])
        last = min(len(tokens), first + max(1, BATCH_TOKENS // length))
        end = next((i for i in range(first, last) if len(tokens[i]) != length), last)
        yield list(tokens[first:end])
        first = end


def to_token_ids(batch: Sequence[Ints], model: Any) -> Any:
    """Return the token ids [windows, length] of a batch on the model's device."""
    return import_extra("torch").from_numpy(np.stack(batch).astype(np.int64)).to(model.device)


def _check(state: CalibrationSums, layers: Sequence[MoeLayer], experts: Sequence[Experts]) -> None:
    """Raise CrispError unless the sums are of this model."""
    expected = {
        layer.index: (layer_experts.n_experts, layer_experts.d_ff)
        for layer, layer_experts in zip(layers, experts, strict=True)
    }
    saved = {layer: sums.activation.shape for layer, sums in state.layers.items()}
    if expected != saved:
        raise CrispError(
            f"the saved calibration is of another model: its layers have experts and neurons "
            f"{saved}, expected {expected}"
        )
