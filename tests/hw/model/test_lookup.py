"""What a device looks up, against the policy's own rule on the host."""

from __future__ import annotations

from fractions import Fraction
from typing import Any

import numpy as np
import pytest

from crisp.errors import CrispError
from crisp.hw.model.lookup import HostLookup, WidthLookup, pair_table
from crisp.model.spec import ModelSpec
from crisp.policy import named
from crisp.policy.widths.base import BoundWidths
from crisp.profile import Profile

torch = pytest.importorskip("torch")

from crisp.adapter import rank_by_weight  # noqa: E402

EXPERTS = 5


def spec(k: int) -> ModelSpec:
    return ModelSpec(
        name="small", n_layers=3, moe_layers=(0, 2), n_experts=EXPERTS, top_k=k, d_model=64,
        d_ff=128, dtype_bits=16, bits=Fraction(16), matrices=3, biases=False,
        dense_params=(0, 0, 0), block=16, config_hash=None,
    )  # fmt: skip


def profile(one: ModelSpec, roles: bool) -> Profile:
    """Random counts, and random roles: of some pairs the lighter expert is the dominant one."""
    draw = np.random.default_rng(one.top_k)
    pairs = np.triu(draw.integers(0, 9, (3, EXPERTS, EXPERTS)), 1)
    dominant = np.where(draw.random(pairs.shape) < 0.5, *np.indices((EXPERTS, EXPERTS)))
    dominant = np.maximum(np.triu(dominant, 1), np.swapaxes(np.triu(dominant, 1), 1, 2))
    counts, measured = pairs.sum(1) + pairs.sum(2), dominant.astype(np.int16) if roles else None
    return Profile(expert_counts=counts, pair_counts=pairs, ordered=True, dominant=measured)


def looked_up(one: ModelSpec, widths: BoundWidths) -> WidthLookup:
    return WidthLookup(one, widths, lambda tensor: tensor, lambda tensor: tensor.numpy())


def router(one: ModelSpec, rows: int, seed: int) -> tuple[Any, Any]:
    """Random choices, unsorted, some of them none, some of equal weight."""
    draw = np.random.default_rng(seed)
    ids = np.array([draw.permutation(EXPERTS)[: one.top_k] for _ in range(rows)])
    ids[draw.random(ids.shape) < 0.15] = EXPERTS
    weights = draw.integers(1, 4, ids.shape) / 4
    return torch.from_numpy(ids), torch.from_numpy(weights).to(torch.bfloat16)


@pytest.mark.parametrize("k", [1, 2, 4])
@pytest.mark.parametrize("roles", [False, True])
@pytest.mark.parametrize("name", ["lru", "up", "crisp"])
def test_widths_and_order_are_those_of_the_policy(k: int, roles: bool, name: str) -> None:
    one = spec(k)
    policy = named(name, **({"width": "single"} if name == "up" else {}))
    bound = policy.width.bind(one, profile(one, roles), True)
    lookup = looked_up(one, bound)
    for row, layer in enumerate(one.moe_layers):
        index, weights = router(one, 40, layer)
        ids, w, _ = rank_by_weight(index, weights, EXPERTS, "layer")
        chosen = lookup(row, "layer", index, weights, router(one, 40, 9))
        np.testing.assert_array_equal(chosen.experts, ids)
        np.testing.assert_array_equal(chosen.weights, w)
        np.testing.assert_array_equal(chosen.widths, bound.widths(layer, ids, None, None))
        guess, _, _ = rank_by_weight(*router(one, 40, 9), EXPERTS, "layer")
        np.testing.assert_array_equal(chosen.guess, guess)
        assert lookup(row, "layer", index, weights, None).guess is None
        assert lookup.own_ns > 0


def test_on_the_host_the_choice_is_the_same_and_widths_are_left_to_the_policy() -> None:
    one = spec(2)
    lookup = looked_up(one, named("lru").width.bind(one, Profile.empty(one), True))
    index, weights = router(one, 40, 1)
    there = lookup(1, "layer", index, weights, router(one, 40, 9))
    here = HostLookup(one)(1, "layer", index, weights, router(one, 40, 9))
    for part in ("experts", "weights", "guess"):
        np.testing.assert_array_equal(getattr(here, part), getattr(there, part))
        assert getattr(here, part).dtype == getattr(there, part).dtype
    assert here.widths is None


def test_what_is_no_table_is_left_to_the_policy() -> None:
    class Depends:
        residency = True

        def table(self) -> None:
            return None

    widths: Any = Depends()
    assert pair_table(spec(2), widths) is None
    index, weights = router(spec(2), 3, 0)
    assert looked_up(spec(2), widths)(0, "layer", index, weights, None).widths is None


def test_an_expert_that_there_is_not_is_refused() -> None:
    lookup = looked_up(spec(2), named("lru").width.bind(spec(2), Profile.empty(spec(2)), True))
    for expert in (EXPERTS + 1, -2):
        for one in (lookup, HostLookup(spec(2))):
            with pytest.raises(CrispError, match=r"layer\.7: chose expert"):
                one(0, "layer.7", torch.tensor([[0, expert]]), torch.tensor([[0.7, 0.3]]), None)
