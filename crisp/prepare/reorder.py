"""Neurons put into another order inside a checkpoint (paper, 3.2.3, Eq. 3).

What is written has the same files, names, shapes, types and headers as the original; a shard is
streamed tensor by tensor, so that memory holds a few experts' matrices whatever the model's size.
"""

from __future__ import annotations

import glob
import hashlib
import json
import os
from collections.abc import Callable, Mapping
from contextlib import closing
from dataclasses import dataclass
from pathlib import Path
from threading import local

import numpy as np
from numpy.typing import NDArray

from crisp.adapter import Layout
from crisp.checkpoint.experts import ExpertTensor, expert_tensors
from crisp.checkpoint.files import Checkpoint, Tensor, combined, open_checkpoint, refuse_prepared
from crisp.checkpoint.streaming import TILE, Source, Tiles, drained, parallel, plain, writing
from crisp.errors import CrispError
from crisp.files import atomic

Progress = Callable[[int, int], None]
Order = NDArray[np.intp]
Sums = dict[str, str]

SYNC = 1 << 26  # bytes after which they are sent to the disk, while the next ones are worked on

# Weights in other formats are not copied: they would be those of the old order.
WEIGHTS = (
    ".safetensors", ".index.json", ".bin", ".pt", ".pth", ".ckpt", ".gguf", ".h5", ".msgpack",
    ".onnx", ".onnx_data", ".ot", ".npz", ".tflite",
)  # fmt: skip

# The bits of a number's exponent, all of which are set in NaN and infinity alone.
_EXPONENT: dict[str, np.unsignedinteger] = {
    "BF16": np.uint16(0x7F80),
    "F16": np.uint16(0x7C00),
    "F32": np.uint32(0x7F800000),
    "F64": np.uint64(0x7FF0000000000000),
}


def reorder(
    source: str | Path,
    out: str | Path,
    permutations: Mapping[int, NDArray[np.integer]],
    found: Layout,
    *,
    progress: Progress | None = None,
    done: Path | None = None,
) -> str:
    """Write the checkpoint in ``source`` to the existing folder ``out``, its neurons reordered.

    permutations: decoder layer -> integers [experts, d_ff], for every MoE layer of ``found`` (see
    ``expert_tensors``): neuron n of the new expert is neuron ``permutation[n]`` of the old one.
    Returns ``weights_digest(out)``, computed on the way. ``progress(done, total)`` counts bytes.

    A file appears under its name when it is complete and on the disk; config and tokenizer come
    after the weights. ``done`` names a file that remembers finished shards, the caller's to remove:
    called again with the same arguments, those are not written again; it is void for another source
    or other permutations.

    Raises CrispError for all that ``open_checkpoint`` and ``expert_tensors`` do not understand, a
    model prepared already, NaN or infinite weights of experts, and a full disk.
    """
    folder = Path(out)
    checkpoint = open_checkpoint(source)
    refuse_prepared(source)
    if folder.resolve() == checkpoint.folder.resolve():
        raise CrispError(f"{out}: is the checkpoint itself; another folder was expected")
    places = expert_tensors(checkpoint, found)
    job = _Job(checkpoint, places, _checked(permutations, places))
    key = job.fingerprint()
    finished = {} if done is None else _remembered(done, key, job, folder)
    total = sum(tensor.nbytes for tensor in checkpoint.tensors.values())
    ready = 0

    def advance(nbytes: int) -> None:
        nonlocal ready
        ready += nbytes
        if progress is not None:
            progress(ready, total)

    for shard in checkpoint.shards:
        if shard in finished:
            advance(sum(tensor.nbytes for tensor in checkpoint.within(shard)))
            continue
        finished[shard] = job.write(shard, folder / shard, advance)
        if done is not None:
            with atomic(done) as temporary:
                temporary.write_text(json.dumps({"job": key, "shards": finished}))
    _copy_others(checkpoint, folder)
    every = {name: own for sums in finished.values() for name, own in sums.items()}
    return combined(checkpoint.tensors.values(), every)


def _checked(
    permutations: Mapping[int, NDArray[np.integer]], places: Mapping[str, ExpertTensor]
) -> dict[int, Order]:
    """The permutations as indices; CrispError if they are not those of these experts."""
    shapes: dict[int, tuple[int, int]] = {}
    for place in places.values():
        experts, _ = shapes.get(place.layer, (0, 0))
        shapes[place.layer] = max(experts, place.first + place.count), place.d_ff
    if set(permutations) != set(shapes):
        raise CrispError(
            f"permutations are of layers {sorted(permutations)}; {sorted(shapes)} were expected"
        )
    for layer, (experts, d_ff) in shapes.items():
        given = permutations[layer]
        if given.shape != (experts, d_ff) or (np.sort(given, axis=1) != np.arange(d_ff)).any():
            raise CrispError(
                f"layer {layer}: a permutation of {d_ff} neurons for each of {experts} experts "
                "was expected"
            )
    return {layer: given.astype(np.intp) for layer, given in permutations.items()}


@dataclass(frozen=True, eq=False)
class _Job:
    """A checkpoint, where its neurons are, and their new order."""

    checkpoint: Checkpoint
    places: Mapping[str, ExpertTensor]
    orders: Mapping[int, Order]

    def fingerprint(self) -> str:
        """The same for the same job on unchanged files."""
        folder = self.checkpoint.folder
        stats = [(folder / shard).stat() for shard in self.checkpoint.shards]
        files = [[x.st_size, x.st_mtime_ns] for x in stats]
        digest = hashlib.sha256(json.dumps([str(folder.resolve()), files]).encode())
        for layer, order in sorted(self.orders.items()):
            digest.update(f"{layer} {order.shape}".encode() + order.astype("<i8").tobytes())
        return digest.hexdigest()

    def write(self, shard: str, path: Path, advance: Callable[[int], None]) -> Sums:
        """Write one shard; the hash of each tensor's bytes in it. ``advance`` gets bytes done."""
        for stale in path.parent.glob(f".{glob.escape(path.name)}.*.part"):
            stale.unlink()  # of a run that was killed
        tensors = self.checkpoint.within(shard)
        size = (self.checkpoint.folder / shard).stat().st_size
        sums: Sums = {}
        with (
            Source(self.checkpoint.folder / shard) as source,
            atomic(path) as temporary,
            writing(temporary) as file,
        ):
            os.posix_fallocate(file, 0, size)  # a full disk is found now, not in an hour
            header = tensors[0].offset if tensors else size
            drained(plain(source, 0, header), file)

            def pass_on(tensor: Tensor) -> str:
                return drained(self._tiles(source, tensor), file, tensor.offset)

            waiting = 0
            with closing(parallel(pass_on, tensors)) as results:
                for tensor, own in zip(tensors, results, strict=True):
                    sums[tensor.name] = own
                    advance(tensor.nbytes)
                    waiting += tensor.nbytes
                    if waiting >= SYNC:
                        os.fdatasync(file)
                        waiting = 0
            os.fsync(file)
        return sums

    def _tiles(self, source: Source, tensor: Tensor) -> Tiles:
        place = self.places.get(tensor.name)
        if place is None:
            return plain(source, tensor.offset, tensor.nbytes)
        orders = self.orders[place.layer][place.first : place.first + place.count]
        return _permuted(source, tensor, place, orders, self.checkpoint.where(tensor.name))


def _permuted(
    source: Source, tensor: Tensor, place: ExpertTensor, orders: Order, where: str
) -> Tiles:
    """The bytes of [count, outer, d_ff, inner] with d_ff reordered; valid until the next tile."""
    mask = _EXPONENT[tensor.dtype]
    item = place.inner * mask.itemsize
    # A few rows of neurons at a time where they are short; a long one whole, and cut into tiles.
    rows = min(place.outer, max(1, TILE // (place.d_ff * item)))
    step = min(place.d_ff, max(1, TILE // (rows * item)))
    block = _scratch.array("block", (rows, place.d_ff, place.inner), mask.dtype)
    tiles = [_scratch.array(x, (rows, step, place.inner), mask.dtype) for x in ("tile", "bits")]
    offset = tensor.offset
    for expert, order in enumerate(orders, place.first):
        for begin in range(0, place.outer, rows):
            own = block[: place.outer - begin]
            source.read(own, offset)
            offset += own.nbytes
            for first in range(0, place.d_ff, step):
                some = order[first : first + step]
                tile, bits = (x[: len(own), : len(some)] for x in tiles)
                # With "clip" numpy writes into `tile` directly; the order is in range.
                np.take(own, some, axis=1, out=tile, mode="clip")
                if np.bitwise_and(tile, mask, out=bits).max() == mask:
                    raise CrispError(
                        f"{where}: expert {expert} has NaN or infinite weights; "
                        "finite ones were expected"
                    )
                yield tile


class _Scratch(local):
    """Memory that each thread keeps: fresh pages would cost as much as copying into them."""

    def __init__(self) -> None:
        self._buffers: dict[str, NDArray[np.uint8]] = {}

    def array(
        self, name: str, shape: tuple[int, ...], dtype: np.dtype[np.unsignedinteger]
    ) -> NDArray[np.unsignedinteger]:
        nbytes = int(np.prod(shape)) * dtype.itemsize
        buffer = self._buffers.get(name)
        if buffer is None or buffer.nbytes < nbytes:
            buffer = self._buffers[name] = np.empty(nbytes, np.uint8)
        return buffer[:nbytes].view(dtype).reshape(shape)


_scratch = _Scratch()


def _remembered(done: Path, key: str, job: _Job, folder: Path) -> dict[str, Sums]:
    """The shards that ``done`` says this job has finished and that are still there."""
    try:
        content = json.loads(done.read_bytes())
        shards = content["shards"] if content["job"] == key else {}
    except (OSError, ValueError, KeyError, TypeError):
        return {}
    sizes = {x: (job.checkpoint.folder / x).stat().st_size for x in job.checkpoint.shards}
    there = {x for x in sizes if (folder / x).is_file() and (folder / x).stat().st_size == sizes[x]}
    return {shard: sums for shard, sums in shards.items() if shard in there}


def _copy_others(checkpoint: Checkpoint, out: Path) -> None:
    """Everything else in the folder: index, config, tokenizer; no hidden files, no README."""
    for path in sorted(checkpoint.folder.rglob("*")):
        relative = path.relative_to(checkpoint.folder)
        mine = relative.name == str(relative) == checkpoint.index
        if path.name.endswith(WEIGHTS) and not mine:
            continue
        if not path.is_file() or any(part.startswith(".") for part in relative.parts):
            continue
        if str(relative) == "README.md":  # it speaks of other weights
            continue
        if path.resolve().is_relative_to(out.resolve()):
            continue
        (out / relative).parent.mkdir(exist_ok=True, parents=True)
        with (
            Source(path) as source,
            atomic(out / relative) as temporary,
            writing(temporary) as file,
        ):
            drained(plain(source, 0, path.stat().st_size), file)
