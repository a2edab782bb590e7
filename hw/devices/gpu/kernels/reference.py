"""The kernels' arithmetic in plain torch: their reference, and their stand-in without Triton."""

from __future__ import annotations

import math
from typing import Any

from crisp.extras import import_extra
from crisp.hw.devices.gpu.kernels.layout import BlockLayout
from crisp.model.quantization import GROUP

ALPHA, LIMIT = 1.702, 7.0  # gpt-oss's clamped activation

_TYPES = {"fp32": "float32", "fp16": "float16", "bf16": "bfloat16"}


def add_blocks(
    layout: BlockLayout, pool: Any, slots: Any, counts: Any, neurons: Any, x: Any, sums: Any
) -> None:
    """Compute `crisp.hw.devices.gpu.kernels.add_blocks` in float32; waits for the tables to reach
    the host.
    """
    table = zip(slots.tolist(), counts.tolist(), neurons.tolist(), strict=True)
    for slot, count, width in table:
        rows = x[:count].float()
        gate, up, down = (matrix(layout, pool[slot], i)[:width] for i in range(3))  # [width, d]
        gates, ups = rows @ gate.T, rows @ up.T  # [count, width]
        if layout.biases:
            biases = _biases(layout, pool[slot])[:, :width]
            gates, ups = gates + biases[0], ups + biases[1]
        sums[:count] += activated(layout.activation, gates, ups) @ down


def activated(activation: str, gate: Any, up: Any) -> Any:
    """Return the neurons' activation from both projections: [count, width]."""
    if activation == "silu":
        return gate * gate.sigmoid() * up
    if activation == "gelu":
        return gate * (1 + (gate / math.sqrt(2)).erf()) / 2 * up
    gate, up = gate.clamp(max=LIMIT), up.clamp(-LIMIT, LIMIT)
    return gate * (ALPHA * gate).sigmoid() * (up + 1)


def matrix(layout: BlockLayout, slot: Any, which: int) -> Any:
    """Return gate (0), up (1) or down (2) of a slot, uint8 [stride]: float32 [block, d_model]."""
    torch = import_extra("torch")
    shape = layout.block, layout.d_model
    begin = which * layout.matrix_bytes
    stored = slot[begin : begin + layout.matrix_bytes]
    if not layout.quantized:
        return stored.view(getattr(torch, _TYPES[layout.dtype])).view(shape).float()
    numbers = stored.view(torch.int8)
    if layout.dtype == "int4":  # the even column is the low half of a byte; the sign is shifted in
        numbers = torch.stack(((numbers << 4) >> 4, numbers >> 4), dim=-1)
    groups = layout.block * layout.d_model // GROUP
    begin = layout.scales_at + which * groups * 2
    scales = slot[begin : begin + groups * 2].view(torch.float16)
    return (numbers.view(groups, GROUP).float() * scales.float()[:, None]).view(shape)


def _biases(layout: BlockLayout, slot: Any) -> Any:
    """Return the biases of gate and up: float32 [2, block]."""
    torch = import_extra("torch")
    kind = torch.float16 if layout.quantized else getattr(torch, _TYPES[layout.dtype])
    length = 2 * layout.block * kind.itemsize
    stored = slot[layout.biases_at : layout.biases_at + length]
    return stored.view(kind).view(2, layout.block).float()
