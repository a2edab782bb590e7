"""The geometry in tensors' names, shapes and types, for every spelling that there is."""

from __future__ import annotations

import math
from fractions import Fraction
from typing import Any

import pytest

from crisp.checkpoint.files import TensorEntry
from crisp.checkpoint.geometry.tensors import tensor_geometry
from crisp.errors import CrispError

D, FF, E, LAYERS = 64, 32, 4, 3
SIZES = {"BF16": 2, "F32": 4, "F8_E4M3": 1, "I32": 4, "U8": 1, "F16": 2}


def entry(name: str, shape: tuple[int, ...], dtype: str = "BF16") -> TensorEntry:
    return TensorEntry(name, "x", dtype, shape, 0, math.prod(shape) * SIZES[dtype])


def beside(layer: int, prefix: str = "model.") -> list[TensorEntry]:
    """Attention of 4 x D x D, two norms, a router."""
    at = f"{prefix}layers.{layer}."
    return [
        *(entry(f"{at}self_attn.{x}_proj.weight", (D, D)) for x in "qkvo"),
        entry(f"{at}input_layernorm.weight", (D,)),
        entry(f"{at}post_attention_layernorm.weight", (D,)),
        entry(f"{at}mlp.gate.weight", (E, D)),
    ]


DENSE = 4 * D * D + 2 * D + E * D


def separate(inside: str, names: tuple[str, str, str], dtype: str = "BF16") -> list[TensorEntry]:
    gate, up, down = names
    return [
        entry(f"model.layers.{layer}.{inside}.experts.{expert}.{name}.weight", shape, dtype)
        for layer in range(LAYERS)
        for expert in range(E)
        for name, shape in ((gate, (FF, D)), (up, (FF, D)), (down, (D, FF)))
    ]


def together(up: str, down: str, transposed: bool, gated: bool = True) -> list[TensorEntry]:
    rows = FF * (2 if gated else 1)
    shapes = ((E, D, rows), (E, FF, D)) if transposed else ((E, rows, D), (E, D, FF))
    return [
        entry(f"model.layers.{layer}.mlp.experts.{name}", shape)
        for layer in range(LAYERS)
        for name, shape in zip((up, down), shapes, strict=True)
    ]


SPELLINGS = {
    "Mixtral": separate("block_sparse_moe", ("w1", "w3", "w2")),
    "DeepSeek": separate("mlp", ("gate_proj", "up_proj", "down_proj")),
    "fused": together("gate_up_proj", "down_proj", transposed=False),
    "fused, transposed": together("gate_up_proj", "down_proj", transposed=True),
    "Aria": together("fc1.weight", "fc2.weight", transposed=True),
}


@pytest.mark.parametrize("spelling", SPELLINGS)
def test_every_spelling(spelling: str) -> None:
    tensors = [*SPELLINGS[spelling], *(x for layer in range(LAYERS) for x in beside(layer))]
    found = tensor_geometry(tensors, LAYERS, D)
    assert found is not None
    assert (found.moe_layers, found.n_experts, found.matrices) == ((0, 1, 2), E, 3)
    assert (found.d_model, found.d_ff, found.biases, found.quantised) == (D, FF, False, False)
    assert found.expert_bits == (16 * E * 3 * D * FF,) * LAYERS
    assert found.dense_params == (DENSE,) * LAYERS


def test_granite_without_the_word_experts() -> None:
    tensors = [
        entry(f"model.layers.0.block_sparse_moe.{name}.weight", shape)
        for name, shape in {"input_linear": (E, 2 * FF, D), "output_linear": (E, D, FF)}.items()
    ]
    found = tensor_geometry(tensors, 1, D)
    assert found is not None
    assert (found.n_experts, found.d_ff, found.matrices) == (E, FF, 3)
    assert found.expert_bits == (16 * E * 3 * D * FF,)


def test_experts_without_a_gate() -> None:
    found = tensor_geometry(together("up_proj", "down_proj", False, gated=False), LAYERS, D)
    assert found is not None
    assert (found.matrices, found.d_ff) == (2, FF)
    assert found.expert_bits == (16 * E * 2 * D * FF,) * LAYERS


def test_biases_are_counted_apart() -> None:
    biases = [
        entry("model.layers.0.mlp.experts.gate_up_proj_bias", (E, 2 * FF)),
        entry("model.layers.0.mlp.experts.down_proj_bias", (E, D)),
    ]
    tensors = together("gate_up_proj", "down_proj", transposed=True)[:2]
    found, plain = (tensor_geometry(x, 1, D) for x in ([*tensors, *biases], tensors))
    assert found is not None
    assert plain is not None
    assert (found.biases, plain.biases) == (True, False)
    assert found.expert_bits == plain.expert_bits


def test_dense_layers_shared_experts_and_layers_beyond_the_model() -> None:
    tensors = [
        *separate("mlp", ("gate_proj", "up_proj", "down_proj"))[3 * E :],  # not in layer 0
        *(entry(f"model.layers.0.mlp.{x}_proj.weight", (96, D)) for x in ("gate", "up")),
        entry("model.layers.0.mlp.down_proj.weight", (D, 96)),
        entry("model.layers.1.mlp.shared_experts.up_proj.weight", (48, D)),
        entry("model.layers.2.mlp.experts.0.gate_proj.weight_scale_inv", (1,), "F32"),
        entry("mtp.layers.0.mlp.experts.0.gate_proj.weight", (FF, D)),
        entry("model.embed_tokens.weight", (100, D)),
    ]
    found = tensor_geometry(tensors, 2, D)
    assert found is not None
    assert found.moe_layers == (1,)
    assert found.dense_params == (3 * 96 * D, 48 * D)
    assert found.n_experts == E


def test_the_text_model_beside_an_image_tower() -> None:
    tower = [entry(f"model.visual.blocks.{i}.mlp.fc1.weight", (9, 9)) for i in range(LAYERS)]
    inner = "model.language_model."
    text = [
        TensorEntry(x.name.replace("model.", inner, 1), x.shard, x.dtype, x.shape, 0, x.nbytes)
        for x in SPELLINGS["fused"]
    ]
    tensors = [*tower, *text, *(x for i in range(LAYERS) for x in beside(i, inner))]
    found = tensor_geometry(tensors, LAYERS, D)
    assert found is not None
    assert found.dense_params == (DENSE,) * LAYERS


def gptq(group: int, layer: int = 0) -> list[TensorEntry]:
    tensors = []
    for expert in range(E):
        for name, (out, inner) in {"gate": (FF, D), "up": (FF, D), "down": (D, FF)}.items():
            at = f"model.layers.{layer}.mlp.experts.{expert}.{name}_proj."
            tensors += [
                entry(f"{at}qweight", (inner * 4 // 32, out), "I32"),
                entry(f"{at}qzeros", (inner // group, out * 4 // 32), "I32"),
                entry(f"{at}scales", (inner // group, out), "F16"),
                entry(f"{at}g_idx", (inner,), "I32"),
            ]
    return tensors


def stored(tensors: list[TensorEntry], matrices: int = 3) -> Fraction:
    found = tensor_geometry(tensors, 1, D)
    assert found is not None
    assert found.quantised
    assert (found.n_experts, found.matrices) == (E, matrices)
    return Fraction(found.expert_bits[0], E * matrices * D * FF)


def test_stored_bits_of_gptq() -> None:
    assert stored(gptq(16)) == 4 + Fraction(16 + 4, 16)


def test_stored_bits_of_mxfp4() -> None:
    at = "model.layers.0.mlp.experts."
    tensors = [
        entry(f"{at}gate_up_proj_blocks", (E, 2 * FF, D // 32, 16), "U8"),
        entry(f"{at}gate_up_proj_scales", (E, 2 * FF, D // 32), "U8"),
        entry(f"{at}gate_up_proj_bias", (E, 2 * FF)),
        entry(f"{at}down_proj_blocks", (E, D, FF // 32, 16), "U8"),
        entry(f"{at}down_proj_scales", (E, D, FF // 32), "U8"),
        entry(f"{at}down_proj_bias", (E, D)),
    ]
    assert stored(tensors) == Fraction(17, 4)


@pytest.mark.parametrize(
    ("scale", "bits"),
    [((2, 4), 8 + Fraction(32, 16 * 16)), ((1,), Fraction(8)), ((), Fraction(8))],
)
def test_stored_bits_of_fp8(scale: tuple[int, ...], bits: Fraction) -> None:
    tensors = []
    for expert in range(E):
        for name, shape in {"gate": (FF, D), "up": (FF, D), "down": (D, FF)}.items():
            at = f"model.layers.0.mlp.experts.{expert}.{name}_proj."
            size = scale[::-1] if name == "down" else scale  # of blocks of 16 x 16
            tensors += [
                entry(f"{at}weight", shape, "F8_E4M3"),
                entry(f"{at}weight_scale_inv", size, "F32"),
            ]
    assert stored(tensors) == bits


def test_packed_weights_beside_the_experts_are_counted_as_parameters() -> None:
    at = "model.layers.0.self_attn.q_proj."
    more = [
        entry(f"{at}qweight", (D * 4 // 32, D), "I32"),
        entry(f"{at}scales", (4, D), "F16"),
        entry(f"{at}qzeros", (4, D * 4 // 32), "I32"),
        entry("model.layers.0.input_layernorm.weight", (D,)),
    ]
    found = tensor_geometry([*gptq(16), *more], 1, D, weight_bits=4)
    assert found is not None
    assert found.dense_params == (D * D + D,)


def test_layers_of_several_numbers_of_experts_are_refused() -> None:
    tensors: list[Any] = [*SPELLINGS["DeepSeek"]]
    tensors.append(entry("model.layers.1.mlp.experts.4.up_proj.weight", (FF, D)))
    with pytest.raises(CrispError, match="4, 5 routed experts; one number was expected"):
        tensor_geometry(tensors, LAYERS, D)


def test_nothing_is_found_where_nothing_is() -> None:
    assert tensor_geometry(beside(0), 1, D) is None
    assert tensor_geometry([], 1, D) is None
