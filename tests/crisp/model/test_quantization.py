"""Whole numbers in groups: how near a weight stays, and what a group of any weights becomes."""

from __future__ import annotations

import hashlib
from collections.abc import Callable

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from crisp.errors import CrispError
from crisp.model.quantization import (
    BITS,
    STORED_BITS,
    check_groups,
    dequantize,
    quantize,
)
from crisp.model.spec import ModelSpec

RANGE = {"int8": (-127, 127), "int4": (-8, 7)}
# sha256 of q and scales of `normal()`, as they have always been
BEFORE = {"int8": "fe9438652a5f0037", "int4": "a0bcdec46da3b7ce"}


def normal(scale: float = 1, seed: int = 0) -> np.ndarray:
    """5 neurons of 3 groups."""
    return (scale * np.random.default_rng(seed).standard_normal((5, 192))).astype(np.float32)


def groups(weights: np.ndarray) -> np.ndarray:
    return weights.reshape(*weights.shape[:-1], -1, 64)


@pytest.mark.parametrize("dtype", BITS)
@given(st.integers(0, 2**32), st.integers(-12, 14), st.sampled_from([1, 3, 9]))
def test_no_weight_is_more_than_half_a_step_from_what_is_read(
    dtype: str, seed: int, magnitude: int, power: int
) -> None:
    """Of normal weights, and of ones of which few in a group are large; down to where float16's
    steps are coarse, which makes a group's scale larger and no more than that."""
    weights = normal(1, seed).astype(np.float64) ** power
    weights = (weights * 2.0**magnitude / np.abs(weights).max()).astype(np.float32)
    q, scales = quantize(weights, dtype)
    assert (q.dtype, q.shape) == (np.int8, weights.shape)
    assert (scales.dtype, scales.shape) == (np.float16, (5, 3))
    low, high = RANGE[dtype]
    assert low <= q.min() <= q.max() <= high
    step = np.abs(scales.astype(np.float64))[..., None]
    off = np.abs(groups(q) * scales.astype(np.float64)[..., None] - groups(weights))
    assert (off <= step / 2 * (1 + 2**-20)).all()
    # what is computed with is that product exactly: 11 bits times 8
    assert (groups(dequantize(q, scales)) == groups(q) * scales.astype(np.float64)[..., None]).all()


@pytest.mark.parametrize(("dtype", "reach"), [("int8", 127), ("int4", 8.5)])
def test_a_scale_is_no_larger_than_it_has_to_be(dtype: str, reach: float) -> None:
    """The next smaller float16 would leave the farthest weight out of reach, or int4's other end
    (7.5 steps)."""
    weights = groups(normal()).astype(np.float64)
    _, scales = quantize(normal(), dtype)
    less = np.nextafter(np.abs(scales), np.float16(0)).astype(np.float64)
    above, below = weights.max(-1), -weights.min(-1)
    far, near = np.maximum(above, below), np.minimum(above, below)
    missed = far > less * reach
    if dtype == "int4":
        missed |= near > less * 7.5
        assert (np.sign(scales) == np.where(above > below, -1, 1)).all()
    assert missed.all()


def test_by_hand() -> None:
    """A group whose farthest weight is 8.5: of int4 a step of 1 up to -8, with the sign turned."""
    group = np.zeros((1, 64), np.float32)
    group[0, :6] = [8.5, 6.4, -7.5, -0.6, 0.5, 1.5]
    q, scales = quantize(group, "int4")
    assert scales.tolist() == [[-1.0]]
    assert q[0, :7].tolist() == [-8, -6, 7, 1, 0, -2, 0]  # halves to the even one; 7.5 to the end
    q, scales = quantize(group * np.float32(127 / 8.5), "int8")
    assert scales.tolist() == [[1.0]]
    assert q[0, :3].tolist() == [127, 96, -112]


@pytest.mark.parametrize("dtype", BITS)
@pytest.mark.parametrize("zero", [0.0, -0.0])
def test_a_group_of_zeros_is_zeros_to_the_bit(dtype: str, zero: float) -> None:
    weights = normal()
    weights[2, 64:128] = zero
    q, scales = quantize(weights, dtype)
    assert not q[2, 64:128].any()
    assert scales.view(np.uint16)[2, 1] == 0
    assert np.isfinite(dequantize(q, scales)).all()


@pytest.mark.parametrize(("dtype", "most"), [("int8", 127), ("int4", 8.5)])
def test_what_float16_cannot_scale_has_an_infinite_scale(dtype: str, most: float) -> None:
    """The largest float16 is 65504."""
    weights = normal()
    weights[0, 0], weights[1, 0] = 65504 * most, 65505 * most
    _, scales = quantize(weights, dtype)
    assert np.isfinite(scales).sum() == 14
    assert not np.isfinite(scales[1, 0])


@pytest.mark.parametrize("dtype", BITS)
def test_the_smallest_weights_are_half_of_the_smallest_float16_off(dtype: str) -> None:
    weights = normal(1e-9)
    q, scales = quantize(weights, dtype)
    assert (np.abs(scales) == np.float16(2**-24)).all()
    assert np.abs(dequantize(q, scales) - weights).max() <= 2**-25


def test_neurons_are_whole_groups(spec: Callable[[int], ModelSpec]) -> None:
    check_groups(spec(128), "int4")
    with pytest.raises(CrispError, match="--dtype int4: needs a d_model that is a multiple of 64"):
        check_groups(spec(96), "int4")


@pytest.fixture
def spec() -> Callable[[int], ModelSpec]:
    config = {
        "model_type": "mixtral", "vocab_size": 8, "intermediate_size": 40, "num_hidden_layers": 1,
        "num_attention_heads": 2, "num_key_value_heads": 2, "num_local_experts": 3,
        "num_experts_per_tok": 2,
    }  # fmt: skip
    return lambda d_model: ModelSpec.from_config(config | {"hidden_size": d_model})


def test_bits_of_a_weight_include_its_share_of_a_scale() -> None:
    assert {dtype: float(bits) for dtype, bits in STORED_BITS.items()} == {
        "int8": 8.25,
        "int4": 4.25,
    }


def squared(weights: np.ndarray, scales: np.ndarray, moments: np.ndarray) -> np.ndarray:
    """Each group's weighted squared error with the nearest q, in float64."""
    steps = np.where(scales == 0, 1, scales).astype(np.float64)[..., None]
    q = np.clip(np.rint(groups(weights) / steps), -8, 7)
    return (
        (q * scales.astype(np.float64)[..., None] - groups(weights)) ** 2 * groups(moments)
    ).sum(-1)


@given(st.integers(0, 2**32), st.integers(-12, 12), st.sampled_from([1, 3, 9]))
def test_a_fitted_scale_leaves_no_group_worse(seed: int, magnitude: int, power: int) -> None:
    random = np.random.default_rng(seed)
    weights = normal(1, seed).astype(np.float64) ** power
    weights = (weights * 2.0**magnitude / np.abs(weights).max()).astype(np.float32)
    moments = random.exponential(size=192).astype(np.float32)
    _, nearest = quantize(weights, "int4")
    q, fitted = quantize(weights, "int4", moments)
    assert (fitted.dtype, fitted.shape, q.dtype) == (np.float16, (5, 3), np.int8)
    before, after = squared(weights, nearest, moments), squared(weights, fitted, moments)
    assert (after <= before * (1 + 1e-4) + 1e-30).all()
    # q is the nearest that there is to the scale
    steps = fitted.astype(np.float64)[..., None]
    off = np.abs(groups(q) * steps - groups(weights))
    assert (off <= np.abs(groups(np.clip(q + 1, -8, 7)) * steps - groups(weights)) + 1e-9).all()


def test_a_fitted_scale_by_hand() -> None:
    """The nearest q are -8 and 1. The large weight has lost 0.5 of 8.5, which all give back."""
    weights = np.ones((1, 64), np.float32)
    weights[0, 5] = -8.5
    moments = np.ones(64, np.float32)
    q, scales = quantize(weights, "int4")
    assert (q[0, 5], q[0, 0], scales.item()) == (-8, 1, 1)
    q, scales = quantize(weights, "int4", moments)
    assert (q[0, 5], q[0, 0]) == (-8, 1)
    # (63 x 1 x 1 + 8.5 x 8.5) / (63 x 1 x 1 + 8.5 x 8)
    assert scales.item() == np.float16(135.25 / 131)
    moments[5] = 0  # nothing is lost of what counts
    assert quantize(weights, "int4", moments)[1].item() == 1


def test_rounding_shrinks_weights_and_a_fit_less() -> None:
    """Of normal weights: the slope of the rounded ones over what they were, and their error."""
    random = np.random.default_rng(0)
    weights = random.standard_normal((64, 256)).astype(np.float32)
    moments = np.exp(random.standard_normal(256)).astype(np.float32)
    weighted = weights.astype(np.float64) * moments
    nearest, fitted = (dequantize(*quantize(weights, "int4", m)) for m in (None, moments))
    slopes = [(weighted * x).sum() / (weighted * weights).sum() for x in (nearest, fitted)]
    assert slopes[0] + 0.001 < slopes[1] < 1
    errors = [((x - weights) ** 2 * moments).sum() for x in (nearest, fitted)]
    assert errors[1] < 0.98 * errors[0]


def test_without_moments_nothing_changed() -> None:
    """Stores packed before are what they would be packed as today."""
    weights = normal()
    for dtype in BITS:
        q, scales = quantize(weights, dtype)
        content = hashlib.sha256(q.tobytes() + scales.tobytes()).hexdigest()
        assert content.startswith(BEFORE[dtype])
    q, scales = quantize(weights, "int8", np.ones(192, np.float32))  # it is not fitted
    assert (q == quantize(weights, "int8")[0]).all()


def test_a_leading_part_is_fitted_alike() -> None:
    """Groups do not depend on each other: a narrower expert is packed as leading blocks are."""
    weights, moments = normal(), np.linspace(0.1, 3, 192).astype(np.float32)
    q, scales = quantize(weights, "int4", moments)
    part, part_scales = quantize(weights[:2], "int4", moments)
    assert (part == q[:2]).all()
    assert (part_scales == scales[:2]).all()


def test_groups_of_zeros_and_moments_of_zero() -> None:
    weights = normal()
    weights[2, :64] = 0
    for moments in (np.zeros(192, np.float32), np.ones(192, np.float32)):
        q, scales = quantize(weights, "int4", moments)
        assert scales[2, 0] == 0
        assert not q[2, :64].any()
        assert np.isfinite(scales).all()
