"""Configs of families that are not listed, by the keys that configs have in common."""

from __future__ import annotations

from typing import Any

import pytest

from crisp.errors import CrispError
from crisp.model.config import ESTIMATED, read_geometry

BASE: dict[str, Any] = {
    "model_type": "a_new_moe",
    "hidden_size": 64,
    "num_hidden_layers": 6,
    "num_attention_heads": 4,
    "num_experts": 8,
    "num_experts_per_tok": 2,
    "moe_intermediate_size": 48,
    "intermediate_size": 96,
}


def read(**changes: Any) -> Any:
    config = {key: value for key, value in {**BASE, **changes}.items() if value is not ...}
    return read_geometry(config, "c.json")


@pytest.mark.parametrize(
    ("changes", "layers"),
    [
        ({}, (0, 1, 2, 3, 4, 5)),
        ({"first_k_dense_replace": 2}, (2, 3, 4, 5)),
        ({"first_k_dense_replace": 1, "moe_layer_freq": 2}, (2, 4)),
        ({"num_dense_layers": 3}, (3, 4, 5)),
        ({"mlp_layer_types": ["dense", *["sparse"] * 5]}, (1, 2, 3, 4, 5)),
        ({"layers_block_type": ["mamba", "moe"] * 3}, (1, 3, 5)),
        ({"hybrid_override_pattern": "ME*EM-"}, (1, 3)),
        ({"moe_layer_freq": [0, 1, 1, 0, 1, 1]}, (1, 2, 4, 5)),
        ({"moe_layers_enum": "1,3, 5"}, (1, 3, 5)),
        ({"moe_layers": [5, 1]}, (1, 5)),
        ({"moe_layer_start_index": 1, "moe_layer_end_index": 4}, (1, 2, 3, 4)),
        (
            {"moe_layer_start_index": 1, "moe_layer_end_index": -1, "moe_layer_interval": 2},
            (1, 3, 5),
        ),
        ({"expert_layer_period": 2, "expert_layer_offset": 1}, (1, 3, 5)),
        ({"interleave_moe_layer_step": 2}, (1, 3, 5)),
        ({"decoder_sparse_step": 2, "mlp_only_layers": [3]}, (1, 5)),
        ({"layer_types": ["full_attention"] * 6, "first_k_dense_replace": 1}, (1, 2, 3, 4, 5)),
    ],
)
def test_which_layers_are_moe(changes: dict[str, Any], layers: tuple[int, ...]) -> None:
    assert read(**changes).moe_layers == layers


@pytest.mark.parametrize(
    "names",
    [
        {"num_experts": "num_local_experts"},
        {"num_experts": "n_routed_experts"},
        {"num_experts": "moe_num_experts", "num_experts_per_tok": "moe_k"},
        {"num_experts_per_tok": "moe_topk", "moe_intermediate_size": "moe_ffn_hidden_size"},
        {"num_experts_per_tok": "top_k_experts"},
        {"hidden_size": "d_model", "num_hidden_layers": "num_layers"},
    ],
)
def test_other_names_mean_the_same(names: dict[str, str]) -> None:
    renamed = {names.get(key, key): value for key, value in BASE.items()}
    found = read_geometry(renamed, "c.json")
    assert found == read()
    assert (found.n_experts, found.top_k, found.d_ff, found.d_model) == (8, 2, 48, 64)
    assert found.notes == (ESTIMATED,)


def test_the_text_model_of_a_multimodal_one() -> None:
    whole = {"model_type": "sees", "text_config": BASE, "torch_dtype": "float32"}
    assert read_geometry(whole, "c.json").dtype_bits == 32
    thinker = {"model_type": "omni", "thinker_config": {"text_config": BASE}}
    quantised = thinker | {"quantization_config": {"quant_method": "fp8"}}
    assert read_geometry(quantised, "c.json").bits == 8
    assert read_geometry(thinker, "c.json") == read()


def test_one_number_in_a_list() -> None:
    assert read(num_experts_per_tok=[3] * 6).top_k == 3
    with pytest.raises(CrispError, match=r"num_experts_per_tok: .* one number for all layers"):
        read(num_experts_per_tok=[1, 2])


def test_experts_in_a_space_of_their_own() -> None:
    found = read(moe_latent_size=32, mlp_hidden_act="relu2")
    assert (found.d_model, found.matrices) == (32, 2)


def test_dense_parameters_are_counted_as_far_as_the_config_says() -> None:
    # four projections of 64 x 64, a router of 8 x 64; a dense FFN of three 64 x 96
    found = read(first_k_dense_replace=1)
    assert found.dense_params[:2] == (4 * 64 * 64 + 3 * 64 * 96, 4 * 64 * 64 + 8 * 64)
    shared = read(n_shared_experts=2).dense_params[0]
    assert shared - read().dense_params[0] == 3 * 64 * 2 * 48


def test_the_same_model_has_the_same_hash_whatever_is_known_beside_its_experts() -> None:
    assert read(num_attention_heads=8, head_dim=16).digest() == read().digest()
    assert read(num_experts=16).digest() != read().digest()


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"num_experts": ...}, "unknown model_type 'a_new_moe'.* which it lacks"),
        ({"num_experts_per_tok": ...}, "num_experts_per_tok: found nothing"),
        ({"moe_intermediate_size": ..., "intermediate_size": ...}, "moe_intermediate_size: found"),
        ({"num_experts_per_tok": 9}, "at most num_experts, 8"),
        ({"hidden_size": "64"}, "hidden_size: found '64'"),
        ({"moe_layers_enum": "1,x"}, "moe_layers_enum: found"),
        ({"moe_layer_freq": [2]}, "moe_layer_freq: found"),
        ({"num_dense_layers": 6}, "no layer of this model is an MoE layer"),
    ],
)
def test_what_is_not_understood_is_refused(changes: dict[str, Any], message: str) -> None:
    with pytest.raises(CrispError, match=message):
        read(**changes)
