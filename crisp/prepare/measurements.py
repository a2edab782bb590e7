"""What the calibration text tells about a model: sums, roles, losses, factors, stage by stage."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass, replace
from typing import Any

import numpy as np
from numpy.typing import NDArray

from crisp.adapter import Experts
from crisp.files import atomic
from crisp.model.spec import ModelSpec
from crisp.prepare.calibration import CalibrationSums, Floats, calibrate
from crisp.prepare.folder import PreparationFolder
from crisp.prepare.layerwise.calibration import calibrate_layerwise
from crisp.prepare.layerwise.saliency import SaliencyPlan
from crisp.prepare.request import PreparationInputs, PreparationRequest
from crisp.prepare.roles import (
    Exact,
    Grouped,
    RoleMethod,
    Weight,
    local_increases,
    measure_increases,
)
from crisp.prepare.saliency.magnitudes import TOKENS as MAGNITUDES_TOKENS
from crisp.prepare.saliency.magnitudes import measure_magnitudes
from crisp.prepare.saliency.measured import SaliencyMeasurements
from crisp.prepare.saliency.rescaling import TOKENS as RESCALING_TOKENS
from crisp.prepare.saliency.rescaling import measure_rescaling
from crisp.prepare.saliency.sensitivities import TOKENS as SENSITIVITIES_TOKENS
from crisp.prepare.saliency.sensitivities import measure_sensitivities
from crisp.prepare.width_losses import WidthLosses, measure_width_losses, sample_windows
from crisp.progress import Progress

Report = Callable[[str, int, int], None]
"""Called with ``(stage, done, total)``."""

CALIBRATION, ROLES, WIDTHS, REORDERING = "calibration", "roles", "widths", "reordering"
LOSS_CURVE = "loss curve"
RESCALING, SENSITIVITIES, DEQUANTISING = "rescaling", "sensitivities", "dequantising"
MAGNITUDES = "magnitudes"


@dataclass(frozen=True, eq=False)
class PreparationMeasurements:
    """What has been measured of each MoE layer, all by layer."""

    calibration: CalibrationSums
    experts: Mapping[int, Any]  # Experts or NeuronNorms: their norms are needed later
    increase: Mapping[int, Floats]  # [E, E]: perplexity by masking, see `crisp.prepare.roles`
    widths: Mapping[int, WidthLosses] | None = None  # None: not requested
    saliency: SaliencyMeasurements | None = None  # None: not measured


def timed(work: PreparationFolder | None, stage: str) -> AbstractContextManager[None]:
    """Add the duration of the block to the stage's time in the folder, if there is one."""
    return nullcontext() if work is None else work.timed(stage)


def measure(
    inputs: PreparationInputs,
    request: PreparationRequest,
    report: Report,
    work: PreparationFolder | None = None,
    plan: SaliencyPlan | None = None,
) -> PreparationMeasurements:
    """Calibrate the model and measure the roles of its experts.

    work: where each stage is saved, to resume from; None: nothing is saved. plan: of a model that
    is read layer by layer, whose saliency is measured on the way.
    """

    def progress_of(stage: str) -> Progress:
        return lambda done, total: report(stage, done, total)

    if inputs.model is None:
        assert work is not None
        spill, progress = work.folder / "spill", progress_of(CALIBRATION)
        with timed(work, CALIBRATION):
            result = calibrate_layerwise(inputs.folder, inputs.windows, spill, progress, plan)
        increase = _calibrated_increases(request.method, result.calibration)
        assert increase is not None
        return PreparationMeasurements(
            result.calibration, result.norms, increase, saliency=result.saliency
        )

    experts = {layer.index: Experts.of(layer) for layer in inputs.layout.layers}
    with timed(work, CALIBRATION):
        calibration = _calibrate(inputs, progress_of(CALIBRATION), work)
    increase = _calibrated_increases(request.method, calibration)
    if increase is None:
        with timed(work, ROLES):
            increase = _masked_increases(request.method, inputs, progress_of(ROLES), work)
    return PreparationMeasurements(calibration, experts, increase)


def add_width_losses(
    measurements: PreparationMeasurements,
    inputs: PreparationInputs,
    spec: ModelSpec,
    report: Report,
    work: PreparationFolder | None = None,
) -> PreparationMeasurements:
    """Add width losses, measured with the neurons in their present order in the model."""
    assert inputs.sample is not None
    with timed(work, WIDTHS):
        losses = measure_width_losses(
            inputs.model,
            inputs.sample,
            spec,
            None if work is None else work.folder,
            lambda done, total: report(WIDTHS, done, total),
        )
    return replace(measurements, widths=losses)


def add_saliency(
    measurements: PreparationMeasurements,
    contributions: Mapping[int, NDArray[np.float32]],
    inputs: PreparationInputs,
    spec: ModelSpec,
    report: Report,
    work: PreparationFolder | None = None,
    *,
    magnitudes: bool = False,
) -> PreparationMeasurements:
    """Add rescaling and sensitivities, measured with neurons in their present order in the model.

    contributions: of blocks in this order, by layer [E, blocks]. magnitudes: what foretells them is
    added, too.
    """
    folder = None if work is None else work.folder
    windows, least = inputs.windows, inputs.windows.window
    with timed(work, RESCALING):
        rescaling = measure_rescaling(
            inputs.model,
            sample_windows(windows, max(RESCALING_TOKENS, least)),
            spec.block,
            folder,
            lambda done, total: report(RESCALING, done, total),
        )
    sample = sample_windows(windows, max(SENSITIVITIES_TOKENS, least))
    with timed(work, SENSITIVITIES):
        sensitivities = measure_sensitivities(
            inputs.model,
            sample,
            spec.block,
            contributions,
            rescaling,
            folder,
            lambda done, total: report(SENSITIVITIES, done, total),
        )
    predicting = None
    if magnitudes:
        with timed(work, MAGNITUDES):
            predicting = measure_magnitudes(
                inputs.model,
                sample_windows(windows, max(MAGNITUDES_TOKENS, least)),
                lambda done, total: report(MAGNITUDES, done, total),
            )
    measured = SaliencyMeasurements(rescaling, sensitivities, sample.n_fed, predicting)
    return replace(measurements, saliency=measured)


def _calibrated_increases(
    method: RoleMethod, calibration: CalibrationSums
) -> dict[int, Floats] | None:
    """Return the increases that the calibration gives; None if the method needs masked runs."""
    if isinstance(method, Weight):
        return {}
    return None if isinstance(method, Exact | Grouped) else local_increases(method, calibration)


def _calibrate(
    inputs: PreparationInputs, progress: Any, work: PreparationFolder | None
) -> CalibrationSums:
    """Return the sums of all windows, resuming from those saved in the folder."""
    if work is None:
        return calibrate(inputs.model, inputs.windows, progress)
    file = work.folder / "calibration.npz"
    state = CalibrationSums.load(file) if file.exists() else None
    result = calibrate(inputs.model, inputs.windows, progress, state, lambda sums: sums.save(file))
    result.save(file)
    return result


def _masked_increases(
    method: RoleMethod, inputs: PreparationInputs, progress: Any, work: PreparationFolder | None
) -> dict[int, Floats]:
    """Return the increases of all layers, each saved in the folder when it is finished."""
    assert isinstance(method, Exact | Grouped)
    result: dict[int, Floats] = {}
    for path in () if work is None else work.folder.glob("roles-*.npy"):
        result[int(path.stem.removeprefix("roles-"))] = np.load(path)
    layers = measure_increases(method, inputs.model, inputs.windows, set(result), progress)
    for layer, increase in layers:
        result[layer] = increase
        if work is not None:
            file = work.folder / f"roles-{layer}.npy"
            with atomic(file) as temporary, temporary.open("wb") as stream:
                np.save(stream, increase)
    return result
