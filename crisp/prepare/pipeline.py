"""Preparing a model (paper, section 4.1), stage by stage, so that a kill costs little.

Everything is made in a folder of its own beside the result, which appears when it is complete.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from contextlib import nullcontext
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np

from crisp import TOOL
from crisp.adapter import Experts, Layout, layout
from crisp.errors import CrispError
from crisp.files import atomic
from crisp.loading import in_float32, load, load_config, load_tokenizer
from crisp.metadata import FILE, POINTS, Metadata
from crisp.model import ModelSpec
from crisp.prepare.calibration import Calibration, Floats, Ints, calibrate
from crisp.prepare.checkpoint import open_checkpoint, refuse_prepared, weights_digest
from crisp.prepare.experts_on_disk import expert_tensors
from crisp.prepare.importance import NeuronOrder, contributions, curves, permutations, scores
from crisp.prepare.layerwise import layerwise
from crisp.prepare.reorder import reorder
from crisp.prepare.roles import (
    Exact,
    Grouped,
    Method,
    Weight,
    increases,
    local,
    spell,
)
from crisp.prepare.skeleton import open_skeleton
from crisp.prepare.work import Work, check_place, refuse_taken, request_digest, was_finished
from crisp.profile import dominant
from crisp.profile.weights import QUANTILES, quantiles
from crisp.windows import Windows, check_vocabulary, read_windows, window_length

Report = Callable[[str, int, int], None]
"""``(stage, done, total)``"""

CALIBRATION, ROLES, REORDERING = "calibration", "roles", "reordering"


@dataclass(frozen=True)
class Request:
    """What is asked for.

    window: tokens read together; None: the model's context, 2,048 at most. tokens: of all texts
    together; None: all. block: neurons of a block; None: the model's default.
    """

    texts: Sequence[Path]
    method: Method
    order: NeuronOrder
    window: int | None = None
    tokens: int | None = None
    block: int | None = None
    layerwise: bool = False

    def __post_init__(self) -> None:
        if self.layerwise and isinstance(self.method, Exact | Grouped):
            raise CrispError(
                f"--roles {spell(self.method)}: needs the whole model in memory; "
                "--layerwise goes with --roles local or weight"
            )

    def digest(self, source: Path) -> str:
        """The same for the same request on unchanged files."""
        options = (
            spell(self.method), self.order, self.window, self.tokens, self.block, self.layerwise
        )  # fmt: skip
        return request_digest(source, self.texts, options)


@dataclass(frozen=True, eq=False)
class Subject:
    """A model and its calibration text; ``model`` is None where it is larger than memory."""

    folder: Path
    windows: Windows
    model: Any
    found: Layout


@dataclass(frozen=True, eq=False)
class Measured:
    """What the text told about the model. ``experts``: of each MoE layer, for their norms."""

    calibration: Calibration
    experts: Mapping[int, Any]
    increase: Mapping[int, Floats]  # of each MoE layer [experts, experts]


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
    subject = _subject(source, asked)
    expert_tensors(open_checkpoint(source), subject.found)  # refused now, not after the work
    with Work.open(out, request) as work:
        measured = _measure(subject, asked, report, work)
        orders = permutations(scores(asked.order, measured.calibration, measured.experts))
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
    subject = _subject(folder, asked)
    measured = _measure(subject, asked, report)
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


def _subject(folder: Path, asked: Request) -> Subject:
    """Read the text and the model; CrispError for what is wrong with them."""
    config = load_config(folder)
    window = window_length(config, asked.window)
    windows = read_windows(load_tokenizer(folder), asked.texts, window, limit=asked.tokens)
    check_vocabulary(windows, config, folder)
    if asked.layerwise:
        return Subject(folder, windows, None, open_skeleton(folder).found)
    model = in_float32(load(str(folder))).model
    return Subject(folder, windows, model, layout(model))


def _measure(
    subject: Subject, asked: Request, report: Report, work: Work | None = None
) -> Measured:
    """Calibration and roles. Without ``work`` nothing is kept on the way."""

    def timed(stage: str) -> Any:
        return nullcontext() if work is None else work.timed(stage)

    def told(stage: str) -> Callable[[int, int], None]:
        return lambda done, total: report(stage, done, total)

    if subject.model is None:
        assert work is not None
        spill = work.folder / "spill"
        with timed(CALIBRATION):
            both = layerwise(subject.folder, subject.windows, spill, told(CALIBRATION))
        sizes = _told_by(asked.method, both.calibration)
        assert sizes is not None
        return Measured(both.calibration, both.norms, sizes)

    experts = {layer.index: Experts.of(layer) for layer in subject.found.layers}
    with timed(CALIBRATION):
        calibration = _calibrated(subject, told(CALIBRATION), work)
    increase = _told_by(asked.method, calibration)
    if increase is None:
        with timed(ROLES):
            increase = _increases(asked.method, subject, told(ROLES), work)
    return Measured(calibration, experts, increase)


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


def _told_by(method: Method, calibration: Calibration) -> dict[int, Floats] | None:
    """What the calibration says about roles; None where the method asks for passes of its own."""
    if isinstance(method, Weight):
        return {}
    return None if isinstance(method, Exact | Grouped) else local(method, calibration)


def _calibrated(subject: Subject, tell: Any, work: Work | None) -> Calibration:
    if work is None:
        return calibrate(subject.model, subject.windows, tell)
    file = work.folder / "calibration.npz"
    state = Calibration.load(file) if file.exists() else None
    found = calibrate(subject.model, subject.windows, tell, state, lambda sums: sums.save(file))
    found.save(file)
    return found


def _increases(method: Method, subject: Subject, tell: Any, work: Work | None) -> dict[int, Floats]:
    """Layer by layer, each kept when it is finished."""
    assert isinstance(method, Exact | Grouped)
    found: dict[int, Floats] = {}
    for path in () if work is None else work.folder.glob("roles-*.npy"):
        found[int(path.stem.removeprefix("roles-"))] = np.load(path)
    for layer, increase in increases(method, subject.model, subject.windows, set(found), tell):
        found[layer] = increase
        if work is not None:
            file = work.folder / f"roles-{layer}.npy"
            with atomic(file) as temporary, temporary.open("wb") as stream:
                np.save(stream, increase)
    return found


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
    return Metadata(spec, digest, str(asked.order), provenance=provenance, **whole)
