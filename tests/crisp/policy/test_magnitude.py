"""Magnitudes: what widths multiply router weights with, and what is refused."""

from __future__ import annotations

from dataclasses import replace
from fractions import Fraction

import numpy as np
import pytest

from crisp.errors import CrispError
from crisp.model.spec import ModelSpec
from crisp.policy import named
from crisp.policy.magnitude import coefficients, weighed
from crisp.profile import Profile

SPEC = ModelSpec.named("mixtral-8x7b").first_layers(2)


def test_products_of_halves_are_exact() -> None:
    """Any two numbers of 11 bits have a product of 22, and float32 has 24."""
    random = np.random.default_rng(0)
    weights, magnitudes = random.random((2, 500, 2)).astype(np.float16) * np.float16(7)
    products = weighed(weights, magnitudes)
    assert products.dtype == np.float32
    for product, weight, magnitude in zip(
        products.ravel(), weights.ravel(), magnitudes.ravel(), strict=True
    ):
        assert Fraction(float(product)) == Fraction(float(weight)) * Fraction(float(magnitude))


def test_the_part_is_named_where_it_is_not_usual() -> None:
    assert "magnitude" not in named("saliency").to_dict()
    assert named("saliency", magnitude="predicted").to_dict()["magnitude"] == "predicted"
    with pytest.raises(CrispError, match="unknown magnitude 'predict'; did you mean 'predicted'"):
        named("saliency", magnitude="predict")
    with pytest.raises(CrispError, match="magnitudes are predicted; --magnitude none was expected"):
        named("saliency", magnitude="predicted", routing="cache-prior(.5)")


def test_coefficients_are_those_of_the_model() -> None:
    profile = Profile.empty(SPEC)
    with pytest.raises(CrispError, match="crisp prepare --magnitudes measures it"):
        coefficients(SPEC, profile)
    with pytest.raises(CrispError, match=r"has inputs of 4096 numbers, but .* measured for 8"):
        coefficients(SPEC, replace(profile, magnitudes=np.zeros((2, 8, 9), np.float16)))
