"""Tiny quantised checkpoints, written number by number, with what their weights are.

Every writer takes (name of the linear layer, out, in, random generator) and returns the stored
tensors and the weight in float32 [out, in], both straight from the description of the format.
"""

from __future__ import annotations

import json
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import torch
from safetensors.torch import load_file, save_file

Stored = dict[str, Any]
Writer = Callable[[str, int, int, Any], tuple[Stored, Any]]

D, D_FF, EXPERTS, LAYERS = 64, 128, 4, 2


def _scales(random: Any, *shape: int, kind: Any = torch.float16) -> Any:
    """Numbers of a type that weights of about 0.1 have as scales."""
    return torch.from_numpy(random.uniform(0.01, 0.03, shape).astype(np.float32)).to(kind)


def _words(numbers: Any, bits: int, axis: int, order: Any = None) -> Any:
    """int32 words of unsigned numbers, the lowest bits first, one number at a time."""
    n = 32 // bits
    turned = np.moveaxis(numbers, axis, 0).astype(np.uint32)
    words = np.zeros((-(-len(turned) // n), *turned.shape[1:]), np.uint32)
    for i in range(len(words)):
        for j in range(n):
            which = i * n + (j if order is None else order[j])
            if which < len(turned):
                words[i] |= turned[which] << np.uint32(bits * j)
    return torch.from_numpy(np.ascontiguousarray(np.moveaxis(words, 0, axis)).view(np.int32))


def gptq(
    name: str, out: int, inputs: int, random: Any, bits: int = 4, group: int = 32,
    desc_act: bool = False, version: int = 1,
) -> tuple[Stored, Any]:  # fmt: skip
    n = 1 << bits
    size = inputs if group == -1 else group
    q = random.integers(0, n, (inputs, out))
    zeros = random.integers(1, n, (inputs // size, out))
    scales = _scales(random, inputs // size, out)
    g_idx = np.arange(inputs) // size
    if desc_act:
        random.shuffle(g_idx)
    weight = np.empty((out, inputs), np.float32)
    for i in range(inputs):
        weight[:, i] = (q[i] - zeros[g_idx[i]]) * scales[g_idx[i]].float().numpy()
    return {
        f"{name}.qweight": _words(q, bits, 0),
        f"{name}.qzeros": _words(zeros - (version == 1), bits, 1),
        f"{name}.scales": scales,
        f"{name}.g_idx": torch.from_numpy(g_idx.astype(np.int32)),
    }, weight


def awq(name: str, out: int, inputs: int, random: Any, group: int = 32) -> tuple[Stored, Any]:
    q = random.integers(0, 16, (inputs, out))
    zeros = random.integers(0, 16, (inputs // group, out))
    scales = _scales(random, inputs // group, out)
    order = [0, 2, 4, 6, 1, 3, 5, 7]
    weight = np.empty((out, inputs), np.float32)
    for i in range(inputs):
        weight[:, i] = (q[i] - zeros[i // group]) * scales[i // group].float().numpy()
    return {
        f"{name}.qweight": _words(q, 4, 1, order),
        f"{name}.qzeros": _words(zeros, 4, 1, order),
        f"{name}.scales": scales,
    }, weight


def _float8(random: Any, out: int, inputs: int) -> Any:
    return torch.from_numpy(random.normal(0, 8, (out, inputs)).astype(np.float32)).to(
        torch.float8_e4m3fn
    )


def fp8_blocks(
    name: str, out: int, inputs: int, random: Any, block: int = 48, suffix: str = "weight_scale_inv"
) -> tuple[Stored, Any]:
    q = _float8(random, out, inputs)
    scales = _scales(random, -(-out // block), -(-inputs // block), kind=torch.float32)
    weight = q.float().numpy()
    for i in range(out):
        weight[i] *= scales[i // block].numpy()[np.arange(inputs) // block]
    return {f"{name}.weight": q, f"{name}.{suffix}": scales}, weight


def fp8_tensor(name: str, out: int, inputs: int, random: Any) -> tuple[Stored, Any]:
    q, scale = _float8(random, out, inputs), _scales(random, 1, kind=torch.float32)
    return {
        f"{name}.weight": q,
        f"{name}.weight_scale": scale[0],
        f"{name}.input_scale": torch.tensor(1.0),
    }, q.float().numpy() * scale.numpy()


def fp8_rows(name: str, out: int, inputs: int, random: Any) -> tuple[Stored, Any]:
    q, scale = _float8(random, out, inputs), _scales(random, out, 1, kind=torch.bfloat16)
    tensors = {f"{name}.weight": q, f"{name}.weight_scale": scale}
    return tensors, q.float().numpy() * scale.float().numpy()


def packed(
    name: str, out: int, inputs: int, random: Any, bits: int = 4, group: int = 32,
    symmetric: bool = True, act_order: bool = False,
) -> tuple[Stored, Any]:  # fmt: skip
    half, groups = 1 << (bits - 1), inputs // group
    q = random.integers(-half, half, (out, inputs))
    scales = _scales(random, out, groups, kind=torch.bfloat16)
    zeros = np.zeros((out, groups), np.int64)
    tensors = {
        f"{name}.weight_packed": _words(q + half, bits, 1),
        f"{name}.weight_scale": scales,
        f"{name}.weight_shape": torch.tensor([out, inputs]),
    }
    if not symmetric:
        zeros = random.integers(-half, half, (out, groups))
        tensors[f"{name}.weight_zero_point"] = _words(zeros + half, bits, 0)
    g_idx = np.arange(inputs) // group
    if act_order:
        random.shuffle(g_idx)
        tensors[f"{name}.weight_g_idx"] = torch.from_numpy(g_idx.astype(np.int32))
    weight = np.empty((out, inputs), np.float32)
    for i in range(inputs):
        weight[:, i] = (q[:, i] - zeros[:, g_idx[i]]) * scales[:, g_idx[i]].float().numpy()
    return tensors, weight


def int8_rows(name: str, out: int, inputs: int, random: Any) -> tuple[Stored, Any]:
    q = random.integers(-127, 128, (out, inputs))
    scale = _scales(random, out, 1, kind=torch.bfloat16) / 16
    tensors = {
        f"{name}.weight": torch.from_numpy(q.astype(np.int8)),
        f"{name}.weight_scale": scale,
    }
    return tensors, q.astype(np.float32) * scale.float().numpy()


def nf4(
    name: str, out: int, inputs: int, random: Any, double: bool = False, group: int = 64
) -> tuple[Stored, Any]:
    values = np.sort(random.uniform(-1, 1, 16)).astype(np.float32)
    codes = random.integers(0, 16, out * inputs)
    groups = out * inputs // group
    state: dict[str, Any] = {
        "quant_type": "nf4", "blocksize": group, "dtype": "bfloat16", "shape": [out, inputs],
    }  # fmt: skip
    absmax = random.uniform(0.05, 0.2, groups).astype(np.float32)
    extra = {}
    if double:
        levels = np.sort(random.uniform(-1, 1, 256)).astype(np.float32)
        inner = random.integers(0, 256, groups).astype(np.uint8)
        nested = random.uniform(0.02, 0.05, -(-groups // 256)).astype(np.float32)
        state |= {"nested_blocksize": 256, "nested_dtype": "float32", "nested_offset": 0.1}
        absmax = np.array(
            [levels[inner[g]] * nested[g // 256] + np.float32(0.1) for g in range(groups)],
            np.float32,
        )
        extra = {
            f"{name}.weight.nested_absmax": torch.from_numpy(nested),
            f"{name}.weight.nested_quant_map": torch.from_numpy(levels),
        }
    bytes_ = (codes[0::2] << 4 | codes[1::2]).astype(np.uint8)[:, None]
    text = np.frombuffer(json.dumps(state).encode(), np.uint8).copy()
    weight = np.array([values[c] * absmax[i // group] for i, c in enumerate(codes)], np.float32)
    return {
        f"{name}.weight": torch.from_numpy(bytes_),
        f"{name}.weight.absmax": torch.from_numpy(inner if double else absmax),
        f"{name}.weight.quant_map": torch.from_numpy(values),
        f"{name}.weight.quant_state.bitsandbytes__nf4": torch.from_numpy(text),
        **extra,
    }, weight.reshape(out, inputs)


def bnb8(name: str, out: int, inputs: int, random: Any) -> tuple[Stored, Any]:
    q = random.integers(-127, 128, (out, inputs)).astype(np.int8)
    largest = random.uniform(0.1, 0.3, out).astype(np.float32)
    weight = q.astype(np.float32) * largest[:, None] * np.float32(1 / 127)
    return {
        f"{name}.weight": torch.from_numpy(q),
        f"{name}.SCB": torch.from_numpy(largest),
        f"{name}.weight_format": torch.tensor([0], dtype=torch.uint8),
    }, weight


def _compressed(form: str, **weights: Any) -> dict[str, Any]:
    group = {"targets": ["Linear"], "weights": weights, "input_activations": None}
    return {
        "quant_method": "compressed-tensors",
        "format": form,
        "quantization_status": "compressed",
        "config_groups": {"group_0": group},
        "ignore": ["lm_head"],
    }


GPTQ = {"quant_method": "gptq", "bits": 4, "group_size": 32, "desc_act": False, "sym": False}
AWQ = {"quant_method": "awq", "bits": 4, "group_size": 32, "zero_point": True, "version": "gemm"}
BNB4 = {"quant_method": "bitsandbytes", "load_in_4bit": True, "bnb_4bit_quant_type": "nf4"}
FP8 = {"quant_method": "fp8", "activation_scheme": "dynamic", "fmt": "e4m3"}
INT4 = {"num_bits": 4, "type": "int", "strategy": "group", "group_size": 32, "symmetric": True}
INT8 = {"num_bits": 8, "type": "int", "strategy": "channel", "symmetric": True}
FLOAT8 = {"num_bits": 8, "type": "float", "strategy": "channel", "symmetric": True}

KINDS: dict[str, tuple[Writer, dict[str, Any]]] = {
    "gptq": (gptq, GPTQ),
    "gptq desc_act": (partial(gptq, desc_act=True), GPTQ | {"desc_act": True}),
    "gptq v2": (partial(gptq, version=2), GPTQ | {"checkpoint_format": "gptq_v2"}),
    "gptq 8 bits": (partial(gptq, bits=8), GPTQ | {"bits": 8}),
    "gptq one group": (partial(gptq, group=-1), GPTQ | {"group_size": -1}),
    "awq": (awq, AWQ),
    "fp8 blocks": (fp8_blocks, FP8 | {"weight_block_size": [48, 48]}),
    "fp8 tensor": (fp8_tensor, FP8 | {"activation_scheme": "static"}),
    "fp8 rows": (fp8_rows, FP8),
    "w4a16": (packed, _compressed("pack-quantized", **INT4)),
    "w4a16 asymmetric": (
        partial(packed, symmetric=False),
        _compressed("pack-quantized", **INT4 | {"symmetric": False}),
    ),
    "w4a16 act order": (
        partial(packed, act_order=True), _compressed("pack-quantized", **INT4, actorder="group"),
    ),
    "w8a16": (partial(packed, bits=8), _compressed("pack-quantized", **INT4 | {"num_bits": 8})),
    "w8a8": (int8_rows, _compressed("int-quantized", **INT8)),
    "compressed fp8": (fp8_rows, _compressed("float-quantized", **FLOAT8)),
    "compressed fp8 blocks": (
        partial(fp8_blocks, suffix="weight_scale"),
        _compressed(
            "float-quantized", **FLOAT8 | {"strategy": "block", "block_structure": [48, 48]}
        ),
    ),
    "nf4": (nf4, BNB4),
    "nf4 double": (partial(nf4, double=True), BNB4 | {"bnb_4bit_use_double_quant": True}),
    "llm.int8": (bnb8, {"quant_method": "bitsandbytes", "load_in_8bit": True}),
}  # fmt: skip
"""By what it is called here: the writer of a linear layer, and the quantization_config."""


def mixtral_config(vocabulary: int) -> Any:
    import transformers

    return transformers.MixtralConfig(
        vocab_size=vocabulary, hidden_size=D, intermediate_size=D_FF, num_hidden_layers=LAYERS,
        num_attention_heads=4, num_key_value_heads=4, num_local_experts=EXPERTS,
        num_experts_per_tok=2, max_position_embeddings=64, dtype="bfloat16",
    )  # fmt: skip


def quantised_mixtral(
    folder: Path, kind: str, seed: int = 0, vocabulary: int = 64
) -> dict[str, Any]:
    """Write a random Mixtral with its linear layers in a format; return its plain tensors.

    What is decoded is float32, the rest bfloat16. Head, routers and embedding stay plain.
    """
    import transformers

    torch.manual_seed(seed)
    model = transformers.AutoModelForCausalLM.from_config(mixtral_config(vocabulary)).to(
        torch.bfloat16
    )
    model.save_pretrained(folder)
    writer, config = KINDS[kind]
    random, stored, plain = np.random.default_rng(seed), dict[str, Any](), dict[str, Any]()
    for name, tensor in load_file(folder / "model.safetensors").items():
        if not name.endswith("_proj.weight") and ".experts." not in name:
            stored[name] = plain[name] = tensor
            continue
        tensors, weight = writer(name.removesuffix(".weight"), *tensor.shape, random)
        stored |= tensors
        plain[name] = torch.from_numpy(weight)
    write(folder, stored, config)
    return plain


def quantised_gpt_oss(folder: Path, seed: int = 0, d_ff: int = 64) -> dict[str, Any]:
    """Write a random gpt-oss as it is published; return its plain tensors."""
    import transformers

    config = transformers.GptOssConfig(
        vocab_size=64, hidden_size=D, intermediate_size=d_ff, num_hidden_layers=2, head_dim=16,
        num_attention_heads=4, num_key_value_heads=2, num_local_experts=EXPERTS,
        num_experts_per_tok=2, max_position_embeddings=64, dtype="bfloat16",
    )  # fmt: skip
    torch.manual_seed(seed)
    model = transformers.AutoModelForCausalLM.from_config(config).to(torch.bfloat16)
    model.save_pretrained(folder)
    values = [0.0, 0.5, 1, 1.5, 2, 3, 4, 6]
    values += [-x for x in values]
    random, stored, plain = np.random.default_rng(seed), dict[str, Any](), dict[str, Any]()
    for name, tensor in load_file(folder / "model.safetensors").items():
        if not name.endswith(("gate_up_proj", "down_proj")):
            stored[name] = plain[name] = tensor
            continue
        experts, inputs, out = tensor.shape
        q = random.integers(0, 16, (experts, out, inputs // 32, 32))
        scales = random.integers(119, 123, (experts, out, inputs // 32))
        weight = np.array(values, np.float32)[q] * 2.0 ** (scales[..., None] - 127)
        stored[f"{name}_blocks"] = torch.from_numpy((q[..., 0::2] | q[..., 1::2] << 4).astype("u1"))
        stored[f"{name}_scales"] = torch.from_numpy(scales.astype("u1"))
        whole = weight.reshape(experts, out, inputs).transpose(0, 2, 1).astype(np.float32)
        plain[name] = torch.from_numpy(np.ascontiguousarray(whole))
    write(folder, stored, {"quant_method": "mxfp4", "modules_to_not_convert": ["lm_head"]})
    return plain


def write(folder: Path, stored: Stored, quantization: dict[str, Any] | None) -> None:
    """Write the tensors of a checkpoint, and what its config says of them."""
    save_file({n: x.contiguous() for n, x in stored.items()}, folder / "model.safetensors")
    config = json.loads((folder / "config.json").read_text())
    config.pop("quantization_config", None)
    if quantization is not None:
        config["quantization_config"] = quantization
    (folder / "config.json").write_text(json.dumps(config))


def plain_copy(
    source: Path, folder: Path, plain: dict[str, Any], kind: Any = torch.float32
) -> None:
    """Write a checkpoint of the plain tensors, decoded ones in a type.

    Biases of experts go with the decoded weights.
    """
    folder.mkdir()
    (folder / "config.json").write_bytes((source / "config.json").read_bytes())
    tensors = {
        name: x.to(kind) if x.dtype == torch.float32 or name.endswith("_proj_bias") else x
        for name, x in plain.items()
    }
    write(folder, tensors, None)
