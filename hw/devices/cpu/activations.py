"""The activations of `crisp.model.activation` in float32, for the cpu device's kernels."""

from __future__ import annotations

import math
from typing import Any

import numpy as np
from numba.extending import register_jitable

from crisp.model.activation import BOTH, PLAIN

KINDS = {name: number for number, name in enumerate([*PLAIN, *BOTH])}
"""The number of an activation in compiled code, by name."""
_SILU, _GELU, _GELU_TANH, _RELU, _RELU2 = (KINDS[name] for name in PLAIN)
_GPT_OSS, _CLAMPED_SILU, _SILU_CLAMPED = (
    KINDS[name] for name in ("gpt_oss", "clamped_silu", "silu_clamped")
)

_FREE = {"reassoc", "contract", "nsz", "arcp"}  # the order within a sum; infinities stay
_ZERO, _ONE, _HALF = np.float32(0), np.float32(1), np.float32(0.5)
_ROOT, _CUBIC = np.float32(math.sqrt(8 / math.pi)), np.float32(0.044715)


@register_jitable(fastmath=_FREE, error_model="numpy")
def apply_activation(
    hidden: Any, kind: int, gated: bool, alpha: Any, limit: Any, first: int, last: int
) -> None:
    """Replace hidden[0] of neurons [first, last) by the activation of both projections.

    hidden: [2, block], or [1, block] without a gate. alpha, limit: the activation's constants.
    """
    if kind in (_SILU, _GELU, _GELU_TANH, _RELU, _RELU2):
        for i in range(first, last):
            gate = hidden[0, i]
            if kind == _SILU:
                passed = gate / (_ONE + np.exp(-gate))
            elif kind == _GELU:
                passed = gate * _HALF * (_ONE + np.float32(math.erf(gate / math.sqrt(2.0))))
            elif kind == _GELU_TANH:
                passed = gate / (_ONE + np.exp(-_ROOT * (gate + _CUBIC * gate * gate * gate)))
            else:
                passed = max(gate, _ZERO)
                if kind == _RELU2:
                    passed *= passed
            hidden[0, i] = passed * hidden[1, i] if gated else passed
        return
    for i in range(first, last):
        gate, up = hidden[0, i], hidden[1, i]
        if kind == _GPT_OSS:
            gate, up = min(gate, limit), min(max(up, -limit), limit)
            hidden[0, i] = (up + _ONE) * gate / (_ONE + np.exp(-alpha * gate))
        elif kind == _CLAMPED_SILU:
            gate, up = min(gate, alpha), min(max(up, -alpha), alpha)
            hidden[0, i] = up * gate / (_ONE + np.exp(-gate))
        elif kind == _SILU_CLAMPED:
            gate = min(gate / (_ONE + np.exp(-gate)), alpha)
            hidden[0, i] = min(max(up, -alpha), alpha) * gate
        else:
            capped = alpha * np.tanh(gate / alpha) * limit * np.tanh(up / limit)
            hidden[0, i] = capped / (_ONE + np.exp(-gate))
