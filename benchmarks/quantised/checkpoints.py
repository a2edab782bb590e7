"""Random quantised checkpoints of a given size: valid numbers of each format, and nothing else."""

from __future__ import annotations

import json
import math
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np

D_MODEL, D_FF, EXPERTS = 2048, 4096, 8
_CHUNK = 1 << 24  # bytes that are drawn once and written again and again

CONFIG = {
    "architectures": ["MixtralForCausalLM"], "model_type": "mixtral", "hidden_size": D_MODEL,
    "intermediate_size": D_FF, "num_attention_heads": 16, "num_key_value_heads": 4,
    "num_local_experts": EXPERTS, "num_experts_per_tok": 2, "vocab_size": 256,
    "max_position_embeddings": 512, "hidden_act": "silu", "torch_dtype": "bfloat16",
}  # fmt: skip


class Part(NamedTuple):
    """A stored tensor of a weight."""

    suffix: str
    dtype: str
    shape: tuple[int, ...]
    fill: bytes | None  # repeated; None: random bytes
    mask: int = 255  # of random bytes: FP8's NaN is left out


def _half(value: float) -> bytes:
    return np.float16(value).tobytes()


def _single(value: float) -> bytes:
    return np.float32(value).tobytes()


def _gptq(out: int, inputs: int) -> list[Part]:
    index = (np.arange(inputs) // 128).astype(np.int32).tobytes()
    return [
        Part("qweight", "I32", (inputs // 8, out), None),
        Part("qzeros", "I32", (inputs // 128, out // 8), b"\x77"),
        Part("scales", "F16", (inputs // 128, out), _half(0.01)),
        Part("g_idx", "I32", (inputs,), index),
    ]


def _awq(out: int, inputs: int) -> list[Part]:
    return [
        Part("qweight", "I32", (inputs, out // 8), None),
        Part("qzeros", "I32", (inputs // 128, out // 8), b"\x88"),
        Part("scales", "F16", (inputs // 128, out), _half(0.01)),
    ]


def _fp8(out: int, inputs: int) -> list[Part]:
    grid = (-(-out // 128), -(-inputs // 128))
    return [
        Part("weight", "F8_E4M3", (out, inputs), None, mask=0b10111111),
        Part("weight_scale_inv", "F32", grid, _single(0.01)),
    ]


def _packed(bits: int) -> Callable[[int, int], list[Part]]:
    def parts(out: int, inputs: int) -> list[Part]:
        shape = np.array([out, inputs], np.int64).tobytes()
        return [
            Part("weight_packed", "I32", (out, inputs * bits // 32), None),
            Part("weight_scale", "BF16", (out, inputs // 128), b"\x00\x3c"),
            Part("weight_shape", "I64", (2,), shape),
        ]

    return parts


def _nf4(out: int, inputs: int) -> list[Part]:
    state = {
        "quant_type": "nf4", "blocksize": 64, "dtype": "bfloat16", "shape": [out, inputs],
        "nested_blocksize": 256, "nested_dtype": "float32", "nested_offset": 0.1,
    }  # fmt: skip
    text, groups = json.dumps(state).encode(), out * inputs // 64
    levels = np.linspace(-1, 1, 16, dtype=np.float32).tobytes()
    nested = np.linspace(-0.1, 0.1, 256, dtype=np.float32).tobytes()
    return [
        Part("weight", "U8", (out * inputs // 2, 1), None),
        Part("weight.absmax", "U8", (groups,), None),
        Part("weight.quant_map", "F32", (16,), levels),
        Part("weight.nested_absmax", "F32", (groups // 256,), _single(0.5)),
        Part("weight.nested_quant_map", "F32", (256,), nested),
        Part("weight.quant_state.bitsandbytes__nf4", "U8", (len(text),), text),
    ]


def _int8(out: int, inputs: int) -> list[Part]:
    return [
        Part("weight", "I8", (out, inputs), None),
        Part("SCB", "F32", (out,), _single(0.2)),
        Part("weight_format", "U8", (1,), b"\0"),
    ]


LINEAR: dict[str, tuple[Callable[[int, int], list[Part]], dict[str, Any]]] = {
    "FP8, blocks of 128 x 128": (_fp8, {"quant_method": "fp8", "weight_block_size": [128, 128]}),
    "GPTQ, 4 bits": (_gptq, {"quant_method": "gptq", "bits": 4, "group_size": 128}),
    "AWQ": (_awq, {"quant_method": "awq", "bits": 4, "group_size": 128}),
    "compressed-tensors w4a16": (_packed(4), {"quant_method": "compressed-tensors"}),
    "compressed-tensors w8a16": (_packed(8), {"quant_method": "compressed-tensors"}),
    "bitsandbytes nf4": (_nf4, {"quant_method": "bitsandbytes", "load_in_4bit": True}),
    "bitsandbytes int8": (_int8, {"quant_method": "bitsandbytes", "load_in_8bit": True}),
}
"""By what it is called on the page: the parts of a linear layer, and the quantization_config."""
MXFP4 = "MXFP4 (gpt-oss)"
GGUF = "GGUF, Q4_K"
KINDS = (MXFP4, *LINEAR, GGUF)


def write(kind: str, folder: Path, nbytes: int) -> Path:
    """Write a checkpoint of ``nbytes`` bytes, in whole layers, into a folder.

    Memory holds a chunk of it. Returns what `pack` is given.
    """
    if kind == GGUF:
        return _write_gguf(folder / "random.gguf", nbytes)
    if kind == MXFP4:
        config = CONFIG | {"model_type": "gpt_oss", "architectures": ["GptOssForCausalLM"]}
        config |= {"head_dim": 64, "quantization_config": {"quant_method": "mxfp4"}}
        tensors = _mxfp4
    else:
        parts_of, quantization = LINEAR[kind]
        config = CONFIG | {"quantization_config": quantization}

        def tensors(layer: int) -> Iterator[tuple[str, Part]]:
            for expert in range(EXPERTS):
                base = f"model.layers.{layer}.block_sparse_moe.experts.{expert}"
                for name in ("w1", "w2", "w3"):
                    sizes = (D_MODEL, D_FF) if name == "w2" else (D_FF, D_MODEL)
                    for part in parts_of(*sizes):
                        yield f"{base}.{name}.{part.suffix}", part

    layers = math.ceil(nbytes / sum(_size(part) for _, part in tensors(0)))
    named = [item for layer in range(layers) for item in tensors(layer)]
    (folder / "config.json").write_text(json.dumps(config | {"num_hidden_layers": layers}))
    _write_safetensors(folder / "model.safetensors", named)
    return folder


def _mxfp4(layer: int) -> Iterator[tuple[str, Part]]:
    base, scale = f"model.layers.{layer}.mlp.experts", b"\x78"
    for name, out, inputs in (("gate_up_proj", 2 * D_FF, D_MODEL), ("down_proj", D_MODEL, D_FF)):
        shape = (EXPERTS, out, inputs // 32)
        yield f"{base}.{name}_blocks", Part("", "U8", (*shape, 16), None)
        yield f"{base}.{name}_scales", Part("", "U8", shape, scale)
        yield f"{base}.{name}_bias", Part("", "BF16", (EXPERTS, out), b"\0\0")


_WIDTH = {"U8": 1, "I8": 1, "F8_E4M3": 1, "F16": 2, "BF16": 2, "F32": 4, "I32": 4, "I64": 8}


def _size(part: Part) -> int:
    return math.prod(part.shape) * _WIDTH[part.dtype]


def _write_safetensors(path: Path, named: list[tuple[str, Part]]) -> None:
    header, end = dict[str, Any](), 0
    for name, part in named:
        begin, end = end, end + _size(part)
        header[name] = {"dtype": part.dtype, "shape": part.shape, "data_offsets": [begin, end]}
    text = json.dumps(header).encode()
    random = np.random.default_rng(0).integers(0, 256, _CHUNK, np.uint8)
    with path.open("wb") as file:
        file.write(len(text).to_bytes(8, "little") + text)
        for _, part in named:
            if part.fill is None:
                _repeat(file, (random & np.uint8(part.mask)).tobytes(), _size(part))
            else:
                _repeat(file, part.fill * max(1, _CHUNK // len(part.fill) // 64), _size(part))


def _repeat(file: Any, data: bytes, nbytes: int) -> None:
    while nbytes:
        file.write(data[:nbytes])
        nbytes -= min(nbytes, len(data))


def _write_gguf(path: Path, nbytes: int) -> Path:
    import gguf

    kind = gguf.GGMLQuantizationType.Q4_K
    block, size = gguf.GGML_QUANT_SIZES[kind]
    data = np.random.default_rng(0).integers(
        0, 256, (EXPERTS * D_FF, D_MODEL // block, size), np.uint8
    )
    data[..., :4] = np.frombuffer(_half(0.001) * 2, np.uint8)  # its two scales
    layers = math.ceil(nbytes / 3 / data.nbytes)
    writer = gguf.GGUFWriter(path, "qwen3moe")
    for key, value in {
        "block_count": layers, "embedding_length": D_MODEL, "expert_count": EXPERTS,
        "expert_used_count": 2, "expert_feed_forward_length": D_FF,
    }.items():  # fmt: skip
        writer.add_uint32(f"qwen3moe.{key}", value)
    shapes = {"gate": (D_FF, D_MODEL), "up": (D_FF, D_MODEL), "down": (D_MODEL, D_FF)}
    for layer in range(layers):
        for name, (rows, columns) in shapes.items():
            content = data.reshape(EXPERTS, rows, columns // block * size)
            writer.add_tensor(f"blk.{layer}.ffn_{name}_exps.weight", content, raw_dtype=kind)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    return path
