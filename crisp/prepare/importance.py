"""In which order an expert's neurons are stored, so that any prefix holds the best of them.

The paper orders by mean |activation| (section 3.2.2, Eq. 2) and compares with magnitude, the
original order and a random one (Figure 12); ``output`` is ours: it also counts how far a neuron's
activation reaches into the output.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

import numpy as np
from numpy.typing import NDArray

from crisp.adapter import Experts
from crisp.errors import CrispError
from crisp.policy.order import Drawn
from crisp.policy.spelling import build
from crisp.prepare.calibration import Calibration, Floats, Ints, LayerSums
from crisp.profile.metadata import POINTS


@dataclass(frozen=True)
class _Plain:
    """An order without parameters."""


ORDERS: dict[str, Callable[..., Any]] = {
    "importance": _Plain,
    "output": _Plain,
    "magnitude": _Plain,
    "original": _Plain,
    "random": Drawn,
}


@dataclass(frozen=True)
class NeuronOrder:
    """An order by name; the seed is that of ``random``."""

    name: str = "importance"
    seed: int = 0

    @classmethod
    def read(cls, text: str) -> NeuronOrder:
        """An order by its spelling; CrispError names the nearest where there is none.

        >>> print(*map(NeuronOrder.read, ["output", "random", "random(7)"]))
        output random(0) random(7)
        """
        made = build(text, ORDERS, "order of neurons")
        if isinstance(made, Drawn):
            return cls("random", int(made.seed or 0))
        return cls(text.partition("(")[0].strip())

    def __str__(self) -> str:
        return f"random({self.seed})" if self.name == "random" else self.name


def scores(
    order: NeuronOrder, calibration: Calibration, experts: Mapping[int, Experts]
) -> dict[int, Floats]:
    """What neurons are ordered by, layer by layer: float64 [E, d_ff], larger is better.

    ``importance``: mean |activation| (paper, Eq. 2); ``output``: that times the L2 norm of the
    neuron's down row; ``magnitude``: L2 norm of all the neuron's weights; ``original``: all equal;
    ``random``: drawn from (seed, layer). Experts that no token reached go by magnitude where the
    order asks for activations. experts: by layer, with their weights as they were calibrated.
    """
    return {
        layer: _scores(order, layer, sums, experts[layer])
        for layer, sums in calibration.layers.items()
    }


def _scores(order: NeuronOrder, layer: int, sums: LayerSums, experts: Experts) -> Floats:
    shape = sums.activation.shape
    if order.name == "original":
        return np.zeros(shape)
    if order.name == "random":
        return np.random.default_rng([order.seed, layer]).random(shape)
    reached = sums.tokens > 0
    if order.name == "importance" and reached.all():
        return sums.importance
    first, down = _norms(experts)
    magnitude: Floats = np.hypot(first, down)
    if order.name == "magnitude":
        return magnitude
    measured = sums.importance * (down if order.name == "output" else 1)
    return np.where(reached[:, None], measured, magnitude)


def _norms(experts: Experts) -> tuple[Floats, Floats]:
    """Each neuron's gate and up weights together, and its down row: L2 norms [E, d_ff] each."""
    both = [experts.norms(expert) for expert in range(experts.n_experts)]
    first, down = (np.stack([pair[i].cpu().numpy() for pair in both]) for i in (0, 1))
    for expert in range(experts.n_experts):
        if not np.isfinite(first[expert]).all() or not np.isfinite(down[expert]).all():
            raise CrispError(f"{experts.name}: expert {expert} has NaN or infinite weights")
    return first, down


def permutations(scored: Mapping[int, Floats]) -> dict[int, Ints]:
    """By layer int64 [E, d_ff]: at place p the neuron that comes to stand there.

    Descending score; equal ones keep their order.
    """
    return {layer: np.argsort(-one, axis=1, kind="stable") for layer, one in scored.items()}


def curves(calibration: Calibration, orders: Mapping[int, Ints]) -> dict[int, NDArray[np.float32]]:
    """By layer float32 [E, 32]: how much of an expert's importance its leading neurons hold.

    Entry q - 1 is the share, in mean |activation|, of the first q / 32 of its neurons (rounded up)
    in the order of ``orders``; 0 throughout for experts whose importance is unknown or nothing.
    """
    result = {}
    for layer, sums in calibration.layers.items():
        upto = np.cumsum(np.take_along_axis(sums.importance, orders[layer], 1), axis=1)
        d_ff = upto.shape[1]
        ends = -(-np.arange(1, POINTS + 1) * d_ff // POINTS) - 1
        total = upto[:, -1:]
        share = np.divide(upto, total, out=np.zeros_like(upto), where=total > 0)
        result[layer] = share[:, ends].astype(np.float32)
    return result


def contributions(
    calibration: Calibration,
    orders: Mapping[int, Ints],
    experts: Mapping[int, Experts],
    block: int,
) -> dict[int, NDArray[np.float32]]:
    """By layer float32 [E, blocks]: how much each block of neurons adds to a token, on average.

    Sum over its neurons of mean |activation| times the L2 norm of the down row: a bound of what the
    block adds to the output before the router's weight. 0 for experts that no token reached.
    experts: as they were calibrated, not yet reordered; block: its neurons.
    """
    result = {}
    for layer, sums in calibration.layers.items():
        each = sums.importance * _norms(experts[layer])[1]
        moved = np.take_along_axis(each, orders[layer], 1)
        starts = np.arange(0, moved.shape[1], block)
        result[layer] = np.add.reduceat(moved, starts, axis=1).astype(np.float32)
    return result
