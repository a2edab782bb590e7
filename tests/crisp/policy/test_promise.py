"""A loss asked for in the place of a threshold."""

from __future__ import annotations

from fractions import Fraction

import numpy as np
import pytest

from crisp.errors import CrispError
from crisp.model.spec import ModelSpec
from crisp.policy import Budget, named
from crisp.policy.promise import within_loss
from crisp.policy.widths.saliency import Saliency
from crisp.profile.loss_curve import LossCurve

SPEC = ModelSpec.named("mixtral-8x7b")
# At 10 % of the experts a share of .5 loses 3 %, at 30 % half of that.
CURVE = LossCurve(
    1000,
    (Fraction(1, 10), Fraction(3, 10)),
    (Fraction(1, 2),),
    np.array([[0.02], [0.01]]),
    np.array([[0.03], [0.015]]),
)
TWO = Fraction(2, 100)


def share(budget: str) -> Fraction:
    policy, promise = within_loss(named("saliency"), TWO, SPEC, Budget.parse(budget), CURVE)
    assert policy.width == Saliency(promise.share)
    assert policy.cache == named("saliency").cache
    return promise.share


def test_the_largest_measured_budget_that_is_no_larger_counts() -> None:
    assert share("10%") == share("29%") == Fraction(3, 4)  # 1.5 % is halfway from 3 % to none
    assert share("30%") == share("100%") == Fraction(1, 2)


def test_a_budget_in_bytes_is_compared_by_the_blocks_that_it_holds() -> None:
    held = sum(Budget.parse("30%").capacity(SPEC, named("saliency").cache))
    assert share(f"{held * SPEC.block_bytes}B") == Fraction(1, 2)
    assert share(f"{held * SPEC.block_bytes - 1}B") == Fraction(3, 4)


def test_what_cannot_be_promised_is_refused() -> None:
    def refusal(
        policy: str, budget: str = "20%", curve: LossCurve | None = CURVE, **parts: str
    ) -> str:
        with pytest.raises(CrispError) as refused:
            within_loss(named(policy, **parts), TWO, SPEC, Budget.parse(budget), curve)
        return str(refused.value)

    assert "losses were measured for 10% and more" in refusal("saliency", "9%")
    assert "crisp prepare --loss-curve" in refusal("saliency", curve=None)
    assert "--loss: is for policy saliency, found lru" in refusal("lru")
    for part, value in (
        ("width", "saliency(.4)"),
        ("rescale", "none"),
        ("cache", "lru"),
        ("scope", "global"),
        ("routing", "cache-prior"),
    ):
        assert f"without another --{part}" in refusal("saliency", **{part: value})
