"""Preparing a model (paper, section 4.1), stage by stage, so that a kill costs little.

Everything is made in a folder of its own beside the result, which appears when it is complete.
"""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

import numpy as np

from crisp import TOOL
from crisp.checkpoint.experts import expert_tensors
from crisp.checkpoint.files import open_checkpoint, refuse_prepared, weights_digest
from crisp.errors import CrispError
from crisp.files import atomic
from crisp.model.spec import ModelSpec
from crisp.prepare.calibration import Ints
from crisp.prepare.importance import contributions, curves, permutations, scores
from crisp.prepare.measuring import (
    REORDERING,
    WIDTHS,
    Measured,
    Report,
    Request,
    Subject,
    measure,
    read_subject,
    with_widths,
)
from crisp.prepare.reorder import reorder
from crisp.prepare.roles import spell
from crisp.prepare.width_losses import LEAST, measured_widths, reordered
from crisp.prepare.work import Work, check_place, refuse_taken, was_finished
from crisp.profile import dominant
from crisp.profile.metadata import FILE, POINTS, Metadata
from crisp.profile.router_weights import QUANTILES, quantiles


def prepare(source: Path, out: Path, asked: Request, report: Report) -> Metadata:
    """Write the model in ``source``, prepared, to ``out``, which must be a new folder or empty.

    Called again after a kill it goes on where it was. Raises CrispError for what cannot be
    prepared, before any work where that can be known.
    """
    spec = _geometry(source, asked)
    refuse_prepared(source)
    check_place(out, source)
    request = asked.digest(source)
    if was_finished(out, request):
        return Metadata.load(out / FILE)
    refuse_taken(out)
    subject = read_subject(source, asked)
    expert_tensors(open_checkpoint(source), subject.found)  # refused now, not after the work
    with Work.open(out, request) as work:
        measured = measure(subject, asked, report, work)
        orders = permutations(scores(asked.order, measured.calibration, measured.experts))
        if subject.sample is not None:
            with work.timed(WIDTHS), reordered(measured.experts, orders):
                measured = with_widths(measured, subject, spec, report, work)
        made = work.folder / "model"
        made.mkdir(exist_ok=True)
        with work.timed(REORDERING):
            digest = reorder(
                source,
                made,
                orders,
                subject.found,
                progress=lambda done, total: report(REORDERING, done, total),
                done=work.folder / "reordered",
            )
        facts = {"source": source.resolve().name, "seconds": work.seconds}
        metadata = _metadata(spec, asked, subject, measured, orders, digest, facts)
        metadata.save(made / FILE)
        with atomic(made / "README.md") as temporary:
            temporary.write_text(_readme(metadata))
        work.finish(made, out)
    return metadata


def refresh(folder: Path, asked: Request, report: Report) -> Metadata:
    """Counts, roles, curves and contributions of a prepared model, new from other text (A.2).

    The weights and the order of their neurons stay. Nothing is written.
    """
    _geometry(folder, asked)
    before = prepared(folder)
    before.check_weights(weights_digest(folder), str(folder))
    subject = read_subject(folder, asked)
    measured = measure(subject, asked, report)
    if subject.sample is not None:
        measured = with_widths(measured, subject, before.spec, report)
    stay = {
        layer: np.broadcast_to(np.arange(sums.activation.shape[1]), sums.activation.shape)
        for layer, sums in measured.calibration.layers.items()
    }
    first = before.provenance.get("ordered_from", before.provenance)
    facts = {
        "source": before.provenance.get("source"),
        "refreshed": True,
        "ordered_from": {key: first[key] for key in ("texts", "tokens", "window") if key in first},
    }
    return _metadata(before.spec, asked, subject, measured, stay, before.weights, facts)


def prepared(folder: Path) -> Metadata:
    """The metadata of a prepared model; CrispError if it is none."""
    if not (folder / FILE).is_file():
        raise CrispError(f"{folder}: is not prepared: it holds no {FILE}")
    return Metadata.load(folder / FILE)


def _geometry(source: Path, asked: Request) -> ModelSpec:
    """The model's, after a look at its files; CrispError for what can be known before any work."""
    if not source.is_dir():
        raise CrispError(f"{source}: is no folder; one with a transformers checkpoint was expected")
    open_checkpoint(source)
    for path in asked.texts:
        if not path.is_file():
            raise CrispError(f"{path}: no such file; a text was expected")
    return ModelSpec.from_config(source).with_(block=asked.block)


def _readme(metadata: Metadata) -> str:
    """A page for the prepared model, which is not quite the one its own page speaks of."""
    found = metadata.provenance
    texts = "".join(f"- {text}\n" for text in found["texts"])
    return (
        f"# {found['source']}, prepared\n\n"
        f"{found['source']} with the neurons of its routed experts in another order, and all else "
        "as it was: it computes the\nsame and loads the same way. Its own page and licence go for "
        f"it, but for hashes of the weights.\n\nMade by {found['tool']}: neurons by "
        f"{metadata.order}, {metadata.roles_told}. What was found out lies in\n`{FILE}`, from "
        f"{found['tokens']:,} tokens, {found['window']:,} at a time, of\n\n{texts}"
    )


def _metadata(
    spec: ModelSpec,
    asked: Request,
    subject: Subject,
    measured: Measured,
    orders: Mapping[int, Ints],
    digest: str,
    facts: Mapping[str, Any],
) -> Metadata:
    calibration = measured.calibration
    by_layer: dict[str, Mapping[int, Any]] = {
        "expert_counts": {layer: sums.tokens for layer, sums in calibration.layers.items()},
        "pair_counts": {layer: sums.pair_counts for layer, sums in calibration.layers.items()},
        "increase": measured.increase,
        "curves": curves(calibration, orders),
        "contributions": contributions(calibration, orders, measured.experts, spec.block),
        "router_weights": {
            layer: quantiles(sums.weighted) for layer, sums in calibration.layers.items()
        },
    }
    layers, n = spec.n_layers, spec.n_experts
    whole: dict[str, Any] = {
        "expert_counts": np.zeros((layers, n), np.int64),
        "pair_counts": np.zeros((layers, n, n), np.int64),
        "increase": np.full((layers, n, n), np.nan, np.float32),
        "curves": np.zeros((layers, n, POINTS), np.float32),
        "contributions": np.zeros((layers, n, spec.n_blocks), np.float32),
        "router_weights": np.zeros((layers, n, QUANTILES), np.float16),
    }
    if measured.widths is not None:
        shape = (layers, n, 2)
        whole["width_losses"] = np.full((*shape, spec.n_blocks + 1), np.nan, np.float32)
        whole["role_counts"] = np.zeros(shape, np.int64)
        by_layer["width_losses"] = {at: one.losses for at, one in measured.widths.items()}
        by_layer["role_counts"] = {at: one.counts for at, one in measured.widths.items()}
    for name, values in by_layer.items():
        for layer, value in values.items():
            whole[name][layer] = value
    pairs = whole["pair_counts"] > 0
    roles = dominant(whole["increase"])
    provenance = {
        **facts,
        "texts": subject.windows.dataset,
        "tokens": calibration.tokens,
        "window": subject.windows.window,
        "layerwise": asked.layerwise,
        "roles": {
            "method": spell(asked.method),
            "pairs": int(pairs.sum()),
            "measured": int((pairs & (roles >= 0)).sum()),
        },
        "unreached": [list(pair) for pair in calibration.unreached],
        "tool": TOOL,
    }
    if subject.sample is not None:
        provenance["width_losses"] = {
            "tokens": subject.sample.fed,
            "widths": measured_widths(spec),
            "least": LEAST,
        }
    return Metadata(spec, digest, str(asked.order), provenance=provenance, **whole)
