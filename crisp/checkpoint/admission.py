"""The one step by which every command takes a model: the same checks, in the same order.

A folder or a name on the hub; custom code, which is never run; the files of the weights, whole and
not pickled; quantisation, which every command takes in the formats of `crisp.checkpoint.quantised`;
a layout that is understood; the geometry; the tokenizer.
"""

from __future__ import annotations

import re
from collections.abc import Iterable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from crisp.adapter import ExpertLayout, expert_layout
from crisp.checkpoint.files import Checkpoint, is_other_part
from crisp.checkpoint.geometry.read import read_folder
from crisp.checkpoint.gguf import refuse_gguf
from crisp.checkpoint.library import load_config, load_tokenizer, model_without_weights
from crisp.checkpoint.quantised import open_any
from crisp.checkpoint.source import ModelSource, find_model, local_model
from crisp.errors import CrispError
from crisp.model.geometry import ModelGeometry
from crisp.model.spec import ModelSpec

_LAYER = re.compile(r"(?:^|\.)(?:layers|h|blocks)\.(\d{1,6})\.")
_PREDICTORS = re.compile(r"(?:^|\.)(?:mtp|mtp_layers|nextn|multi_token_predictor)\.")


@dataclass(frozen=True, eq=False)
class AdmittedModel:
    """A model that has passed the checks; none of its weights has been read."""

    source: ModelSource
    config: Any  # transformers' config
    checkpoint: Checkpoint  # a quantised one is a `DecodedCheckpoint`
    layout: ExpertLayout  # of the model without weights
    geometry: ModelGeometry | None  # None: it is not understood, and was not needed
    tokenizer: Any  # None: it was not needed
    notes: tuple[str, ...]

    @property
    def spec(self) -> ModelSpec:
        """The geometry, of a model that was admitted for what needs one."""
        assert self.geometry is not None
        return self.geometry.spec

    @property
    def n_layers(self) -> int:
        """Decoder layers."""
        return self.layout.n_layers


def admit(
    name: str | Path,
    *,
    tokenizer: bool = False,
    geometry: bool = False,
) -> AdmittedModel:
    """Check the model in a folder, or of a name on the hub, as far as that takes no weights.

    tokenizer: what is to be done needs one. geometry: it needs the geometry; otherwise one that is
    not understood is but noted. Raises CrispError, one line that names the file, for the first
    check that fails.
    """
    refuse_gguf(local_model(name))
    source = find_model(name)
    folder = source.folder
    if not (folder / "config.json").exists():
        raise CrispError(f"{folder}: has no config.json; a transformers checkpoint was expected")
    config = load_config(folder)
    checkpoint = open_any(folder)
    layout = expert_layout_of(folder, config)
    notes: list[str] = []
    found: ModelGeometry | None = None
    try:
        found = read_folder(source)
        notes += found.notes
    except CrispError as error:
        if geometry:
            raise
        notes.append(f"its geometry is not recorded: {error}")
    return AdmittedModel(
        source=source,
        config=config,
        checkpoint=checkpoint,
        layout=layout,
        geometry=found,
        tokenizer=load_tokenizer(folder) if tokenizer else None,
        notes=tuple(notes),
    )


def expert_layout_of(folder: Path, config: Any) -> ExpertLayout:
    """Return where the model of a config has its experts; CrispError if that is not understood."""
    try:
        return expert_layout(model_without_weights(folder, config))
    except CrispError as error:
        raise CrispError(
            f"{folder}: {error}" if str(folder) not in str(error) else str(error)
        ) from (error)


def is_extra(name: str, n_layers: int) -> bool:
    """Return whether a tensor is of a layer beyond the model's, which predicts further tokens."""
    place = _LAYER.search(name)
    return _PREDICTORS.search(name) is not None or (place is not None and int(place[1]) >= n_layers)


def refuse_unless_extra(names: Iterable[str], n_layers: int, where: str) -> list[str]:
    """Raise CrispError for weights that the model does not have, but for those of extra layers.

    Returns a note about these. What reads images or sound is left alone, where the model is the
    language model of a larger one.
    """
    names = {name for name in names if not is_other_part(name)}
    unknown = {name for name in names if not is_extra(name, n_layers)}
    if unknown:
        raise CrispError(
            f"{where}: holds {len(unknown)} weights that the model does not have, such as "
            f"{min(unknown)}"
        )
    if not names:
        return []
    return [
        f"{len(names)} tensors of layers beyond the model's {n_layers} are left alone, such as "
        f"{min(names)}"
    ]
