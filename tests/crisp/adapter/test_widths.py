"""A policy's widths inside a real model."""

from collections.abc import Iterator
from dataclasses import replace
from fractions import Fraction
from pathlib import Path
from typing import Any

import numpy as np
import pytest

torch = pytest.importorskip("torch")
pytest.importorskip("transformers")

from crisp.adapter import attach  # noqa: E402
from crisp.capture import cache_of  # noqa: E402
from crisp.checkpoint.loading import load_model  # noqa: E402
from crisp.errors import CrispError  # noqa: E402
from crisp.model.spec import ModelSpec  # noqa: E402
from crisp.policy import Budget, named  # noqa: E402
from crisp.profile import Profile, tiers  # noqa: E402
from crisp.trace import RoutingTrace  # noqa: E402

ROOT = Path(__file__).parents[3]
TOKENS = torch.arange(5, 69).reshape(2, 32)[:, :24] * 17 % 2048


@pytest.fixture(scope="module")
def model() -> Iterator[Any]:
    model = load_model(str(ROOT / "traces" / "tiny-mixtral")).model.float()
    model.set_experts_implementation("eager")
    yield model


@pytest.fixture(scope="module")
def spec(model: Any) -> ModelSpec:
    """Blocks of 16, so that half is exact: 20 blocks an expert."""
    return ModelSpec.from_config(model.config.to_dict()).with_(block=16)


@pytest.fixture(scope="module")
def profile() -> Profile:
    return Profile.from_trace(
        RoutingTrace.load(ROOT / "traces/tiny-mixtral-docs.trace.safetensors")
    )


def logits(model: Any) -> Any:
    with torch.inference_mode():
        return model(input_ids=TOKENS, use_cache=False).logits


def by_hand(model: Any, widths: Any, factors: Any = None) -> Any:
    """Logits when ``widths(layer, pair) -> neurons`` of each expert; a plain loop over tokens.

    factors [layers, experts, blocks + 1]: what outputs are multiplied with.
    """
    moe = [layer.mlp for layer in model.model.layers]
    forwards = [block.experts.forward for block in moe]

    def forward(which: int, experts: Any) -> Any:
        def run(hidden: Any, index: Any, weights: Any) -> Any:
            out = torch.zeros_like(hidden)
            for row in range(len(hidden)):
                requested = widths(which, index[row].tolist(), weights[row].tolist())
                for expert, weight, width in zip(index[row], weights[row], requested, strict=True):
                    gate, up = experts.gate_up_proj[expert].chunk(2)
                    act = torch.nn.functional.silu(gate[:width] @ hidden[row])
                    act = act * (up[:width] @ hidden[row])
                    if factors is not None:
                        weight = weight * float(factors[which, expert, width // 16])
                    out[row] += weight * (experts.down_proj[expert][:, :width] @ act)
            return out

        return run

    try:
        for which, block in enumerate(moe):
            block.experts.forward = forward(which, block.experts)
        return logits(model)
    finally:
        for block, saved in zip(moe, forwards, strict=True):
            block.experts.forward = saved


def close(a: Any, b: Any) -> bool:
    # float32, sums in another order: rounding of some 1e-6 of logits up to about 20
    return bool(torch.allclose(a, b, rtol=0, atol=2e-4))


def test_full_width_changes_no_bit(model: Any, spec: ModelSpec) -> None:
    plain = logits(model)
    with attach(model, named("lru"), spec=spec) as attached:
        assert torch.equal(logits(model), plain)
        tally = attached.tally
    assert (tally.rows, tally.touched, tally.skipped) == (48, 48 * 6 * 2 * 20, 0)
    assert tally.hits is None


def test_when_it_is_detached_the_model_is_as_before(model: Any, spec: ModelSpec) -> None:
    plain = logits(model)
    attached = attach(model, named("up"), spec=spec)
    assert not torch.equal(logits(model), plain)
    attached.detach()
    attached.detach()
    assert torch.equal(logits(model), plain)


def test_uniform_widths_run_the_leading_neurons(model: Any, spec: ModelSpec) -> None:
    expected = by_hand(model, lambda *_: [160, 160])
    with attach(model, named("up"), spec=spec):
        assert close(logits(model), expected)


def test_tiers_decide_each_expert(model: Any, spec: ModelSpec, profile: Profile) -> None:
    tier = tiers(profile, Fraction(3, 5), Fraction(9, 10))

    def widths(layer: int, pair: list[int], weights: list[float]) -> list[int]:
        assert weights[0] >= weights[1]
        return [320, (320, 160, 0)[tier[layer, pair[0], pair[1]]]]

    expected = by_hand(model, widths)
    with attach(model, named("crisp"), profile, spec=spec) as attached:
        assert close(logits(model), expected)
    assert attached.tally.skipped > 0


def test_outputs_are_multiplied_by_the_factor_of_their_width(
    model: Any, spec: ModelSpec, profile: Profile
) -> None:
    tier = tiers(profile, Fraction(3, 5), Fraction(9, 10))
    factors = np.random.default_rng(0).uniform(0.5, 1.5, (6, 8, 21)).astype(np.float32)

    def widths(layer: int, pair: list[int], _: list[float]) -> list[int]:
        return [320, (320, 160, 0)[tier[layer, pair[0], pair[1]]]]

    expected, counts = by_hand(model, widths, factors), replace(profile, rescaling=factors)
    with attach(model, named("crisp", rescale="measured"), counts, spec=spec):
        assert close(logits(model), expected)
    assert not close(by_hand(model, widths), expected)


def test_single_renormalised_is_the_first_expert_at_weight_one(model: Any, spec: ModelSpec) -> None:
    moe = model.model.layers[0].mlp
    hidden = torch.randn(5, 128, generator=torch.Generator().manual_seed(0))
    index, weights = torch.tensor([[3, 1]] * 5), torch.tensor([[0.7, 0.3]] * 5)
    with attach(model, named("lru", width="single"), spec=spec, renormalize=True):
        output = moe.experts(hidden, index, weights)
    alone = moe.experts(hidden, index[:, :1], torch.ones(5, 1))
    assert torch.allclose(output, alone, atol=1e-6)
    with attach(model, named("lru", width="single"), spec=spec):
        assert torch.allclose(moe.experts(hidden, index, weights), 0.7 * alone, atol=1e-6)


def test_measured_roles_decide_which_of_a_pair_stays_full(model: Any, spec: ModelSpec) -> None:
    """With every lower expert called dominant, `single` runs the lower of each pair."""
    lower = np.minimum.outer(np.arange(8), np.arange(8)).astype(np.int16)
    np.fill_diagonal(lower, -1)
    roles = replace(Profile.empty(spec), dominant=np.stack([lower] * 6))
    expected = by_hand(model, lambda _, pair, w: [320 * (e == min(pair)) for e in pair])
    with attach(model, named("lru", width="single"), roles, spec=spec):
        assert close(logits(model), expected)


def resident_policy(**parts: Any) -> Any:
    """The first of a pair in full; the second as far as it is resident."""
    return named("lru", width="resident(0)", **parts)


@pytest.mark.parametrize("unit", ["expert", "block"])
def test_residency_in_one_pass_equals_token_by_token(
    model: Any, spec: ModelSpec, unit: str
) -> None:
    """The second expert runs only where the LRU list by hand says that it is there."""
    budget = Budget.parse("50%")  # 4 experts a layer
    policy = resident_policy(unit=unit)
    with attach(model, policy, spec=spec, budget=budget) as window, torch.inference_mode():
        whole = model(input_ids=TOKENS[:1], use_cache=False).logits[0]
    with attach(model, policy, spec=spec, budget=budget) as token, torch.inference_mode():
        cache: dict[str, Any] = {}
        rows = []
        for i in range(TOKENS.shape[1]):
            out = model(input_ids=TOKENS[:1, i : i + 1], use_cache=True, **cache)
            cache = cache_of(out, model)
            rows.append(out.logits[0, 0])
    assert window.tally == token.tally
    assert close(torch.stack(rows), whole)
    assert window.tally.tasks is not None and window.tally.hits is not None
    assert 0 < window.tally.hits < window.tally.tasks


def test_the_cache_of_a_layer_is_the_one_by_hand(model: Any, spec: ModelSpec) -> None:
    seen: list[tuple[list[int], list[int]]] = []

    def watch(which: int, ids: Any, weights: Any, widths: Any) -> None:
        if which == 2:
            seen.extend(zip(ids.tolist(), widths.tolist(), strict=True))

    policy = resident_policy()
    with attach(model, policy, spec=spec, budget=Budget.parse("25%"), watch=watch):
        logits(model)
    recent: list[int] = []  # two experts a layer, the most recent last
    for (first, second), (w1, w2) in seen:
        assert (w1, w2) == (20, 20 if second in recent else 0)
        used = sorted({first, second} if w2 else {first}, reverse=True)
        recent = [e for e in recent if e not in used] + used  # equally recent: the lower id goes
        if len(recent) > 2:
            recent = recent[-2:]
    assert {w2 for _, (_, w2) in seen} == {0, 20}


def test_scope_global_wants_one_token_at_a_time(model: Any, spec: ModelSpec) -> None:
    policy = resident_policy(scope="global")
    with attach(model, policy, spec=spec, budget=Budget.parse("50%")) as attached:
        with pytest.raises(CrispError, match="feed one at a time"):
            logits(model)
        with torch.inference_mode():
            model(input_ids=TOKENS[:1, :1], use_cache=False)
    assert attached.tally.rows == 1


@pytest.mark.parametrize(
    ("policy", "options", "words"),
    [
        (named("crisp"), {}, "needs counts"),
        (named("up", rescale="measured"), {}, "rescale: asks what an expert's output"),
        (named("mo"), {"budget": Budget.parse("10%")}, "depends on time"),
        (named("lru", order="johnson"), {"budget": Budget.parse("10%")}, "asks for times"),
        (resident_policy(), {}, "give a budget"),
        (named("lru"), {"spec": ModelSpec.named("mixtral-8x7b")}, "has 6 layers, its geometry"),
    ],
)
def test_what_does_not_go_together_is_refused(
    model: Any, policy: Any, options: dict[str, Any], words: str
) -> None:
    plain = logits(model)
    with pytest.raises(CrispError, match=words):
        attach(model, policy, **options)
    assert torch.equal(logits(model), plain)
