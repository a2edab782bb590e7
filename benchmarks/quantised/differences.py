"""The largest difference between weights as CRISP decodes them and as the formats' libraries do."""

from __future__ import annotations

from typing import Any

import numpy as np
import torch

from crisp.checkpoint.quantised import compressed, fp8, mxfp4
from crisp.checkpoint.quantised.numbers import StoredPart


def differences() -> list[dict[str, Any]]:
    """Return rows of the page: format, library, largest difference of random weights."""
    rows = [
        ("mxfp4", "transformers", _mxfp4()),
        ("fp8", "transformers", _fp8()),
        ("compressed-tensors", "compressed-tensors", _compressed()),
    ]
    return [{"format": a, "library": b, "difference": c} for a, b, c in rows]


def _largest(ours: Any, theirs: Any) -> float:
    """Return the largest difference, in the library's type of numbers."""
    return float((ours.to(theirs.dtype).double() - theirs.double()).abs().max())


def _mxfp4() -> float:
    from transformers.integrations.mxfp4 import convert_moe_packed_tensors

    random = np.random.default_rng(0)
    blocks = random.integers(0, 256, (64, 4, 16), np.uint8)
    scales = random.integers(100, 140, (64, 4), np.uint8)
    parts = {"blocks": StoredPart(blocks, "U8"), "scales": StoredPart(scales, "U8")}
    theirs = convert_moe_packed_tensors(
        torch.from_numpy(blocks)[None], torch.from_numpy(scales)[None]
    )[0]
    return _largest(torch.from_numpy(mxfp4.decode(parts).copy()), theirs)


def _fp8() -> float:
    from transformers.integrations.finegrained_fp8 import Fp8Dequantize

    generator = torch.Generator().manual_seed(0)
    worst = 0.0
    for grid in ((128, 128), (256, 384)):  # blocks; one scale for the matrix
        weight = torch.randn(256, 384, generator=generator).to(torch.float8_e4m3fn)
        scale = torch.rand(256 // grid[0], 384 // grid[1], generator=generator)
        parts = {
            "weight": StoredPart(weight.view(torch.uint8).numpy(), "F8_E4M3"),
            "scale": StoredPart(scale.numpy(), "F32"),
        }
        theirs = Fp8Dequantize(None)._dequantize_one(weight, scale, torch.float32)
        worst = max(worst, _largest(torch.from_numpy(fp8.decode(parts, grid)), theirs))
    return worst


def _compressed() -> float:
    from compressed_tensors.compressors import BaseCompressor
    from compressed_tensors.quantization import QuantizationScheme

    generator, worst = torch.Generator().manual_seed(0), 0.0
    for bits in (4, 8):
        weights = {"num_bits": bits, "type": "int", "strategy": "group", "group_size": 32}
        scheme = QuantizationScheme.model_validate({"targets": ["Linear"], "weights": weights})
        shape = (64, 128 * bits // 32)
        stored = {
            "weight_packed": torch.randint(-(2**31), 2**31, shape, generator=generator).int(),
            "weight_scale": torch.rand(64, 4, generator=generator).bfloat16(),
            "weight_shape": torch.tensor([64, 128]),
        }
        theirs = BaseCompressor.get_value_from_registry("pack-quantized").decompress(stored, scheme)
        scale = stored["weight_scale"].view(torch.int16).numpy().view(np.uint16)
        parts = {
            "packed": StoredPart(stored["weight_packed"].numpy(), "I32"),
            "scale": StoredPart(scale, "BF16"),
        }
        ours = torch.from_numpy(compressed.decode_packed(parts, bits, "random"))
        worst = max(worst, _largest(ours, theirs["weight"]))
    return worst
