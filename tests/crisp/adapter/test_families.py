"""Widths in every family that spells its experts its own way, against straight-line arithmetic."""

from __future__ import annotations

import copy
import functools
import importlib
import json
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, replace
from fractions import Fraction
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest

torch = pytest.importorskip("torch", reason="needs the extra hf")
transformers = pytest.importorskip("transformers", reason="needs the extra hf")

from crisp.adapter import Experts, MoeLayer, attach, execute, expert_layout  # noqa: E402
from crisp.capture import cache_of  # noqa: E402
from crisp.errors import CrispError  # noqa: E402
from crisp.model.config import FAMILIES  # noqa: E402
from crisp.model.spec import ModelSpec  # noqa: E402
from crisp.policy import Policy, named  # noqa: E402

# -- one expert and one token, by each family's own formula ----------------------------------------


def silu_gated(m: Any, expert: int, x: Any, width: int) -> Any:
    """Rows of gates, then rows of ups: SwiGLU."""
    gate, up = m.gate_up_proj[expert].chunk(2)
    gate, up = gate[:width] @ x, up[:width] @ x
    return m.down_proj[expert][:, :width] @ (gate / (1 + torch.exp(-gate)) * up)


def clamped_interleaved(m: Any, expert: int, x: Any, width: int) -> Any:
    """Columns gate, up, gate, up, ..., biases everywhere, both clamped, and the up plus one."""
    both = x @ m.gate_up_proj[expert] + m.gate_up_proj_bias[expert]
    gate, up = both[0::2].clamp(max=LIMIT)[:width], both[1::2].clamp(-LIMIT, LIMIT)[:width]
    activation = (up + 1) * gate / (1 + torch.exp(-1.702 * gate))
    return activation @ m.down_proj[expert][:width] + m.down_proj_bias[expert]


def squared_relu(m: Any, expert: int, x: Any, width: int) -> Any:
    """No gate."""
    up = m.up_proj[expert][:width] @ x
    return m.down_proj[expert][:, :width] @ (up.clamp(min=0) ** 2)


def columns_gated(m: Any, expert: int, x: Any, width: int) -> Any:
    """Columns of gates, then columns of ups."""
    first, half = x @ m.gate_up_proj[expert], m.gate_up_proj.shape[2] // 2
    gate, up = first[:width], first[half : half + width]
    return (gate / (1 + torch.exp(-gate)) * up) @ m.down_proj[expert][:width]


# -- tiny models -----------------------------------------------------------------------------------

LIMIT = 0.5  # of gpt-oss's clamps: low enough to be reached
D_FF, BLOCK = 32, 8

SMALL: dict[str, Any] = {
    "vocab_size": 96,
    "hidden_size": 32,
    "intermediate_size": D_FF,
    "num_hidden_layers": 3,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "max_position_embeddings": 64,
    "pad_token_id": 0,
}
FINE = {"num_experts": 6, "moe_intermediate_size": D_FF, "intermediate_size": 40}
LATENT = {
    "intermediate_size": 40,
    "moe_intermediate_size": D_FF,
    "n_routed_experts": 8,
    "num_experts_per_tok": 3,
    "n_shared_experts": 2,
    "first_k_dense_replace": 1,
    "kv_lora_rank": 8,
    "qk_rope_head_dim": 8,
    "qk_nope_head_dim": 8,
    "v_head_dim": 8,
    "num_key_value_heads": 4,
    "routed_scaling_factor": 2.5,
}
HYBRID = {
    "layers_block_type": ["linear_attention", "moe", "full_attention", "moe"],
    "head_dim": 8,
    "n_routed_experts": 8,
    "num_experts_per_tok": 3,
    "moe_intermediate_size": D_FF,
    "moe_shared_expert_intermediate_size": 24,
    "n_group": 4,
    "topk_group": 2,
    "routed_scaling_factor": 2.5,
    "mamba_num_heads": 4,
    "mamba_head_dim": 8,
    "ssm_state_size": 8,
    "n_groups": 2,
    "chunk_size": 8,
}


@dataclass(frozen=True)
class Case:
    """A family's config (on top of SMALL), its formula, and where its routed experts are."""

    model_type: str
    config: dict[str, Any]
    formula: Callable[[Any, int, Any, int], Any]
    moe_layers: tuple[int, ...] = (0, 1, 2)
    bf16: bool = True  # whether bfloat16 is that of transformers to the bit as well


CASES = {
    "mixtral": Case("mixtral", {"num_local_experts": 6, "num_experts_per_tok": 2}, silu_gated),
    "phimoe": Case("phimoe", {"num_local_experts": 6, "num_experts_per_tok": 2}, silu_gated),
    "olmoe": Case("olmoe", {"num_experts": 6, "num_experts_per_tok": 3}, silu_gated),
    "qwen2_moe": Case(
        "qwen2_moe",
        {
            **FINE,
            "num_experts_per_tok": 3,
            "shared_expert_intermediate_size": 16,
            "mlp_only_layers": [1],
        },
        silu_gated,
        (0, 2),
    ),
    "qwen3_moe": Case(
        "qwen3_moe",
        {**FINE, "num_experts_per_tok": 3, "head_dim": 8, "norm_topk_prob": True},
        silu_gated,
    ),
    "deepseek_v2": Case("deepseek_v2", {**LATENT, "q_lora_rank": None}, silu_gated, (1, 2)),
    "deepseek_v3": Case(
        "deepseek_v3",
        {**LATENT, "q_lora_rank": 16, "n_group": 4, "topk_group": 2},
        silu_gated,
        (1, 2),
    ),
    "gpt_oss": Case(
        "gpt_oss",
        {
            "num_local_experts": 6,
            "num_experts_per_tok": 3,
            "head_dim": 8,
            "swiglu_limit": LIMIT,
        },
        clamped_interleaved,
    ),
    "nemotron_h": Case("nemotron_h", HYBRID, squared_relu, (1, 3), bf16=False),
    "nemotron_h, experts in a smaller space": Case(
        "nemotron_h", {**HYBRID, "moe_latent_size": 16}, squared_relu, (1, 3), bf16=False
    ),
    "aria_text": Case("aria_text", {"moe_num_experts": 6, "moe_topk": 2}, columns_gated),
}
every = pytest.mark.parametrize("name", CASES)


@functools.cache
def built(name: str) -> Any:
    """A random model in float32: routers and all biases are drawn too, so that tokens differ."""
    case = CASES[name]
    config = transformers.AutoConfig.for_model(case.model_type, **{**SMALL, **case.config})
    auto = transformers.AutoModelForCausalLM
    model = auto.from_config(config, experts_implementation="eager").eval().float()
    torch.manual_seed(0)
    drawn = dict(model.named_parameters())
    drawn |= {k: v for k, v in model.named_buffers() if k.endswith("correction_bias")}
    for key, value in drawn.items():
        if value.dim() > 1 or key.endswith("bias"):
            torch.nn.init.normal_(value, std=0.25)
    return model


def spec_of(name: str) -> ModelSpec:
    """From the config where CRISP reads the family, else by hand."""
    case, model = CASES[name], built(name)
    if case.model_type in FAMILIES:
        return ModelSpec.from_config(model.config.to_dict()).with_(block=BLOCK)
    experts = modules(model)[case.moe_layers[0]]
    return ModelSpec(
        name=name,
        n_layers=model.config.num_hidden_layers,
        moe_layers=case.moe_layers,
        n_experts=experts.num_experts,
        top_k=case.config.get("num_experts_per_tok", 2),
        d_model=experts.down_proj.shape[1],
        d_ff=D_FF,
        dtype_bits=32,
        bits=Fraction(32),
        matrices=3 if experts.has_gate else 2,
        biases=experts.has_bias,
        dense_params=(0,) * model.config.num_hidden_layers,
        block=BLOCK,
        config_hash=None,
    )


def modules(model: Any) -> dict[int, Any]:
    """The routed experts by layer, found by their name alone."""
    return {
        int(name.split(".")[2]): module
        for name, module in model.named_modules()
        if name.startswith("model.layers.") and name.endswith(".experts")
    }


IDS = torch.randint(3, 96, (2, 9), generator=torch.Generator().manual_seed(1))


def logits(model: Any) -> Any:
    with torch.no_grad():
        return model(IDS, use_cache=False).logits


def decoded(model: Any) -> list[Any]:
    """Logits of a prompt, and of two steps after it that read the cache."""
    found: list[Any] = []
    cache: dict[str, Any] = {}
    with torch.no_grad():
        for part in (IDS[:, :7], IDS[:, 7:8], IDS[:, 8:]):
            out = model(part, use_cache=True, **cache)
            found.append(out.logits)
            cache = cache_of(out, model)
    return found


@contextmanager
def by_hand(name: str, widths: Callable[[int, int], int]) -> Iterator[Any]:
    """The model with its routed experts computed token by token by the family's formula."""
    model, formula = built(name), CASES[name].formula

    def standing_in(layer: int, m: Any) -> Any:
        def forward(hidden: Any, index: Any, weights: Any) -> Any:
            rows = []
            for x, chosen, w in zip(hidden, index.tolist(), weights, strict=True):
                row = torch.zeros_like(x)
                for expert, weight in zip(chosen, w, strict=True):
                    if width := widths(layer, expert):
                        row = row + weight * formula(m, expert, x, width)
                rows.append(row)
            return torch.stack(rows)

        return forward

    experts = modules(model)
    try:
        for layer, m in experts.items():
            m.forward = standing_in(layer, m)
        yield model
    finally:
        for m in experts.values():
            del m.forward


def differ(a: Any, b: Any) -> float:
    """The largest difference, as a share of the largest number."""
    return float((a - b).abs().max() / b.abs().max())


# float32 rounds to 6e-8; sums of at most 40 products, in another order, through 2 or 3 layers
ROUNDING = 1e-5

MIXED = (4, 2, 0, 1)  # blocks: in full, half, skipped, a quarter


@dataclass(frozen=True)
class ByExpert:
    """Each expert at a width of its own."""

    residency = counted = False

    def bind(self, spec: ModelSpec, profile: Any, ordered: bool) -> ByExpert:
        return self

    def widths(self, layer: int, experts: Any, weights: Any, resident: Any) -> Any:
        widths = np.array(MIXED, np.int16)[(layer + experts) % 4]
        return np.where(experts < 0, 0, widths).astype(np.int16)

    def table(self) -> None:
        return None


@dataclass(frozen=True)
class Nothing(ByExpert):
    """All routed experts skipped."""

    def widths(self, layer: int, experts: Any, weights: Any, resident: Any) -> Any:
        return np.zeros_like(experts)


def of_width(width: Any) -> Policy:
    return replace(named("lru"), width=width)


# -- whole models ----------------------------------------------------------------------------------


@every
def test_full_width_changes_no_bit_in_a_pass_or_in_decoding(name: str) -> None:
    model, spec = built(name), spec_of(name)
    plain, steps = logits(model), decoded(model)
    with attach(model, named("lru"), spec=spec) as attached:
        assert torch.equal(logits(model), plain)
        logits_after = decoded(model)
    for one, other in zip(logits_after, steps, strict=True):
        assert torch.equal(one, other)
    events = 2 * IDS.numel() * len(CASES[name].moe_layers) * spec.top_k
    tally = attached.tally
    assert (tally.rows, tally.touched, tally.skipped) == (2 * IDS.numel(), 4 * events, 0)


@every
def test_widths_are_those_of_straight_line_arithmetic(name: str) -> None:
    model, spec = built(name), spec_of(name)
    plain = logits(model)
    with by_hand(name, lambda layer, expert: D_FF):
        assert differ(logits(model), plain) < ROUNDING
    with by_hand(name, lambda layer, expert: D_FF // 2):
        half = logits(model)
    with by_hand(name, lambda layer, expert: BLOCK * MIXED[(layer + expert) % 4]):
        mixed = logits(model)
    with attach(model, named("up"), spec=spec):
        assert differ(logits(model), half) < ROUNDING
    with attach(model, of_width(ByExpert()), spec=spec) as attached:
        assert differ(logits(model), mixed) < ROUNDING
    assert attached.tally.skipped > 0
    # what is compared is far apart against that
    assert differ(half, plain) > 1000 * ROUNDING
    assert differ(mixed, plain) > 1000 * ROUNDING


@every
def test_tokens_choose_differently(name: str) -> None:
    """Or the tests above would have shown little."""
    seen: dict[int, set[tuple[int, ...]]] = {}

    def watch(which: int, ids: Any, weights: Any, widths: Any) -> None:
        seen.setdefault(which, set()).update(map(tuple, np.sort(ids, 1).tolist()))

    with attach(built(name), named("lru"), spec=spec_of(name), watch=watch):
        logits(built(name))
    assert len(seen) == len(CASES[name].moe_layers)
    assert all(len(chosen) > 4 for chosen in seen.values())


def test_groups_and_correction_bias_decide_which_experts_but_not_their_weights() -> None:
    """DeepSeek-V3's router: the adapter takes what it returned and computes nothing anew."""
    model = built("deepseek_v3")
    seen: list[tuple[Any, Any]] = []
    inputs: list[Any] = []
    mlp = model.model.layers[1].mlp
    hook = mlp.register_forward_pre_hook(lambda _, args: inputs.append(args[0].reshape(-1, 32)))

    def watch(which: int, ids: Any, weights: Any, widths: Any) -> None:
        if which == 0:
            seen.append((ids, weights))

    with attach(model, named("lru"), spec=spec_of("deepseek_v3"), watch=watch):
        logits(model)
    hook.remove()
    (ids, weights), scores = seen[0], torch.sigmoid(inputs[0] @ mlp.gate.weight.T).numpy(force=True)
    chosen_scores = np.take_along_axis(scores, ids.astype(np.int64), 1)
    expected = 2.5 * chosen_scores / chosen_scores.sum(1, keepdims=True)
    assert np.abs(weights - expected).max() < 2e-3  # float16
    best = np.sort(np.argsort(-scores, 1)[:, :3], 1)
    assert (np.sort(ids, 1) != best).any(1).sum() > 3
    assert all(len({int(e) // 2 for e in row}) <= 2 for row in ids)  # two groups of two experts


@pytest.mark.parametrize(
    ("name", "shared"),
    [
        (
            "qwen2_moe",
            lambda m, x: torch.sigmoid(m.shared_expert_gate(x)) * m.shared_expert(x),
        ),
        ("deepseek_v2", lambda m, x: m.shared_experts(x)),
        ("deepseek_v3", lambda m, x: m.shared_experts(x)),
        ("nemotron_h", lambda m, x: m.shared_experts(x)),
        ("aria_text", lambda m, x: m.shared_experts(x)),
        ("mixtral", lambda m, x: torch.zeros_like(x)),
    ],
)
def test_with_all_routed_experts_skipped_the_shared_ones_remain(name: str, shared: Any) -> None:
    model, spec = built(name), spec_of(name)
    block = expert_layout(model).layers[0].block
    x = torch.randn(1, 5, 32, generator=torch.Generator().manual_seed(2))
    with torch.no_grad():
        alone = shared(block, x)
        with attach(model, of_width(Nothing()), spec=spec) as attached:
            output = block(x)
    assert torch.equal(output, alone)
    assert attached.tally.touched == 0
    assert attached.tally.skipped == 5 * spec.top_k


@every
def test_neurons_in_another_order_are_the_same_model(name: str) -> None:
    model = copy.deepcopy(built(name)).double()
    plain = logits(model)
    with attach(model, named("up"), spec=spec_of(name)):
        half = logits(model)
    generator = torch.Generator().manual_seed(3)
    for layer in expert_layout(model).layers:
        experts = Experts.of(layer)
        for expert in range(experts.n_experts):
            first, down = experts.norms(expert)
            order = torch.randperm(D_FF, generator=generator)
            experts.shuffle(expert, order)
            again = experts.norms(expert)
            assert torch.allclose(again[0], first[order], rtol=1e-12)
            assert torch.allclose(again[1], down[order], rtol=1e-12)
    assert float((logits(model) - plain).abs().max()) < 1e-10
    with attach(model, named("up"), spec=spec_of(name)):
        assert differ(logits(model), half) > 1e-3  # other neurons lead now


@every
def test_bfloat16_stays_bfloat16(name: str) -> None:
    """And is transformers' to the bit, unless that sums up in float32 (nemotron_h)."""
    model = copy.deepcopy(built(name)).bfloat16()
    plain = logits(model)
    with attach(model, named("lru"), spec=spec_of(name)):
        actual = logits(model)
    assert actual.dtype == plain.dtype  # float32 where the model's head returns that
    if CASES[name].bf16:
        assert torch.equal(actual, plain)
    else:
        assert differ(actual.float(), plain.float()) < 0.05  # 8 bits, through four layers


# -- what a config says, and what is built from it -------------------------------------------------


@pytest.mark.parametrize(
    ("name", "more"),
    [
        *((name, {}) for name, case in CASES.items() if case.model_type in FAMILIES),
        ("qwen2_moe", {"decoder_sparse_step": 2, "mlp_only_layers": [3], "num_hidden_layers": 6}),
        ("qwen3_moe", {"decoder_sparse_step": 3, "num_hidden_layers": 6}),
        ("qwen3_moe", {"mlp_only_layers": [0, 2]}),
        ("deepseek_v2", {"first_k_dense_replace": 0}),
        ("deepseek_v2", {"first_k_dense_replace": 2, "q_lora_rank": 8}),
        ("deepseek_v3", {"first_k_dense_replace": 2, "q_lora_rank": None}),
    ],
)
def test_the_geometry_is_that_of_the_model_however_its_config_is_spelled(
    name: str, more: dict[str, Any]
) -> None:
    case = CASES[name]
    config = transformers.AutoConfig.for_model(case.model_type, **{**SMALL, **case.config, **more})
    with torch.device("meta"):
        layout = expert_layout(transformers.AutoModelForCausalLM.from_config(config))
    spec = ModelSpec.from_config(config.to_dict())
    assert (spec.n_layers, spec.n_experts) == (layout.n_layers, layout.n_experts)
    assert spec.moe_layers == tuple(layer.index for layer in layout.layers)
    for experts in map(Experts.of, layout.layers):
        assert (spec.d_ff, spec.d_model) == (experts.d_ff, experts.d_model)
        assert spec.matrices == (3 if experts.has_gate else 2)
        assert spec.biases == experts.has_bias
    assert ModelSpec.from_config(json.loads(config.to_json_string())) == spec  # as on disk


def test_a_family_that_is_not_listed_needs_no_geometry() -> None:
    model = built("nemotron_h")
    whole = logits(model)
    with attach(model, named("lru")):
        assert torch.equal(logits(model), whole)


# -- odd layouts, one module each ------------------------------------------------------------------

NUMBERS = {
    "hidden_size": 24,
    "intermediate_size": 16,
    "moe_intermediate_size": 16,
    "num_experts": 5,
    "num_local_experts": 5,
    "n_routed_experts": 5,
    "moe_num_experts": 5,
    "moe_hidden_size": 24,
    "hidden_act": "silu",
    "hidden_activation": "gelu_pytorch_tanh",
    "swiglu_limit": LIMIT,
    "swiglu_alpha": 1.3,
    "mlp_gate_softcap": 1.0,
    "mlp_up_softcap": 1.0,
    "post_norm_eps": 1e-5,
    "_experts_implementation": "eager",
}


def odd(family: str, name: str) -> MoeLayer:
    """An experts module of transformers by itself, with random numbers in it."""
    library = importlib.import_module(f"transformers.models.{family}.modeling_{family}")
    module = getattr(library, name)(SimpleNamespace(**NUMBERS)).eval()
    torch.manual_seed(4)
    for value in module.parameters():
        torch.nn.init.normal_(value, std=0.5)
    return MoeLayer(0, "model.layers.0.mlp.experts", module, module)


def routed(n_experts: int, d_model: int) -> tuple[Any, Any, Any]:
    """40 tokens for three experts each: (hidden, index, weights)."""
    generator = torch.Generator().manual_seed(5)
    weights, index = torch.rand(40, n_experts, generator=generator).softmax(-1).topk(3)
    return torch.randn(40, d_model, generator=generator), index, weights


@pytest.mark.parametrize(
    ("family", "name"),
    [
        ("aria", "AriaExperts"),  # transposed
        ("openai_privacy_filter", "OpenAIPrivacyFilterExperts"),  # and biases, not interleaved
        ("deepseek_v4", "DeepseekV4Experts"),  # clamped SwiGLU
        ("minimax_m3_vl", "MiniMaxM3VLExperts"),  # clamped, and the up plus one
        ("glm5_next", "Glm5NextTextExperts"),  # without act_fn
        ("lfm2_moe", "Lfm2MoeExperts"),  # act_fn a function
        ("gemma4", "Gemma4TextExperts"),  # GELU
        ("inkling2", "Inkling2Experts"),  # act_fn a module of gate and up
    ],
)
def test_a_width_is_as_if_the_rest_of_the_down_matrix_were_zero(family: str, name: str) -> None:
    """Transformers' own arithmetic is the reference: what zeros multiply does not count."""
    layer = odd(family, name)
    experts, module = Experts.of(layer), layer.experts
    assert (experts.n_experts, experts.d_ff, experts.d_model) == (5, 16, 24)
    hidden, index, weights = routed(5, 24)
    with torch.no_grad():
        full = module(hidden, index, weights)
        assert torch.equal(execute(experts, hidden, index, weights), full)
        width = torch.tensor([16, 8, 5, 1, 12])
        output = execute(experts, hidden, index, weights, width[index])
        for expert, neurons in enumerate(width.tolist()):
            down = module.down_proj[expert]
            (down if module.is_transposed else down.T)[neurons:] = 0
        expected = module(hidden, index, weights)
    assert differ(output, expected) < 1e-6
    assert differ(output, full) > 0.1


def test_no_expert_is_skipped_whatever_its_weight() -> None:
    layer = expert_layout(built("mixtral")).layers[0]
    experts = Experts.of(layer)
    hidden, index, weights = routed(6, 32)
    index = index.clone()
    index[::2, 1] = 6
    index[3] = 6
    with torch.no_grad():
        output = execute(experts, hidden, index, weights)
        zeroed = torch.where(index == 6, 0, weights)
        expected = layer.experts(hidden, index.clamp(max=5), zeroed)
        assert torch.equal(output, layer.experts(hidden, index, weights))
        width = torch.full_like(index, 8)  # a width of nothing is nothing
        narrow = execute(experts, hidden, index, weights, width)
    assert torch.allclose(output, expected, atol=1e-6)
    assert (output[3] == 0).all()
    assert (narrow[3] == 0).all()

    with attach(built("mixtral"), named("lru"), spec=spec_of("mixtral")) as attached:
        assert torch.equal(layer.experts(hidden, index, weights), output)
    none = int((index == 6).sum())
    assert attached.tally.touched == 4 * (3 * 40 - none)
    assert attached.tally.skipped == 0


def test_norms_by_hand() -> None:
    """A neuron's gate and up weights together, and its down weights; biases do not count."""
    for name, first, down in (
        ("mixtral", lambda m: (m.gate_up_proj[2, 7], m.gate_up_proj[2, 39]), (2, slice(None), 7)),
        ("gpt_oss", lambda m: (m.gate_up_proj[2, :, 14], m.gate_up_proj[2, :, 15]), (2, 7)),
        ("nemotron_h", lambda m: (m.up_proj[2, 7],), (2, slice(None), 7)),
    ):
        layer = expert_layout(built(name)).layers[0]
        norms = Experts.of(layer).norms(2)
        with torch.no_grad():
            square = sum(float((part.double() ** 2).sum()) for part in first(layer.experts))
            down_rows = layer.experts.down_proj[down].double()
        assert norms[0].dtype == norms[1].dtype == torch.float64
        assert float(norms[0][7]) == pytest.approx(square**0.5, rel=1e-12)
        assert float(norms[1][7]) == pytest.approx(float((down_rows**2).sum()) ** 0.5, rel=1e-12)


# -- what is not understood is refused by name -----------------------------------------------------


def test_a_norm_of_each_experts_output_is_refused() -> None:
    with pytest.raises(CrispError, match=r"layers.0.mlp.experts \(MuseSparkExperts\): normalises"):
        Experts.of(odd("muse_spark", "MuseSparkExperts"))


def spoiled(name: str, **attributes: Any) -> MoeLayer:
    """A layer whose experts have some attributes changed; ... takes one away."""
    layer = expert_layout(built(name)).layers[0]
    module = copy.deepcopy(layer.experts)
    for key, value in attributes.items():
        if value is ...:
            delattr(module, key)
        else:
            setattr(module, key, value)
    return replace(layer, experts=module)


@pytest.mark.parametrize(
    ("name", "attributes", "words"),
    [
        ("mixtral", {"act_fn": torch.nn.Softmax(-1)}, "its activation mixes neurons"),
        ("nemotron_h", {"act_fn": torch.nn.Softmax(-1)}, "its activation mixes neurons"),
        ("nemotron_h", {"act_fn": torch.nn.LayerNorm(D_FF)}, "does not take 16 neurons alone"),
        (
            "gpt_oss",
            {"_apply_gate": lambda both: both[:, ::2] * both[:, 1::2].mean()},
            "its activation mixes neurons",
        ),
        ("gpt_oss", {"is_concatenated": True}, "its activation mixes neurons"),
        ("mixtral", {"is_concatenated": False}, "its activation mixes neurons"),
        ("mixtral", {"has_gate": ...}, r"does not say its layout \(has_gate\)"),
        ("mixtral", {"is_transposed": "no"}, r"does not say its layout \(is_transposed\)"),
        ("mixtral", {"gate_up_proj": ...}, "not the three-dimensional ones"),
        ("mixtral", {"down_proj": torch.nn.Parameter(torch.ones(2, 2))}, "not the three-dim"),
        (
            "nemotron_h",
            {"up_proj": torch.nn.Parameter(torch.ones(8, 64, 32))},
            r"gate and up are \(8, 64, 32\), expected \(8, 32, 32\)",
        ),
    ],
)
def test_experts_that_are_not_what_they_say_are_refused(
    name: str, attributes: dict[str, Any], words: str
) -> None:
    where = CASES[name].moe_layers[0]
    with pytest.raises(CrispError, match=rf"model.layers.{where}.*Experts\): .*{words}"):
        Experts.of(spoiled(name, **attributes))
