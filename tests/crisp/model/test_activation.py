"""Activations by hand, and how they are spelled."""

from __future__ import annotations

import math

import numpy as np
import pytest

from crisp.errors import CrispError
from crisp.model.activation import Activation


def sigmoid(x: float) -> float:
    return 1 / (1 + math.exp(-x))


G, U = 1.5, -0.75
BY_HAND = {
    "silu": G * sigmoid(G) * U,
    "gelu": G * 0.5 * (1 + math.erf(G / math.sqrt(2))) * U,
    "gelu_tanh": G * 0.5 * (1 + math.tanh(math.sqrt(2 / math.pi) * (G + 0.044715 * G**3))) * U,
    "relu": G * U,
    "relu2": G * G * U,
    "gpt_oss": G * sigmoid(1.702 * G) * (U + 1),
    "gpt_oss(1.5,0.5)": 0.5 * sigmoid(1.5 * 0.5) * (-0.5 + 1),
    "clamped_silu(0.5)": 0.5 * sigmoid(0.5) * -0.5,
    "silu_clamped(0.5)": 0.5 * -0.5,
    "softcapped_silu(2,3)": 2 * math.tanh(G / 2) * sigmoid(G) * 3 * math.tanh(U / 3),
}


@pytest.mark.parametrize("name", BY_HAND)
def test_by_hand(name: str) -> None:
    activation = Activation.read(name)
    assert activation(np.array([G]), np.array([U]))[0] == pytest.approx(BY_HAND[name], rel=1e-12)
    assert str(activation) == name


def test_without_a_gate() -> None:
    assert Activation.read("relu2")(np.array([-1.0, 3.0])).tolist() == [0, 9]
    assert not Activation.read("relu2").gated
    assert Activation.read("clamped_silu(7)").gated


@pytest.mark.parametrize(
    "text",
    ["tanh", "silu(1)", "gpt_oss(1)", "clamped_silu", "clamped_silu(0)", "clamped_silu(x)",
     "clamped_silu(inf)", "silu_clamped(1,2)", "relu2 ", "", "gpt_oss(1,2,3)"],
)  # fmt: skip
def test_what_there_is_not(text: str) -> None:
    with pytest.raises(CrispError, match=r"activation: found .*, expected silu or gelu or "):
        Activation.read(text)
