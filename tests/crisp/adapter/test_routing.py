"""Routing rules inside real models, against the models' own formulas and against a simulation."""

from __future__ import annotations

import functools
from typing import Any

import numpy as np
import pytest

torch = pytest.importorskip("torch", reason="needs the extra hf")
transformers = pytest.importorskip("transformers", reason="needs the extra hf")

from crisp.adapter import attach, record_routing  # noqa: E402
from crisp.errors import CrispError  # noqa: E402
from crisp.model.spec import ModelSpec  # noqa: E402
from crisp.policy import Budget, named  # noqa: E402
from crisp.profile import Profile  # noqa: E402
from crisp.run.case import Case  # noqa: E402
from crisp.sim.fast_simulate import fast_simulate  # noqa: E402
from crisp.sim.hardware import hardware_profile  # noqa: E402
from crisp.sim.simulate import simulate  # noqa: E402
from crisp.trace import DECODE, Header, RoutingTrace  # noqa: E402

SMALL: dict[str, Any] = {
    "vocab_size": 96,
    "hidden_size": 32,
    "intermediate_size": 32,
    "num_hidden_layers": 1,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "max_position_embeddings": 64,
    "pad_token_id": 0,
}
FINE = {"num_experts": 8, "moe_intermediate_size": 32, "num_experts_per_tok": 3, "head_dim": 8}
LATENT = {
    "moe_intermediate_size": 32, "n_routed_experts": 8, "num_experts_per_tok": 3,
    "n_shared_experts": 1, "first_k_dense_replace": 0, "kv_lora_rank": 8, "qk_rope_head_dim": 8,
    "qk_nope_head_dim": 8, "v_head_dim": 8, "num_key_value_heads": 4, "q_lora_rank": 16,
    "routed_scaling_factor": 2.5, "n_group": 1, "topk_group": 1,
}  # fmt: skip
CONFIGS: dict[str, dict[str, Any]] = {
    "mixtral": {"num_local_experts": 8, "num_experts_per_tok": 2},  # softmax over the chosen
    "qwen3_moe": {**FINE, "norm_topk_prob": False},  # softmax over all
    "deepseek_v3": LATENT,  # sigmoid, times 2.5 over the sum
}
RULES = ("cache-prior(1)", "substitute(.2)", "skip-missing")
IDS = torch.randint(3, 96, (1, 40), generator=torch.Generator().manual_seed(1))
families = pytest.mark.parametrize("family", CONFIGS)
rules = pytest.mark.parametrize("rule", RULES)


@functools.cache
def built(family: str) -> Any:
    """A random model of one layer, in float32."""
    config = transformers.AutoConfig.for_model(family, **{**SMALL, **CONFIGS[family]})
    auto = transformers.AutoModelForCausalLM
    model = auto.from_config(config, experts_implementation="eager").eval().float()
    torch.manual_seed(0)
    for value in model.parameters():
        if value.dim() > 1:
            torch.nn.init.normal_(value, std=0.25)
    return model


def spec_of(family: str) -> ModelSpec:
    return ModelSpec.from_config(built(family).config.to_dict()).with_(block=16)


def logits(family: str) -> Any:
    with torch.inference_mode():
        return built(family)(input_ids=IDS, use_cache=False).logits


def policy(rule: str) -> Any:
    return named("lru", unit="block", routing=rule)


@functools.cache
def recorded(family: str) -> RoutingTrace:
    """The plain model's routing, with scores, as decoded tokens of one sequence."""
    with record_routing(built(family), scores=True) as recorder:
        logits(family)
        routing = recorder.take()
    n, k = len(routing.experts), routing.experts.shape[2]
    return RoutingTrace(
        experts=routing.experts,
        sequence=np.zeros(n, np.int32),
        position=np.arange(n, dtype=np.int32),
        phase=np.full(n, DECODE, np.uint8),
        weights=routing.weights.astype(np.float16),
        scores=routing.scores,
        header=Header(n_experts=8, top_k=k, ordered=True, origin="captured"),
    )


def executed(family: str, rule: str, budget: str) -> Any:
    """(logits, experts, weights, the tally) under a rule."""
    seen: list[Any] = []
    with attach(
        built(family), policy(rule), spec=spec_of(family), budget=Budget.parse(budget),
        watch=lambda which, ids, weights, blocks: seen.append((ids, weights)),
    ) as attached:  # fmt: skip
        out = logits(family)
    return out, *seen[0], attached.tally


@families
@rules
def test_with_everything_resident_no_bit_changes(family: str, rule: str) -> None:
    """Every block of every expert is put there before anything runs."""
    plain = logits(family)
    with attach(
        built(family), policy(rule), spec=spec_of(family), budget=Budget.parse("100%")
    ) as attached:
        replay = attached._replay
        assert replay is not None
        resident = replay.scheduler.residency.resident
        resident[:] = [spec_of(family).n_blocks] * len(resident)
        assert torch.equal(logits(family), plain)


@families
@rules
def test_the_first_expert_stays_and_weights_are_the_models(family: str, rule: str) -> None:
    """Weights by the family's formula, in float64, from its scores of all experts."""
    trace = recorded(family)
    assert trace.scores is not None
    scores = trace.scores[:, 0].astype(np.float64)
    shares = 1 / (1 + np.exp(-scores)) if family == "deepseek_v3" else np.exp(scores)
    _, ids, weights, _ = executed(family, rule, "30%")
    own = np.where(ids >= 0, np.take_along_axis(shares, np.maximum(ids, 0).astype(int), 1), 0)
    over = shares if family == "qwen3_moe" else own
    scale = 2.5 if family == "deepseek_v3" else 1
    expected = scale * own / over.sum(1, keepdims=True)
    # float16 has scores below 16 to 2^-8 and weights to 2^-11 of them
    assert np.allclose(weights, expected, rtol=2**-7, atol=2**-12)
    assert (ids[:, 0] == trace.experts[:, 0, 0]).all()
    changed = (np.sort(ids, 1) != np.sort(trace.experts[:, 0], 1)).any(1)
    assert 0 < changed.sum() < len(ids)
    assert trace.weights is not None
    assert np.array_equal(weights[~changed], trace.weights[~changed, 0])


@families
@rules
def test_the_model_executes_what_the_rule_says(family: str, rule: str) -> None:
    """Token by token by hand, with the experts and weights that were shown."""
    out, ids, weights, _ = executed(family, rule, "30%")
    m = next(mod for name, mod in built(family).named_modules() if name.endswith(".experts"))
    trace, forward = recorded(family), m.forward
    assert trace.weights is not None

    def by_hand(hidden: Any, index: Any, router_weights: Any) -> Any:
        rows = torch.zeros_like(hidden)
        for row, x in enumerate(hidden):
            kept = (ids[row] == trace.experts[row, 0]).all()
            full = router_weights[row].sort(descending=True).values.tolist()
            for rank, expert in enumerate(ids[row].tolist()):
                weight = full[rank] if kept else float(weights[row, rank])
                if expert >= 0:
                    gate, up = (m.gate_up_proj[expert] @ x).chunk(2)
                    act = torch.nn.functional.silu(gate) * up
                    rows[row] += weight * (m.down_proj[expert] @ act)
        return rows

    try:
        m.forward = by_hand
        expected = logits(family)
    finally:
        m.forward = forward
    # float32 rounds to 6e-8; sums of at most 32 products, in another order, through one layer
    assert float((out - expected).abs().max() / expected.abs().max()) < 1e-5


@families
@rules
@pytest.mark.parametrize("budget", ["20%", "40%"])
def test_a_simulation_of_the_recorded_scores_counts_the_same(
    family: str, rule: str, budget: str
) -> None:
    """In one layer nothing that is executed changes what is routed later."""
    *_, tally = executed(family, rule, budget)
    spec = spec_of(family)
    case = Case(recorded(family), spec, policy(rule), Budget.parse(budget), Profile.empty(spec))
    run = simulate(case, hardware_profile("rtx4090-pcie4"))
    metrics = run.metrics
    found = {key: metrics[key] for key in ("tasks", "hits", "partial_hits", "blocks_loaded")}
    assert found == {key: getattr(tally, key) for key in found}
    assert metrics["skipped"] == tally.skipped
    assert (tally.skipped > 0) == (rule == "skip-missing")
    assert tally.blocks_loaded
    assert run.settings["policy"]["routing"].startswith(rule.partition("(")[0])


def test_the_compiled_engine_refuses_by_name() -> None:
    spec = spec_of("mixtral")
    one = Case(
        recorded("mixtral"), spec, policy("skip-missing"), Budget.parse("20%"), Profile.empty(spec)
    )
    with pytest.raises(CrispError, match=r"routing skip-missing\(keep=1\)"):
        fast_simulate(one, "rtx4090-pcie4")


def test_what_is_refused() -> None:
    with pytest.raises(CrispError, match="policy lru: its routing depends on what is resident; gi"):
        attach(built("mixtral"), policy("skip-missing"), spec=spec_of("mixtral"))
    config = transformers.AutoConfig.for_model(
        "phimoe", **SMALL, num_local_experts=6, num_experts_per_tok=2
    )
    phi = transformers.AutoModelForCausalLM.from_config(config).eval()
    torch.manual_seed(0)
    for value in phi.parameters():
        torch.nn.init.normal_(value, std=0.25)
    forward = phi.model.layers[0].mlp.experts.forward
    with pytest.raises(
        CrispError, match=r"routing skip-missing\(keep=1\): how this model makes weig"
    ):
        attach(phi, policy("skip-missing"), budget=Budget.parse("50%"))
    assert phi.model.layers[0].mlp.experts.forward == forward
