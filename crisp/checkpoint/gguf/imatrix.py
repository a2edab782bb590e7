"""How often each expert was used while llama.cpp collected an importance matrix."""

from __future__ import annotations

import re
from pathlib import Path

import numpy as np
import numpy.typing as npt

from crisp.checkpoint.gguf.header import read_header
from crisp.checkpoint.streaming import ByteSource
from crisp.errors import CrispError

_COUNTS = re.compile(r"blk\.(\d+)\.ffn_(?:gate_up|gate|up|down)_exps\.weight\.counts")


def read_counts(path: Path) -> npt.NDArray[np.int64]:
    """Return the rows that each routed expert was given, [layers, experts], of an imatrix in GGUF.

    Layers without routed experts are zero. Raises CrispError for a file without such counts, and
    for counts that are not whole numbers.
    """
    header = read_header(path)
    by_layer = dict[int, npt.NDArray[np.int64]]()
    for name, tensor in header.tensors.items():
        match = _COUNTS.fullmatch(name)
        if match is None:
            continue
        if tensor.kind != "F32" or int(match[1]) > 10_000:
            raise CrispError(f"{tensor.where}: is {tensor.kind}, counts in F32 were expected")
        counts = np.empty(tensor.nbytes // 4, np.float32)
        with ByteSource(path) as source:
            source.read(counts, tensor.offset)
        if not ((counts >= 0) & (counts < 1 << 40) & (counts == np.floor(counts))).all():
            raise CrispError(f"{tensor.where}: holds numbers that are no counts")
        layer, whole = int(match[1]), counts.astype(np.int64)
        before = by_layer.setdefault(layer, whole)
        if before.shape == whole.shape:  # the matrices of a layer see the same rows
            by_layer[layer] = np.maximum(before, whole)
    if not by_layer:
        raise CrispError(f"{path}: holds no counts of routed experts; llama-imatrix writes them")
    sizes = {len(counts) for counts in by_layer.values()}
    if len(sizes) > 1:
        raise CrispError(
            f"{path}: its layers have counts of {sorted(sizes)} experts; one was expected"
        )
    result = np.zeros((max(by_layer) + 1, sizes.pop()), np.int64)
    for layer, of_layer in by_layer.items():
        result[layer] = of_layer
    return result
