"""The activations of experts that stores and devices know: what becomes of a neuron's projections.

With a gate g and an up u a plain one is act(g) * u, without a gate act(u). The others take both.
"""

from __future__ import annotations

import math
import re
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import numpy as np
import numpy.typing as npt

from crisp.errors import CrispError

Floats = npt.NDArray[np.float64]


def _sigmoid(x: Floats) -> Floats:
    return np.asarray(0.5 + 0.5 * np.tanh(x / 2))


def _gelu(x: Floats) -> Floats:
    return np.asarray(x * 0.5 * (1 + np.vectorize(math.erf)(x / math.sqrt(2))))


def _gelu_tanh(x: Floats) -> Floats:
    return np.asarray(x * _sigmoid(2 * math.sqrt(2 / math.pi) * (x + 0.044715 * x**3)))


PLAIN: dict[str, Callable[[Floats], Floats]] = {
    "silu": lambda x: x * _sigmoid(x),
    "gelu": _gelu,
    "gelu_tanh": _gelu_tanh,
    "relu": lambda x: np.maximum(x, 0),
    "relu2": lambda x: np.square(np.maximum(x, 0)),
}
"""Activations of one number, by name: they go with and without a gate."""


def _clamped(gate: Floats, up: Floats, limit: float) -> tuple[Floats, Floats]:
    return np.minimum(gate, limit), np.clip(up, -limit, limit)


def _gpt_oss(gate: Floats, up: Floats, alpha: float, limit: float) -> Floats:
    gate, up = _clamped(gate, up, limit)
    return gate * _sigmoid(alpha * gate) * (up + 1)


def _clamped_silu(gate: Floats, up: Floats, limit: float, _: float) -> Floats:
    gate, up = _clamped(gate, up, limit)
    return PLAIN["silu"](gate) * up


def _silu_clamped(gate: Floats, up: Floats, limit: float, _: float) -> Floats:
    gate, up = _clamped(PLAIN["silu"](gate), up, limit)
    return gate * up


def _softcapped_silu(gate: Floats, up: Floats, first: float, second: float) -> Floats:
    capped = first * np.tanh(gate / first), second * np.tanh(up / second)
    return capped[0] * _sigmoid(gate) * capped[1]


BOTH: dict[str, Callable[[Floats, Floats, float, float], Floats]] = {
    "gpt_oss": _gpt_oss,
    "clamped_silu": _clamped_silu,
    "silu_clamped": _silu_clamped,
    "softcapped_silu": _softcapped_silu,
}
"""Activations of gate and up with up to two constants, by name."""
CONSTANTS = {"gpt_oss": 2, "clamped_silu": 1, "silu_clamped": 1, "softcapped_silu": 2}
_USUAL = {"gpt_oss": (1.702, 7.0)}  # constants that the bare name stands for


@dataclass(frozen=True)
class Activation:
    """An activation by name, with its constants (0 where it has none)."""

    kind: str = "silu"  # a key of PLAIN or BOTH
    first: float = 0.0  # gpt_oss: factor of the sigmoid; otherwise the limit or cap of the gate
    second: float = 0.0  # gpt_oss: limit; softcapped_silu: cap of the up

    @classmethod
    def read(cls, text: str) -> Activation:
        """Parse what `str` writes; CrispError says which there are.

        >>> print(*map(Activation.read, ["relu2", "gpt_oss", "gpt_oss(1.5, 7)"]))
        relu2 gpt_oss gpt_oss(1.5,7)
        >>> Activation.read("clamped_silu(7)").first
        7.0
        """
        match = re.fullmatch(r"(\w+)(?:\(([-+.\w]+)(?:, ?([-+.\w]+))?\))?", text)
        name = match[1] if match else text
        if match and not match[2] and (name in PLAIN or name in _USUAL):
            return cls(name, *_USUAL.get(name, ()))
        if match and match[2] and name in BOTH:
            try:
                constants = [float(number) for number in match.groups()[1:] if number]
            except ValueError:
                constants = []
            good = all(0 < number < math.inf for number in constants)
            if len(constants) == CONSTANTS[name] and good:
                return cls(name, *constants)
        raise CrispError(f"activation: found {text!r}, expected {' or '.join([*PLAIN, *BOTH])}")

    def __str__(self) -> str:
        constants = (self.first, self.second)[: CONSTANTS.get(self.kind, 0)]
        if not constants or constants == _USUAL.get(self.kind):
            return self.kind
        return f"{self.kind}({','.join(f'{number:g}' for number in constants)})"

    @property
    def gated(self) -> bool:
        """Whether it needs a gate."""
        return self.kind in BOTH

    def __call__(self, gate: Floats, up: Any = None) -> Floats:
        """Return the activation of neurons, float64. up: None without a gate."""
        if self.kind in BOTH:
            return BOTH[self.kind](gate, up, self.first, self.second)
        passed = PLAIN[self.kind](gate)
        return passed if up is None else passed * up
