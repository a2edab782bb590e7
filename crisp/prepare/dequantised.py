"""A plain copy of a quantised checkpoint: the same weights in bfloat16, and a config without it."""

from __future__ import annotations

import json
import math
import os
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np

from crisp.checkpoint.files import INDEX, TensorEntry
from crisp.checkpoint.quantised import DecodedCheckpoint
from crisp.checkpoint.quantised.view import Decoder
from crisp.checkpoint.streaming import ByteSource, open_new_file, read_tiles
from crisp.extras import import_extra
from crisp.files import atomic
from crisp.model.layouts import QUANTISATION
from crisp.progress import Progress, counter, no_progress


def write_dequantised(
    checkpoint: DecodedCheckpoint, out: Path, progress: Progress = no_progress
) -> None:
    """Write the weights of ``checkpoint`` and its config to the existing folder ``out``.

    Decoded weights become the nearest bfloat16, others stay as they are; shards keep their names.
    Memory holds one expert's matrix. progress: called with (bytes written, in all).
    """
    sizes = {name: _size(checkpoint, entry) for name, entry in checkpoint.tensors.items()}
    advance = counter(progress, sum(sizes.values()))
    with checkpoint.decoder() as decoder:
        for shard in checkpoint.shards:
            entries = sorted(checkpoint.tensors_of(shard), key=lambda entry: entry.name)
            with (
                ByteSource(checkpoint.folder / shard) as source,
                atomic(out / shard) as temporary,
                open_new_file(temporary) as file,
            ):
                offset = _write(file, _header(checkpoint, entries, sizes), 0)
                for entry in entries:
                    for tile in _tiles(checkpoint, decoder, source, entry):
                        offset = _write(file, tile.data.cast("B"), offset)
                        advance(tile.nbytes)
                os.fsync(file)
    if checkpoint.index is not None:
        shards = {name: entry.shard for name, entry in sorted(checkpoint.tensors.items())}
        index = {"metadata": {"total_size": sum(sizes.values())}, "weight_map": shards}
        with atomic(out / INDEX) as temporary:
            temporary.write_text(json.dumps(index, indent=2) + "\n", encoding="utf-8")
    (out / "quantize_config.json").unlink(missing_ok=True)  # GPTQ's other place of its config
    with atomic(out / "config.json") as temporary:
        config = json.loads((checkpoint.folder / "config.json").read_bytes())
        temporary.write_text(json.dumps(_plain(config), indent=2) + "\n", encoding="utf-8")


def _plain(config: dict[str, Any]) -> dict[str, Any]:
    """Return a config that says nothing of quantisation."""
    plain = {key: value for key, value in config.items() if key not in QUANTISATION}
    if isinstance(plain.get("text_config"), dict):
        plain["text_config"] = _plain(plain["text_config"])
    return plain


def _size(checkpoint: DecodedCheckpoint, entry: TensorEntry) -> int:
    """Return the bytes of a tensor in the copy."""
    return 2 * math.prod(entry.shape) if entry.name in checkpoint.weights else entry.nbytes


def _header(
    checkpoint: DecodedCheckpoint, entries: list[TensorEntry], sizes: dict[str, int]
) -> memoryview:
    """Return the beginning of a safetensors file with these tensors."""
    content, begin = dict[str, Any](__metadata__={"format": "pt"}), 0
    for entry in entries:
        end = begin + sizes[entry.name]
        dtype = "BF16" if entry.name in checkpoint.weights else entry.dtype
        content[entry.name] = {"dtype": dtype, "shape": entry.shape, "data_offsets": [begin, end]}
        begin = end
    text = json.dumps(content, separators=(",", ":")).encode()
    text = text.ljust(-(-len(text) // 8) * 8)
    return memoryview(len(text).to_bytes(8, "little") + text)


def _tiles(
    checkpoint: DecodedCheckpoint, decoder: Decoder, source: ByteSource, entry: TensorEntry
) -> Iterator[np.ndarray[Any, Any]]:
    """Yield the bytes of a tensor of the copy."""
    weight = checkpoint.weights.get(entry.name)
    if weight is None:
        yield from read_tiles(source, entry.offset, entry.nbytes)
        return
    torch = import_extra("torch")
    for expert in range(weight.shape[0] if weight.stacked else 1):
        matrix = torch.from_numpy(decoder.read_matrix(entry.name, expert)).contiguous()
        yield matrix.to(torch.bfloat16).view(torch.int16).numpy()


def _write(file: int, data: memoryview, offset: int) -> int:
    """Write all of ``data`` at ``offset``; return the offset behind it."""
    while data:
        count = os.pwrite(file, data, offset)
        data, offset = data[count:], offset + count
    return offset
