"""Launch the kernels: their arguments, from the layout, the launch table and the tensors."""

from __future__ import annotations

from functools import cache
from typing import Any

import torch

from crisp.hw.devices.gpu.kernels import blocks
from crisp.hw.devices.gpu.kernels.launch import SHARED, Launch, launch
from crisp.hw.devices.gpu.kernels.layout import BlockLayout
from crisp.model.activation import Activation

INTERPRETED = 80
"""The architecture whose launch parameters are used with Triton's interpreter."""

_POOL = {
    "fp32": torch.float32, "fp16": torch.float16, "bf16": torch.bfloat16,
    "int8": torch.int8, "int4": torch.int8,
}  # fmt: skip


def add_blocks(
    layout: BlockLayout,
    pool: Any,
    slots: Any,
    counts: Any,
    neurons: Any,
    x: Any,
    sums: Any,
    hidden: Any,
) -> None:
    """Compute `kernels.add_blocks` by two Triton kernels, on x's device and current stream."""
    rows, total = len(x), len(slots)
    arch, shared = _card(x.device.index) if x.is_cuda else (INTERPRETED, SHARED[INTERPRETED])
    kind = torch.float32 if rows == 1 else operand(layout, x.dtype)
    width = 8 * kind.itemsize
    numbers = pool.view(_POOL[layout.dtype])
    halves = pool.view(torch.float16) if layout.quantized else numbers
    if hidden is None:
        hidden = torch.empty(hidden_size(layout, total, rows), dtype=torch.float32, device=x.device)
    hidden = hidden.view(kind)
    table = slots, counts, neurons
    front = launch("front", layout.bits, width, rows, arch, shared)
    back = launch("back", layout.bits, width, rows, arch, shared)
    tiles, columns = -(-layout.block // front.neurons), -(-layout.d_model // back.columns)
    first, second = constants(layout, "front", front), constants(layout, "back", back)
    if rows == 1:
        blocks.front_row[tiles, total](
            numbers, halves, *table, x, hidden, **first, **_options(front)
        )
        blocks.back_row[columns,](
            numbers, halves, *table, hidden, sums, total, **second, **_options(back)
        )
    else:
        blocks.front_rows[-(-rows // front.rows), tiles, total](
            numbers, halves, *table, x, hidden, rows, **first, **_options(front)
        )
        blocks.back_rows[-(-rows // back.rows), columns](
            numbers, halves, *table, hidden, sums, total, rows, **second, **_options(back)
        )


def operand(layout: BlockLayout, x: torch.dtype) -> torch.dtype:
    """Return the type of what is multiplied for many rows, and of hidden.

    It is x's type where weights are of that type too, or quantised; otherwise neither type holds
    the other's numbers, and both are widened to float32.
    """
    return x if layout.quantized or x == _POOL[layout.dtype] else torch.float32


def hidden_size(layout: BlockLayout, total: int, rows: int) -> int:
    """Return the numbers of hidden [blocks, rows, block], a block padded to a multiple of 16."""
    return total * rows * _padded_block(layout)


def constants(layout: BlockLayout, kernel: str, how: Launch) -> dict[str, Any]:
    """Return the compile-time constants (in capitals) of ``front`` or ``back``."""
    item = max(1, layout.bits // 8)
    halves = 2 if layout.quantized else item
    values: dict[str, Any] = {
        "D": layout.d_model,
        "BLOCK": layout.block,
        "WIDTH": _padded_block(layout),
        "BITS": layout.bits,
        "STRIDE": layout.stride // item,
        "HALVES": layout.stride // halves,
        "SCALES_AT": layout.scales_at // halves,
        "NEURONS": how.neurons,
        "COLUMNS": how.columns,
        "STAGES": how.stages,
    }
    if how.rows > 1:
        values["ROWS"] = how.rows
    if kernel == "front":
        activation = Activation.read(layout.activation)
        values["BIASES_AT"] = layout.biases_at // halves if layout.biases else -1
        values["GATED"] = layout.matrices == 3
        values["ACTIVATION"] = activation.kind
        values["FIRST"], values["SECOND"] = activation.first, activation.second
    else:
        values["DOWN"] = layout.matrices - 1
    return values


def _options(how: Launch) -> dict[str, int]:
    return {"num_warps": how.warps, "num_stages": how.stages}


def _padded_block(layout: BlockLayout) -> int:
    return -(-layout.block // 16) * 16


@cache
def _card(index: int) -> tuple[int, int]:
    """Return a card's architecture and the bytes of shared memory that a program may have."""
    properties = torch.cuda.get_device_properties(index)
    arch = 10 * properties.major + properties.minor
    return arch, properties.shared_memory_per_block_optin
