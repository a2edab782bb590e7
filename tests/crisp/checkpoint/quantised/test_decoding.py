"""Every format gives the weights that its description says, and its library's own code."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest

torch = pytest.importorskip("torch", reason="needs the extra hf")
transformers = pytest.importorskip("transformers", reason="needs the extra hf")

from safetensors.torch import load_file  # noqa: E402

from crisp.checkpoint.quantised import DecodedCheckpoint, open_decoded  # noqa: E402
from tests.crisp.checkpoint.quantised.made import (  # noqa: E402
    KINDS,
    quantised_gpt_oss,
    quantised_mixtral,
)


def weights(folder: Path) -> dict[str, Any]:
    """Every decoded weight of a checkpoint, float32."""
    checkpoint = open_decoded(folder)
    with checkpoint.decoder() as decoder:
        return {name: decoder.read_tensor(name, torch.float32) for name in checkpoint.weights}


def seen(checkpoint: DecodedCheckpoint) -> dict[str, tuple[int, ...]]:
    return {name: entry.shape for name, entry in checkpoint.tensors.items()}


@pytest.mark.parametrize("kind", KINDS)
def test_weights_are_what_was_written(tmp_path: Path, kind: str) -> None:
    plain = quantised_mixtral(tmp_path, kind)
    checkpoint, decoded = open_decoded(tmp_path), weights(tmp_path)
    assert seen(checkpoint) == {name: tuple(x.shape) for name, x in plain.items()}
    assert decoded.keys() == {name for name, x in plain.items() if x.dtype == torch.float32}
    assert len(decoded) == 2 * (4 + 4 * 3)
    for name, weight in decoded.items():
        assert torch.equal(weight, plain[name]), name


def test_mxfp4_is_what_was_written(tmp_path: Path) -> None:
    plain, decoded = quantised_gpt_oss(tmp_path), weights(tmp_path)
    assert seen(open_decoded(tmp_path)) == {name: tuple(x.shape) for name, x in plain.items()}
    assert len(decoded) == 4
    for name, weight in decoded.items():
        assert torch.equal(weight, plain[name]), name


def test_mxfp4_as_transformers_dequantises(tmp_path: Path) -> None:
    from transformers.integrations.mxfp4 import convert_moe_packed_tensors

    quantised_gpt_oss(tmp_path)
    stored = load_file(tmp_path / "model.safetensors")
    for name, weight in weights(tmp_path).items():
        theirs = convert_moe_packed_tensors(stored[f"{name}_blocks"], stored[f"{name}_scales"])
        assert torch.equal(weight.to(torch.bfloat16), theirs)


def test_fp8_as_transformers_dequantises(tmp_path: Path) -> None:
    from transformers.integrations.finegrained_fp8 import Fp8Dequantize

    quantised_mixtral(tmp_path, "fp8 tensor")
    stored = load_file(tmp_path / "model.safetensors")
    for name, weight in weights(tmp_path).items():
        scale = stored[f"{name}_scale"].reshape(1, 1)
        theirs = Fp8Dequantize(None)._dequantize_one(stored[name], scale, torch.float32)
        assert torch.equal(weight, theirs)


def test_fp8_blocks_as_transformers_dequantises() -> None:
    from transformers.integrations.finegrained_fp8 import Fp8Dequantize

    from crisp.checkpoint.quantised.fp8 import decode
    from crisp.checkpoint.quantised.numbers import StoredPart

    generator = torch.Generator().manual_seed(0)
    q = torch.randn(256, 384, generator=generator).to(torch.float8_e4m3fn)
    scale = torch.rand(2, 3, generator=generator)
    parts = {
        "weight": StoredPart(q.view(torch.uint8).numpy(), "F8_E4M3"),
        "scale": StoredPart(scale.numpy(), "F32"),
    }
    theirs = Fp8Dequantize(None)._dequantize_one(q, scale, torch.float32)
    assert torch.equal(torch.from_numpy(decode(parts, (128, 128))), theirs)


# Groups in another order ("act order") its current version reads no more.
PACKED = ("w4a16", "w4a16 asymmetric", "w8a16")


@pytest.mark.parametrize("kind", [*PACKED, "w8a8", "compressed fp8"])
def test_compressed_tensors_as_its_own_package_does(tmp_path: Path, kind: str) -> None:
    pytest.importorskip("compressed_tensors", reason="needs compressed-tensors")
    from compressed_tensors.compressors import BaseCompressor
    from compressed_tensors.quantization import QuantizationScheme

    quantised_mixtral(tmp_path, kind)
    config = KINDS[kind][1]
    scheme = QuantizationScheme.model_validate(config["config_groups"]["group_0"])
    compressor = BaseCompressor.get_value_from_registry(config["format"])
    stored = load_file(tmp_path / "model.safetensors")
    for name, weight in weights(tmp_path).items():
        parts = {
            key.removeprefix(name.removesuffix("weight")): tensor
            for key, tensor in stored.items()
            if key.startswith(name)
        }
        theirs = compressor.decompress(parts, scheme)["weight"]
        assert torch.equal(weight.to(theirs.dtype), theirs), name


def test_experts_are_read_one_by_one(tmp_path: Path) -> None:
    plain = quantised_gpt_oss(tmp_path)
    checkpoint = open_decoded(tmp_path)
    name = "model.layers.1.mlp.experts.gate_up_proj"
    with checkpoint.decoder() as decoder:
        one = decoder.read_matrix(name, 2)
    assert (one == plain[name][2].numpy()).all()


def test_a_zero_that_was_stored_with_a_borrow() -> None:
    """The first version stores zero - 1 of a whole word: 0 borrows from the next."""
    from crisp.checkpoint.quantised.gptq import unpacked_zeros

    zeros = [0, 3, 0, 15, 1, 2, 0, 7]
    word = sum(zero << 4 * i for i, zero in enumerate(zeros)) - 0x11111111
    stored = np.array([[word & 0xFFFFFFFF]], np.uint32).view(np.int32)
    assert unpacked_zeros(stored, 4, less_one=True).tolist() == [zeros]
