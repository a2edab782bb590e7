"""The safetensors files of a checkpoint: their headers, which say where each tensor lies.

The folder holds ``model.safetensors``, or the shards that ``model.safetensors.index.json`` names,
as transformers writes and reads them. No tensor is loaded here.
"""

from __future__ import annotations

import hashlib
import json
import re
from collections.abc import Iterable, Mapping
from contextlib import closing
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from safetensors import SafetensorError, safe_open

from crisp.checkpoint.streaming import ByteSource, hash_tiles, map_in_threads, read_tiles
from crisp.errors import CrispError, reason_of
from crisp.files import check_readable
from crisp.profile.metadata import FILE
from crisp.progress import Progress, counter, no_progress

SINGLE, INDEX = "model.safetensors", "model.safetensors.index.json"
_OTHER_PARTS = re.compile(r"(^|\.)(vision|visual|vit|image|audio|multi_modal_|mm_)[a-z_]*\.")
PICKLED = (".bin", ".pt", ".pth", ".ckpt")


@dataclass(frozen=True)
class TensorEntry:
    """A tensor of the checkpoint, as the header of its file describes it."""

    name: str
    shard: str  # name of its file
    dtype: str  # spelled as in the header, such as BF16
    shape: tuple[int, ...]
    offset: int  # of its first byte in the file
    nbytes: int


@dataclass(frozen=True, eq=False)
class Checkpoint:
    """The files with the weights of a model."""

    folder: Path
    shards: tuple[str, ...]  # names of the files
    index: str | None  # name of the file that says which shard has which tensor; None: one shard
    tensors: Mapping[str, TensorEntry]  # by name, those of a shard in the order of their bytes

    def tensors_of(self, shard: str) -> list[TensorEntry]:
        """Return the tensors of one shard, in the order of their bytes."""
        return [tensor for tensor in self.tensors.values() if tensor.shard == shard]

    def where(self, name: str) -> str:
        """Return file and name of a tensor, for messages."""
        return f"{self.folder / self.tensors[name].shard}: tensor {name!r}"


def open_checkpoint(folder: str | Path) -> Checkpoint:
    """Read the headers of the checkpoint in ``folder``, quantised or not, as its files have it.

    Raises CrispError, naming file and tensor, if the folder has no weights in safetensors, lacks a
    shard or a tensor that the index names, holds one that it does not name, or is cut off.
    """
    folder = Path(folder)
    if not folder.is_dir():
        raise CrispError(f"{folder}: is no folder; one with a transformers checkpoint was expected")
    single, index = folder / SINGLE, folder / INDEX
    if single.exists() and index.exists():
        raise CrispError(f"{folder}: has both {SINGLE} and {INDEX}; one of them was expected")
    if single.exists():
        return Checkpoint(
            folder, (SINGLE,), None, {x.name: x for x in _read_header(folder, SINGLE)}
        )
    if not index.exists():
        pickled = sorted(path.name for path in folder.iterdir() if path.suffix in PICKLED)
        has = f"has only pickled weights ({pickled[0]})" if pickled else "has no weights"
        gguf = sorted(path.name for path in folder.iterdir() if path.suffix == ".gguf")
        if gguf:
            has = f"has only a GGUF file ({gguf[0]}), which crisp pack reads and this does not"
        raise CrispError(f"{folder}: {has}; {SINGLE} or {INDEX} was expected")
    return _read_sharded(folder, _read_weight_map(index))


def is_other_part(name: str) -> bool:
    """Return whether a tensor is of a part of a model that reads images or sound, not text.

    >>> is_other_part("model.visual.blocks.0.attn.qkv.weight")
    True
    >>> is_other_part("model.layers.0.mlp.experts.down_proj")
    False
    """
    return _OTHER_PARTS.search(name) is not None


def refuse_prepared(folder: str | Path) -> None:
    """Raise CrispError if the model in ``folder`` has been prepared already."""
    path = Path(folder) / FILE
    if path.exists():
        raise CrispError(f"{folder}: is prepared already ({FILE} is there)")


def weights_digest(folder: str | Path, progress: Progress = no_progress) -> str:
    """Return a hash of the weights in ``folder`` that does not depend on their shards.

    It is the sha256, in hex, over (name, dtype, shape, XXH3 of the bytes) of all tensors by name.
    Every weight is read; ``progress(done, total)`` counts bytes. Raises CrispError as
    `open_checkpoint` does.
    """
    checkpoint = open_checkpoint(folder)
    advance = counter(progress, sum(tensor.nbytes for tensor in checkpoint.tensors.values()))
    hashes: dict[str, str] = {}
    for shard in checkpoint.shards:
        tensors = checkpoint.tensors_of(shard)
        with ByteSource(checkpoint.folder / shard) as source:

            def digest(tensor: TensorEntry, source: ByteSource = source) -> str:
                return hash_tiles(read_tiles(source, tensor.offset, tensor.nbytes))

            with closing(map_in_threads(digest, tensors)) as results:
                for tensor, result in zip(tensors, results, strict=True):
                    hashes[tensor.name] = result
                    advance(tensor.nbytes)
    return combine_digests(checkpoint.tensors.values(), hashes)


def combine_digests(tensors: Iterable[TensorEntry], hashes: Mapping[str, str]) -> str:
    """Return `weights_digest` from the XXH3 of each tensor's bytes, by name."""
    whole = hashlib.sha256()
    for tensor in sorted(tensors, key=lambda tensor: tensor.name):
        entry = [tensor.name, tensor.dtype, list(tensor.shape), hashes[tensor.name]]
        whole.update(json.dumps(entry).encode() + b"\n")
    return whole.hexdigest()


def _read_weight_map(path: Path) -> dict[str, str]:
    """Return the file name of each tensor, as the index says."""
    weight_map = _read_json(path).get("weight_map")
    if not isinstance(weight_map, dict) or not weight_map:
        raise CrispError(f"{path}: has no weight_map; the file of each tensor was expected")
    for name, shard in weight_map.items():
        if not isinstance(shard, str) or Path(shard).name != shard or shard == FILE:
            raise CrispError(f"{path}: places {name!r} in {shard!r}; a file beside it was expected")
    return weight_map


def _read_sharded(folder: Path, weight_map: dict[str, str]) -> Checkpoint:
    shards = tuple(sorted(set(weight_map.values())))
    tensors: dict[str, TensorEntry] = {}
    for shard in shards:
        expected = {name for name, file in weight_map.items() if file == shard}
        if not (folder / shard).exists():
            raise CrispError(
                f"{folder / shard}: is missing; {INDEX} places {len(expected)} tensors there, "
                f"such as {min(expected)!r}"
            )
        in_file = {tensor.name: tensor for tensor in _read_header(folder, shard)}
        for name in sorted(expected - in_file.keys()):
            raise CrispError(f"{folder / shard}: lacks {name!r}, which {INDEX} places there")
        for name in sorted(in_file.keys() - expected):
            raise CrispError(
                f"{folder / shard}: holds {name!r}, which {INDEX} does not place there"
            )
        tensors |= in_file
    return Checkpoint(folder, shards, INDEX, tensors)


def _read_header(folder: Path, shard: str) -> list[TensorEntry]:
    """Return the tensors of a file in the order of their bytes; CrispError if it is not whole."""
    path = folder / shard
    if not path.is_file():
        raise CrispError(f"{path}: is not a file; a safetensors file was expected")
    check_readable(path)
    try:
        with safe_open(path, framework="numpy"):  # its parser refuses hostile headers
            pass
        with path.open("rb") as file:
            size = int.from_bytes(file.read(8), "little")
            entries = json.loads(file.read(size))
    except (SafetensorError, OSError) as error:
        raise CrispError(f"{path}: is not a whole safetensors file ({reason_of(error)})") from error
    entries.pop("__metadata__", None)
    tensors = []
    for name, entry in entries.items():
        begin, end = entry["data_offsets"]
        shape = tuple(entry["shape"])
        tensors.append(
            TensorEntry(name, shard, entry["dtype"], shape, 8 + size + begin, end - begin)
        )
    return sorted(tensors, key=lambda tensor: tensor.offset)


def _read_json(path: Path) -> dict[str, Any]:
    """Return the object in a JSON file; CrispError for anything else."""
    try:
        content = json.loads(path.read_bytes())
    except FileNotFoundError as error:
        raise CrispError(f"{path}: is missing") from error
    except (OSError, ValueError, RecursionError) as error:
        raise CrispError(f"{path}: is no JSON file ({reason_of(error)})") from error
    if not isinstance(content, dict):
        raise CrispError(f"{path}: is no JSON object; one was expected")
    return content
