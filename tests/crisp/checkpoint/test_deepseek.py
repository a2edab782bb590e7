from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from crisp.checkpoint.deepseek import register
from crisp.errors import CrispError

torch = pytest.importorskip("torch", reason="needs the extra hf")
transformers = pytest.importorskip("transformers", reason="needs the extra hf")

TINY: dict[str, Any] = {
    "vocab_size": 61,
    "hidden_size": 32,
    "intermediate_size": 40,
    "moe_intermediate_size": 12,
    "num_hidden_layers": 4,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "n_routed_experts": 8,
    "n_shared_experts": 2,
    "num_experts_per_tok": 3,
    "first_k_dense_replace": 1,
    "initializer_range": 0.3,
}


def built(**changes: Any) -> Any:
    register()
    torch.manual_seed(0)
    config = transformers.AutoConfig.for_model("deepseek", **{**TINY, **changes})
    model = transformers.AutoModelForCausalLM.from_config(config).double().eval()
    model.set_experts_implementation("eager")  # grouped_mm has no float64
    for name, value in model.named_parameters():  # ones and zeros would hide a forgotten tensor
        if name.endswith(("norm.weight", "bias")):
            torch.nn.init.normal_(value.data, 1.0, 0.2)
    return model


def tokens() -> Any:
    return torch.randint(0, 61, (2, 19), generator=torch.Generator().manual_seed(1))


def published(folder: Path) -> dict[str, Any]:
    from safetensors.torch import load_file

    return dict(load_file(folder / "model.safetensors"))


# -- an independent forward: straight from the checkpoint's tensors, one sequence, loops -----------


def norm(x: Any, weight: Any, eps: float) -> Any:
    x = x.float()
    return weight * (x * torch.rsqrt((x * x).mean(-1, keepdim=True) + eps)).double()


def rotated(x: Any, theta: float) -> Any:
    """[T, heads, d]: the pair (i, i + d/2) turned by position / theta^(2i/d)."""
    half = x.shape[-1] // 2
    frequency = 1.0 / (theta ** (torch.arange(0, half).float() * 2 / x.shape[-1]))
    angle = torch.arange(len(x)).float()[:, None, None] * frequency
    cos, sin = angle.cos().double(), angle.sin().double()
    a, b = x[..., :half], x[..., half:]
    return torch.cat([a * cos - b * sin, b * cos + a * sin], -1)


def straight(w: dict[str, Any], c: dict[str, Any], ids: Any) -> Any:
    """Logits [T, vocabulary] of one sequence, norms and the router's softmax in float32."""

    def linear(x: Any, name: str) -> Any:
        bias = w.get(f"{name}.bias")
        out = x @ w[f"{name}.weight"].T
        return out if bias is None else out + bias

    def mlp(x: Any, name: str) -> Any:
        gate = linear(x, f"{name}.gate_proj")
        gate = gate / (1 + torch.exp(-gate))
        return linear(gate * linear(x, f"{name}.up_proj"), f"{name}.down_proj")

    heads, groups = c["num_attention_heads"], c["num_key_value_heads"]
    d, eps, n = c["hidden_size"] // heads, c["rms_norm_eps"], len(ids)
    x = w["model.embed_tokens.weight"][ids]
    for layer in range(c["num_hidden_layers"]):
        at = f"model.layers.{layer}"
        h = norm(x, w[f"{at}.input_layernorm.weight"], eps)
        q = rotated(linear(h, f"{at}.self_attn.q_proj").view(n, heads, d), c["rope_theta"])
        k = rotated(linear(h, f"{at}.self_attn.k_proj").view(n, groups, d), c["rope_theta"])
        v = linear(h, f"{at}.self_attn.v_proj").view(n, groups, d)
        mixed = torch.zeros(n, heads, d, dtype=torch.float64)
        for t in range(n):
            for head in range(heads):
                group = head * groups // heads
                chance = torch.softmax(k[: t + 1, group] @ q[t, head] / d**0.5, 0)
                mixed[t, head] = chance @ v[: t + 1, group]
        x = x + linear(mixed.reshape(n, -1), f"{at}.self_attn.o_proj")
        h = norm(x, w[f"{at}.post_attention_layernorm.weight"], eps)
        if layer < c["first_k_dense_replace"] or layer % c["moe_layer_freq"]:
            x = x + mlp(h, f"{at}.mlp")
            continue
        out = torch.zeros_like(h)
        for t in range(n):
            chance = torch.softmax((h[t] @ w[f"{at}.mlp.gate.weight"].T).float(), 0)
            best = sorted(range(len(chance)), key=lambda e: -float(chance[e]))
            best = best[: c["num_experts_per_tok"]]
            total = chance[best].sum() if c["norm_topk_prob"] else 1.0
            for e in best:
                out[t] += (chance[e] / total).double() * mlp(h[t], f"{at}.mlp.experts.{e}")
        if f"{at}.mlp.shared_experts.up_proj.weight" in w:
            out = out + mlp(h, f"{at}.mlp.shared_experts")
        x = x + out
    x = norm(x, w["model.norm.weight"], eps)
    head = "model.embed_tokens" if c["tie_word_embeddings"] else "lm_head"
    return x @ w[f"{head}.weight"].T


@pytest.mark.parametrize(
    "changes",
    [
        {},
        {"attention_bias": True},
        {"num_hidden_layers": 5, "first_k_dense_replace": 2, "moe_layer_freq": 2},
        {"n_shared_experts": None, "tie_word_embeddings": True},
        {"norm_topk_prob": True},
    ],
    ids=str,
)
def test_the_logits_are_those_of_a_straight_line_forward(
    tmp_path: Path, changes: dict[str, Any]
) -> None:
    model = built(**changes)
    model.save_pretrained(tmp_path)
    config = {**model.config.to_dict(), "rope_theta": 10_000.0}
    weights, ids = published(tmp_path), tokens()
    with torch.no_grad():
        logits = model(ids).logits
    for row in range(len(ids)):
        expected = straight(weights, config, ids[row])
        torch.testing.assert_close(logits[row], expected, rtol=0, atol=1e-10)


def test_a_checkpoint_has_the_published_names_and_gives_the_same_logits(tmp_path: Path) -> None:
    model = built()
    model.save_pretrained(tmp_path)
    ffn = ("gate_proj", "up_proj", "down_proj")
    names = {"model.embed_tokens", "model.norm", "lm_head"}
    for layer in range(4):
        at = f"model.layers.{layer}"
        names |= {f"{at}.input_layernorm", f"{at}.post_attention_layernorm"}
        names |= {f"{at}.self_attn.{part}_proj" for part in "qkvo"}
        if layer == 0:
            names |= {f"{at}.mlp.{part}" for part in ffn}
        else:
            names |= {f"{at}.mlp.experts.{e}.{part}" for e in range(8) for part in ffn}
            names |= {f"{at}.mlp.shared_experts.{part}" for part in ffn} | {f"{at}.mlp.gate"}
    assert set(published(tmp_path)) == {f"{name}.weight" for name in names}
    assert json.loads((tmp_path / "config.json").read_text())["model_type"] == "deepseek"

    again, info = transformers.AutoModelForCausalLM.from_pretrained(
        tmp_path, dtype="auto", output_loading_info=True
    )
    assert not info["missing_keys"] and not info["unexpected_keys"]
    with torch.no_grad():
        again.set_experts_implementation("eager")
        logits = again(tokens()).logits
        # Not to the bit: how a product is summed may go by where its factors lie in memory.
        torch.testing.assert_close(logits, model(tokens()).logits, rtol=0, atol=1e-12)


def test_the_config_as_published_is_read(tmp_path: Path) -> None:
    """With its pointer to code on the hub, which is neither fetched nor run."""
    register()
    fields = {
        **{key: value for key, value in TINY.items() if key != "initializer_range"},
        "architectures": ["DeepseekForCausalLM"],
        "auto_map": {
            "AutoConfig": "configuration_deepseek.DeepseekConfig",
            "AutoModelForCausalLM": "modeling_deepseek.DeepseekForCausalLM",
        },
        "aux_loss_alpha": 0.001,
        "ep_size": 1,
        "model_type": "deepseek",
        "moe_layer_freq": 1,
        "norm_topk_prob": False,
        "rope_scaling": {"type": "linear", "factor": 2.0},
        "rope_theta": 5000,
        "scoring_func": "softmax",
        "seq_aux": True,
        "torch_dtype": "bfloat16",
    }
    (tmp_path / "config.json").write_text(json.dumps(fields))
    config = transformers.AutoConfig.from_pretrained(tmp_path)
    assert type(config).__module__ == "crisp.checkpoint.deepseek"
    assert config.rope_parameters["rope_theta"] == 5000
    model = transformers.AutoModelForCausalLM.from_config(config)
    # A factor of 2 halves every frequency: 1/2 for the first pair of numbers.
    assert model.model.rotary_emb.inv_freq[0].item() == 0.5


@pytest.mark.parametrize("implementation", ["eager", "grouped_mm", "batched_mm"])
def test_the_experts_follow_the_implementation_that_is_set(implementation: str) -> None:
    model = built().float()
    with torch.no_grad():
        expected = built().float()(tokens()).logits
        model.set_experts_implementation(implementation)
        assert model.config._experts_implementation == implementation
        torch.testing.assert_close(model(tokens()).logits, expected, rtol=1e-4, atol=1e-4)


def test_decoding_with_a_cache_equals_the_full_forward() -> None:
    model, ids = built(), tokens()
    with torch.no_grad():
        full = model(ids).logits
        out = model(ids[:, :7], use_cache=True)
        steps = [out.logits]
        for t in range(7, ids.shape[1]):
            key = "cache" if "cache" in out else "past_key_values"  # newer and older transformers
            out = model(ids[:, t : t + 1], use_cache=True, **{key: out[key]})
            steps.append(out.logits)
    # A float32 rounding of a norm or of the router may fall the other way.
    torch.testing.assert_close(torch.cat(steps, 1), full, rtol=0, atol=1e-6)


def test_the_adapter_finds_its_layers_and_what_its_router_chose() -> None:
    from crisp.adapter import expert_layout, record_routing

    model = built()
    layout = expert_layout(model)
    assert (layout.n_layers, layout.n_experts) == (4, 8)
    assert [layer.index for layer in layout.layers] == [1, 2, 3]
    with record_routing(model) as recorder, torch.no_grad():
        out = model(tokens(), output_router_logits=True)
    routing = recorder.take()
    for which, logits in enumerate(out.router_logits, start=1):
        chance, index = torch.softmax(logits.float(), -1).topk(3)
        assert (routing.experts[:, which] == index.numpy()).all()
        assert routing.weights[:, which] == pytest.approx(chance.numpy(), abs=1e-7)
    assert (routing.experts[:, 0] == -1).all()


def test_another_score_is_refused_by_name() -> None:
    with pytest.raises(CrispError, match="scoring_func 'sigmoid' is not understood"):
        built(scoring_func="sigmoid")


def test_registering_twice_does_nothing() -> None:
    register()
    first = transformers.CONFIG_MAPPING["deepseek"]
    register()
    assert transformers.CONFIG_MAPPING["deepseek"] is first
