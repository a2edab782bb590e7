"""The kernels' arithmetic in plain torch: their reference, and their stand-in without Triton."""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any

from crisp.extras import import_extra
from crisp.hw.devices.gpu.kernels.layout import BlockLayout
from crisp.model.activation import Activation
from crisp.model.quantization import GROUP

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
        *both, down = (matrix(layout, pool[slot], i)[:width] for i in range(layout.matrices))
        projected = [rows @ part.T for part in both]  # [count, width] each
        if layout.biases:
            biases = _biases(layout, pool[slot])[:, :width]
            projected = [own + bias for own, bias in zip(projected, biases, strict=True)]
        sums[:count] += activated(layout.activation, *projected) @ down


def activated(activation: str, gate: Any, up: Any = None) -> Any:
    """Return the neurons' activation from both projections [count, width]; up: None, no gate."""
    own = Activation.read(activation)
    if own.kind not in _PLAIN:
        return _BOTH[own.kind](gate, up, own.first, own.second)
    passed = _PLAIN[own.kind](gate)
    return passed if up is None else passed * up


def _silu(x: Any) -> Any:
    return x * x.sigmoid()


def _gelu_tanh(x: Any) -> Any:
    return x / 2 * (1 + (math.sqrt(2 / math.pi) * (x + 0.044715 * x**3)).tanh())


_PLAIN: dict[str, Callable[[Any], Any]] = {
    "silu": _silu,
    "gelu": lambda x: x * (1 + (x / math.sqrt(2)).erf()) / 2,
    "gelu_tanh": _gelu_tanh,
    "relu": lambda x: x.clamp(min=0),
    "relu2": lambda x: x.clamp(min=0) ** 2,
}


def _gpt_oss(gate: Any, up: Any, alpha: float, limit: float) -> Any:
    gate = gate.clamp(max=limit)
    return gate * (alpha * gate).sigmoid() * (up.clamp(-limit, limit) + 1)


_BOTH: dict[str, Callable[[Any, Any, float, float], Any]] = {
    "gpt_oss": _gpt_oss,
    "clamped_silu": lambda gate, up, limit, _: (
        _silu(gate.clamp(max=limit)) * up.clamp(-limit, limit)
    ),
    "silu_clamped": lambda gate, up, limit, _: (
        _silu(gate).clamp(max=limit) * up.clamp(-limit, limit)
    ),
    "softcapped_silu": lambda gate, up, first, second: (
        first * (gate / first).tanh() * gate.sigmoid() * second * (up / second).tanh()
    ),
}


def matrix(layout: BlockLayout, slot: Any, which: int) -> Any:
    """Return gate (0), up (1) or down (2) of a slot, uint8 [stride]: float32 [block, d_model].

    Without a gate they are up (0) and down (1).
    """
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
    """Return the biases of gate and up: float32 [2, block], [1, block] without a gate."""
    torch = import_extra("torch")
    kind = torch.float16 if layout.quantized else getattr(torch, _TYPES[layout.dtype])
    parts = layout.matrices - 1
    length = parts * layout.block * kind.itemsize
    stored = slot[layout.biases_at : layout.biases_at + length]
    return stored.view(kind).view(parts, layout.block).float()
