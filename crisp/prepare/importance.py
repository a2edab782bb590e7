"""The order in which an expert's neurons are stored, so that a prefix holds the best of them.

The paper orders by mean |activation| (section 3.2.2, Eq. 2) and compares with magnitude, the
original order and a random one (Figure 12); ``output`` is CRISP's own: it also counts how far a
neuron's activation reaches into the output.
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
from crisp.prepare.calibration import CalibrationSums, Floats, Ints, LayerSums
from crisp.profile.metadata import POINTS


@dataclass(frozen=True)
class _NoParameters:
    """An order without parameters."""


ORDERS: dict[str, Callable[..., Any]] = {
    "importance": _NoParameters,
    "output": _NoParameters,
    "magnitude": _NoParameters,
    "original": _NoParameters,
    "random": Drawn,
}


@dataclass(frozen=True)
class NeuronOrder:
    """An order of neurons by name; ``seed`` counts for ``random`` only."""

    name: str = "importance"
    seed: int = 0

    @classmethod
    def read(cls, text: str) -> NeuronOrder:
        """Parse the spelling of an order; CrispError names the nearest to an unknown one.

        >>> print(*map(NeuronOrder.read, ["output", "random", "random(7)"]))
        output random(0) random(7)
        """
        order = build(text, ORDERS, "order of neurons")
        if isinstance(order, Drawn):
            return cls("random", int(order.seed or 0))
        return cls(text.partition("(")[0].strip())

    def __str__(self) -> str:
        return f"random({self.seed})" if self.name == "random" else self.name


def neuron_scores(
    order: NeuronOrder, calibration: CalibrationSums, experts: Mapping[int, Experts]
) -> dict[int, Floats]:
    """Return the scores neurons are ordered by: for each layer float64 [E, d_ff], larger first.

    ``importance``: mean |activation| (paper, Eq. 2); ``output``: that times the L2 norm of the
    neuron's down row; ``magnitude``: L2 norm of all the neuron's weights; ``original``: all equal;
    ``random``: drawn from (seed, layer). Experts that no token was routed to go by
    magnitude where the order needs activations. experts: by layer, their weights as calibrated.
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
    up, down = _finite_norms(experts)  # [E, d_ff] each
    magnitude: Floats = np.hypot(up, down)
    if order.name == "magnitude":
        return magnitude
    measured = sums.importance * (down if order.name == "output" else 1)
    return np.where(reached[:, None], measured, magnitude)


def stack_norms(experts: Experts) -> Floats:
    """Return the norms of all experts of a layer, float64 [2, E, d_ff]: see `Experts.norms`."""
    by_expert = [experts.norms(expert) for expert in range(experts.n_experts)]
    return np.stack([np.stack([norms[i].cpu().numpy() for norms in by_expert]) for i in (0, 1)])


def _finite_norms(experts: Experts) -> Floats:
    """Return `stack_norms`; CrispError, naming the expert, for NaN or infinite weights."""
    norms = stack_norms(experts)
    finite = np.isfinite(norms).all(axis=(0, 2))  # [E]
    if not finite.all():
        expert = int(np.argmin(finite))
        raise CrispError(f"{experts.name}: expert {expert} has NaN or infinite weights")
    return norms


def permutations(
    scores: Mapping[int, Floats], runs: Mapping[int, int] | None = None
) -> dict[int, Ints]:
    """Return for each layer int64 [E, d_ff]: at place p the neuron that comes to stand there.

    scores: by layer [E, d_ff]. They descend; neurons of equal score keep their order. runs: by
    layer, how many neighbours have to stay together; None: one in all of them. Runs descend by
    their sums and the neurons of each by their scores; a shorter last run stays the last.
    """
    runs = {} if runs is None else runs
    return {
        layer: np.stack([_in_runs(of_expert, runs.get(layer, 1)) for of_expert in in_layer])
        for layer, in_layer in scores.items()
    }


def _in_runs(scores: Floats, run: int) -> Ints:
    """Return an expert's permutation, see `permutations`."""
    whole = len(scores) // run * run
    by_run = scores[:whole].reshape(-1, run)
    first = np.argsort(-by_run.sum(1), kind="stable")
    inside = np.argsort(-by_run, axis=1, kind="stable")
    rest = whole + np.argsort(-scores[whole:], kind="stable")
    return np.concatenate([(first[:, None] * run + inside[first]).reshape(-1), rest])


def importance_curves(
    calibration: CalibrationSums, orders: Mapping[int, Ints]
) -> dict[int, NDArray[np.float32]]:
    """Return for each layer float32 [E, 32]: the share of importance that leading neurons hold.

    Entry q - 1 is the share of an expert's mean |activation| that is in the first q / 32 of its
    neurons (rounded up). orders: by layer [E, d_ff], as `permutations` returns them. All entries
    are 0 for experts whose importance is unknown or zero.
    """
    result = {}
    for layer, sums in calibration.layers.items():
        cumulative = np.cumsum(np.take_along_axis(sums.importance, orders[layer], 1), axis=1)
        d_ff = cumulative.shape[1]
        ends = -(-np.arange(1, POINTS + 1) * d_ff // POINTS) - 1
        total = cumulative[:, -1:]  # [E, 1]
        share = np.divide(cumulative, total, out=np.zeros_like(cumulative), where=total > 0)
        result[layer] = share[:, ends].astype(np.float32)
    return result


def block_contributions(
    calibration: CalibrationSums,
    orders: Mapping[int, Ints],
    experts: Mapping[int, Experts],
    block: int,
) -> dict[int, NDArray[np.float32]]:
    """Return for each layer float32 [E, blocks]: how much a block adds to a token, on average.

    It is the sum over the block's neurons of mean |activation| times the L2 norm of the down row: a
    bound of what the block adds to the output before the router's weight; 0 for experts that no
    token was routed to. orders: by layer [E, d_ff]. experts: by layer, as calibrated, not yet
    reordered. block: neurons of a block.
    """
    result = {}
    for layer, sums in calibration.layers.items():
        by_neuron = sums.importance * _finite_norms(experts[layer])[1]  # [E, d_ff]
        reordered = np.take_along_axis(by_neuron, orders[layer], 1)
        starts = np.arange(0, reordered.shape[1], block)
        result[layer] = np.add.reduceat(reordered, starts, axis=1).astype(np.float32)
    return result
