"""What a layer's input foretells of each expert's contribution, by ridge regression.

An expert contributes to a token the sum over its neurons of |activation| x norm of the down row.
The logarithm of that over its mean is regressed on the layer's input, expert by expert; how strong
the ridge is, as a share of the input's mean variance, is chosen for each layer on every fourth of
an expert's tokens. Intercepts are such that the magnitudes of an expert are 1 in the mean.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

import numpy as np
from numpy.typing import NDArray

from crisp.adapter import Experts, execute, expert_layout, intercept_experts
from crisp.extras import import_extra
from crisp.policy.magnitude import LARGEST, Coefficients
from crisp.prepare.calibration import Floats, batch_windows, to_token_ids
from crisp.prepare.width_losses import LEAST
from crisp.progress import Progress, no_progress
from crisp.text_windows import TokenWindows

TOKENS = 1 << 14  # of the sample that coefficients are fitted on, at most: their inputs are kept
RIDGES = (1e-3, 1e-2, 1e-1, 1.0)


@dataclass(eq=False)
class ContributionSample:
    """The inputs of one layer's experts, and what the experts contributed."""

    experts: Experts
    inputs: list[NDArray[np.float32]] = field(default_factory=list)  # [n, d_model] each
    tokens: list[list[NDArray[np.int64]]] = field(default_factory=list)  # by expert: its tokens
    sizes: list[list[Floats]] = field(default_factory=list)  # by expert: what it contributed
    read: int = 0  # tokens

    def __post_init__(self) -> None:
        n = range(self.experts.n_experts)
        self.tokens, self.sizes = [[] for _ in n], [[] for _ in n]
        self._norms = [self.experts.norms(expert)[1].float() for expert in n]

    def run(self, hidden: Any, index: Any, weights: Any) -> Any:
        """Return the output [n, d_model], and take note; arguments: as the router returned them."""
        last: list[Floats] = []

        def size(expert: int, activation: Any) -> None:
            contributed = activation.detach().float().abs() @ self._norms[expert]
            last.append(contributed.double().cpu().numpy())

        def whose(expert: int, token: Any, _: Any) -> None:
            self.tokens[expert].append(token.cpu().numpy() + self.read)
            self.sizes[expert].append(last.pop())

        out = execute(self.experts, hidden, index, weights, watch=size, watch_output=whose)
        self.inputs.append(hidden.detach().float().cpu().numpy())
        self.read += len(hidden)
        return out

    def fit(self) -> Coefficients:
        """Return the coefficients [E, d_model + 1], intercepts last; 0 for hardly used experts."""
        inputs = np.concatenate(self.inputs)
        result = np.zeros((self.experts.n_experts, inputs.shape[1] + 1))
        data: dict[int, tuple[NDArray[np.float32], Floats]] = {}
        for expert, (tokens, sizes) in enumerate(zip(self.tokens, self.sizes, strict=True)):
            size = np.concatenate(sizes) if sizes else np.zeros(0)
            if len(size) >= LEAST and size.mean() > 0:
                data[expert] = inputs[np.concatenate(tokens)], logs(size)
        ridge = best_ridge([*data.values()])
        for expert, (x, y) in data.items():
            slope, intercept = regress(x, y, ridge)
            predicted = np.exp(np.clip(x @ slope + intercept, -np.log(LARGEST), np.log(LARGEST)))
            result[expert, :-1], result[expert, -1] = slope, intercept - np.log(predicted.mean())
        return result.astype(np.float16)


def logs(sizes: Floats) -> Floats:
    """Return the logarithm of sizes over their mean, those beyond `LARGEST` cut off."""
    ratio: Floats = np.log(np.clip(sizes / sizes.mean(), 1 / LARGEST, LARGEST))
    return ratio


def regress(x: NDArray[np.float32], y: Floats, ridge: float) -> tuple[Floats, float]:
    """Return (slope [d], intercept) of y [n] on x [n, d].

    ridge: of the mean variance of a number of x.
    """
    mean, middle = x.mean(axis=0, dtype=np.float64), float(y.mean())
    centred = x - mean
    moments = centred.T @ centred / len(x)
    scale = max(float(np.trace(moments)) / len(mean), 1e-12)
    moments[np.diag_indices(len(mean))] += ridge * scale
    slope: Floats = np.linalg.solve(moments, centred.T @ (y - middle) / len(x))
    return slope, middle - float(slope @ mean)


def best_ridge(data: Sequence[tuple[NDArray[np.float32], Floats]]) -> float:
    """Return the ridge whose fits on three of four tokens foretell the fourth best, in squares."""
    errors = dict.fromkeys(RIDGES, 0.0)
    for x, y in data:
        held = np.arange(len(y)) % 4 == 3
        for ridge in RIDGES:
            slope, intercept = regress(x[~held], y[~held], ridge)
            errors[ridge] += float(np.square(x[held] @ slope + intercept - y[held]).sum())
    return min(RIDGES, key=lambda ridge: errors[ridge])


def measure_magnitudes(
    model: Any, windows: TokenWindows, progress: Progress = no_progress
) -> dict[int, Coefficients]:
    """Read all ``windows`` once; return the coefficients of every MoE layer.

    The inputs of all layers are held in memory, in float32. progress: called with (tokens read, in
    all).
    """
    layout = expert_layout(model)
    samples = [ContributionSample(Experts.of(layer)) for layer in layout.layers]

    def handler(which: int, hidden: Any, index: Any, weights: Any, _: Any) -> Any:
        return samples[which].run(hidden, index, weights)

    done = 0
    with import_extra("torch").inference_mode(), intercept_experts(layout, handler):
        for batch in batch_windows(windows.tokens, 0):
            ids = to_token_ids(batch, model)
            model.base_model(input_ids=ids, use_cache=False)  # without its head
            done += ids.numel()
            progress(done, windows.n_fed)
    return {layer.index: sample.fit() for layer, sample in zip(layout.layers, samples, strict=True)}
