"""Rescaling and sensitivities of a model that is larger than memory.

While a layer is in memory its neurons are put in their final order. Windows pass it once more for
the factors; for the sensitivities several runs of a sample of windows are carried from layer to
layer on the disk: the plain one, and for every MoE layer so far one in which only that layer is
halved. Behind the last layer all of them are predictions to compare.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import numpy as np

from crisp.adapter import Experts, Handler, execute, intercept_experts
from crisp.checkpoint.skeleton import Skeleton
from crisp.errors import CrispError
from crisp.extras import import_extra
from crisp.policy.magnitude import Coefficients
from crisp.prepare.ablation import log_probabilities
from crisp.prepare.calibration import CalibrationSums, Ints, LayerSums
from crisp.prepare.importance import (
    NeuronOrder,
    block_contributions,
    neuron_scores,
    permutations,
)
from crisp.prepare.layerwise.passes import batches, run_windows
from crisp.prepare.layerwise.spill import SpillFolder, write_header
from crisp.prepare.saliency.magnitudes import TOKENS as MAGNITUDES_TOKENS
from crisp.prepare.saliency.magnitudes import ContributionSample
from crisp.prepare.saliency.measured import SaliencyMeasurements
from crisp.prepare.saliency.rescaling import TOKENS, BlockProducts, Factors
from crisp.prepare.saliency.sensitivities import HalvedLayer, SensitivitySums, divergence
from crisp.prepare.width_losses import sample_windows, spread, temporarily_reordered
from crisp.text_windows import TokenWindows

Advance = Callable[[int], None]

CARRIED = 1024  # tokens of the sample that is carried, at most, or one window


@dataclass(frozen=True, eq=False)
class SaliencyPlan:
    """How the neurons of the prepared model will stand."""

    order: NeuronOrder
    runs: Mapping[int, int]  # by layer: how many have to stay together, see `permutations`
    block: int  # neurons
    magnitudes: bool = False  # whether what foretells them is measured, too


class LayerwiseSaliency:
    """What a calibration layer by layer measures for the policy `saliency`, layer by layer."""

    def __init__(
        self, skeleton: Skeleton, windows: TokenWindows, spill: SpillFolder, plan: SaliencyPlan
    ) -> None:
        self._skeleton, self._spill, self._plan = skeleton, spill, plan
        self._layers = [layer.index for layer in skeleton.layout.layers]
        self._carried = sample_windows(windows, max(CARRIED, windows.window))
        starts = np.cumsum([0, *map(len, windows.tokens)])

        def sample(tokens: int) -> tuple[list[Ints], list[int]]:
            """Return some windows, and where they start."""
            kept = spread(windows, max(tokens, windows.window))
            return [windows.tokens[i] for i in kept], starts[kept].tolist()

        self._rescaling, self._starts = sample(TOKENS)
        self._predicting, self._predicting_starts = sample(MAGNITUDES_TOKENS)
        if not plan.magnitudes:
            self._predicting, self._predicting_starts = [], []
        self._sums = SensitivitySums.empty(len(self._layers))

    def cost(self, index: int) -> int:
        """Return how many tokens `measure` runs through layer ``index``."""
        runs = 1 + sum(layer <= index for layer in self._layers)
        passed = [*self._rescaling, *self._predicting] if index in self._layers else []
        rescaled = sum(map(len, passed))
        return rescaled + runs * self._carried.n_fed

    @property
    def head_cost(self) -> int:
        """How many tokens `predict` runs through the model's head."""
        return (1 + len(self._layers)) * self._carried.n_fed

    def measure(
        self, index: int, experts: Experts | None, sums: LayerSums | None, advance: Advance
    ) -> None:
        """Measure decoder layer ``index``, which is loaded.

        experts, sums: of the layer, None where it has none. The input of all windows and of the
        carried runs is read from the spill folder; the latter's output is written there. advance:
        called with how many more tokens have passed the layer.
        """
        if experts is None or sums is None:
            self._carry(index, None, advance)
            return
        plan, calibration = self._plan, CalibrationSums({index: sums})
        orders = permutations(neuron_scores(plan.order, calibration, {index: experts}), plan.runs)
        sizes = block_contributions(calibration, orders, {index: experts}, plan.block)[index]
        with temporarily_reordered({index: experts}, orders):
            factors = self._factors(index, experts, advance)
            halved = HalvedLayer(experts, sizes.astype(np.float64), factors, plan.block)
            squares = self._carry(index, halved, advance)
        if plan.magnitudes:
            self._spill.save("magnitudes", index, self._coefficients(index, experts, advance))
        self._spill.save("factors", index, factors)
        self._spill.save("squares", index, np.array(squares))

    def _factors(self, index: int, experts: Experts, advance: Advance) -> Factors:
        """Return the factors of a layer's experts, from one more pass of windows."""
        products = BlockProducts.empty(experts, self._plan.block)
        watch = products.watch(experts, self._plan.block)

        def handler(_: int, hidden: Any, chosen: Any, weights: Any, __: Any) -> Any:
            return execute(experts, hidden, chosen, weights, watch=watch)

        before = self._spill.mapped("hidden", index)  # [tokens, d]
        with self._intercepted(handler):
            for above in run_windows(self._skeleton, index, self._rescaling, before, self._starts):
                advance(len(above))
        return products.factors()

    def _coefficients(self, index: int, experts: Experts, advance: Advance) -> Coefficients:
        """Return what foretells the magnitudes of a layer's experts, from a pass of windows."""
        sample = ContributionSample(experts)

        def handler(_: int, hidden: Any, chosen: Any, weights: Any, __: Any) -> Any:
            return sample.run(hidden, chosen, weights)

        before = self._spill.mapped("hidden", index)  # [tokens, d]
        with self._intercepted(handler):
            for above in run_windows(
                self._skeleton, index, self._predicting, before, self._predicting_starts
            ):
                advance(len(above))
        return sample.fit()

    def _carry(self, index: int, halved: HalvedLayer | None, advance: Advance) -> float:
        """Run the carried runs through a layer, and the plain one once more, halved.

        Returns the sum of (weight x contribution left out)^2.
        """
        before = self._spill.mapped("copies", index)  # [runs, tokens, d]
        squares = [0.0]

        def whole(_: int, hidden: Any, chosen: Any, weights: Any, __: Any) -> Any:
            assert halved is not None  # it is called in an MoE layer only
            return execute(halved.experts, hidden, chosen, weights)

        def half(_: int, hidden: Any, chosen: Any, weights: Any, __: Any) -> Any:
            assert halved is not None
            output, left_out = halved.run(hidden, chosen, weights)
            squares.append(float(np.square(left_out).sum()))
            return output

        runs = [(number, whole) for number in range(1 if before is None else len(before))]
        runs += [] if halved is None else [(0, half)]
        with self._spill.writing("copies", index + 1) as file:
            for n, (number, handler) in enumerate(runs):
                hidden, begun = None if before is None else before[number], n > 0
                with self._intercepted(handler):
                    for above in run_windows(self._skeleton, index, self._carried.tokens, hidden):
                        if not begun:
                            write_header(file, (len(runs), self._carried.n_fed, above.shape[1]))
                            begun = True
                        file.write(above.data)
                        advance(len(above))
        return sum(squares)

    @contextmanager
    def _intercepted(self, handler: Handler) -> Iterator[None]:
        """Let ``handler`` compute the loaded layer's experts within the block."""
        with (
            import_extra("torch").inference_mode(),
            intercept_experts(self._skeleton.layout, handler),
        ):
            yield

    def predict(self, advance: Advance) -> None:
        """Compare the predictions of the carried runs; ``advance`` is called as in `measure`."""
        copies = self._spill.mapped("copies", self._skeleton.layout.n_layers)
        assert copies is not None
        windows, number = self._carried, 0
        with self._skeleton.loaded_head(), import_extra("torch").inference_mode():
            parts = [batches(windows.tokens, of_run) for of_run in copies]
            for plain, *others in zip(*parts, strict=True):
                scored = windows.scored[number : number + len(plain[0])]
                number += len(plain[0])
                before = log_probabilities(self._skeleton.predict(*plain))
                advance(plain[0].numel())
                for which, (ids, hidden) in enumerate(others):
                    logits = self._skeleton.predict(ids, hidden)
                    self._sums.moved[which] += divergence(before, logits, scored)
                    advance(ids.numel())

    def result(self) -> SaliencyMeasurements:
        """Return what was measured; CrispError for a loss that is not finite."""
        sums, windows = self._sums, self._carried
        if not np.isfinite(sums.moved).all():
            raise CrispError(f"{type(self._skeleton.model).__name__}: its loss is not finite")
        sums.scored, sums.tokens = windows.n_scored, windows.n_fed
        sums.squares[:] = [float(self._spill.array("squares", layer)) for layer in self._layers]
        magnitudes = None
        if self._plan.magnitudes:
            magnitudes = {layer: self._spill.array("magnitudes", layer) for layer in self._layers}
        return SaliencyMeasurements(
            {layer: self._spill.array("factors", layer) for layer in self._layers},
            dict(zip(self._layers, sums.sensitivities().tolist(), strict=True)),
            windows.n_fed,
            magnitudes,
        )
