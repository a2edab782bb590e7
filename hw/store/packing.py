"""pack(), pack_synthetic(): an expert store of a checkpoint, or of random weights."""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

from crisp.checkpoint.files import open_checkpoint
from crisp.errors import CrispError
from crisp.hw.store.blocks import RandomBlocks, blocks_of
from crisp.hw.store.checkpoint_experts import ExpertReader, skeleton
from crisp.hw.store.format import DTYPES
from crisp.hw.store.numbers import NAMES
from crisp.hw.store.reader import Store
from crisp.hw.store.writer import check_new, new_store
from crisp.model.quantization import BITS, check_groups
from crisp.model.spec import ModelSpec
from crisp.profile.metadata import FILE, Metadata

Progress = Callable[[int, int], None]
"""``(done, total)``, in bytes"""

# hidden_act of a config, and what a store calls a gate with it
_GATES = {"silu": "silu", "swish": "silu", "gelu": "gelu"}


def pack(
    folder: Path,
    out: Path,
    *,
    dtype: str | None = None,
    block: int | None = None,
    progress: Progress | None = None,
) -> Store:
    """Write the routed experts of the checkpoint in ``folder`` to ``out``, a new or empty folder.

    dtype: bf16, fp16, fp32, int8 or int4; None: the checkpoint's own. block: in neurons; None: a
    prepared model's own, else the model's default. Memory holds one expert and a few of its blocks.

    Raises CrispError for a checkpoint that is not whole, quantised or not understood, weights that
    are not finite or do not fit ``dtype``, neurons that are not whole groups of it, metadata of
    other weights, and a full disk.
    """
    _check_dtype(dtype)
    check_new(out)
    checkpoint = open_checkpoint(folder)
    metadata = Metadata.load(folder / FILE) if (folder / FILE).exists() else None
    spec = ModelSpec.from_config(folder, None if metadata is None else metadata.spec.name)
    if block is None and metadata is not None:
        block = metadata.spec.block
    spec = spec.with_(block=block)
    config = json.loads((folder / "config.json").read_bytes())
    activation = activation_of(config, str(folder / "config.json"))
    found = skeleton(folder, spec, activation)
    advance = _counting(progress, sum(tensor.nbytes for tensor in checkpoint.tensors.values()))
    with ExpertReader(checkpoint, found, advance) as reader:
        stored = dtype or next((key for key, kind in NAMES.items() if kind == reader.kind), None)
        if stored is None:
            raise CrispError(f"{folder}: its experts are {reader.kind}; --dtype has to be given")
        if stored in BITS:
            check_groups(spec, stored)
        spec = spec.with_(bits=DTYPES[stored], block=block)
        with new_store(out, spec, stored, activation) as writer:
            for layer in spec.moe_layers:
                writer.layer(layer, blocks_of(reader, spec, layer, stored))
            digest = reader.weights()
            if metadata is not None:
                metadata.check_weights(digest, str(folder))
            writer.finish(_about(stored, activation, weights=digest))
    return Store.open(out)


def pack_synthetic(
    spec: ModelSpec,
    out: Path,
    *,
    dtype: str | None = None,
    activation: str | None = None,
    seed: int = 0,
    progress: Progress | None = None,
) -> Store:
    """Write random experts of the geometry of ``spec``, its block included, to ``out``.

    dtype: bf16, fp16, fp32, int8 or int4; None: fp32 if that is the model's, else bf16.
    activation: None: gpt_oss for a model with biases, else silu. The numbers: see
    `crisp.hw.store.blocks.RandomBlocks`.

    Raises CrispError for a full disk, an ``out`` that is taken, and neurons that are not whole
    groups of ``dtype``.
    """
    stored, spec = stored_as(spec, dtype, seed)
    activation = activation or ("gpt_oss" if spec.biases else "silu")
    advance = _counting(progress, spec.routed_bytes)
    with new_store(out, spec, stored, activation) as writer:
        made = RandomBlocks(spec, stored, seed)
        for layer in spec.moe_layers:
            writer.layer(layer, made.layer(advance))
        writer.finish(_about(stored, activation, seed=seed))
    return Store.open(out)


def stored_as(spec: ModelSpec, dtype: str | None, seed: int) -> tuple[str, ModelSpec]:
    """(dtype, geometry) of random experts; None: fp32 if that is the model's dtype, else bf16.

    Raises CrispError for what `pack_synthetic` would refuse before it writes anything.
    """
    _check_dtype(dtype)
    if spec.matrices != 3:
        raise CrispError(f"{spec.name}: its experts have no gate; gated ones were expected")
    if seed < 0:
        raise CrispError(f"--seed {seed}: must be at least 0")
    stored = dtype or ("fp32" if spec.dtype_bits == 32 else "bf16")
    if stored in BITS:
        check_groups(spec, stored)
    return stored, spec.with_(bits=DTYPES[stored])


def activation_of(config: Mapping[str, Any], where: str) -> str:
    """What stands between an expert's projections, in a store's words; of a config.json.

    Raises CrispError, naming ``where``, for one that no device computes.
    """
    if config.get("model_type") == "gpt_oss":
        return "gpt_oss"
    named = config.get("hidden_act", "silu")
    if not isinstance(named, str) or named not in _GATES:
        raise CrispError(f"{where}: hidden_act: found {named!r}, expected {' or '.join(_GATES)}")
    return _GATES[named]


def _counting(progress: Progress | None, total: int) -> Callable[[int], None]:
    done = 0

    def advance(more: int) -> None:
        nonlocal done
        done += more
        if progress is not None:
            progress(done, total)

    return advance


def _check_dtype(dtype: str | None) -> None:
    if dtype is not None and dtype not in DTYPES:
        raise CrispError(f"--dtype {dtype}: expected {', '.join(DTYPES)}")


def _about(
    dtype: str, activation: str, weights: str | None = None, seed: int | None = None
) -> dict[str, Any]:
    """What the index says besides geometry and files."""
    return {
        "dtype": dtype,
        "activation": activation,
        "origin": "checkpoint" if seed is None else "synthetic",
        "weights": weights,
        "seed": seed,
    }
