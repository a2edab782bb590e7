"""The geometry of an MoE, read from a Hugging Face config.

Each family of models spells its config differently and has small parts of its own (biases, norms of
queries and keys, shared experts, low-rank attention). The differences stand in the table
`FAMILIES`; an unknown `model_type` is refused, because a guessed geometry silently gives wrong
bytes.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from fractions import Fraction

from crisp.errors import CrispError, unknown_name

DTYPE_BITS = {"bfloat16": 16, "float16": 16, "float32": 32}


@dataclass(frozen=True)
class ConfigGeometry:
    """The geometry in a config, with the names and units of `crisp.model.spec.ModelSpec`."""

    n_layers: int
    moe_layers: tuple[int, ...]
    n_experts: int
    top_k: int
    d_model: int
    d_ff: int
    dtype_bits: int
    bits: Fraction
    biases: bool
    dense_params: tuple[int, ...]


@dataclass(frozen=True)
class Fields:
    """The fields of a config, checked as they are read; errors name the file and the key."""

    where: str
    values: Mapping[str, object]

    def wrong(self, key: str, expected: str) -> CrispError:
        """Return the error for the value of `key`, or for its absence."""
        value = repr(self.values[key]) if key in self.values else "nothing"
        return CrispError(f"{self.where}: {key}: found {value}, expected {expected}")

    def count(self, key: str, default: int | None = None, least: int = 1) -> int:
        """Return a whole number >= `least`; absent or null means `default`, if there is one."""
        value = self.values.get(key)
        if value is None and default is not None:
            return default
        if not isinstance(value, int) or isinstance(value, bool) or value < least:
            raise self.wrong(key, f"a whole number of at least {least}")
        return value

    def flag(self, key: str, default: bool) -> bool:
        """Return true or false; absent or null means `default`."""
        value = self.values.get(key)
        if value is None:
            return default
        if not isinstance(value, bool):
            raise self.wrong(key, "true or false")
        return value

    def layers(self, key: str) -> frozenset[int]:
        """Return the layer numbers in a list; absent or null means none."""
        value = self.values.get(key)
        if value is None:
            return frozenset()
        if not isinstance(value, list) or not all(type(layer) is int for layer in value):
            raise self.wrong(key, "a list of layer numbers")
        return frozenset(value)


# -- attention: parameters of one layer ----------------------------------------------------------


def _heads(f: Fields) -> tuple[int, int, int]:
    """Return (query heads, key and value heads, size of a head)."""
    heads = f.count("num_attention_heads")
    size = f.count("head_dim", default=max(f.count("hidden_size") // heads, 1))
    return heads, f.count("num_key_value_heads", default=heads), size


def _grouped(f: Fields, qkv_bias: bool = False, out_bias: bool = False) -> int:
    """Return the parameters of grouped-query attention: q, k, v and output projections."""
    heads, kv_heads, size = _heads(f)
    d, inner = f.count("hidden_size"), (heads + 2 * kv_heads) * size
    return d * inner + heads * size * d + inner * qkv_bias + d * out_bias


def _grouped_biased(f: Fields, default: bool = False) -> int:
    """Return those of `_grouped`, where one flag gives all four projections biases."""
    bias = f.flag("attention_bias", default)
    return _grouped(f, bias, bias)


def _qwen3_attention(f: Fields) -> int:
    return _grouped_biased(f) + 2 * _heads(f)[2]  # norms of each query and each key head


def _olmoe_attention(f: Fields) -> int:
    heads, kv_heads, size = _heads(f)
    return _grouped_biased(f) + (heads + kv_heads) * size  # norms over all query and key heads


def _gpt_oss_attention(f: Fields) -> int:
    return _grouped_biased(f, default=True) + _heads(f)[0]  # one sink a head


def _latent(f: Fields) -> int:
    """Return those of multi-head latent attention (DeepSeek-V2, arXiv:2405.04434, section 2.1)."""
    d, heads = f.count("hidden_size"), f.count("num_attention_heads")
    rope, nope = f.count("qk_rope_head_dim"), f.count("qk_nope_head_dim")
    kv_rank, value = f.count("kv_lora_rank"), f.count("v_head_dim")
    bias = f.flag("attention_bias", False)
    query = d * heads * (nope + rope)
    if f.values.get("q_lora_rank") is not None:
        rank = f.count("q_lora_rank")
        query = d * rank + rank * bias + rank + rank * heads * (nope + rope)  # down, norm, up
    down = (d + bias) * (kv_rank + rope) + kv_rank
    return query + down + kv_rank * heads * (nope + value) + heads * value * d + d * bias


# -- which layers are MoE, and what stands beside their routed experts ---------------------------


def _every_layer(f: Fields, layer: int) -> bool:
    return True


def _qwen_layer(f: Fields, layer: int) -> bool:
    step = f.count("decoder_sparse_step", default=1)
    return layer not in f.layers("mlp_only_layers") and (layer + 1) % step == 0


def _deepseek_layer(f: Fields, layer: int) -> bool:
    first = f.count("first_k_dense_replace", default=0, least=0)
    return layer >= first and layer % f.count("moe_layer_freq", default=1) == 0


def _nothing(f: Fields) -> int:
    return 0


def _qwen2_shared(f: Fields) -> int:
    d = f.count("hidden_size")
    return 3 * d * f.count("shared_expert_intermediate_size", least=0) + d  # and its scalar gate


def _deepseek_shared(f: Fields) -> int:
    width = f.count("moe_intermediate_size") * f.count("n_shared_experts", default=0, least=0)
    return 3 * f.count("hidden_size") * width


@dataclass(frozen=True)
class Family:
    """A family of models: how its `model_type` spells a config, and the parameters only it has."""

    d_ff: str  # key of the width of one routed expert
    attention: Callable[[Fields], int]
    is_moe: Callable[[Fields, int], bool] = _every_layer
    shared: Callable[[Fields], int] = _nothing
    router_bias: bool = False  # one number per expert
    norm: int = 1  # vectors of d_model numbers in each of the two norms of a layer
    biases: bool = False  # routed experts have gate and up biases


# Read from the modelling code of transformers 5 (one file per name below), `deepseek` from the
# modelling code published with deepseek-ai/deepseek-moe-16b-base.
FAMILIES = {
    "mixtral": Family("intermediate_size", _grouped),
    "phimoe": Family("intermediate_size", _grouped_biased, norm=2),
    "olmoe": Family("intermediate_size", _olmoe_attention),
    "qwen2_moe": Family(
        "moe_intermediate_size",
        lambda f: _grouped(f, qkv_bias=f.flag("qkv_bias", True)),
        _qwen_layer,
        _qwen2_shared,
    ),
    "qwen3_moe": Family("moe_intermediate_size", _qwen3_attention, _qwen_layer),
    "gpt_oss": Family("intermediate_size", _gpt_oss_attention, router_bias=True, biases=True),
    "deepseek": Family("moe_intermediate_size", _grouped_biased, _deepseek_layer, _deepseek_shared),
    "deepseek_v2": Family("moe_intermediate_size", _latent, _deepseek_layer, _deepseek_shared),
    "deepseek_v3": Family(  # its router bias is the correction bias of each expert
        "moe_intermediate_size", _latent, _deepseek_layer, _deepseek_shared, router_bias=True
    ),
}
# transformers 5 renames this field when it saves some families
EXPERTS = ("num_experts", "num_local_experts", "n_routed_experts")


def _dtype_bits(f: Fields) -> int:
    """Return the bits of the published dtype; 16, the usual ones, where the config names none."""
    key = "dtype" if f.values.get("dtype") is not None else "torch_dtype"
    if f.values.get(key) is None:
        return 16
    name = str(f.values[key]).removeprefix("torch.")
    if name not in DTYPE_BITS:
        raise f.wrong(key, " or ".join(DTYPE_BITS))
    return DTYPE_BITS[name]


def _expert_bits(f: Fields, dtype_bits: int) -> Fraction:
    """Return the bits of one stored weight of a routed expert, its share of the scales included.

    Only the two formats in which models are *published* are read: MXFP4 (4-bit numbers, an 8-bit
    scale for each 32; OCP Microscaling Formats v1.0, section 5) and block-scaled FP8 (a 32-bit
    scale for each block). Any other quantisation is a later choice, given by `--bits`.
    """
    config = f.values.get("quantization_config")
    if not isinstance(config, Mapping):
        return Fraction(dtype_bits)
    q = Fields(f"{f.where}: quantization_config", config)
    method = config.get("quant_method")
    if method == "mxfp4":
        return 4 + Fraction(8, 32)
    if method == "fp8":
        block = config.get("weight_block_size")
        if block is None:  # a scale for each matrix, or for each of its rows
            return Fraction(8)
        if (
            not isinstance(block, list)
            or len(block) != 2
            or not all(type(n) is int and n > 0 for n in block)
        ):
            raise q.wrong("weight_block_size", "two positive whole numbers")
        return 8 + Fraction(32, block[0] * block[1])
    return Fraction(dtype_bits)


def read_geometry(config: Mapping[str, object], where: str) -> ConfigGeometry:
    """Return the geometry of the model that `config` (a config.json as a dict) describes.

    `where` names the file in errors. Raises CrispError for an unknown `model_type`, a missing or
    impossible field, and a model without a single MoE layer.
    """
    f = Fields(where, config)
    model_type = config.get("model_type")
    if not isinstance(model_type, str):
        raise f.wrong("model_type", f"one of {', '.join(FAMILIES)}")
    if model_type not in FAMILIES:
        raise CrispError(f"{where}: {unknown_name(model_type, FAMILIES, 'model_type')}")
    family = FAMILIES[model_type]
    d, n_layers = f.count("hidden_size"), f.count("num_hidden_layers")
    experts = next((key for key in EXPERTS if key in config), EXPERTS[0])
    n_experts, top_k = f.count(experts), f.count("num_experts_per_tok")
    if top_k > n_experts:
        raise f.wrong("num_experts_per_tok", f"at most {experts}, {n_experts}")
    moe_layers = tuple(i for i in range(n_layers) if family.is_moe(f, i))
    if not moe_layers:
        raise CrispError(f"{where}: no layer of this model is an MoE layer")
    every = family.attention(f) + 2 * family.norm * d
    moe = every + (d + family.router_bias) * n_experts + family.shared(f)
    dense = every
    if len(moe_layers) < n_layers:
        dense += 3 * d * f.count("intermediate_size")
    dtype_bits = _dtype_bits(f)
    return ConfigGeometry(
        n_layers=n_layers,
        moe_layers=moe_layers,
        n_experts=n_experts,
        top_k=top_k,
        d_model=d,
        d_ff=f.count(family.d_ff),
        dtype_bits=dtype_bits,
        bits=_expert_bits(f, dtype_bits),
        biases=family.biases,
        dense_params=tuple(moe if i in set(moe_layers) else dense for i in range(n_layers)),
    )
