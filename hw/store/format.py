"""The store's file format: names of files and tensors, headers, and types of numbers."""

from __future__ import annotations

import json
import math
from fractions import Fraction
from typing import Any

from crisp.model.quantization import STORED_BITS
from crisp.model.spec import PAGE, ModelSpec

VERSION = 1
HASHES = "hashes.safetensors"
DTYPES = {"bf16": Fraction(16), "fp16": Fraction(16), "fp32": Fraction(32)} | STORED_BITS
"""Bits of a stored weight by dtype, its share of a scale included."""


def file_name(layer: int) -> str:
    """Return the name of a decoder layer's file."""
    return f"layer-{layer:03}.safetensors"


def table_name(layer: int) -> str:
    """Return the name of the tensor with the hashes of a decoder layer's blocks."""
    return f"layer.{layer}"


def header(spec: ModelSpec, layer: int, table: str, dtype: str, activation: str) -> bytes:
    """Return the header of a layer's file, which says how its weights are to be read.

    table: sha256 of its blocks' hashes. safetensors allows no gaps between tensors, but spaces
    behind its header: with them the weights begin at a multiple of 4096 bytes.
    """
    shape, size = [spec.n_blocks, spec.block_bytes], spec.expert_bytes
    geometry = {"layer": layer, "d_model": spec.d_model, "d_ff": spec.d_ff, "block": spec.block,
            "biases": int(spec.biases)}  # fmt: skip
    if spec.matrices != 3:
        geometry["matrices"] = spec.matrices
    words = {"dtype": dtype, "activation": activation, "hashes_sha256": table}
    content: dict[str, Any] = {"__metadata__": {key: str(n) for key, n in geometry.items()} | words}
    for e in range(spec.n_experts):
        place = [e * size, (e + 1) * size]
        content[f"expert.{e}"] = {"dtype": "U8", "shape": shape, "data_offsets": place}
    text = json.dumps(content, separators=(",", ":")).encode()
    length = PAGE * math.ceil((8 + len(text)) / PAGE) - 8
    return length.to_bytes(8, "little") + text.ljust(length)
