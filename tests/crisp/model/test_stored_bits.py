"""The stored bits of quantised configs, against sizes counted by hand."""

from __future__ import annotations

from fractions import Fraction
from typing import Any

import pytest

from crisp.errors import CrispError
from crisp.model.builtin import CONFIGS
from crisp.model.config import read_geometry
from crisp.model.stored_bits import matches

D, FF = 4096, 14336  # of Mixtral
WEIGHTS = 3 * D * FF


def geometry(quantization: dict[str, Any], **more: Any) -> Any:
    return read_geometry(
        {**CONFIGS["mixtral-8x7b"], "quantization_config": quantization, **more}, "c.json"
    )


def per_row() -> int:
    """Rows of an expert's three matrices: two of FF, one of D."""
    return 2 * FF + D


@pytest.mark.parametrize(
    ("quantization", "bits"),
    [
        ({"quant_method": "gptq", "bits": 4, "group_size": 128}, 4 + Fraction(16 + 4, 128)),
        ({"quant_method": "gptq", "bits": 8, "group_size": 32}, 8 + Fraction(16 + 8, 32)),
        (
            {"quant_method": "gptq", "bits": 4, "group_size": -1},
            4 + Fraction(per_row() * 20, WEIGHTS),
        ),
        ({"quant_method": "awq", "bits": 4, "group_size": 128}, 4 + Fraction(20, 128)),
        ({"quant_method": "awq", "w_bit": 4, "q_group_size": 64}, 4 + Fraction(20, 64)),
        ({"quant_method": "mxfp4"}, Fraction(17, 4)),
        ({"quant_method": "fp8", "weight_block_size": [128, 128]}, 8 + Fraction(1, 512)),
        ({"quant_method": "fp8", "activation_scheme": "static"}, Fraction(8)),
        (
            {"quant_method": "bitsandbytes", "load_in_4bit": True, "bnb_4bit_quant_type": "nf4"},
            4 + Fraction(32, 64),
        ),
        (
            {
                "quant_method": "bitsandbytes",
                "load_in_4bit": True,
                "bnb_4bit_use_double_quant": True,
            },
            4 + Fraction(8, 64) + Fraction(32, 64 * 256),
        ),
        (
            {"quant_method": "bitsandbytes", "load_in_8bit": True},
            8 + Fraction(per_row() * 32, WEIGHTS),
        ),
    ],
)
def test_bits_and_what_groups_share(quantization: dict[str, Any], bits: Fraction) -> None:
    found = geometry(quantization)
    assert (found.bits, found.layer_bits) == (bits, None)
    assert found.notes[-1].startswith(
        f"stored bits: quantization_config, {quantization['quant_method']}"
    )


def compressed(weights: dict[str, Any], **more: Any) -> dict[str, Any]:
    groups = {"group_0": {"targets": ["Linear"], "weights": weights}}
    return {"quant_method": "compressed-tensors", "config_groups": groups, **more}


@pytest.mark.parametrize(
    ("weights", "bits"),
    [
        (
            {"num_bits": 4, "type": "int", "strategy": "group", "group_size": 128},
            4 + Fraction(16, 128),
        ),
        (
            {"num_bits": 4, "strategy": "group", "group_size": 128, "symmetric": False},
            4 + Fraction(20, 128),
        ),
        ({"num_bits": 8, "strategy": "channel"}, 8 + Fraction(per_row() * 16, WEIGHTS)),
        ({"num_bits": 8, "type": "float", "strategy": "tensor"}, Fraction(8)),
        (
            {"num_bits": 8, "type": "float", "strategy": "block", "block_structure": [128, 128]},
            8 + Fraction(16, 128 * 128),
        ),
        (
            {"num_bits": 4, "type": "float", "strategy": "tensor_group", "group_size": 16},
            4 + Fraction(8, 16),
        ),
    ],
)
def test_compressed_tensors(weights: dict[str, Any], bits: Fraction) -> None:
    assert geometry(compressed(weights)).bits == bits


def test_what_is_left_as_it_was() -> None:
    four = {"num_bits": 4, "strategy": "group", "group_size": 128}
    ignored = geometry(compressed(four, ignore=["re:.*block_sparse_moe.experts.*", "lm_head"]))
    assert ignored.bits == 16
    assert ignored.notes[-1].endswith("the routed experts are not quantised")
    router = geometry(compressed(four, ignore=["re:.*block_sparse_moe.gate$", "lm_head"]))
    assert router.bits == 4 + Fraction(16, 128)
    elsewhere = compressed(four)
    elsewhere["config_groups"]["group_0"]["targets"] = ["re:.*self_attn.*"]
    assert geometry(elsewhere).bits == 16


def test_layers_may_differ() -> None:
    first = {r"+:.*layers\.0\..*": {"bits": 8, "group_size": 64}, r"-:.*layers\.1\..*": {}}
    found = geometry({"quant_method": "gptq", "bits": 4, "group_size": 128, "dynamic": first})
    four, eight = 4 + Fraction(20, 128), 8 + Fraction(24, 64)
    assert found.layer_bits == (eight, Fraction(16), *[four] * 30)
    assert found.bits == (eight + 16 + 30 * four) / 32
    skipped = {"quant_method": "awq", "bits": 4, "group_size": 128}
    found = geometry(skipped | {"modules_to_not_convert": ["gate", "model.layers.31"]})
    assert found.layer_bits == (*[four] * 31, Fraction(16))


def test_what_is_not_known_says_what_helps() -> None:
    with pytest.raises(CrispError, match=r"how many bits hqq stores .*--bits B says it"):
        geometry({"quant_method": "hqq"})
    config = CONFIGS["mixtral-8x7b"] | {"quantization_config": {"quant_method": "hqq"}}
    assert read_geometry(config, "c.json", any_bits=True).n_experts == 8
    known = CONFIGS["mixtral-8x7b"] | {"quantization_config": {"quant_method": "mxfp4"}}
    stated, read = (read_geometry(known, "c.json", any_bits=x) for x in (True, False))
    assert stated.digest() == read.digest()
    for quantization in (
        {"quant_method": "gptq"},
        {"quant_method": "gptq", "bits": 4, "group_size": 64, "dynamic": 5},
        {"quant_method": "gptq", "bits": 4, "group_size": 64, "dynamic": {"(": {}}},
        {"quant_method": "bitsandbytes", "load_in_4bit": True, "bnb_4bit_quant_type": 5},
        {"quant_method": "awq", "bits": 4, "modules_to_not_convert": ["re:("]},
        "gptq",
        {"quant_method": "compressed-tensors"},
        {"quant_method": "fp8", "weight_block_size": [0, 1]},
        compressed({"num_bits": 4, "strategy": "?"}),
    ):
        with pytest.raises(CrispError, match=r"^c\.json: quantization_config"):
            geometry(quantization)


def test_patterns_mean_whole_parts_of_names() -> None:
    name = "model.layers.1.mlp.experts.0.gate_proj"
    for pattern, means in {
        "gate": False,
        "mlp.gate": False,
        "layers.1": True,
        "layers.11": False,
        "model.layers.*.mlp": True,
        "re:.*experts.*": True,
    }.items():
        assert matches(pattern, name) is means, pattern
