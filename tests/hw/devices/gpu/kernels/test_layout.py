"""Where kernels look for a block's numbers, against where the store's own reader finds them."""

from __future__ import annotations

from dataclasses import replace
from fractions import Fraction
from pathlib import Path

import pytest
import torch

from crisp.hw.devices.gpu.kernels import BlockLayout
from crisp.hw.devices.gpu.kernels.reference import matrix
from crisp.hw.store.packing import pack_synthetic
from crisp.hw.store.reader import view_blocks
from crisp.model.quantization import GROUP
from crisp.model.spec import ModelSpec

SPEC = ModelSpec(
    name="small", n_layers=1, moe_layers=(0,), n_experts=1, top_k=1, d_model=192, d_ff=40,
    dtype_bits=16, bits=Fraction(16), matrices=3, biases=True, dense_params=(0,), block=16,
    config_hash=None,
)  # fmt: skip


@pytest.mark.parametrize("biases", [True, False])
@pytest.mark.parametrize("dtype", ["fp32", "fp16", "bf16", "int8", "int4"])
def test_a_stores_own_views_begin_at_the_same_bytes(
    dtype: str, biases: bool, tmp_path: Path
) -> None:
    store = pack_synthetic(replace(SPEC, biases=biases), tmp_path / "store", dtype=dtype)
    layout = BlockLayout.of(store)
    slot = torch.zeros(layout.stride, dtype=torch.uint8)
    parts = view_blocks(slot, store)
    matrices = [part.data_ptr() - slot.data_ptr() for part in parts[:3]]
    assert matrices == [i * layout.matrix_bytes for i in range(3)]
    if biases:
        assert parts.gate_bias.data_ptr() - slot.data_ptr() == layout.biases_at
    if layout.quantized:
        assert parts.scales.data_ptr() - slot.data_ptr() == layout.scales_at


@pytest.mark.parametrize("dtype", ["bf16", "int8", "int4"])
def test_weights_of_a_packed_store(dtype: str, tmp_path: Path) -> None:
    store = pack_synthetic(SPEC, tmp_path / "store", dtype=dtype)
    begin = store.offset(0, 0, 1)
    raw = bytearray(store.files[0].read_bytes()[begin : begin + store.spec.block_bytes])
    slot = torch.frombuffer(raw, dtype=torch.uint8)
    parts = view_blocks(slot, store)
    for which in range(3):
        expected = parts[which]
        if dtype == "int4":
            low, high = expected.int() & 15, expected.int() >> 4
            expected = torch.stack((low, high), -1).flatten(-2)
            expected = torch.where(expected > 7, expected - 16, expected)
        if dtype != "bf16":
            scales = parts.scales[which].float().repeat_interleave(GROUP, -1)
            expected = expected * scales
        assert torch.equal(matrix(BlockLayout.of(store), slot, which), expected.float())
