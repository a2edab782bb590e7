"""The preparation of a model (paper, section 4.1), in stages that can be resumed after a kill.

Everything is made in a folder of its own beside the result, which appears when it is complete.
"""

from __future__ import annotations

import shutil
from collections.abc import Callable, Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np

from crisp.checkpoint.admission import AdmittedModel, admit
from crisp.checkpoint.expert_tensors import expert_tensors
from crisp.checkpoint.files import refuse_prepared, weights_digest
from crisp.checkpoint.geometry.read import read_folder
from crisp.checkpoint.quantised import DecodedCheckpoint
from crisp.checkpoint.source import ModelSource
from crisp.errors import CrispError
from crisp.files import atomic, check_new_folder
from crisp.model.spec import ModelSpec
from crisp.prepare.calibration import Ints
from crisp.prepare.dequantised import write_dequantised
from crisp.prepare.folder import PreparationFolder, check_place, was_finished
from crisp.prepare.importance import (
    block_contributions,
    importance_curves,
    neuron_scores,
    permutations,
)
from crisp.prepare.layerwise.saliency import SaliencyPlan
from crisp.prepare.measurements import (
    DEQUANTISING,
    LOSS_CURVE,
    REORDERING,
    PreparationMeasurements,
    Report,
    add_saliency,
    add_width_losses,
    measure,
)
from crisp.prepare.quantised_reorder import neuron_runs
from crisp.prepare.reorder import copy_others, reorder
from crisp.prepare.request import PreparationInputs, PreparationRequest, read_inputs
from crisp.prepare.roles import spell_method
from crisp.prepare.width_losses import LEAST, measured_widths, temporarily_reordered
from crisp.profile import dominant
from crisp.profile.metadata import FILE, POINTS, Metadata
from crisp.profile.router_weights import QUANTILES, quantiles
from crisp.text_windows import check_texts
from crisp.version import TOOL

MeasuredCurve = Callable[[Metadata, Path], Metadata]
"""Adds a loss curve to the metadata of the prepared model in a folder."""


def prepare(
    source: Path,
    out: Path,
    request: PreparationRequest,
    report: Report,
    add_curve: MeasuredCurve | None = None,
) -> Metadata:
    """Write the model in ``source``, prepared, to ``out``, which must be a new folder or empty.

    Called again after a kill it resumes. report: called with (stage, done, total). add_curve:
    called last, before the result appears. Raises CrispError for what cannot be prepared, before
    any work where that can be known.
    """
    admitted = _admit(source, request)
    source, spec = admitted.source.folder, admitted.spec.with_(block=request.block)
    refuse_prepared(source)
    check_place(out, source)
    digest = request.digest(source)
    if was_finished(out, digest):
        return Metadata.load(out / FILE)
    if (out / FILE).is_file():
        raise CrispError(
            f"--out {out}: holds a prepared model; crisp refresh measures what it lacks, such as "
            "--loss-curve"
        )
    check_new_folder(out)
    inputs, runs = _inputs(admitted, request)
    checkpoint = admitted.checkpoint
    with PreparationFolder.open(out, digest) as work:
        if isinstance(checkpoint, DecodedCheckpoint) and request.dequantize:
            source = _plain_copy(checkpoint, work, report)
            plain = read_folder(ModelSource.of_folder(source)).spec.with_(block=request.block)
            spec = replace(plain, name=spec.name)
        plan = SaliencyPlan(request.order, runs, spec.block, request.magnitudes)
        measurements = measure(inputs, request, report, work, plan)
        scores = neuron_scores(request.order, measurements.calibration, measurements.experts)
        orders = permutations(scores, runs)
        if inputs.model is not None:
            contributions = block_contributions(
                measurements.calibration, orders, measurements.experts, spec.block
            )
            with temporarily_reordered(measurements.experts, orders):
                if inputs.sample is not None:
                    measurements = add_width_losses(measurements, inputs, spec, report, work)
                measurements = add_saliency(
                    measurements, contributions, inputs, spec, report, work,
                    magnitudes=request.magnitudes,
                )  # fmt: skip
        model = work.folder / "model"
        model.mkdir(exist_ok=True)
        with work.timed(REORDERING):
            weights = reorder(
                source,
                model,
                orders,
                inputs.layout,
                progress=lambda done, total: report(REORDERING, done, total),
                done=work.folder / "reordered",
            )
        facts = {"source": admitted.source.name, "seconds": work.seconds}
        if isinstance(checkpoint, DecodedCheckpoint):
            facts |= _quantised_facts(runs, request.dequantize)
        metadata = _metadata(spec, request, inputs, measurements, orders, weights, facts)
        if add_curve is not None:
            del inputs, measurements  # they hold a model, and the curve loads another
            with work.timed(LOSS_CURVE):
                metadata = add_curve(metadata, model)
        metadata.save(model / FILE)
        with atomic(model / "README.md") as temporary:
            temporary.write_text(_readme(metadata))
        work.finish(model, out)
    return metadata


def refresh(folder: Path, request: PreparationRequest, report: Report) -> Metadata:
    """Measure a prepared model on other text; return its new metadata (paper, A.2).

    Counts, roles, curves and contributions are new; the weights and the order of their neurons
    stay. Nothing is written.
    """
    folder = _admit(folder, request).source.folder
    before = prepared_metadata(folder)
    before.check_weights(weights_digest(folder), str(folder))
    inputs = read_inputs(folder, request)
    measurements = measure(inputs, request, report)
    unchanged = {  # by layer [E, d_ff]
        layer: np.broadcast_to(np.arange(sums.activation.shape[1]), sums.activation.shape)
        for layer, sums in measurements.calibration.layers.items()
    }
    if inputs.sample is not None:
        measurements = add_width_losses(measurements, inputs, before.spec, report)
    contributions = block_contributions(
        measurements.calibration, unchanged, measurements.experts, before.spec.block
    )
    measurements = add_saliency(
        measurements, contributions, inputs, before.spec, report, magnitudes=request.magnitudes
    )
    first = before.provenance.get("ordered_from", before.provenance)
    facts = {
        "source": before.provenance.get("source"),
        "refreshed": True,
        "ordered_from": {key: first[key] for key in ("texts", "tokens", "window") if key in first},
    }
    return _metadata(before.spec, request, inputs, measurements, unchanged, before.weights, facts)


def prepared_metadata(folder: Path) -> Metadata:
    """Return the metadata of a prepared model; CrispError if it is not prepared."""
    if not (folder / FILE).is_file():
        raise CrispError(f"{folder}: is not prepared: it holds no {FILE}")
    return Metadata.load(folder / FILE)


def _admit(source: Path, request: PreparationRequest) -> AdmittedModel:
    """Return the model; CrispError for what can be refused before any work."""
    check_texts(request.texts)
    return admit(source, tokenizer=True, geometry=True)


def _inputs(
    admitted: AdmittedModel, request: PreparationRequest
) -> tuple[PreparationInputs, Mapping[int, int]]:
    """Return the model and its text, and by layer how many neurons have to stay together.

    Raises CrispError for what could not be written after the work.
    """
    folder, checkpoint = admitted.source.folder, admitted.checkpoint
    if request.dequantize and not isinstance(checkpoint, DecodedCheckpoint):
        raise CrispError(f"--dequantize: {folder} is not quantised")
    inputs, runs = read_inputs(folder, request), dict[int, int]()
    neurons = expert_tensors(checkpoint, inputs.layout)
    if isinstance(checkpoint, DecodedCheckpoint) and not request.dequantize:
        runs = neuron_runs(checkpoint, neurons)
    return inputs, runs


def _plain_copy(checkpoint: DecodedCheckpoint, work: PreparationFolder, report: Report) -> Path:
    """Write the checkpoint in bfloat16 into the working folder, once; return where it is."""
    folder, unfinished = work.folder / "plain", work.folder / "plain.part"
    if not folder.exists():
        shutil.rmtree(unfinished, ignore_errors=True)
        unfinished.mkdir()
        with work.timed(DEQUANTISING):
            copy_others(checkpoint.stored, unfinished)
            write_dequantised(
                checkpoint, unfinished, lambda done, total: report(DEQUANTISING, done, total)
            )
        unfinished.replace(folder)
    return folder


def _quantised_facts(runs: Mapping[int, int], dequantised: bool) -> dict[str, Any]:
    """Return what the provenance says of a quantised model."""
    if dequantised:
        return {"dequantised": True}
    return {"runs": sorted(set(runs.values()))}  # neurons that stayed together


def _readme(metadata: Metadata) -> str:
    """Return a README for the prepared model, which differs from the one of the original."""
    provenance, source = metadata.provenance, metadata.provenance["source"]
    texts = "".join(f"- {text}\n" for text in provenance["texts"])
    return (
        f"# {source}, prepared\n\n"
        f"{source} with the neurons of its routed experts in another order and everything else as "
        "it was: it computes\nthe same and loads the same way. Its own page and licence apply, but "
        f"for hashes of the weights.\n\nMade by {provenance['tool']}: neurons by "
        f"{metadata.order}, {metadata.roles_description}. The measurements lie in\n`{FILE}`, from "
        f"{provenance['tokens']:,} tokens, {provenance['window']:,} at a time, of\n\n{texts}"
    )


def _metadata(
    spec: ModelSpec,
    request: PreparationRequest,
    inputs: PreparationInputs,
    measurements: PreparationMeasurements,
    orders: Mapping[int, Ints],
    weights: str,
    facts: Mapping[str, Any],
) -> Metadata:
    """Return the metadata of the weights whose digest is ``weights``.

    orders: by layer [E, d_ff]; facts: entries of the provenance that only the caller knows.
    """
    calibration = measurements.calibration
    by_layer: dict[str, Mapping[int, Any]] = {
        "expert_counts": {layer: sums.tokens for layer, sums in calibration.layers.items()},
        "pair_counts": {layer: sums.pair_counts for layer, sums in calibration.layers.items()},
        "increase": measurements.increase,
        "curves": importance_curves(calibration, orders),
        "contributions": block_contributions(calibration, orders, measurements.experts, spec.block),
        "router_weights": {
            layer: quantiles(sums.weighted) for layer, sums in calibration.layers.items()
        },
        "input_moments": {layer: sums.input_moments for layer, sums in calibration.layers.items()},
    }
    layers, n = spec.n_layers, spec.n_experts
    whole: dict[str, Any] = {
        "expert_counts": np.zeros((layers, n), np.int64),
        "pair_counts": np.zeros((layers, n, n), np.int64),
        "increase": np.full((layers, n, n), np.nan, np.float32),
        "curves": np.zeros((layers, n, POINTS), np.float32),
        "contributions": np.zeros((layers, n, spec.n_blocks), np.float32),
        "router_weights": np.zeros((layers, n, QUANTILES), np.float16),
        "input_moments": np.zeros((layers, spec.d_model), np.float16),
    }
    if measurements.widths is not None:
        shape = (layers, n, 2)
        whole["width_losses"] = np.full((*shape, spec.n_blocks + 1), np.nan, np.float32)
        whole["role_counts"] = np.zeros(shape, np.int64)
        by_layer["width_losses"] = {
            layer: widths.losses for layer, widths in measurements.widths.items()
        }
        by_layer["role_counts"] = {
            layer: widths.counts for layer, widths in measurements.widths.items()
        }
    if measurements.saliency is not None:
        whole["sensitivities"] = np.zeros(layers, np.float32)
        whole["rescaling"] = np.ones((layers, n, spec.n_blocks + 1), np.float16)
        by_layer["sensitivities"] = measurements.saliency.sensitivities
        by_layer["rescaling"] = measurements.saliency.rescaling
        if measurements.saliency.magnitudes is not None:
            whole["magnitudes"] = np.zeros((layers, n, spec.d_model + 1), np.float16)
            by_layer["magnitudes"] = measurements.saliency.magnitudes
    for name, values in by_layer.items():
        for layer, value in values.items():
            whole[name][layer] = value
    pairs = whole["pair_counts"] > 0
    roles = dominant(whole["increase"])
    provenance = {
        **facts,
        "texts": inputs.windows.dataset,
        "tokens": calibration.tokens,
        "window": inputs.windows.window,
        "layerwise": request.layerwise,
        "roles": {
            "method": spell_method(request.method),
            "pairs": int(pairs.sum()),
            "measured": int((pairs & (roles >= 0)).sum()),
        },
        "unreached": [list(pair) for pair in calibration.unreached],
        "tool": TOOL,
    }
    if inputs.sample is not None:
        provenance["width_losses"] = {
            "tokens": inputs.sample.n_fed,
            "widths": measured_widths(spec),
            "least": LEAST,
        }
    if measurements.saliency is not None:
        provenance["saliency"] = {"tokens": measurements.saliency.tokens, "least": LEAST}
    return Metadata(spec, weights, str(request.order), provenance=provenance, **whole)
