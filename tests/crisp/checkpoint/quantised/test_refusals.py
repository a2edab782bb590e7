"""What is damaged or not understood is one line that names the file and the tensor."""

from __future__ import annotations

import json
import re
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

torch = pytest.importorskip("torch", reason="needs the extra hf")
pytest.importorskip("transformers", reason="needs the extra hf")

from safetensors.torch import load_file  # noqa: E402

from crisp.checkpoint.quantised import open_any, open_decoded  # noqa: E402
from crisp.errors import CrispError  # noqa: E402
from tests.crisp.checkpoint.quantised.made import (  # noqa: E402
    KINDS,
    quantised_gpt_oss,
    quantised_mixtral,
    write,
)

EXPERT = "model.layers.1.block_sparse_moe.experts.2.w1"


def changed(folder: Path, kind: str, change: Callable[[dict[str, Any]], Any], **config: Any) -> str:
    """Write a checkpoint with other tensors and another config; return the refusal."""
    if kind == "mxfp4":
        quantised_gpt_oss(folder)
        quantization = {"quant_method": "mxfp4"}
    else:
        quantised_mixtral(folder, kind)
        quantization = KINDS[kind][1]
    tensors = load_file(folder / "model.safetensors")
    change(tensors)
    write(folder, tensors, quantization | config)
    with pytest.raises(CrispError) as refusal, open_decoded(folder).decoder() as decoder:
        for name in open_decoded(folder).weights:
            decoder.read_matrix(name, 0)
    line = str(refusal.value)
    assert "\n" not in line
    assert str(folder) in line
    return line


def drop(name: str) -> Callable[[dict[str, Any]], Any]:
    return lambda tensors: tensors.pop(name)


def put(name: str, tensor: Any) -> Callable[[dict[str, Any]], Any]:
    return lambda tensors: tensors.__setitem__(name, tensor)


def nothing(tensors: dict[str, Any]) -> None:
    """Change nothing."""


I32, F16 = torch.int32, torch.float16


@pytest.mark.parametrize(
    ("kind", "change", "config", "words"),
    [
        ("gptq", drop(f"{EXPERT}.qzeros"), {}, f"'{EXPERT}.qweight'.*has no '{EXPERT}.qzeros'"),
        ("gptq", put(f"{EXPERT}.scales", torch.ones(3, 128, dtype=F16)), {}, r"\[2, 128\]"),
        ("gptq", put(f"{EXPERT}.g_idx", torch.full((64,), 9, dtype=I32)), {}, "g_idx names"),
        ("gptq", put(f"{EXPERT}.qweight", torch.ones(8, dtype=I32)), {}, r"I32 \[in / 8, out\]"),
        ("gptq", nothing, {"bits": 3}, "bits: found 3, expected 2, 4 or 8"),
        ("gptq", nothing, {"bits": 10**30}, "bits: found 1000"),
        ("gptq", nothing, {"group_size": 0}, "group_size: found 0"),
        ("gptq", nothing, {"checkpoint_format": "marlin"}, "found 'marlin', expected gptq or"),
        ("awq", nothing, {"version": "gemv"}, "version: found 'gemv', expected gemm"),
        ("awq", nothing, {"bits": 8}, "bits: found 8, expected 4"),
        ("awq", drop(f"{EXPERT}.scales"), {}, "has no"),
        ("fp8 blocks", drop(f"{EXPERT}.weight_scale_inv"), {}, f"'{EXPERT}.weight': has no scale"),
        ("fp8 blocks", nothing, {"weight_block_size": [48]}, "weight_block_size: found"),
        ("fp8 blocks", nothing, {"weight_block_size": [32, 32]}, "expected a scale of"),
        ("fp8 blocks", nothing, {"weight_block_size": None}, "expected a scale of"),
        ("w4a16", drop(f"{EXPERT}.weight_shape"), {}, "has no"),
        ("w4a16", put(f"{EXPERT}.weight_shape", torch.tensor([128, 1 << 40])), {}, "is no shape"),
        ("w4a16", put(f"{EXPERT}.weight_shape", torch.tensor([128, 65])), {}, "do not make"),
        ("w4a16", put(f"{EXPERT}.weight_shape", torch.zeros(1 << 12, dtype=I32)), {}, "at most 2"),
        ("nf4", drop(f"{EXPERT}.weight.absmax"), {}, "has no"),
        (
            "nf4",
            put(
                f"{EXPERT}.weight.quant_state.bitsandbytes__nf4",
                torch.tensor(list(b'{"shape": [128, "x"], "blocksize": 64}'), dtype=torch.uint8),
            ),
            {},
            "is no state of a weight",
        ),
        ("nf4", put(f"{EXPERT}.weight", torch.zeros(5, 1, dtype=torch.uint8)), {}, "expected U8"),
        ("llm.int8", put(f"{EXPERT}.weight_format", torch.tensor([2])), {}, "not in order"),
        ("llm.int8", drop(f"{EXPERT}.weight"), {}, "has no"),
        ("mxfp4", drop("model.layers.0.mlp.experts.down_proj_scales"), {}, "has no"),
        (
            "mxfp4",
            put("model.layers.0.mlp.experts.down_proj_blocks", torch.zeros(4, 64, 2, 8).byte()),
            {},
            r"U8 \[experts, out, in / 32, 16\]",
        ),
        ("gptq", nothing, {"quant_method": "hqq"}, "found 'hqq', expected mxfp4,.*bf16"),
        ("gptq", nothing, {"quant_method": "auto-round"}, "found 'auto-round', expected mxfp4"),
        ("gptq", nothing, {"quant_method": "torchao"}, "found 'torchao', expected mxfp4"),
        ("gptq", nothing, {"quant_method": ["x"]}, r"quant_method: found \['x'\]"),
        ("gptq", nothing, {"quant_method": "mxfp4"}, "says mxfp4, and no tensor is quantised"),
        ("gptq", put(f"{EXPERT}.weight", torch.zeros(128, 64)), {}, "is there quantised as well"),
    ],
)  # fmt: skip
def test_one_line(
    tmp_path: Path, kind: str, change: Any, config: dict[str, Any], words: str
) -> None:
    assert re.search(words, changed(tmp_path, kind, change, **config))


def test_a_file_that_is_cut_off(tmp_path: Path) -> None:
    quantised_mixtral(tmp_path, "gptq")
    file = tmp_path / "model.safetensors"
    file.write_bytes(file.read_bytes()[:-100])
    with pytest.raises(CrispError, match="is not a whole safetensors file"):
        open_decoded(tmp_path)


def test_a_plain_checkpoint_stays_plain(tmp_path: Path) -> None:
    quantised_mixtral(tmp_path, "gptq")
    write(tmp_path, {"x": torch.zeros(3)}, None)
    assert type(open_any(tmp_path)).__name__ == "Checkpoint"


def test_a_config_that_is_no_object(tmp_path: Path) -> None:
    quantised_mixtral(tmp_path, "gptq")
    config = json.loads((tmp_path / "config.json").read_text())
    (tmp_path / "config.json").write_text(json.dumps(config | {"quantization_config": 3}))
    with pytest.raises(CrispError, match="quantization_config: found 3, expected an object"):
        open_any(tmp_path)
