"""Pack an expert store: of a checkpoint's experts, or of random weights."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any

from crisp.checkpoint.admission import admit
from crisp.checkpoint.gguf import GgufExperts, gguf_activation, gguf_file, read_model
from crisp.checkpoint.quantised import DecodedCheckpoint
from crisp.checkpoint.source import local_model
from crisp.errors import CrispError
from crisp.files import check_outside
from crisp.hw.store.checkpoint_experts import locate_experts
from crisp.hw.store.dtypes import NAMES
from crisp.hw.store.encoding import RandomBlocks, encode_blocks
from crisp.hw.store.expert_source import GgufSource, expert_source
from crisp.hw.store.format import DTYPES
from crisp.hw.store.reader import Store
from crisp.hw.store.scale_fit import ScaleFit
from crisp.hw.store.writer import check_new, new_store
from crisp.model.activation import PLAIN
from crisp.model.quantization import BITS, check_groups
from crisp.model.spec import ModelSpec
from crisp.profile.metadata import FILE, Metadata
from crisp.progress import Progress, counter, no_progress

# the store's name of the activation, by hidden_act of a config
_NAMES = {name: name for name in PLAIN} | {"swish": "silu", "gelu_pytorch_tanh": "gelu_tanh"}


def pack(
    folder: Path,
    out: Path,
    *,
    dtype: str | None = None,
    block: int | None = None,
    progress: Progress = no_progress,
) -> Store:
    """Write the routed experts of a checkpoint to ``out``, a new or empty folder.

    folder: of a checkpoint, quantised or not, its name on the hub, or a GGUF file. dtype: bf16,
    fp16, fp32, int8 or int4; None: the checkpoint's own, or bf16 for what is quantised. block: in
    neurons; None: a prepared model's own, else the model's default. Memory holds one expert, what
    it is made from, and a few of its blocks. int4's scales are fitted where a prepared model's
    metadata has the moments for it.

    Raises CrispError for a checkpoint that is not whole or not understood, weights that are not
    finite or do not fit ``dtype``, neurons that are not whole groups of it, metadata of other
    weights, and a full disk.
    """
    _check_dtype(dtype)
    check_new(out)
    place = local_model(folder)
    if place.is_dir():
        check_outside(out, place)
    file = gguf_file(place)
    if file is not None:
        return _pack_gguf(file, out, dtype, block, progress)
    admitted = admit(folder, geometry=True)
    folder, checkpoint = admitted.source.folder, admitted.checkpoint
    metadata = Metadata.load(folder / FILE) if (folder / FILE).exists() else None
    spec = admitted.spec
    if metadata is not None:
        spec = replace(spec, name=metadata.spec.name)
    if block is None and metadata is not None:
        block = metadata.spec.block
    spec = spec.with_(block=block)
    layout, found = locate_experts(folder, spec)
    activation = str(found)
    quantised = checkpoint if isinstance(checkpoint, DecodedCheckpoint) else None
    moments = metadata.moments() if metadata is not None else None
    with expert_source(checkpoint, layout, progress) as reader:
        own = next((key for key, kind in NAMES.items() if kind == reader.kind), None)
        stored = dtype or ("bf16" if quantised else own)
        if stored is None:
            raise CrispError(f"{folder}: its experts are {reader.kind}; --dtype has to be given")
        if stored in BITS:
            check_groups(spec, stored)
        spec = spec.with_(bits=DTYPES[stored], block=block)
        fit = ScaleFit(moments) if moments is not None and stored == "int4" else None
        with new_store(out, spec, stored, activation) as writer:
            for layer in spec.moe_layers:
                writer.layer(layer, encode_blocks(reader, spec, layer, stored, fit))
            digest = reader.weights()
            if metadata is not None:
                metadata.check_weights(digest, str(folder))
            about = _about(stored, activation, weights=digest)
            if quantised is not None:
                about["source"] = {"format": quantised.method, "settings": dict(quantised.settings)}
            if fit is not None:
                about["errors"] = fit.errors()
            writer.finish(about)
    return Store.open(out)


def _pack_gguf(
    file: Path, out: Path, dtype: str | None, block: int | None, progress: Progress
) -> Store:
    """Write the routed experts of a GGUF file; see `pack`."""
    model = read_model(file)
    activation = gguf_activation(model)
    stored = dtype or "bf16"
    spec = model.spec.with_(bits=DTYPES[stored], block=block)
    if stored in BITS:
        check_groups(spec, stored)
    with GgufExperts(model, progress) as experts:
        source = GgufSource(experts)
        with new_store(out, spec, stored, activation) as writer:
            for layer in spec.moe_layers:
                writer.layer(layer, encode_blocks(source, spec, layer, stored))
            about = _about(stored, activation, weights=source.weights())
            about["source"] = {"format": "gguf", "file": file.name, "types": model.types}
            writer.finish(about)
    return Store.open(out)


def pack_synthetic(
    spec: ModelSpec,
    out: Path,
    *,
    dtype: str | None = None,
    activation: str | None = None,
    seed: int = 0,
    progress: Progress = no_progress,
) -> Store:
    """Write random experts of the geometry of ``spec``, its block included, to ``out``.

    dtype: bf16, fp16, fp32, int8 or int4; None: fp32 if that is the model's, else bf16.
    activation: None: gpt_oss for a model with biases, relu2 for one without a gate, else silu. The
    numbers: see `crisp.hw.store.encoding.RandomBlocks`.

    Raises CrispError for a full disk, an ``out`` that is taken, and neurons that are not whole
    groups of ``dtype``.
    """
    stored, spec = synthetic_geometry(spec, dtype, seed)
    usual = "relu2" if spec.matrices == 2 else "gpt_oss" if spec.biases else "silu"
    activation = activation or usual
    advance = counter(progress, spec.routed_bytes)
    with new_store(out, spec, stored, activation) as writer:
        random_blocks = RandomBlocks(spec, stored, seed)
        for layer in spec.moe_layers:
            writer.layer(layer, random_blocks.layer(advance))
        writer.finish(_about(stored, activation, seed=seed))
    return Store.open(out)


def synthetic_geometry(spec: ModelSpec, dtype: str | None, seed: int) -> tuple[str, ModelSpec]:
    """Return (dtype, geometry) of a store of random experts.

    dtype: None: fp32 if that is the model's, else bf16. Raises CrispError for what `pack_synthetic`
    refuses before it writes anything.
    """
    _check_dtype(dtype)
    if seed < 0:
        raise CrispError(f"--seed {seed}: must be at least 0")
    stored = dtype or ("fp32" if spec.dtype_bits == 32 else "bf16")
    if stored in BITS:
        check_groups(spec, stored)
    return stored, spec.with_(bits=DTYPES[stored])


def read_activation(config: Mapping[str, Any], where: str) -> str:
    """Return the store's name of the activation that a config.json names.

    Raises CrispError, naming ``where``, for one that no device computes.
    """
    if config.get("model_type") == "gpt_oss":
        return "gpt_oss"
    keys = "mlp_hidden_act", "hidden_act", "hidden_activation"
    key = next((key for key in keys if key in config), keys[1])
    named = config.get(key, "silu")
    if not isinstance(named, str) or named not in _NAMES:
        raise CrispError(f"{where}: {key}: found {named!r}, expected {' or '.join(_NAMES)}")
    return _NAMES[named]


def _check_dtype(dtype: str | None) -> None:
    """Raise CrispError for a dtype that stores do not have."""
    if dtype is not None and dtype not in DTYPES:
        raise CrispError(f"--dtype {dtype}: expected {', '.join(DTYPES)}")


def _about(
    dtype: str, activation: str, weights: str | None = None, seed: int | None = None
) -> dict[str, Any]:
    """Return the fields of the index besides geometry and files."""
    return {
        "dtype": dtype,
        "activation": activation,
        "origin": "checkpoint" if seed is None else "synthetic",
        "weights": weights,
        "seed": seed,
    }
