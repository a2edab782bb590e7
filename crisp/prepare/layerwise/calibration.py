"""Calibration of a model that is larger than memory, one decoder layer after the other.

All windows pass a layer before the next is read; between layers their hidden states lie on disk.
The sums are those of `crisp.prepare.calibration`, in the same batches, in float32.
"""

from __future__ import annotations

import hashlib
import json
from collections.abc import Iterator, Sequence
from contextlib import ExitStack
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np

from crisp.adapter import ExpertLayout, Experts, Handler, intercept_experts
from crisp.checkpoint.skeleton import Skeleton, open_skeleton
from crisp.extras import import_extra
from crisp.prepare.calibration import CalibrationSums, Floats, Ints, LayerSums
from crisp.prepare.importance import stack_norms
from crisp.prepare.layerwise.passes import run_windows
from crisp.prepare.layerwise.saliency import LayerwiseSaliency, SaliencyPlan
from crisp.prepare.layerwise.spill import SpillFolder, write_header
from crisp.prepare.saliency.measured import SaliencyMeasurements
from crisp.progress import Progress, no_progress
from crisp.text_windows import TokenWindows


@dataclass(frozen=True, eq=False)
class NeuronNorms:
    """The norms of one layer's neurons, kept when its weights are no longer in memory.

    They stand in for `Experts` where only `Experts.norms` is needed.
    """

    name: str  # of the experts' module
    stacked: Floats  # [2, E, d_ff]: L2 norm of gate and up weights, and of the down row

    @property
    def n_experts(self) -> int:
        """Number of routed experts of the layer."""
        return int(self.stacked.shape[1])

    def norms(self, expert: int) -> tuple[Any, Any]:
        """Return what `Experts.norms` returned, [d_ff] each."""
        up, down = import_extra("torch").from_numpy(self.stacked[:, expert])
        return up, down


@dataclass(frozen=True, eq=False)
class LayerwiseCalibration:
    """What a calibration layer by layer returns."""

    layout: ExpertLayout  # of the model, without weights
    calibration: CalibrationSums
    norms: dict[int, NeuronNorms]  # by MoE layer
    saliency: SaliencyMeasurements | None = None  # None: not asked for


def calibrate_layerwise(
    folder: Path,
    windows: TokenWindows,
    spill: Path,
    progress: Progress = no_progress,
    plan: SaliencyPlan | None = None,
) -> LayerwiseCalibration:
    """Calibrate the model in ``folder`` on ``windows`` with one decoder layer in memory at a time.

    Memory holds at most one layer in float32, one batch and the sums. The folder ``spill`` (created
    if it does not exist) holds the float32 hidden states of every token before and after the layer,
    and the sums. After a kill the same call resumes at the first layer that was not finished; the
    result is the same to the bit. The folder may be removed afterwards.

    plan: how to measure what the policy `saliency` needs (None: not). progress: called with (tokens
    times layers done, in all), where passes for that count as well. Raises CrispError for what
    `open_skeleton` and `crisp.prepare.calibration.calibrate` refuse, for a ``spill`` of another
    calibration and for a full disk.
    """
    skeleton = open_skeleton(folder)
    spill_folder = SpillFolder(spill, _fingerprint(folder, windows.tokens))
    saliency = None if plan is None else LayerwiseSaliency(skeleton, windows, spill_folder, plan)
    layers = {layer.index: layer for layer in skeleton.layout.layers}
    n = skeleton.layout.n_layers
    costs = [windows.n_fed + (saliency.cost(index) if saliency else 0) for index in range(n)]
    total, done = sum(costs) + (saliency.head_cost if saliency else 0), 0

    def advance(tokens: int) -> None:
        nonlocal done
        done += tokens
        progress(done, total)

    for index in range(n):
        if spill_folder.finished(index):
            continue
        done = sum(costs[:index])
        with skeleton.loaded_layer(index):
            experts = Experts.of(layers[index]) if index in layers else None
            sums = None
            if experts is not None:
                sums = LayerSums.empty(experts.n_experts, experts.d_ff, experts.d_model)
            handler = _summing_handler(experts, sums)
            with (
                import_extra("torch").inference_mode(),
                intercept_experts(skeleton.layout, handler),
            ):
                for tokens in _pass(skeleton, index, windows, spill_folder):
                    advance(tokens)
            if saliency is not None:
                saliency.measure(index, experts, sums, advance)
            spill_folder.finish(index, sums, None if experts is None else stack_norms(experts))
    calibration = CalibrationSums({}, len(windows.tokens), windows.n_fed)
    norms: dict[int, NeuronNorms] = {}
    for index, layer in layers.items():
        calibration.layers[index] = spill_folder.sums(index)
        norms[index] = NeuronNorms(layer.name, spill_folder.array("norms", index))
    measured, done = None, sum(costs)
    if saliency is not None:
        saliency.predict(advance)
        measured = saliency.result()
    return LayerwiseCalibration(skeleton.layout, calibration, norms, measured)


def _summing_handler(experts: Experts | None, sums: LayerSums | None) -> Handler:
    """Return a handler that computes one layer's experts and adds to its sums."""

    def handler(_: int, hidden: Any, index: Any, weights: Any, __: Any) -> Any:
        assert experts is not None and sums is not None  # it is called in an MoE layer only
        return sums.run(experts, hidden, index, weights)

    return handler


def _pass(
    skeleton: Skeleton, index: int, windows: TokenWindows, spill: SpillFolder
) -> Iterator[int]:
    """Run all windows through decoder layer ``index``, which is loaded; yield how many tokens.

    The input is read from the spill folder (the first layer has none), and the output is written
    there (the last layer's is not needed).
    """
    before = spill.mapped("hidden", index)  # [tokens, d]
    with ExitStack() as stack:
        file, begun = None, False
        if index + 1 < skeleton.layout.n_layers:
            file = stack.enter_context(spill.writing("hidden", index + 1))
        for above in run_windows(skeleton, index, windows.tokens, before):
            if file is not None:
                if not begun:
                    write_header(file, (windows.n_fed, above.shape[1]))
                    begun = True
                file.write(above.data)
            yield len(above)


def _fingerprint(folder: Path, tokens: Sequence[Ints]) -> str:
    """Return a hash of the checkpoint's files, by size and time, and of the tokens."""
    files = sorted([*folder.glob("*.safetensors"), folder / "config.json"])
    stats = [(file.name, file.stat().st_size, file.stat().st_mtime_ns) for file in files]
    digest = hashlib.sha256(json.dumps(stats).encode())
    for window in tokens:
        digest.update(np.array([len(window), *window], np.int64).tobytes())
    return digest.hexdigest()
