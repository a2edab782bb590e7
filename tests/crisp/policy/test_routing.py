"""Routing rules and how they weigh, on numbers that can be followed by hand."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from crisp.errors import CrispError
from crisp.model.spec import ModelSpec
from crisp.policy import Budget, named
from crisp.policy.routing.rules import ROUTINGS, BoundRouting, RoutingRule
from crisp.policy.routing.weighing import Weighing, understand
from crisp.policy.spelling import build
from crisp.profile import Profile
from crisp.run.case import Case
from crisp.trace import RoutingTrace
from crisp.trace.bundled import bundled_traces
from crisp.trace.fitting import fit_to_trace

MIXTRAL = ModelSpec.named("mixtral-8x7b").first_layers(1).with_(block=3584)  # 4 blocks an expert
THREE = replace(MIXTRAL, n_experts=3)
SOFTMAX = Weighing(sigmoid=False, normalised=True, by_score=True)
PLAIN = Weighing(sigmoid=False, normalised=False, by_score=True)
SIGMOID = Weighing(sigmoid=True, normalised=True, by_score=True)
BIASED = Weighing(sigmoid=True, normalised=True, by_score=False)


def bound(
    text: str, weighing: Weighing = SOFTMAX, profile: Profile | None = None, spec: ModelSpec = THREE
) -> BoundRouting:
    rule = build(text, ROUTINGS, "routing")
    assert isinstance(rule, RoutingRule)
    return BoundRouting(rule, spec, profile or Profile.empty(spec), {0: weighing})


def chosen(rule: BoundRouting, shares: Any, experts: Any, weights: Any, resident: Any) -> Any:
    """(experts, weights) of one token; shares: what the router's weights are proportional to."""
    found = rule.choose(
        0,
        np.log(np.array([shares])).astype(np.float16),
        np.array([experts], np.int16),
        np.array([weights], np.float16),
        resident,
    )
    return found[0][0].tolist(), found[1][0].tolist()


# The router gives three experts 4 : 2 : 1 and takes the first two. Float16 keeps logarithms of 1, 2
# and 4 to 2^-11, and so their ratios to 1e-3.
ROUTED = [4, 2, 1], [0, 1], [2 / 3, 1 / 3]


def near(found: Any, experts: list[int], weights: list[float]) -> bool:
    return bool(found[0] == experts and np.allclose(found[1], weights, atol=1e-3))


def test_a_prior_takes_the_resident_expert_where_it_outweighs_the_difference() -> None:
    """Expert 2 is there, 1 is not; between them lie log 2 = .693 nats."""
    kept, taken = bound("cache-prior(.69)"), bound("cache-prior(.7)")
    assert near(chosen(kept, *ROUTED, [0, 0, 4]), [0, 1], [2 / 3, 1 / 3])
    assert near(chosen(taken, *ROUTED, [0, 0, 4]), [0, 2], [4 / 5, 1 / 5])
    half = bound("cache-prior(1.38)"), bound("cache-prior(1.4)")
    assert near(chosen(half[0], *ROUTED, [0, 0, 2]), [0, 1], [2 / 3, 1 / 3])  # half of its blocks
    assert near(chosen(half[1], *ROUTED, [0, 0, 2]), [0, 2], [4 / 5, 1 / 5])
    assert near(chosen(bound("cache-prior(50)"), *ROUTED, [0, 4, 4]), [0, 1], [2 / 3, 1 / 3])


def test_a_prior_counts_by_contribution_where_there_is_one() -> None:
    """The first block of expert 2 has three quarters of it: log 2 / .75 = .924."""
    sizes = np.ones((1, 3, 4), np.float32)
    sizes[0, 2] = [9, 1, 1, 1]
    profile = Profile(
        np.ones((1, 3), np.int64), np.zeros((1, 3, 3), np.int64), True, contributions=sizes
    )
    assert chosen(bound("cache-prior(.92)", SOFTMAX, profile), *ROUTED, [0, 0, 1])[0] == [0, 1]
    assert chosen(bound("cache-prior(.93)", SOFTMAX, profile), *ROUTED, [0, 0, 1])[0] == [0, 2]


def test_a_substitute_stands_in_for_what_is_not_there_at_all() -> None:
    """Expert 2 has half the share of 1."""
    rule = bound("substitute(.49)")
    assert near(chosen(rule, *ROUTED, [0, 0, 1]), [0, 2], [4 / 5, 1 / 5])
    assert near(chosen(rule, *ROUTED, [0, 1, 4]), [0, 1], [2 / 3, 1 / 3])  # a block of 1 is there
    assert near(chosen(rule, *ROUTED, [4, 0, 0]), [0, 1], [2 / 3, 1 / 3])  # nobody is
    assert near(chosen(bound("substitute(.51)"), *ROUTED, [0, 0, 4]), [0, 1], [2 / 3, 1 / 3])


def test_nobody_stands_in_for_two() -> None:
    four = replace(THREE, n_experts=4, top_k=3)
    rule = bound("substitute(0)", SOFTMAX, None, four)
    found = chosen(rule, [8, 4, 2, 1], [0, 1, 2], [8 / 14, 4 / 14, 2 / 14], [0, 0, 0, 4])
    assert near(found, [0, 2, 3], [8 / 11, 2 / 11, 1 / 11])


def test_what_is_missing_is_skipped_but_for_the_first() -> None:
    assert near(chosen(bound("skip-missing"), *ROUTED, [0, 0, 4]), [0, -1], [1, 0])
    assert near(chosen(bound("skip-missing"), *ROUTED, [0, 1, 0]), [0, 1], [2 / 3, 1 / 3])
    assert near(chosen(bound("skip-missing(2)"), *ROUTED, [0, 0, 0]), [0, 1], [2 / 3, 1 / 3])


def test_weights_follow_the_models_own_way() -> None:
    """Shares of all three are 4/7, 2/7, 1/7: without division by the sum those are the weights,
    times whatever constant the model has. Sigmoids of 4 : 2 : 1 to none are 4/5, 2/3, 1/2.
    """
    routed = [4, 2, 1], [0, 1], [2 * 4 / 7, 2 * 2 / 7]
    assert near(chosen(bound("substitute(0)", PLAIN), *routed, [4, 0, 4]), [0, 2], [8 / 7, 2 / 7])
    assert near(chosen(bound("skip-missing", PLAIN), *routed, [4, 0, 4]), [0, -1], [8 / 7, 0])
    routed = [4, 2, 1], [0, 1], [3 * 12 / 22, 3 * 10 / 22]  # the sum is 3
    found = chosen(bound("substitute(0)", SIGMOID), *routed, [4, 0, 4])
    assert near(found, [0, 2], [3 * 8 / 13, 3 * 5 / 13])


def test_weights_of_a_kept_choice_are_kept_to_the_bit() -> None:
    """They are not even what the scores give; and expert 0, which is as good, does not come in."""
    experts, weights = np.array([[1, 2]], np.int16), np.array([[0.7001, 0.2999]], np.float16)
    scores = np.zeros((1, 3), np.float16)
    for text in ("cache-prior(9)", "substitute(0)", "skip-missing"):
        found = bound(text).choose(0, scores, experts, weights, [4, 4, 4])
        assert found[0] is experts
        assert found[1] is weights


@given(
    scores=st.lists(st.lists(st.integers(-20, 20), min_size=6, max_size=6), min_size=1, max_size=5),
    resident=st.lists(st.integers(0, 4), min_size=6, max_size=6),
    text=st.sampled_from(["cache-prior(.5)", "cache-prior(8)", "substitute(.3)", "skip-missing"]),
    way=st.sampled_from([SOFTMAX, PLAIN, SIGMOID]),
)
def test_the_first_expert_stays_and_weights_sum_as_the_models_do(
    scores: Any, resident: Any, text: str, way: Weighing
) -> None:
    values = np.array(scores) / 4
    shares = 1 / (1 + np.exp(-values)) if way.sigmoid else np.exp(values)
    experts = np.argsort(-values, axis=1, kind="stable")[:, :3].astype(np.int16)
    used = np.take_along_axis(shares, experts.astype(np.int64), 1)
    over = used.sum(1, keepdims=True) if way.normalised else shares.sum(1, keepdims=True)
    weights = (2.5 * used / over).astype(np.float16)
    spec = replace(THREE, n_experts=6, top_k=3)
    rule = bound(text, way, None, spec)
    now, by = rule.choose(0, values.astype(np.float16), experts, weights, resident)
    assert (now[:, 0] == experts[:, 0]).all()
    assert (np.diff(by.astype(np.float64), axis=1) <= 0).all()
    assert ((by > 0) == (now >= 0)).all()
    of_used = np.where(now >= 0, np.take_along_axis(shares, np.maximum(now, 0).astype(int), 1), 0)
    over = of_used.sum(1, keepdims=True) if way.normalised else over
    # three float16 weights were rounded on the way in, and are again on the way out
    assert np.allclose(by, 2.5 * of_used / over, rtol=2**-10, atol=2**-13)
    if text.startswith(("cache", "sub")):
        assert (now >= 0).all()
    everything = rule.choose(0, values.astype(np.float16), experts, weights, [4] * 6)
    assert np.array_equal(everything[0], experts)
    assert np.array_equal(everything[1], weights)


# -- how a router weighs, from what it did ---------------------------------------------------------


def routed(sigmoid: bool, normalised: bool, scale: float, bias: float, rows: int = 64) -> Any:
    """(scores, experts, weights) of a router of 8 experts, top-3, all rounded to bfloat16."""
    draw = np.random.default_rng(3)
    scores = draw.normal(0, 2, (rows, 8)).astype(np.float16)
    values = scores.astype(np.float64)
    shares = 1 / (1 + np.exp(-values)) if sigmoid else np.exp(values)
    shares = shares if sigmoid else shares / shares.sum(1, keepdims=True)
    places = np.argsort(-(shares + bias * draw.normal(size=8)), axis=1)[:, :3]
    weights = np.take_along_axis(shares, places, 1)
    order = np.argsort(-weights, axis=1)
    places, weights = np.take_along_axis(places, order, 1), np.take_along_axis(weights, order, 1)
    weights = scale * (weights / weights.sum(1, keepdims=True) if normalised else weights)
    bits = weights.astype(np.float32).view(np.uint32) + 0x8000 & 0xFFFF0000  # to bfloat16
    return scores, places.astype(np.int16), bits.view(np.float32).astype(np.float16)


@pytest.mark.parametrize("sigmoid", [False, True])
@pytest.mark.parametrize("normalised", [False, True])
@pytest.mark.parametrize("scale", [1, 2.5, 16])
@pytest.mark.parametrize("bias", [0, 0.5])
def test_every_way_is_recognised(
    sigmoid: bool, normalised: bool, scale: float, bias: float
) -> None:
    way = understand(*routed(sigmoid, normalised, scale, bias), "it")
    assert way == Weighing(sigmoid, normalised, by_score=not bias)


@pytest.mark.parametrize("normalised", [False, True])
def test_one_row_is_taken_to_have_no_constant(normalised: bool) -> None:
    assert understand(*routed(False, normalised, 1, 0, rows=1), "it").normalised is normalised


def test_other_ways_are_refused() -> None:
    scores, experts, weights = routed(False, True, 1, 0)
    squared = (weights.astype(np.float32) ** 2).astype(np.float16)
    for wrong in (squared, weights[::-1], np.full_like(weights, 1 / 3)):
        with pytest.raises(CrispError, match="it: how this model makes weights of scores is not u"):
            understand(scores, experts, wrong, "it")


def test_a_prior_needs_a_choice_by_score() -> None:
    with pytest.raises(CrispError, match=r"routing cache-prior: this model does not choose the ex"):
        bound("cache-prior", BIASED)
    bound("substitute(.5)", BIASED)


# -- in a policy -----------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("substitute", "routing 'substitute': ratio has to be given"),
        ("substitute(2)", "routing substitute: ratio 2 is not between 0 and 1"),
        ("cache-prior(-1)", "routing cache-prior: strength -1 is negative"),
        ("skip-missing(.5)", "routing skip-missing: keep 0.5: expected a whole number from 1"),
        ("skip-missing(0)", "routing skip-missing: keep 0: expected a whole number from 1"),
        ("router(1)", "routing 'router(1)': takes 0 values at most"),
        ("cash-prior", "cash-prior"),
    ],
)
def test_what_is_refused(text: str, message: str) -> None:
    with pytest.raises(CrispError) as error:
        named("lru", routing=text)
    assert message in str(error.value)


def test_a_run_says_it_where_it_is_not_the_routers_choice() -> None:
    assert named("lru", routing="router") == named("lru")
    assert "routing" not in named("lru").to_dict()
    one = named("lru", routing="cache-prior")
    assert one.to_dict()["routing"] == "cache-prior(strength=0.5)"
    assert one.profiled
    assert not named("lru", routing="skip-missing").profiled


def test_a_trace_without_scores_is_refused() -> None:
    code = RoutingTrace.load(bundled_traces()["tiny-mixtral-code"])
    spec = fit_to_trace(ModelSpec.named("mixtral-8x7b"), code)
    policy = named("lru", routing="skip-missing")
    case = Case(code, spec, policy, Budget.parse("20%"), Profile.empty(spec))
    with pytest.raises(CrispError) as error:
        case.workload()
    assert str(error.value) == (
        "routing skip-missing(keep=1): asks for the router's scores of all experts, but the trace "
        "has no scores; crisp trace capture --scores records both"
    )
