"""A checkpoint in safetensors, known from its headers: where each tensor lies, none of it loaded.

The folder holds ``model.safetensors``, or the shards that ``model.safetensors.index.json`` names,
as transformers writes and reads them.
"""

from __future__ import annotations

import hashlib
import json
from collections.abc import Callable, Iterable, Mapping
from contextlib import closing
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from safetensors import SafetensorError, safe_open

from crisp.checkpoint.streaming import Source, drained, parallel, plain
from crisp.errors import CrispError
from crisp.files import check_readable
from crisp.profile.metadata import FILE

SINGLE, INDEX = "model.safetensors", "model.safetensors.index.json"
PICKLED = (".bin", ".pt", ".pth", ".ckpt")


@dataclass(frozen=True)
class Tensor:
    """A tensor of the checkpoint: ``offset`` is where its bytes begin in the file ``shard``.

    ``dtype`` is spelled as in the header (``BF16``).
    """

    name: str
    shard: str
    dtype: str
    shape: tuple[int, ...]
    offset: int
    nbytes: int


@dataclass(frozen=True, eq=False)
class Checkpoint:
    """The weights in ``folder``: file names of its shards, of their index (None without), and all
    tensors by name, each shard's in the order of their bytes.
    """

    folder: Path
    shards: tuple[str, ...]
    index: str | None
    tensors: Mapping[str, Tensor]

    def within(self, shard: str) -> list[Tensor]:
        """The tensors of one shard, in the order of their bytes."""
        return [tensor for tensor in self.tensors.values() if tensor.shard == shard]

    def where(self, name: str) -> str:
        """The place of a tensor, for messages."""
        return f"{self.folder / self.tensors[name].shard}: tensor {name!r}"


def open_checkpoint(folder: str | Path) -> Checkpoint:
    """The checkpoint in ``folder``; only headers are read.

    Raises CrispError, naming file and tensor, if the folder has no weights in safetensors, lacks a
    shard or a tensor that the index names, holds one that it does not name, is cut off, or if its
    config says that the weights are quantised.
    """
    found = _headers(Path(folder))
    path = found.folder / "config.json"
    quantisation = _read_json(path).get("quantization_config")
    if quantisation is not None:
        method = quantisation.get("quant_method") if isinstance(quantisation, dict) else None
        raise quantised(str(path), f"quantization_config {method or 'of no named method'}")
    return found


def quantised(where: str, what: str) -> CrispError:
    """The error for weights that are not plain floating-point numbers."""
    return CrispError(
        f"{where}: {what}: quantised; only bf16/fp16/fp32 checkpoints can be prepared"
    )


def refuse_prepared(folder: str | Path) -> None:
    """Raise CrispError if the model in ``folder`` has been prepared already."""
    path = Path(folder) / FILE
    if path.exists():
        raise CrispError(f"{folder}: is prepared already ({FILE} is there)")


def weights_digest(folder: str | Path, progress: Callable[[int, int], None] | None = None) -> str:
    """What identifies the weights in ``folder``, however they are spread over shards.

    sha256, in hex, over (name, dtype, shape, XXH3 of the bytes) of all tensors by name.
    ``progress(done, total)`` counts bytes. Reads every weight; raises CrispError as
    ``open_checkpoint`` does, but asks no config.
    """
    found = _headers(Path(folder))
    total, done = sum(tensor.nbytes for tensor in found.tensors.values()), 0
    sums: dict[str, str] = {}
    for shard in found.shards:
        tensors = found.within(shard)
        with Source(found.folder / shard) as source:

            def digest(tensor: Tensor, source: Source = source) -> str:
                return drained(plain(source, tensor.offset, tensor.nbytes))

            with closing(parallel(digest, tensors)) as results:
                for tensor, own in zip(tensors, results, strict=True):
                    sums[tensor.name] = own
                    done += tensor.nbytes
                    if progress is not None:
                        progress(done, total)
    return combined(found.tensors.values(), sums)


def combined(tensors: Iterable[Tensor], sums: Mapping[str, str]) -> str:
    """``weights_digest`` from the hash of each tensor's bytes."""
    whole = hashlib.sha256()
    for tensor in sorted(tensors, key=lambda tensor: tensor.name):
        entry = [tensor.name, tensor.dtype, list(tensor.shape), sums[tensor.name]]
        whole.update(json.dumps(entry).encode() + b"\n")
    return whole.hexdigest()


def _headers(folder: Path) -> Checkpoint:
    if not folder.is_dir():
        raise CrispError(f"{folder}: is no folder; one with a transformers checkpoint was expected")
    single, index = folder / SINGLE, folder / INDEX
    if single.exists() and index.exists():
        raise CrispError(f"{folder}: has both {SINGLE} and {INDEX}; one of them was expected")
    if single.exists():
        return Checkpoint(folder, (SINGLE,), None, {x.name: x for x in _header(folder, SINGLE)})
    if not index.exists():
        pickled = sorted(path.name for path in folder.iterdir() if path.suffix in PICKLED)
        has = f"has only pickled weights ({pickled[0]})" if pickled else "has no weights"
        raise CrispError(f"{folder}: {has}; {SINGLE} or {INDEX} was expected")
    return _sharded(folder, _weight_map(index))


def _weight_map(path: Path) -> dict[str, str]:
    """Tensor name -> file name, as the index says."""
    named = _read_json(path).get("weight_map")
    if not isinstance(named, dict) or not named:
        raise CrispError(f"{path}: has no weight_map; the file of each tensor was expected")
    for name, shard in named.items():
        if not isinstance(shard, str) or Path(shard).name != shard or shard == FILE:
            raise CrispError(f"{path}: places {name!r} in {shard!r}; a file beside it was expected")
    return named


def _sharded(folder: Path, named: dict[str, str]) -> Checkpoint:
    shards = tuple(sorted(set(named.values())))
    tensors: dict[str, Tensor] = {}
    for shard in shards:
        expected = {name for name, place in named.items() if place == shard}
        if not (folder / shard).exists():
            raise CrispError(
                f"{folder / shard}: is missing; {INDEX} places {len(expected)} tensors there, "
                f"such as {min(expected)!r}"
            )
        held = {tensor.name: tensor for tensor in _header(folder, shard)}
        for name in sorted(expected - held.keys()):
            raise CrispError(f"{folder / shard}: lacks {name!r}, which {INDEX} places there")
        for name in sorted(held.keys() - expected):
            raise CrispError(
                f"{folder / shard}: holds {name!r}, which {INDEX} does not place there"
            )
        tensors |= held
    return Checkpoint(folder, shards, INDEX, tensors)


def _header(folder: Path, shard: str) -> list[Tensor]:
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
        reason = " ".join(str(error).split())
        raise CrispError(f"{path}: is not a whole safetensors file ({reason})") from error
    entries.pop("__metadata__", None)
    tensors = []
    for name, entry in entries.items():
        begin, end = entry["data_offsets"]
        shape = tuple(entry["shape"])
        tensors.append(Tensor(name, shard, entry["dtype"], shape, 8 + size + begin, end - begin))
    return sorted(tensors, key=lambda tensor: tensor.offset)


def _read_json(path: Path) -> dict[str, Any]:
    try:
        content = json.loads(path.read_bytes())
    except FileNotFoundError as error:
        raise CrispError(f"{path}: is missing") from error
    except (OSError, ValueError, RecursionError) as error:
        raise CrispError(f"{path}: is no JSON file ({error})") from error
    if not isinstance(content, dict):
        raise CrispError(f"{path}: is no JSON object; one was expected")
    return content
