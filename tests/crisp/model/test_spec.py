"""The geometry of the built-in models, and of whatever config a user brings."""

from __future__ import annotations

import json
from fractions import Fraction
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from crisp.errors import CrispError
from crisp.model.builtin import CONFIGS
from crisp.model.spec import BUILTIN, ModelSpec

MIXTRAL = BUILTIN["mixtral-8x7b"]
GPT_OSS = BUILTIN["gpt-oss-20b"]


def config(name: str = "mixtral-8x7b", **changes: Any) -> dict[str, Any]:
    """A built-in config with some fields changed; a change to `...` removes the field."""
    changed = CONFIGS[name] | changes
    return {key: value for key, value in changed.items() if value is not ...}


# -- published sizes -----------------------------------------------------------------------------


def parameters(name: str, experts: int) -> int:
    """Parameters of a model that keeps `experts` of each layer's routed experts."""
    spec, vocab = BUILTIN[name], CONFIGS[name]["vocab_size"]
    expert = 3 * spec.d_model * spec.d_ff
    if spec.biases:
        expert += 2 * spec.d_ff + spec.d_model  # gate and up, and that of the down projection
    embeddings = 2 * vocab * spec.d_model  # every built-in model has an LM head of its own
    return len(spec.moe_layers) * experts * expert + sum(spec.dense_params) + embeddings


@pytest.mark.parametrize(
    ("name", "billions"),
    [
        ("mixtral-8x7b", 46.7),
        ("deepseek-moe-16b", 16.4),
        ("deepseek-v2-lite", 15.7),
        ("qwen1.5-moe-a2.7b", 14.3),
        ("qwen3-30b-a3b", 30.5),
        ("olmoe-1b-7b", 6.9),
        ("gpt-oss-20b", 20.9),
        ("phi-3.5-moe", 41.9),
    ],
)
def test_parts_add_up_to_the_published_total(name: str, billions: float) -> None:
    assert round(parameters(name, BUILTIN[name].n_experts) / 1e9, 1) == billions


@pytest.mark.parametrize(
    ("name", "billions"),
    [
        ("mixtral-8x7b", 12.9),
        ("deepseek-moe-16b", 2.8),
        ("qwen1.5-moe-a2.7b", 2.7),
        ("olmoe-1b-7b", 1.3),
        ("phi-3.5-moe", 6.6),
    ],
)
def test_parts_of_one_token_add_up_to_the_published_active_size(name: str, billions: float) -> None:
    assert round(parameters(name, BUILTIN[name].top_k) / 1e9, 1) == billions


def test_mixtral_attention_by_hand() -> None:
    # q and o 4096 x 4096, k and v 4096 x 1024, router 4096 x 8, two norms
    assert set(MIXTRAL.dense_params) == {2 * 4096**2 + 2 * 4096 * 1024 + 4096 * 8 + 2 * 4096}


def test_deepseek_moe_by_hand() -> None:
    spec = BUILTIN["deepseek-moe-16b"]
    attention = 4 * 2048**2 + 2 * 2048
    assert spec.moe_layers == tuple(range(1, 28))
    assert spec.dense_params[0] == attention + 3 * 2048 * 10944
    assert spec.dense_params[1] == attention + 2048 * 64 + 2 * 3 * 2048 * 1408


def test_deepseek_can_skip_layers() -> None:
    spec = ModelSpec.from_config(config("deepseek-moe-16b", moe_layer_freq=3))
    assert spec.moe_layers == tuple(range(3, 28, 3))  # layer 0 is one of the dense ones


# -- against transformers ------------------------------------------------------------------------

# every size differs from every other, so that no term can stand in for another
TINY: dict[str, Any] = {
    "vocab_size": 40,
    "hidden_size": 48,
    "intermediate_size": 56,
    "num_hidden_layers": 4,
    "num_attention_heads": 6,
    "num_key_value_heads": 2,
    "num_experts_per_tok": 2,
}
LATENT: dict[str, Any] = TINY | {
    "num_key_value_heads": 6,
    "moe_intermediate_size": 24,
    "kv_lora_rank": 10,
    "q_lora_rank": None,
    "qk_nope_head_dim": 14,
    "qk_rope_head_dim": 4,
    "v_head_dim": 12,
    "n_routed_experts": 8,
    "n_shared_experts": 3,
    "first_k_dense_replace": 1,
    "n_group": 1,
    "topk_group": 1,
}
QWEN: dict[str, Any] = TINY | {"moe_intermediate_size": 24, "num_experts": 5}
FAMILIES = [
    ("mixtral", TINY | {"num_local_experts": 7}),
    ("mixtral", TINY | {"num_local_experts": 7, "head_dim": 10}),
    ("phimoe", TINY | {"num_local_experts": 7, "attention_bias": True}),
    ("olmoe", TINY | {"num_experts": 7}),
    ("olmoe", TINY | {"num_experts": 7, "attention_bias": True}),
    ("gpt_oss", TINY | {"num_local_experts": 7, "head_dim": 10}),
    ("qwen2_moe", QWEN | {"shared_expert_intermediate_size": 20, "mlp_only_layers": [2]}),
    ("qwen2_moe", QWEN | {"shared_expert_intermediate_size": 20, "qkv_bias": False}),
    ("qwen3_moe", QWEN | {"head_dim": 10, "decoder_sparse_step": 2, "attention_bias": True}),
    ("deepseek_v2", LATENT),
    ("deepseek_v2", LATENT | {"q_lora_rank": 18, "attention_bias": True}),
    ("deepseek_v3", LATENT | {"q_lora_rank": 18}),
    ("deepseek_v3", LATENT | {"attention_bias": True}),
]


@pytest.mark.parametrize(("model_type", "fields"), FAMILIES)
def test_counts_what_transformers_builds(model_type: str, fields: dict[str, Any]) -> None:
    torch = pytest.importorskip("torch")
    transformers = pytest.importorskip("transformers")
    built = transformers.AutoConfig.for_model(model_type, **fields)
    spec = ModelSpec.from_config(built.to_dict())
    with torch.device("meta"):
        model = transformers.AutoModelForCausalLM.from_config(built)
    expert = 3 * spec.d_model * spec.d_ff
    if spec.biases:
        expert += 2 * spec.d_ff + spec.d_model
    for i, layer in enumerate(model.model.layers):
        numbers = dict(layer.named_parameters())
        numbers |= {k: v for k, v in layer.named_buffers() if k.endswith("correction_bias")}
        routed = sum(v.numel() for k, v in numbers.items() if ".experts." in k)
        assert routed == spec.n_experts * expert * (i in spec.moe_layers)
        assert spec.dense_params[i] == sum(v.numel() for v in numbers.values()) - routed


def test_reads_the_shared_model(shared: Path) -> None:
    spec = ModelSpec.named(shared / "models" / "tiny-mixtral")
    assert (spec.name, spec.n_layers, spec.n_experts, spec.top_k) == ("tiny-mixtral", 6, 8, 2)
    assert (spec.block, spec.n_blocks, spec.neurons(6, 7)) == (48, 7, 32)


# -- blocks and bytes ----------------------------------------------------------------------------


def test_every_built_in_model_has_eight_blocks_of_a_multiple_of_16() -> None:
    assert {spec.n_blocks for spec in BUILTIN.values()} == {8}
    assert all(spec.block % 16 == 0 for spec in BUILTIN.values())


def test_the_last_block_of_gpt_oss_is_shorter() -> None:
    assert [GPT_OSS.neurons(b, b + 1) for b in range(8)] == [368] * 7 + [304]
    assert GPT_OSS.neurons(0, 8) == 2880


def test_bytes_of_a_mixtral_expert() -> None:
    assert MIXTRAL.expert_bytes == 3 * 4096 * 14336 * 2
    assert MIXTRAL.with_(bits=Fraction("4.25")).expert_bytes == 93_585_408  # * 4.25 / 8
    assert MIXTRAL.routed_bytes == 32 * 8 * MIXTRAL.expert_bytes


def test_a_block_is_rounded_up_to_whole_pages() -> None:
    # 368 * 3 * 2880 * 4.25 / 8 of weights + 368 * 2 * 2 of biases = 412.7 pages
    assert GPT_OSS.block_bytes == 413 * 4096
    assert GPT_OSS.expert_bytes == 8 * 413 * 4096  # the short last block is padded


def test_biases_take_room() -> None:
    # 64 * 3 * 2048 * 2 bytes of weights are 192 pages; 64 * 2 biases of 2 bytes need one more
    fields = GPT_OSS.with_(bits=Fraction(16), block=64).to_dict() | {"d_model": 2048}
    assert ModelSpec.from_dict(fields).block_bytes == 193 * 4096
    assert ModelSpec.from_dict(fields | {"biases": False}).block_bytes == 192 * 4096


def test_without_a_gate_a_neuron_has_two_vectors() -> None:
    fields = MIXTRAL.to_dict() | {"matrices": 2}
    assert 3 * ModelSpec.from_dict(fields).block_bytes == 2 * MIXTRAL.block_bytes


def test_widths_round_up_to_whole_blocks() -> None:
    assert [MIXTRAL.width(Fraction(k, 8)) for k in range(9)] == list(range(9))
    assert MIXTRAL.width(Fraction(1, 1000)) == 1
    assert GPT_OSS.width(Fraction(1, 2)) == 4  # 1440 neurons, 3 blocks have 1104
    assert GPT_OSS.width(Fraction(7, 8)) == 7  # 2520 of the 2576 in 7 blocks
    with pytest.raises(CrispError, match="expected 0 to 1"):
        MIXTRAL.width(Fraction(9, 8))


@given(
    share=st.fractions(0, 1),
    name=st.sampled_from(sorted(BUILTIN)),
    block=st.integers(1, 400),
)
def test_a_width_is_the_smallest_that_suffices(share: Fraction, name: str, block: int) -> None:
    spec = BUILTIN[name].with_(block=block)
    width = spec.width(share)
    assert spec.neurons(0, width) >= share * spec.d_ff
    assert width == 0 or spec.neurons(0, width - 1) < share * spec.d_ff


# -- bits ----------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("quantised", "bits"),
    [
        ({"quant_method": "mxfp4"}, Fraction(17, 4)),
        ({"quant_method": "fp8", "weight_block_size": [128, 128]}, 8 + Fraction(1, 512)),
        ({"quant_method": "gptq", "bits": 4}, Fraction(16)),  # a later choice: --bits says it
        (None, Fraction(16)),
    ],
)
def test_bits_of_the_published_format(quantised: object, bits: Fraction) -> None:
    assert ModelSpec.from_config(config(quantization_config=quantised)).bits == bits


@pytest.mark.parametrize(
    ("fields", "bits"),
    [
        ({"torch_dtype": "float32"}, 32),
        ({"torch_dtype": ..., "dtype": "float16"}, 16),
        ({"torch_dtype": ...}, 16),
    ],
)
def test_bits_of_the_published_dtype(fields: dict[str, Any], bits: int) -> None:
    spec = ModelSpec.from_config(config(**fields))
    assert (spec.dtype_bits, spec.bits) == (bits, bits)


# -- variants ------------------------------------------------------------------------------------


def test_first_layers() -> None:
    spec = BUILTIN["deepseek-v2-lite"].first_layers(3)
    assert (spec.n_layers, spec.moe_layers, spec.n_routed) == (3, (1, 2), 128)
    assert spec.dense_params == BUILTIN["deepseek-v2-lite"].dense_params[:3]
    for n in (0, 28):
        with pytest.raises(CrispError, match=f"has 27 layers, {n} were requested"):
            BUILTIN["deepseek-v2-lite"].first_layers(n)
    with pytest.raises(CrispError, match="at least one"):
        BUILTIN["deepseek-v2-lite"].first_layers(1)


def test_variants_change_only_what_is_asked() -> None:
    spec = MIXTRAL.with_(block=3584, top_k=1)
    assert (spec.n_blocks, spec.top_k, spec.bits) == (4, 1, MIXTRAL.bits)
    assert spec.config_hash == MIXTRAL.config_hash
    for change in (
        {"block": 0},
        {"block": 14337},
        {"top_k": 9},
        {"top_k": 0},
        {"bits": Fraction(0)},
    ):
        with pytest.raises(CrispError, match=f"mixtral-8x7b: {next(iter(change))} is"):
            MIXTRAL.with_(**change)  # type: ignore[arg-type]


@pytest.mark.parametrize("spec", BUILTIN.values(), ids=BUILTIN)
def test_survives_json(spec: ModelSpec) -> None:
    spec = spec.with_(bits=Fraction(13, 3))
    assert ModelSpec.from_dict(json.loads(json.dumps(spec.to_dict()))) == spec


@pytest.mark.parametrize(
    ("fields", "message"),
    [
        ({"bits": "a quarter"}, "bits"),
        ({"bits": "1/0"}, "bits"),
        ({"bits": "1e999999999"}, "bits"),
        ({"n_layers": 10**15}, "dense_params"),
        ({"d_ff": 2.5}, "d_ff"),
        ({"d_ff": True}, "d_ff"),
        ({"d_ff": 0}, "d_ff"),
        ({"moe_layers": [3, 1]}, "moe_layers"),
        ({"moe_layers": [99]}, "moe_layers"),
        ({"moe_layers": 3}, "moe_layers"),
        ({"dense_params": [1]}, "dense_params"),
        ({"matrices": 4}, "matrices"),
        ({"surprise": 1}, "surprise of the model is not known"),
    ],
)
def test_hostile_dicts_are_refused(fields: dict[str, Any], message: str) -> None:
    with pytest.raises(CrispError, match=message):
        ModelSpec.from_dict(MIXTRAL.to_dict() | fields)


def test_an_incomplete_dict_is_refused() -> None:
    fields = MIXTRAL.to_dict()
    del fields["block"]
    with pytest.raises(CrispError, match=r"x.trace: the field block of the model is missing"):
        ModelSpec.from_dict(fields, "x.trace")


# -- names and files -----------------------------------------------------------------------------


def test_a_folder_a_file_and_a_dict_give_the_same_model(tmp_path: Path) -> None:
    folder = tmp_path / "my-model"
    folder.mkdir()
    (folder / "config.json").write_text(json.dumps(config()))
    (tmp_path / "other.json").write_text(json.dumps(config()))
    read = [
        ModelSpec.named(folder),
        ModelSpec.named(str(folder / "config.json")),
        ModelSpec.named(tmp_path / "other.json"),
        ModelSpec.from_config(config()),
    ]
    assert [spec.name for spec in read] == ["my-model", "my-model", "other", "mixtral"]
    assert {spec.config_hash for spec in read} == {MIXTRAL.config_hash}


def test_the_hash_is_of_the_geometry() -> None:
    def digest(**changes: Any) -> str | None:
        return ModelSpec.from_config(config(**changes)).config_hash

    assert digest(rope_theta=1e6, torch_dtype=..., dtype="bfloat16") == MIXTRAL.config_hash
    assert digest(intermediate_size=14337) != MIXTRAL.config_hash
    assert digest(num_key_value_heads=4) != MIXTRAL.config_hash


def test_an_unknown_name_gets_the_nearest(tmp_path: Path) -> None:
    with pytest.raises(CrispError, match="did you mean 'mixtral-8x7b'"):
        ModelSpec.named("mixtral8x7b")
    with pytest.raises(CrispError, match=r"config\.json: cannot be read"):
        ModelSpec.named(tmp_path)


@pytest.mark.parametrize(
    ("text", "message"),
    [("{", "is not JSON"), ("[1]", "holds a list"), ("\udcff", "is not JSON")],
)
def test_an_unreadable_file_is_named(tmp_path: Path, text: str, message: str) -> None:
    file = tmp_path / "broken.json"
    file.write_bytes(text.encode(errors="surrogateescape"))
    with pytest.raises(CrispError, match=rf"broken\.json: {message}"):
        ModelSpec.from_config(file)


@pytest.mark.parametrize(
    ("fields", "message"),
    [
        ({"model_type": "llama"}, "unknown model_type 'llama'"),
        ({"model_type": "mixtrel"}, "did you mean 'mixtral'"),
        ({"model_type": ...}, "model_type: found nothing"),
        ({"hidden_size": ...}, "hidden_size: found nothing, expected a whole number"),
        ({"hidden_size": "4096"}, "hidden_size: found '4096'"),
        ({"hidden_size": 4096.0}, "hidden_size: found 4096.0"),
        ({"num_hidden_layers": True}, "num_hidden_layers: found True"),
        ({"num_local_experts": 0}, "num_local_experts: found 0"),
        ({"intermediate_size": -1}, "intermediate_size: found -1"),
        ({"num_experts_per_tok": 9}, "num_experts_per_tok: found 9, expected at most"),
        ({"torch_dtype": "int3"}, "torch_dtype: found 'int3', expected bfloat16"),
    ],
)
def test_a_bad_field_is_named(tmp_path: Path, fields: dict[str, Any], message: str) -> None:
    (tmp_path / "config.json").write_text(json.dumps(config(**fields)))
    with pytest.raises(CrispError, match=message) as caught:
        ModelSpec.from_config(tmp_path)
    assert str(caught.value).startswith(str(tmp_path / "config.json"))
    assert "\n" not in str(caught.value)


@pytest.mark.parametrize(
    ("name", "fields", "message"),
    [
        ("qwen3-30b-a3b", {"mlp_only_layers": list(range(48))}, "no layer .* is an MoE layer"),
        ("qwen3-30b-a3b", {"mlp_only_layers": "all"}, "mlp_only_layers: found 'all'"),
        ("qwen3-30b-a3b", {"attention_bias": "no"}, "attention_bias: found 'no'"),
        ("deepseek-moe-16b", {"first_k_dense_replace": 28}, "no layer .* is an MoE layer"),
        ("deepseek-moe-16b", {"n_routed_experts": None}, "n_routed_experts: found None"),
    ],
)
def test_a_dense_model_is_refused(name: str, fields: dict[str, Any], message: str) -> None:
    with pytest.raises(CrispError, match=message):
        ModelSpec.from_config(config(name, **fields))
