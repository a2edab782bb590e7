"""Reordering of neurons inside a checkpoint (paper, 3.2.3, Eq. 3).

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

from crisp.adapter import ExpertLayout
from crisp.checkpoint.expert_tensors import ExpertTensor, expert_tensors
from crisp.checkpoint.files import (
    Checkpoint,
    TensorEntry,
    combine_digests,
    refuse_prepared,
)
from crisp.checkpoint.quantised import DecodedCheckpoint, open_any
from crisp.checkpoint.streaming import (
    TILE,
    ByteSource,
    Tiles,
    hash_tiles,
    map_in_threads,
    open_new_file,
    read_tiles,
)
from crisp.errors import CrispError
from crisp.files import atomic
from crisp.prepare.quantised_reorder import QuantisedTiles, check_runs, neuron_runs
from crisp.progress import Progress, counter, no_progress

Order = NDArray[np.intp]
"""[experts, d_ff]: at each place of a new expert the neuron of the old one."""
Hashes = dict[str, str]
"""Tensor name -> XXH3 of its bytes, in hex."""

SYNC = 1 << 26  # bytes between two flushes to the disk, which run beside the work on the next

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
    layout: ExpertLayout,
    *,
    progress: Progress = no_progress,
    done: Path | None = None,
) -> str:
    """Write the checkpoint in ``source`` to the existing folder ``out``, its neurons reordered.

    permutations: decoder layer -> integers [experts, d_ff], for every MoE layer of ``layout`` (see
    `expert_tensors`): neuron n of the new expert is neuron ``permutation[n]`` of the old one.
    Returns ``weights_digest(out)``, computed on the way. ``progress(done, total)`` counts bytes.

    A file appears under its name when it is complete and on the disk; config and tokenizer come
    after the weights. ``done`` names a file that records finished shards and that the caller
    removes: called again with the same arguments, those shards are not written again. Of another
    source or other permutations it is ignored.

    Raises CrispError for all that `open_checkpoint` and `expert_tensors` do not understand, a
    model prepared already, NaN or infinite weights of experts, and a full disk. A quantised one
    stays in its format, whose runs of neurons the permutations have to keep (see
    `crisp.prepare.quantised_reorder`).
    """
    folder = Path(out)
    checkpoint = open_any(source)
    refuse_prepared(source)
    if folder.resolve() == checkpoint.folder.resolve():
        raise CrispError(f"{out}: is the checkpoint itself; another folder was expected")
    neurons = expert_tensors(checkpoint, layout)
    orders, quantised = _checked_orders(permutations, neurons), None
    if isinstance(checkpoint, DecodedCheckpoint):
        check_runs(orders, neuron_runs(checkpoint, neurons))
        quantised = QuantisedTiles(checkpoint, neurons, orders)
        checkpoint = checkpoint.stored
    job = _Job(checkpoint, neurons, orders, quantised)
    key = job.fingerprint()
    finished = {} if done is None else _finished_shards(done, key, job, folder)
    total = sum(tensor.nbytes for tensor in checkpoint.tensors.values())
    advance = counter(progress, total)
    for shard in checkpoint.shards:
        if shard in finished:
            advance(sum(tensor.nbytes for tensor in checkpoint.tensors_of(shard)))
            continue
        finished[shard] = job.write(shard, folder / shard, advance)
        if done is not None:
            with atomic(done) as temporary:
                temporary.write_text(json.dumps({"job": key, "shards": finished}))
    copy_others(checkpoint, folder)
    if quantised is not None:
        quantised.adapt_config(folder)
    hashes = {name: digest for shard in finished.values() for name, digest in shard.items()}
    return combine_digests(checkpoint.tensors.values(), hashes)


def _checked_orders(
    permutations: Mapping[int, NDArray[np.integer]], neurons: Mapping[str, ExpertTensor]
) -> dict[int, Order]:
    """Return the permutations as indices; CrispError if they are not those of these experts."""
    shapes: dict[int, tuple[int, int]] = {}  # by layer: experts, d_ff
    for tensor in neurons.values():
        experts, _ = shapes.get(tensor.layer, (0, 0))
        shapes[tensor.layer] = max(experts, tensor.first + tensor.count), tensor.d_ff
    if set(permutations) != set(shapes):
        raise CrispError(
            f"permutations are of layers {sorted(permutations)}; {sorted(shapes)} were expected"
        )
    for layer, (experts, d_ff) in shapes.items():
        order = permutations[layer]
        if order.shape != (experts, d_ff) or (np.sort(order, axis=1) != np.arange(d_ff)).any():
            raise CrispError(
                f"layer {layer}: a permutation of {d_ff} neurons for each of {experts} experts "
                "was expected"
            )
    return {layer: order.astype(np.intp) for layer, order in permutations.items()}


@dataclass(frozen=True, eq=False)
class _Job:
    """A checkpoint, where its neurons are, and their new order."""

    checkpoint: Checkpoint
    neurons: Mapping[str, ExpertTensor]  # by tensor name
    orders: Mapping[int, Order]  # by decoder layer
    quantised: QuantisedTiles | None = None  # streams the tensors of quantised weights

    def fingerprint(self) -> str:
        """Return a hash that stays the same for the same job on unchanged files."""
        folder = self.checkpoint.folder
        stats = [(folder / shard).stat() for shard in self.checkpoint.shards]
        files = [[stat.st_size, stat.st_mtime_ns] for stat in stats]
        digest = hashlib.sha256(json.dumps([str(folder.resolve()), files]).encode())
        for layer, order in sorted(self.orders.items()):
            digest.update(f"{layer} {order.shape}".encode() + order.astype("<i8").tobytes())
        return digest.hexdigest()

    def write(self, shard: str, path: Path, advance: Callable[[int], None]) -> Hashes:
        """Write one shard; return its tensors' hashes. ``advance(nbytes)`` is called on the way."""
        for stale in path.parent.glob(f".{glob.escape(path.name)}.*.part"):
            stale.unlink()  # of a run that was killed
        tensors = self.checkpoint.tensors_of(shard)
        size = (self.checkpoint.folder / shard).stat().st_size
        hashes: Hashes = {}
        with (
            ByteSource(self.checkpoint.folder / shard) as source,
            atomic(path) as temporary,
            open_new_file(temporary) as file,
        ):
            os.posix_fallocate(file, 0, size)  # a full disk is found now, not in an hour
            header = tensors[0].offset if tensors else size
            hash_tiles(read_tiles(source, 0, header), file)

            def copy(tensor: TensorEntry) -> str:
                return hash_tiles(self._tiles(source, tensor), file, tensor.offset)

            unsynced = 0
            with closing(map_in_threads(copy, tensors)) as results:
                for tensor, digest in zip(tensors, results, strict=True):
                    hashes[tensor.name] = digest
                    advance(tensor.nbytes)
                    unsynced += tensor.nbytes
                    if unsynced >= SYNC:
                        os.fdatasync(file)
                        unsynced = 0
            os.fsync(file)
        return hashes

    def _tiles(self, source: ByteSource, tensor: TensorEntry) -> Tiles:
        """Return the bytes of a tensor, those of experts with their neurons reordered."""
        if self.quantised is not None and self.quantised.covers(tensor):
            return self.quantised.tiles(source, tensor)
        neurons = self.neurons.get(tensor.name)
        if neurons is None:
            return read_tiles(source, tensor.offset, tensor.nbytes)
        orders = self.orders[neurons.layer][neurons.first : neurons.first + neurons.count]
        return _reordered_tiles(source, tensor, neurons, orders, self.checkpoint.where(tensor.name))


def _reordered_tiles(
    source: ByteSource, tensor: TensorEntry, neurons: ExpertTensor, orders: Order, where: str
) -> Tiles:
    """Yield the bytes of a tensor [count, outer, d_ff, inner] with its axis d_ff reordered.

    Tiles are [rows, neurons, inner] of unsigned integers as wide as the tensor's numbers. orders
    [count, d_ff]; where: the tensor's name in errors.
    """
    mask = _EXPONENT[tensor.dtype]
    item = neurons.inner * mask.itemsize
    # A few rows of neurons at a time where they are short; a long one whole, and cut into tiles.
    rows = min(neurons.outer, max(1, TILE // (neurons.d_ff * item)))
    step = min(neurons.d_ff, max(1, TILE // (rows * item)))
    block = _scratch.array("block", (rows, neurons.d_ff, neurons.inner), mask.dtype)
    tiles = [_scratch.array(x, (rows, step, neurons.inner), mask.dtype) for x in ("tile", "bits")]
    offset = tensor.offset
    for expert, order in enumerate(orders, neurons.first):
        for begin in range(0, neurons.outer, rows):
            part = block[: neurons.outer - begin]  # [rows, d_ff, inner]
            source.read(part, offset)
            offset += part.nbytes
            for first in range(0, neurons.d_ff, step):
                chosen = order[first : first + step]
                tile, bits = (x[: len(part), : len(chosen)] for x in tiles)
                # With "clip" numpy writes into `tile` directly; the order is in range.
                np.take(part, chosen, axis=1, out=tile, mode="clip")
                if np.bitwise_and(tile, mask, out=bits).max() == mask:
                    raise CrispError(
                        f"{where}: expert {expert} has NaN or infinite weights; "
                        "finite ones were expected"
                    )
                yield tile


class _Scratch(local):
    """Buffers that each thread keeps: new memory would cost as much as copying into it."""

    def __init__(self) -> None:
        self._buffers: dict[str, NDArray[np.uint8]] = {}

    def array(
        self, name: str, shape: tuple[int, ...], dtype: np.dtype[np.unsignedinteger]
    ) -> NDArray[np.unsignedinteger]:
        """Return the buffer ``name`` as an array with undefined contents."""
        nbytes = int(np.prod(shape)) * dtype.itemsize
        buffer = self._buffers.get(name)
        if buffer is None or buffer.nbytes < nbytes:
            buffer = self._buffers[name] = np.empty(nbytes, np.uint8)
        return buffer[:nbytes].view(dtype).reshape(shape)


_scratch = _Scratch()


def _finished_shards(done: Path, key: str, job: _Job, folder: Path) -> dict[str, Hashes]:
    """Return the hashes of shards that ``done`` calls finished by this job and that still exist."""
    try:
        content = json.loads(done.read_bytes())
        shards = content["shards"] if content["job"] == key else {}
    except (OSError, ValueError, KeyError, TypeError):
        return {}
    sizes = {x: (job.checkpoint.folder / x).stat().st_size for x in job.checkpoint.shards}
    present = {
        x for x in sizes if (folder / x).is_file() and (folder / x).stat().st_size == sizes[x]
    }
    return {shard: hashes for shard, hashes in shards.items() if shard in present}


def copy_others(checkpoint: Checkpoint, out: Path) -> None:
    """Copy everything but weights: index, config, tokenizer; no hidden files, no README."""
    for path in sorted(checkpoint.folder.rglob("*")):
        relative = path.relative_to(checkpoint.folder)
        is_index = relative.name == str(relative) == checkpoint.index
        if path.name.endswith(WEIGHTS) and not is_index:
            continue
        if not path.is_file() or any(part.startswith(".") for part in relative.parts):
            continue
        if str(relative) == "README.md":  # it describes other weights
            continue
        if path.resolve().is_relative_to(out.resolve()):
            continue
        (out / relative).parent.mkdir(exist_ok=True, parents=True)
        with (
            ByteSource(path) as source,
            atomic(out / relative) as temporary,
            open_new_file(temporary) as file,
        ):
            hash_tiles(read_tiles(source, 0, path.stat().st_size), file)
