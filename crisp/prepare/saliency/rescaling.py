"""What the output of an expert is multiplied with where only its leading blocks are executed.

What is executed foretells what is left out: the factor of a width is the one with which the output
at that width comes nearest to the full output, in least squares over the tokens of a text,

    sum <full, part> / sum <part, part>.

Both follow from the inner products of what each block adds, which are summed in float64.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from crisp.adapter import Experts, execute, expert_layout, intercept_experts
from crisp.extras import import_extra
from crisp.files import atomic
from crisp.prepare.calibration import SAVE_EVERY, Floats, Ints, batch_windows, to_token_ids
from crisp.prepare.width_losses import LEAST
from crisp.profile.metadata import RESCALING_RANGE
from crisp.progress import Progress, no_progress
from crisp.text_windows import TokenWindows

TOKENS = 1 << 16  # of the sample that factors are measured on, at most
_ENTRIES = 1 << 17  # numbers that blocks add to tokens, converted to float64 at a time

Factors = NDArray[np.float16]
"""[E, blocks + 1], by the number of executed blocks; as metadata stores them."""


@dataclass(frozen=True, eq=False)
class BlockProducts:
    """The inner products of what the blocks of one layer's E experts add to tokens, summed.

    An expert's part 0 is the bias of its down projection (nothing where it has none), which belongs
    to every width; part b is its block b - 1.
    """

    sums: Floats  # [E, blocks + 1, blocks + 1]
    tokens: Ints  # [E]: tokens routed to each expert

    @classmethod
    def empty(cls, experts: Experts, block: int) -> BlockProducts:
        """Return the sums before the first token; block: neurons."""
        parts = -(-experts.d_ff // block) + 1
        shape = (experts.n_experts, parts, parts)
        return cls(np.zeros(shape), np.zeros(experts.n_experts, np.int64))

    def watch(self, experts: Experts, block: int) -> Callable[[int, Any], None]:
        """Return a function that adds an expert's activations: the ``watch`` of `execute`."""

        def add(expert: int, activation: Any) -> None:
            self.sums[expert] += _products(experts, expert, activation, block)
            self.tokens[expert] += len(activation)

        return add

    def factors(self) -> Factors:
        """Return the factors of the experts, clipped to `RESCALING_RANGE`.

        They are 1 at no block and at all of them. All factors of an expert with fewer than 16
        tokens are 1, and so is that of a width which adds nothing.
        """
        with_full = self.sums.sum(axis=1).cumsum(axis=1)  # [E, blocks + 1]: <full, part>
        cumulative = self.sums.cumsum(axis=1).cumsum(axis=2)
        own = np.diagonal(cumulative, axis1=1, axis2=2)  # [E, blocks + 1]: <part, part>
        known = (own > 0) & (self.tokens[:, None] >= LEAST)
        known[:, [0, -1]] = False
        result: Factors = (
            np.divide(with_full, own, out=np.ones_like(with_full), where=known)
            .clip(*RESCALING_RANGE)
            .astype(np.float16)
        )
        return result


def _products(experts: Experts, expert: int, activation: Any, block: int) -> Floats:
    """Return the inner products of an expert's parts, summed: [blocks + 1, blocks + 1].

    activation: of all neurons, [rows, d_ff].
    """
    torch = import_extra("torch")
    activation = activation.detach()
    bias = experts.output(expert, activation.new_zeros(1, experts.d_ff)).detach()  # [1, d_model]
    down = experts.neurons(expert)[1].split(block)  # [block, d_model] each
    rows = max(1, _ENTRIES // (experts.d_model * (len(down) + 1)))
    total = np.zeros((len(down) + 1, len(down) + 1))
    for some in activation.split(rows):
        added = [z @ w for z, w in zip(some.split(block, dim=1), down, strict=True)]
        parts = torch.stack([bias.expand_as(added[0]), *added])  # [blocks + 1, rows, d_model]
        flat = parts.flatten(1).double()
        total += (flat @ flat.T).cpu().numpy()
    return total


def measure_rescaling(
    model: Any,
    windows: TokenWindows,
    block: int,
    folder: Path | None = None,
    progress: Progress = no_progress,
) -> dict[int, Factors]:
    """Read all ``windows`` once; return the factors of every MoE layer.

    Neurons are taken in their order in the model, ``block`` of them a block. The sums are saved to
    ``folder`` (None: nowhere) about every 32 windows, and taken from there when the same call is
    made again; the result is the same to the bit. progress: called with (tokens read, in all).
    """
    layout = expert_layout(model)
    experts = [Experts.of(layer) for layer in layout.layers]
    layers = [layer.index for layer in layout.layers]
    products = {
        layer: BlockProducts.empty(of_layer, block)
        for layer, of_layer in zip(layers, experts, strict=True)
    }
    file, first = None if folder is None else folder / "rescaling.npz", 0
    if file is not None and file.exists():
        products, first = _load(file)
    watches = [
        products[layer].watch(of_layer, block)
        for layer, of_layer in zip(layers, experts, strict=True)
    ]

    def handler(which: int, hidden: Any, index: Any, weights: Any, _: Any) -> Any:
        return execute(experts[which], hidden, index, weights, watch=watches[which])

    read, saved, done = first, first, sum(map(len, windows.tokens[:first]))
    with import_extra("torch").inference_mode(), intercept_experts(layout, handler):
        for batch in batch_windows(windows.tokens, first):
            ids = to_token_ids(batch, model)
            model.base_model(input_ids=ids, use_cache=False)  # without its head
            read += len(batch)
            done += ids.numel()
            last = read == len(windows.tokens)
            if file is not None and (last or read - saved >= SAVE_EVERY):
                _save(file, products, read)
                saved = read
            progress(done, windows.n_fed)
    return {layer: of_layer.factors() for layer, of_layer in products.items()}


def _save(path: Path, products: Mapping[int, BlockProducts], windows: int) -> None:
    """Write the products of the layers and the windows read, whole or not at all."""
    arrays: dict[str, Any] = {"windows": np.array(windows)}
    for layer, of_layer in products.items():
        arrays |= {f"{layer}.sums": of_layer.sums, f"{layer}.tokens": of_layer.tokens}
    with atomic(path) as temporary, temporary.open("wb") as file:
        np.savez(file, **arrays)


def _load(path: Path) -> tuple[dict[int, BlockProducts], int]:
    """Read what `_save` wrote."""
    with np.load(path, allow_pickle=False) as file:
        layers = [int(name.removesuffix(".sums")) for name in file if name.endswith(".sums")]
        products = {
            layer: BlockProducts(file[f"{layer}.sums"], file[f"{layer}.tokens"]) for layer in layers
        }
        return products, int(file["windows"])
