"""What is asked of a preparation, and what the calibration text tells about the model."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from contextlib import nullcontext
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import numpy as np

from crisp.adapter import Experts, Layout, layout
from crisp.checkpoint.loading import in_float32, load, load_config, load_tokenizer
from crisp.checkpoint.skeleton import open_skeleton
from crisp.checkpoint.windows import Windows, check_vocabulary, read_windows, window_length
from crisp.errors import CrispError
from crisp.files import atomic
from crisp.model.spec import ModelSpec
from crisp.prepare.calibration import Calibration, Floats, calibrate
from crisp.prepare.importance import NeuronOrder
from crisp.prepare.layerwise import layerwise
from crisp.prepare.roles import Exact, Grouped, Method, Weight, increases, local, spell
from crisp.prepare.width_losses import WidthLosses, spread
from crisp.prepare.width_losses import measured as width_losses
from crisp.prepare.work import Work, request_digest

Report = Callable[[str, int, int], None]
"""``(stage, done, total)``"""

CALIBRATION, ROLES, WIDTHS, REORDERING = "calibration", "roles", "widths", "reordering"


@dataclass(frozen=True)
class Request:
    """What is asked for.

    window: tokens read together; None: the model's context, 2,048 at most. tokens: of all texts
    together; None: all. block: neurons of a block; None: the model's default. width_losses: tokens
    on which to measure what each width of each expert costs; None: that is not measured.
    """

    texts: Sequence[Path]
    method: Method
    order: NeuronOrder
    window: int | None = None
    tokens: int | None = None
    block: int | None = None
    layerwise: bool = False
    width_losses: int | None = None

    def __post_init__(self) -> None:
        if self.layerwise and self.width_losses is not None:
            raise CrispError(
                "--width-losses: needs the whole model in memory; it does not go with --layerwise"
            )
        if self.layerwise and isinstance(self.method, Exact | Grouped):
            raise CrispError(
                f"--roles {spell(self.method)}: needs the whole model in memory; "
                "--layerwise goes with --roles local or weight"
            )

    def digest(self, source: Path) -> str:
        """The same for the same request on unchanged files."""
        options = (
            spell(self.method), self.order, self.window, self.tokens, self.block, self.layerwise,
            self.width_losses,
        )  # fmt: skip
        return request_digest(source, self.texts, options)


@dataclass(frozen=True, eq=False)
class Subject:
    """A model and its calibration text; ``model`` is None where it is larger than memory.

    sample: the part of the text on which widths are measured, if they are.
    """

    folder: Path
    windows: Windows
    sample: Windows | None
    model: Any
    found: Layout


@dataclass(frozen=True, eq=False)
class Measured:
    """What the text told about the model. ``experts``: of each MoE layer, for their norms."""

    calibration: Calibration
    experts: Mapping[int, Any]
    increase: Mapping[int, Floats]  # of each MoE layer [experts, experts]
    widths: Mapping[int, WidthLosses] | None = None


def read_subject(folder: Path, asked: Request) -> Subject:
    """Read the text and the model; CrispError for what is wrong with them."""
    config = load_config(folder)
    window = window_length(config, asked.window)
    windows = read_windows(load_tokenizer(folder), asked.texts, window, limit=asked.tokens)
    check_vocabulary(windows, config, folder)
    sample = None if asked.width_losses is None else spread(windows, asked.width_losses)
    if asked.layerwise:
        return Subject(folder, windows, sample, None, open_skeleton(folder).found)
    model = in_float32(load(str(folder))).model
    return Subject(folder, windows, sample, model, layout(model))


def measure(subject: Subject, asked: Request, report: Report, work: Work | None = None) -> Measured:
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


def with_widths(
    measured: Measured, subject: Subject, spec: ModelSpec, report: Report, work: Work | None = None
) -> Measured:
    """What widths cost beside it, of neurons as they now stand in the model."""
    assert subject.sample is not None
    losses = width_losses(
        subject.model,
        subject.sample,
        spec,
        None if work is None else work.folder,
        lambda done, total: report(WIDTHS, done, total),
    )
    return replace(measured, widths=losses)


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
