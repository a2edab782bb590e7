"""Load a transformers model without its routed experts, which stay in a store.

The experts' parameters remain on torch's meta device.
"""

from __future__ import annotations

import mmap
import os
from collections.abc import Iterable
from contextlib import ExitStack
from dataclasses import dataclass
from itertools import islice
from pathlib import Path
from typing import Any

from crisp.adapter import ExpertLayout, Experts, expert_layout
from crisp.checkpoint.admission import admit
from crisp.checkpoint.conversion import Conversion
from crisp.checkpoint.files import Checkpoint, TensorEntry, weights_digest
from crisp.checkpoint.filling import (
    compute_buffers,
    keep_float32,
    own_type,
    plain_config,
    set_tensor,
)
from crisp.checkpoint.geometry.read import read_folder
from crisp.checkpoint.loading import LoadedModel, model_without_weights, one_line_errors
from crisp.checkpoint.source import find_model
from crisp.errors import CrispError
from crisp.extras import import_extra
from crisp.hw.memory import return_freed_memory
from crisp.hw.store.checkpoint_experts import locate_experts
from crisp.hw.store.encoding import encode_blocks
from crisp.hw.store.expert_source import expert_source
from crisp.hw.store.reader import Store
from crisp.hw.store.scale_fit import ScaleFit
from crisp.model.spec import ModelSpec
from crisp.profile.metadata import FILE, Metadata
from crisp.progress import Progress, no_progress


@dataclass(frozen=True, eq=False)
class ResidentModel:
    """A model in memory, without its routed experts, and the store that has them."""

    loaded: LoadedModel
    store: Store
    layout: ExpertLayout  # where the model has its experts
    biases: tuple[Any, ...]  # by MoE row: of the down projections, float32 [experts, d_model]
    mapped: int  # bytes of the weights that are mapped from the checkpoint


def open_resident(
    folder: Path,
    store: Store,
    *,
    device: str = "cpu",
    verify: bool = False,
    progress: Progress = no_progress,
) -> ResidentModel:
    """Load the model in ``folder``, in its own type, with its experts in ``store``.

    On a CPU, weights that the folder's files hold as the model has them are mapped, not copied: the
    files must not be changed meanwhile.

    device: torch's name of where it runs.
    verify: hash all weights in the folder, to be sure that the store was packed from them.
    Otherwise the blocks of one expert in the first MoE layer and of one in the last are compared,
    and the hash in a prepared model's metadata.

    Raises CrispError for a checkpoint that is incomplete or does not fit its config, a model that
    is not understood, and another model's store.
    """
    admitted = admit(folder, tokenizer=True, geometry=True)
    folder, checkpoint = admitted.source.folder, admitted.checkpoint
    spec = _same_geometry(admitted.spec, folder, store)
    _same_weights(checkpoint, store, verify, progress)
    torch, transformers = import_extra("torch"), import_extra("transformers")
    kind = own_type(admitted.config, checkpoint)
    model = model_without_weights(folder, plain_config(admitted.config), kind).eval()
    keep_float32(model, kind)
    layout = expert_layout(model)
    stored = {name for layer in layout.layers for name in Experts.of(layer).parameters()}
    conversion = Conversion(model, checkpoint)
    compute_buffers(model)
    wanted = {name: x for name, x in model.state_dict().items() if name not in stored}
    total, done = sum(x.nbytes for x in wanted.values()), 0
    for name, tensor in conversion.tensors(wanted.keys(), mapped=True):
        set_tensor(model, name, tensor.to(device))
        done += tensor.nbytes
        progress(done, total)
    # The checkpoint has one of the names that a tied tensor goes by, or all of them.
    missing = {name for name, x in model.state_dict().items() if name in wanted and x.is_meta}
    model.tie_weights(missing_keys=missing, recompute_mapping=False)
    for name, buffer in list(model.named_buffers()):  # those that no checkpoint holds, too
        if not buffer.is_meta:
            set_tensor(model, name, buffer.to(device))
    left = [name for name, x in model.state_dict().items() if name in wanted and x.is_meta]
    if left:  # a family may declare them optional; what it would do then is not understood
        raise CrispError(f"{folder}: lacks the model's {min(left)}")
    _forget(checkpoint)
    mapped = list(filter(None, map(conversion.stored, wanted))) if device == "cpu" else []
    _read_ahead(checkpoint, mapped)
    if device == "cpu":
        for tensor in model.state_dict().values():
            if not tensor.is_meta and tensor.is_contiguous():  # a byte of each page
                tensor.reshape(-1).view(torch.uint8)[:: mmap.PAGESIZE].sum()
    return_freed_memory()
    with one_line_errors(str(folder), "its generation_config.json"):
        if (folder / "generation_config.json").exists():
            model.generation_config = transformers.GenerationConfig.from_pretrained(folder)
    loaded = LoadedModel(
        model=model,
        tokenizer=admitted.tokenizer,
        name=admitted.source.name,
        revision=admitted.source.revision,
        spec=spec,
        how=f"{str(model.dtype).removeprefix('torch.')} on {device}, experts in {store.dtype}, "
        f"torch {torch.__version__}, transformers {transformers.__version__}",
    )
    return ResidentModel(
        loaded,
        store,
        layout,
        tuple(_down_bias(layer.experts) for layer in layout.layers),
        sum(tensor.nbytes for tensor in mapped),
    )


def same_geometry(folder: Path, store: Store) -> ModelSpec:
    """Raise CrispError unless the store is of this model's geometry; return the geometry."""
    return _same_geometry(read_folder(find_model(folder)).spec, folder, store)


def _same_geometry(spec: ModelSpec, folder: Path, store: Store) -> ModelSpec:
    if store.spec.config_hash != spec.config_hash or store.spec.n_layers != spec.n_layers:
        raise CrispError(
            f"{store.path}: is a store of {store.spec.name}, not of the model {folder}"
        )
    if store.origin != "checkpoint":
        raise CrispError(f"{store.path}: holds random weights, not those of {folder}")
    return spec


def _same_weights(checkpoint: Checkpoint, store: Store, verify: bool, progress: Progress) -> None:
    """Raise CrispError if the folder's weights are seen not to be those that were packed."""
    folder = checkpoint.folder
    refused = CrispError(f"{store.path}: was packed from other weights than those in {folder}")
    metadata = Metadata.load(folder / FILE) if (folder / FILE).exists() else None
    if metadata is not None and metadata.weights != store.weights:
        raise refused
    if verify and weights_digest(folder, progress) != store.weights:
        raise refused
    layout, activation = locate_experts(folder, store.spec)
    if str(activation) != store.activation:
        raise refused
    hashed, layers = import_extra("xxhash").xxh3_64_intdigest, store.spec.moe_layers
    fit = None
    if store.fitted:  # else it was packed before there were moments
        moments = None if metadata is None else metadata.moments()
        if moments is None:
            raise refused
        fit = ScaleFit(moments)
    for row in sorted({0, len(layers) - 1}):
        with expert_source(checkpoint, layout, no_progress) as reader:
            blocks = encode_blocks(reader, store.spec, layers[row], store.dtype, fit)
            hashes = [hashed(block.data) for block in islice(blocks, store.spec.n_blocks)]
        if hashes != store.hashes(row)[0].tolist():
            raise refused


def _forget(checkpoint: Checkpoint) -> None:
    """Drop the files from the page cache, which is memory, too."""
    for shard in checkpoint.shards:
        with (checkpoint.folder / shard).open("rb") as file:
            os.posix_fadvise(file.fileno(), 0, 0, os.POSIX_FADV_DONTNEED)


def _read_ahead(checkpoint: Checkpoint, mapped: Iterable[TensorEntry]) -> None:
    """Have the system begin to read the tensors that are mapped."""
    with ExitStack() as stack:
        files = {
            shard: stack.enter_context((checkpoint.folder / shard).open("rb")).fileno()
            for shard in checkpoint.shards
        }
        for tensor in mapped:
            place = files[tensor.shard], tensor.offset, tensor.nbytes
            os.posix_fadvise(*place, os.POSIX_FADV_WILLNEED)


def _down_bias(module: Any) -> Any:
    """Return the down projections' biases, float32 [experts, d_model]; None: there are none."""
    bias = getattr(module, "down_proj_bias", None)
    return None if bias is None else bias.detach().float()
