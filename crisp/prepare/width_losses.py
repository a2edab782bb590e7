"""What each width of each expert costs, measured one by one.

An expert in one of its roles, the token's anchor or beside it, runs at a width wherever it has that
role in one layer, and all else runs in full: by so much the mean loss of a token grows. Frequency
is in it. Only windows with such a token run, from that layer up.

The loss is what the model itself expects it to be: how far its prediction moves (Kullback-Leibler),
not how much less likely the very next token becomes. The two have the same mean where a text is as
the model predicts, but the latter goes up and down with the tokens that happen to come, and whoever
looks for what costs little finds the luck of that text.
"""

from __future__ import annotations

from collections.abc import Callable, Container, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, replace
from fractions import Fraction
from pathlib import Path
from typing import Any

import numpy as np

from crisp.adapter import Experts
from crisp.checkpoint.windows import Windows
from crisp.errors import CrispError
from crisp.extras import need
from crisp.files import atomic
from crisp.model.spec import ModelSpec
from crisp.prepare.ablation import Ablation, Batch, Flags
from crisp.prepare.calibration import Floats, Ints

Progress = Callable[[int, int], None]

SHARES = tuple(Fraction(eighths, 8) for eighths in (0, 1, 2, 3, 4, 6))  # what is measured
LEAST = 16  # tokens that an expert must have in a role
ANCHOR, BESIDE = 0, 1  # roles


@dataclass(frozen=True, eq=False)
class WidthLosses:
    """Of one layer of E experts."""

    losses: Floats  # [E, 2, blocks + 1]: nats, mean of all scored tokens, by blocks; NaN: unknown
    counts: Ints  # [E, 2]: tokens in which the expert had the role

    def save(self, path: Path) -> None:
        """Write both to one ``.npz`` file, whole or not at all."""
        with atomic(path) as temporary, temporary.open("wb") as file:
            np.savez(file, losses=self.losses, counts=self.counts)

    @classmethod
    def load(cls, path: Path) -> WidthLosses:
        """What `save` wrote."""
        with np.load(path, allow_pickle=False) as file:
            return cls(file["losses"], file["counts"])


def measured_widths(spec: ModelSpec) -> list[int]:
    """Widths that are run, in blocks, rising; the full one costs nothing."""
    return sorted({spec.width(share) for share in SHARES} - {spec.n_blocks})


def spread(windows: Windows, tokens: int) -> Windows:
    """At most so many tokens, in whole windows that are spread evenly over the text.

    Raises CrispError for less than a window.
    """
    if tokens < windows.window:
        raise CrispError(
            f"--width-losses {tokens}: at least a window of {windows.window} tokens was expected"
        )
    total = len(windows.tokens)
    count = min(total, tokens // windows.window)
    kept = [(2 * part + 1) * total // (2 * count) for part in range(count)]
    return replace(
        windows,
        tokens=[windows.tokens[i] for i in kept],
        fresh=[windows.fresh[i] for i in kept],
        text=[windows.text[i] for i in kept],
    )


def width_losses(
    model: Any,
    windows: Windows,
    spec: ModelSpec,
    skip: Container[int] = (),
    progress: Progress = lambda done, total: None,
) -> Iterator[tuple[int, WidthLosses]]:
    """Layer by layer, (layer, what was measured), but for the layers in ``skip``.

    Neurons are taken as they stand in the model. Between the measured widths losses are
    interpolated, in a straight line. Raises CrispError for a model not understood.
    """
    ablation, asked = Ablation(model, windows), measured_widths(spec)
    layers = [layer for layer in ablation.layers if layer not in skip]
    total, done = len(layers) * ablation.n_experts * 2, 0
    neurons = [spec.neurons(0, width) for width in asked]
    for layer in layers:
        batches = ablation.plain(layer)
        scored = sum(int(batch.scored.sum()) for batch in batches)
        losses = np.full((ablation.n_experts, 2, spec.n_blocks + 1), np.nan)
        counts = np.zeros((ablation.n_experts, 2), np.int64)
        for expert, role in np.ndindex(ablation.n_experts, 2):
            parts = [part for batch in batches if (part := _part(batch, expert, role))]
            counts[expert, role] = sum(int(mask.sum()) for _, mask in parts)
            if counts[expert, role] >= LEAST:
                moved = [ablation.moved(layer, *part, neurons).sum(axis=1) for part in parts]
                known = [*(np.sum(moved, axis=0) / scored), 0]
                losses[expert, role] = np.interp(
                    np.arange(spec.n_blocks + 1), [*asked, spec.n_blocks], known
                )
            done += 1
            progress(done, total)
        yield layer, WidthLosses(losses, counts)


def measured(
    model: Any, windows: Windows, spec: ModelSpec, folder: Path | None, progress: Progress
) -> dict[int, WidthLosses]:
    """`width_losses` of all layers, each kept in ``folder`` (None: nowhere) when it is finished."""
    found: dict[int, WidthLosses] = {}
    for path in () if folder is None else folder.glob("widths-*.npz"):
        found[int(path.stem.removeprefix("widths-"))] = WidthLosses.load(path)
    for layer, losses in width_losses(model, windows, spec, set(found), progress):
        found[layer] = losses
        if folder is not None:
            losses.save(folder / f"widths-{layer}.npz")
    return found


def _part(batch: Batch, expert: int, role: int) -> tuple[Batch, Flags] | None:
    """The windows in which the expert has the role, and where it has: [n, k]."""
    mask = batch.experts == expert
    mask[:, 1:] &= role == BESIDE
    mask[:, :1] &= role == ANCHOR
    windows = np.flatnonzero(mask.reshape(len(batch.windows), -1).any(axis=1))
    if not len(windows):
        return None
    rows = (windows[:, None] * batch.ids.shape[1] + np.arange(batch.ids.shape[1])).ravel()
    part = Batch(
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
    """The same of what a decoder layer returned, a tensor [windows, ...] or a tuple with some."""
    if isinstance(below, tuple):
        return tuple(_of_windows(each, windows) for each in below)
    return below[windows] if need("torch").is_tensor(below) else below


@contextmanager
def reordered(experts: Mapping[int, Experts], orders: Mapping[int, Ints]) -> Iterator[None]:
    """The model with its experts' neurons in other orders, [experts, d_ff] by layer, until then."""
    _shuffle(experts, orders)
    try:
        yield
    finally:
        _shuffle(experts, {layer: np.argsort(order, axis=1) for layer, order in orders.items()})


def _shuffle(experts: Mapping[int, Experts], orders: Mapping[int, Ints]) -> None:
    torch = need("torch")
    for layer, order in orders.items():
        for expert, moved in enumerate(order):
            experts[layer].shuffle(expert, torch.from_numpy(moved.copy()))
