"""Read a model's geometry from the best there is: see `read_model`."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from fractions import Fraction
from pathlib import Path
from typing import Any

from crisp.checkpoint.files import INDEX, SINGLE, open_checkpoint
from crisp.checkpoint.geometry.skeleton import default_config, skeleton_geometry
from crisp.checkpoint.geometry.tensors import TensorGeometry, tensor_geometry
from crisp.checkpoint.gguf import gguf_file
from crisp.checkpoint.gguf import read_geometry as read_gguf
from crisp.checkpoint.source import ModelSource, local_model
from crisp.errors import CrispError
from crisp.model import layouts
from crisp.model.config import ESTIMATED, FAMILIES, ConfigGeometry, read_geometry, read_json
from crisp.model.fields import Fields
from crisp.model.geometry import BITS_NOTE, ModelGeometry, read_named
from crisp.model.spec import BUILTIN, STORE_INDEX, ModelSpec

GGUF = "a GGUF file"


def read_model(name_or_path: str | Path, bits: Fraction | None = None) -> ModelGeometry:
    """Read a model's geometry; no weight is read, and nothing is downloaded.

    It is the first of these that there is: a built-in model; an expert store; a geometry stated by
    hand (TOML); a GGUF file, or a folder with one and no safetensors, as `crisp pack` takes it; a
    config.json, or a folder or a snapshot in the hub's cache with one.
    What a folder's tensors say of its experts wins over its config. Without tensors, a family that
    is not listed is asked of transformers, if that is there, else estimated, which a note says.

    bits: stored, of a routed weight, where they are given: they win. Raises CrispError for what
    cannot be read, is no MoE or contradicts itself.
    """
    path = Path(name_or_path)
    if str(name_or_path) in BUILTIN or (path / STORE_INDEX).exists() or path.suffix == ".toml":
        return read_named(name_or_path, bits)
    path = local_model(path)
    if not path.exists():
        return read_named(name_or_path, bits)  # says which names there are
    gguf = gguf_file(path)
    if gguf is not None:
        return ModelGeometry(read_gguf(gguf), GGUF).with_bits(bits)
    if path.is_dir():
        return read_folder(ModelSource.of_folder(path), bits)
    name = path.resolve().parent.name if path.stem == "config" else path.stem
    return _read(read_json(path), path, name, None, bits)


def read_folder(source: ModelSource, bits: Fraction | None = None) -> ModelGeometry:
    """Read the geometry of the checkpoint, or the config alone, in a folder: see `read_model`."""
    folder = source.folder
    config = folder / "config.json"
    weights = folder if has_weights(folder) else None
    return _read(read_json(config), config, source.name, weights, bits)


def has_weights(folder: Path) -> bool:
    """Return whether a folder has weights in safetensors, or an index of such."""
    return (folder / SINGLE).exists() or (folder / INDEX).exists()


def _read(
    config: Mapping[str, Any], path: Path, name: str, weights: Path | None, bits: Fraction | None
) -> ModelGeometry:
    """Read a geometry; path: of the config; weights: the folder that has some."""
    entries, notes = None, list[str]()
    if weights is not None:
        try:
            entries = open_checkpoint(weights).tensors.values()
        except CrispError as error:
            notes.append(f"its tensors were not looked at: {error}")
    given = bits is not None
    try:
        geometry, more = _from_config(config, str(path), any_bits=given)
    except CrispError:
        if entries is None:
            raise
        geometry, more = _from_config(config, str(path), any_bits=True)  # tensors say the bits
    notes += more
    tensors, source = None, "its config"
    if entries is not None:
        tensors = _of(entries, geometry, config, str(weights))
        source = "its config and its tensors" if tensors else source
    stored = tensors is not None
    if tensors is None and not geometry.listed:
        tensors = skeleton_geometry(path, config)
        source = "its config, as transformers understands it" if tensors else source
    said = geometry.bits
    if tensors is not None:
        geometry, more = _refined(geometry, tensors, str(path), stored=stored)
        notes += more
    elif not geometry.listed:
        notes.append(ESTIMATED)
    notes += geometry.notes
    # the same model, whether its tensors are there or not
    digest = replace(geometry, bits=said).digest()
    spec = ModelSpec.from_geometry(geometry, name, digest)
    return ModelGeometry(spec, source, tuple(notes)).with_bits(bits)


def _from_config(
    config: Mapping[str, Any], where: str, *, any_bits: bool
) -> tuple[ConfigGeometry, list[str]]:
    """Return the geometry in a config, keys that it omits taken from transformers, and notes."""
    own = layouts.text_fields(Fields(where, config))
    listed, error = str(own.values.get("model_type")) in FAMILIES, None
    if listed:
        try:
            return _without_estimate(read_geometry(config, where, any_bits=any_bits)), []
        except CrispError as reason:
            error = reason
    full = default_config(config)
    if full is None:
        if error is not None:
            raise error
        return _without_estimate(read_geometry(config, where, any_bits=any_bits)), []
    geometry = _without_estimate(read_geometry(full, where, any_bits=any_bits))
    notes = []
    asked = {
        "the number of experts": (layouts.EXPERTS, geometry.n_experts),
        "the experts of a token": (layouts.TOP_K, geometry.top_k),
        "the neurons of an expert": (layouts.NEURONS, geometry.d_ff),
        "the number of layers": (layouts.LAYERS, geometry.n_layers),
        "the model's width": (layouts.WIDTH, geometry.d_model),
    }
    for what, (keys, value) in asked.items():
        if own.first(keys) is None:
            notes.append(f"{what}, {value}: transformers' default, for {where} does not say it")
    return geometry, notes


def _without_estimate(geometry: ConfigGeometry) -> ConfigGeometry:
    return replace(geometry, notes=tuple(note for note in geometry.notes if note != ESTIMATED))


def _of(
    entries: Any, geometry: ConfigGeometry, config: Mapping[str, Any], where: str
) -> TensorGeometry | None:
    quantised = layouts.quantisation(Fields(where, config))
    bits = None
    if quantised is not None:
        bits = next(
            (quantised.values[key] for key in ("bits", "w_bit") if quantised.has(key)),
            4 if quantised.values.get("load_in_4bit") else None,
        )
    try:
        return tensor_geometry(
            entries, geometry.n_layers, geometry.d_model, bits if isinstance(bits, int) else None
        )
    except CrispError as error:
        raise CrispError(f"{where}: {error}") from error


def _refined(
    geometry: ConfigGeometry, tensors: TensorGeometry, where: str, *, stored: bool
) -> tuple[ConfigGeometry, list[str]]:
    """Return the geometry with what tensors say better, and notes.

    stored: the tensors are those of a checkpoint. Raises CrispError where they contradict a config
    of a listed family.
    """
    found = {
        "n_experts": tensors.n_experts,
        "moe_layers": tensors.moe_layers,
        "d_ff": tensors.d_ff or geometry.d_ff,
        "d_model": tensors.d_model or geometry.d_model,
    }
    if geometry.listed:
        for key, value in found.items():
            said = getattr(geometry, key)
            if said != value:
                raise CrispError(f"{where}: {key} is {said}, but the tensors have {value}")
    else:
        found |= {"dense_params": tensors.dense_params, "biases": tensors.biases}
    changed = replace(geometry, matrices=tensors.matrices, **found)  # type: ignore[arg-type]
    if not stored:
        return _for_layers(changed), []
    weights = changed.n_experts * changed.matrices * changed.d_model * changed.d_ff
    each = tuple(Fraction(bits, weights) for bits in tensors.expert_bits)
    notes = []
    before = geometry.layer_bits or (geometry.bits,) * len(geometry.moe_layers)
    kept = geometry.notes
    if each != before or tensors.quantised:
        method = next((note for note in kept if note.startswith(BITS_NOTE)), None)
        method = method if tensors.quantised else None
        kept = tuple(note for note in kept if not note.startswith(BITS_NOTE))
        how = f" ({method.partition(', ')[2]})" if method else ""
        notes.append(f"{BITS_NOTE}: as the checkpoint's tensors have them{how}")
    return replace(
        changed,
        bits=Fraction(sum(each), len(each)),
        layer_bits=each if len(set(each)) > 1 else None,
        notes=kept,
    ), notes


def _for_layers(geometry: ConfigGeometry) -> ConfigGeometry:
    """Return the geometry with bits for as many MoE layers as it has."""
    if geometry.layer_bits is None or len(geometry.layer_bits) == len(geometry.moe_layers):
        return geometry
    return replace(geometry, layer_bits=None)
