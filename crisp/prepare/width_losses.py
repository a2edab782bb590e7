"""By how much each width of each expert raises the loss, measured one by one.

An expert in one of its roles, the token's anchor or beside it, runs at a smaller width wherever it
has that role in one layer, while everything else runs in full; measured is the increase of the mean
loss of all tokens, so the expert's frequency is included. Only windows with such a token run, from
that layer up.

The loss is the one that the model itself expects: how far its prediction moves (Kullback-Leibler),
not how much less likely the next token of the text becomes. The two have the same mean where a text
is as the model predicts, but the latter depends on which tokens happen to come, and a search for
cheap widths would fit the luck of that text.
"""

from __future__ import annotations

from collections.abc import Container, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, replace
from fractions import Fraction
from pathlib import Path
from typing import Any

import numpy as np

from crisp.adapter import Experts
from crisp.errors import CrispError
from crisp.extras import import_extra
from crisp.files import atomic
from crisp.model.spec import ModelSpec
from crisp.prepare.ablation import Ablation, AblationBatch, Flags
from crisp.prepare.calibration import Floats, Ints
from crisp.progress import Progress, no_progress
from crisp.text_windows import TokenWindows

SHARES = tuple(Fraction(eighths, 8) for eighths in (0, 1, 2, 3, 4, 6))  # measured widths
LEAST = 16  # tokens that an expert must have in a role to be measured
ANCHOR, BESIDE = 0, 1  # roles


@dataclass(frozen=True, eq=False)
class WidthLosses:
    """The measured losses of one layer of E experts."""

    # [E, 2, blocks + 1]: by width in blocks, nats in the mean of all scored tokens; NaN: unknown
    losses: Floats
    counts: Ints  # [E, 2]: tokens in which the expert had the role

    def save(self, path: Path) -> None:
        """Write both to one ``.npz`` file, whole or not at all."""
        with atomic(path) as temporary, temporary.open("wb") as file:
            np.savez(file, losses=self.losses, counts=self.counts)

    @classmethod
    def load(cls, path: Path) -> WidthLosses:
        """Read what `save` wrote."""
        with np.load(path, allow_pickle=False) as file:
            return cls(file["losses"], file["counts"])


def measured_widths(spec: ModelSpec) -> list[int]:
    """Return the widths to run, in blocks, ascending; the full width costs nothing."""
    return sorted({spec.width(share) for share in SHARES} - {spec.n_blocks})


def sample_windows(windows: TokenWindows, tokens: int) -> TokenWindows:
    """Select whole windows, spread evenly over the text, of at most ``tokens`` tokens together.

    Raises CrispError if that is less than a window.
    """
    if tokens < windows.window:
        raise CrispError(
            f"--width-losses {tokens}: at least a window of {windows.window} tokens was expected"
        )
    kept = spread(windows, tokens)
    return replace(
        windows,
        tokens=[windows.tokens[i] for i in kept],
        scored=[windows.scored[i] for i in kept],
        text=[windows.text[i] for i in kept],
    )


def spread(windows: TokenWindows, tokens: int) -> list[int]:
    """Return the numbers of the windows that `sample_windows` selects."""
    total = len(windows.tokens)
    count = min(total, tokens // windows.window)
    return [(2 * part + 1) * total // (2 * count) for part in range(count)]


def each_width_losses(
    model: Any,
    windows: TokenWindows,
    spec: ModelSpec,
    skip: Container[int] = (),
    progress: Progress = no_progress,
) -> Iterator[tuple[int, WidthLosses]]:
    """Yield (layer, losses) of every MoE layer that is not in ``skip``.

    Neurons are taken in their order in the model. Between the measured widths losses are
    interpolated linearly. Raises CrispError for a model not understood.
    """
    ablation, widths = Ablation(model, windows), measured_widths(spec)
    layers = [layer for layer in ablation.layers if layer not in skip]
    total, done = len(layers) * ablation.n_experts * 2, 0
    neurons = [spec.neurons(0, width) for width in widths]
    for layer in layers:
        batches = ablation.plain(layer)
        scored = sum(int(batch.scored.sum()) for batch in batches)
        losses = np.full((ablation.n_experts, 2, spec.n_blocks + 1), np.nan)
        counts = np.zeros((ablation.n_experts, 2), np.int64)
        for expert, role in np.ndindex(ablation.n_experts, 2):
            parts = [part for batch in batches if (part := _part(batch, expert, role))]
            counts[expert, role] = sum(int(mask.sum()) for _, mask in parts)
            if counts[expert, role] >= LEAST:
                moved = [ablation.divergence(layer, *part, neurons).sum(axis=1) for part in parts]
                measured = [*(np.sum(moved, axis=0) / scored), 0]
                losses[expert, role] = np.interp(
                    np.arange(spec.n_blocks + 1), [*widths, spec.n_blocks], measured
                )
            done += 1
            progress(done, total)
        yield layer, WidthLosses(losses, counts)


def measure_width_losses(
    model: Any, windows: TokenWindows, spec: ModelSpec, folder: Path | None, progress: Progress
) -> dict[int, WidthLosses]:
    """Measure the losses of all layers; return them by layer.

    Each layer is saved to ``folder`` (None: nowhere) when it is finished, and taken from there when
    the same call is made again.
    """
    result: dict[int, WidthLosses] = {}
    for path in () if folder is None else folder.glob("widths-*.npz"):
        result[int(path.stem.removeprefix("widths-"))] = WidthLosses.load(path)
    for layer, losses in each_width_losses(model, windows, spec, set(result), progress):
        result[layer] = losses
        if folder is not None:
            losses.save(folder / f"widths-{layer}.npz")
    return result


def _part(batch: AblationBatch, expert: int, role: int) -> tuple[AblationBatch, Flags] | None:
    """Return the windows in which the expert has the role, and where it has it: [n, k]."""
    mask = batch.experts == expert
    mask[:, 1:] &= role == BESIDE
    mask[:, :1] &= role == ANCHOR
    windows = np.flatnonzero(mask.reshape(len(batch.windows), -1).any(axis=1))
    if not len(windows):
        return None
    rows = (windows[:, None] * batch.ids.shape[1] + np.arange(batch.ids.shape[1])).ravel()
    part = AblationBatch(
        windows=batch.windows[windows],
        ids=batch.ids[windows],
        below=_of_windows(batch.below, windows),
        experts=batch.experts[rows],
        rank=batch.rank[rows],
        loss=batch.loss[rows],
        scored=batch.scored[rows],
    )
    return part, mask[rows]


def _of_windows(below: Any, windows: Ints) -> Any:
    """Select windows from a decoder layer's output: a tensor [windows, ...] or a tuple of some."""
    if isinstance(below, tuple):
        return tuple(_of_windows(part, windows) for part in below)
    return below[windows] if import_extra("torch").is_tensor(below) else below


@contextmanager
def temporarily_reordered(
    experts: Mapping[int, Experts], orders: Mapping[int, Ints]
) -> Iterator[None]:
    """Put the experts' neurons into other orders within the block; orders: by layer [E, d_ff]."""
    _shuffle(experts, orders)
    try:
        yield
    finally:
        _shuffle(experts, {layer: np.argsort(order, axis=1) for layer, order in orders.items()})


def _shuffle(experts: Mapping[int, Experts], orders: Mapping[int, Ints]) -> None:
    """Put the experts' neurons into other orders, in place; orders: by layer [E, d_ff]."""
    torch = import_extra("torch")
    for layer, order in orders.items():
        for expert, permutation in enumerate(order):
            experts[layer].shuffle(expert, torch.from_numpy(permutation.copy()))
