"""A request to prepare a model, and the model and text it names."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from crisp.adapter import ExpertLayout, expert_layout
from crisp.checkpoint.loading import load_config, load_model, load_tokenizer, to_float32
from crisp.checkpoint.skeleton import open_skeleton
from crisp.errors import CrispError
from crisp.prepare.folder import request_digest
from crisp.prepare.importance import NeuronOrder
from crisp.prepare.roles import Exact, Grouped, RoleMethod, spell_method
from crisp.prepare.width_losses import sample_windows
from crisp.text_windows import TokenWindows, check_vocabulary, read_windows, window_length


@dataclass(frozen=True)
class PreparationRequest:
    """The options of a preparation."""

    texts: Sequence[Path]  # the calibration text
    method: RoleMethod
    order: NeuronOrder
    window: int | None = None  # tokens read together; None: the model's context, 2,048 at most
    tokens: int | None = None  # of all texts together; None: all
    block: int | None = None  # neurons of a block; None: the model's default
    layerwise: bool = False  # keep one decoder layer at a time in memory
    width_losses: int | None = None  # tokens to measure the loss of each width on; None: do not
    dequantize: bool = False  # write a quantised model in bfloat16
    # tokens, at most, that a loss curve will be measured on; None: none will. It decides nothing of
    # the other results.
    curve_tokens: int | None = None
    magnitudes: bool = False  # measure what foretells the magnitudes of experts' outputs

    def __post_init__(self) -> None:
        if self.layerwise and self.width_losses is not None:
            raise CrispError(
                "--width-losses: needs the whole model in memory; it does not go with --layerwise"
            )
        if self.layerwise and self.curve_tokens is not None:
            raise CrispError(
                "--loss-curve: needs the whole model in memory; it does not go with --layerwise"
            )
        if self.layerwise and isinstance(self.method, Exact | Grouped):
            raise CrispError(
                f"--roles {spell_method(self.method)}: needs the whole model in memory; "
                "--layerwise goes with --roles local or weight"
            )

    def digest(self, source: Path) -> str:
        """Return a hash that stays the same for the same request on unchanged files."""
        options = (
            spell_method(self.method), self.order, self.window, self.tokens, self.block,
            self.layerwise, self.width_losses, *([self.dequantize] if self.dequantize else []),
            *(["magnitudes"] if self.magnitudes else []),
        )  # fmt: skip
        return request_digest(source, self.texts, options)


@dataclass(frozen=True, eq=False)
class PreparationInputs:
    """A model and its calibration text."""

    folder: Path
    windows: TokenWindows
    sample: TokenWindows | None  # the windows that width losses are measured on; None: they are not
    model: Any  # None if only one layer at a time is to be in memory
    layout: ExpertLayout


def read_inputs(folder: Path, request: PreparationRequest) -> PreparationInputs:
    """Read the text and the model; CrispError for what is wrong with them."""
    config = load_config(folder)
    window = window_length(config, request.window)
    windows = read_windows(load_tokenizer(folder), request.texts, window, limit=request.tokens)
    check_vocabulary(windows, config, folder)
    if request.curve_tokens is not None and (
        len(windows.tokens) < 2 or request.curve_tokens <= window
    ):
        raise CrispError(
            f"--loss-curve: one window of {window} tokens says nothing about other text; more text "
            "or a smaller --window was expected"
        )
    tokens = request.width_losses
    sample = None if tokens is None else sample_windows(windows, tokens)
    if request.layerwise:
        return PreparationInputs(folder, windows, sample, None, open_skeleton(folder).layout)
    model = to_float32(load_model(str(folder))).model
    return PreparationInputs(folder, windows, sample, model, expert_layout(model))
