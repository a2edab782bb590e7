"""Tiny GGUF files with random experts, written by the format's own package."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import gguf
import numpy as np

# Where in a block its float16 scales are, by type; MXFP4 has a byte with an exponent
SCALES = {
    "Q4_0": (0,), "Q8_0": (0,), "IQ4_NL": (0,), "IQ4_XS": (0,), "Q4_K": (0, 2), "Q5_K": (0, 2),
    "Q6_K": (208,), "Q3_K": (108,), "Q2_K": (80, 82), "MXFP4": (),
}  # fmt: skip
D, D_FF, EXPERTS = 256, 512, 3


def random_tensor(kind: str, random: Any, *shape: int) -> Any:
    """Stored bytes of random weights of about 0.1: uint8 [..., bytes of a row], or plain floats."""
    if kind in ("F32", "F16"):
        return random.normal(0, 0.1, shape).astype({"F32": np.float32, "F16": np.float16}[kind])
    if kind == "BF16":
        bits = random.normal(0, 0.1, shape).astype(np.float32).view(np.uint32) >> 16
        return bits.astype(np.uint16).view(np.uint8)
    block, size = gguf.GGML_QUANT_SIZES[gguf.GGMLQuantizationType[kind]]
    data = random.integers(0, 256, (*shape[:-1], shape[-1] // block, size)).astype(np.uint8)
    for at in SCALES[kind]:
        scale = random.uniform(1e-3, 3e-3, data.shape[:-1]).astype(np.float16)
        data[..., at : at + 2] = scale[..., None].view(np.uint8)
    if kind == "MXFP4":
        data[..., 0] = random.integers(118, 124, data.shape[:-1])
    return data.reshape(*shape[:-1], -1)


def write(
    path: Path, kinds: tuple[str, ...] = ("Q4_K", "Q4_K", "Q6_K"), *, arch: str = "qwen3moe",
    layers: int = 2, dense: int = 0, biases: bool = False, fused: bool = False,
    fields: dict[str, Any] | None = None, d_ff: int = D_FF,
) -> dict[str, tuple[str, Any]]:  # fmt: skip
    """Write a file; return its routed tensors: name -> (type, bytes). kinds: gate, up, down."""
    random, stored = np.random.default_rng(0), dict[str, tuple[str, Any]]()
    writer = gguf.GGUFWriter(path, arch)
    counts = {
        "block_count": layers, "embedding_length": D, "expert_count": EXPERTS,
        "expert_used_count": 2, "feed_forward_length": 128, "expert_feed_forward_length": d_ff,
    }  # fmt: skip
    writer.add_name("Tiny Experts")
    for key, value in (counts | (fields or {})).items():
        writer.add_uint32(f"{arch}.{key}", value)
    writer.add_array("tokenizer.ggml.tokens", ["a", "bc", ""])
    writer.add_array("tokenizer.ggml.scores", [0.5, 1.5])

    def add(name: str, kind: str, *shape: int) -> None:
        data = random_tensor(kind, random, *shape)
        raw = None if data.dtype.kind == "f" else gguf.GGMLQuantizationType[kind]
        writer.add_tensor(name, data, raw_dtype=raw)
        if "_exps" in name:
            stored[name] = kind, data

    gate, up, down = kinds
    add("token_embd.weight", "F16", 8, D)
    for layer in range(layers):
        own = f"blk.{layer}"
        add(f"{own}.attn_norm.weight", "F32", D)
        add(f"{own}.attn_q.weight", "Q8_0", D, D)
        if layer < dense:
            add(f"{own}.ffn_up.weight", "F16", 128, D)
            continue
        add(f"{own}.ffn_gate_inp.weight", "F32", EXPERTS, D)
        if fused:
            add(f"{own}.ffn_gate_up_exps.weight", gate, EXPERTS, 2 * d_ff, D)
        else:
            add(f"{own}.ffn_gate_exps.weight", gate, EXPERTS, d_ff, D)
            add(f"{own}.ffn_up_exps.weight", up, EXPERTS, d_ff, D)
        add(f"{own}.ffn_down_exps.weight", down, EXPERTS, D, d_ff)
        if biases:
            for part, size in (("gate", d_ff), ("up", d_ff), ("down", D)):
                add(f"{own}.ffn_{part}_exps.bias", "F32", EXPERTS, size)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    return stored


def dequantised(stored: dict[str, tuple[str, Any]], name: str) -> Any:
    """A stored tensor in float32, by the package."""
    kind, data = stored[name]
    if data.dtype.kind == "f":
        return data.astype(np.float32)
    return gguf.dequantize(data, gguf.GGMLQuantizationType[kind])
