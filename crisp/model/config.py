"""The geometry of an MoE, read from a Hugging Face config.

Each family of models spells its config differently and has small parts of its own (biases, norms of
queries and keys, shared experts, low-rank attention). For the families in the table `FAMILIES` the
differences stand there; any other is read by the keys that configs have in common
(`crisp.model.layouts`).
"""

from __future__ import annotations

import hashlib
import json
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from fractions import Fraction
from pathlib import Path
from typing import Any

from crisp.errors import CrispError, reason_of, unknown_name
from crisp.files import check_readable
from crisp.model import layouts
from crisp.model.fields import Fields
from crisp.model.stored_bits import ExpertShape, StoredBits, stored_bits

ESTIMATED = (
    "parameters beside the routed experts: estimated from the config, without norms, biases and "
    "what the family has of its own"
)
_FACTS = (
    "n_layers", "moe_layers", "n_experts", "top_k", "d_model", "d_ff", "dtype_bits", "bits",
    "biases", "dense_params",
)  # fmt: skip


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
    layer_bits: tuple[Fraction, ...] | None  # [MoE layers]; None: `bits` in each
    matrices: int
    listed: bool  # the family is one of `FAMILIES`: exact in everything
    notes: tuple[str, ...]  # where numbers are from that one would not expect

    def digest(self) -> str:
        """Return the sha256 that says whether two models have the same geometry.

        It is over what all sources of a geometry agree on. For a family that is not listed, that is
        neither stored bits nor biases nor the parameters beside the experts, which its tensors say
        better.
        """
        facts: dict[str, Any] = {key: getattr(self, key) for key in _FACTS}
        if not self.listed:
            facts["bits"] = facts["dense_params"] = facts["biases"] = None
        return hashlib.sha256(json.dumps(facts, sort_keys=True, default=str).encode()).hexdigest()


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


def read_geometry(
    config: Mapping[str, object], where: str, *, any_bits: bool = False
) -> ConfigGeometry:
    """Return the geometry of the model that `config` (a config.json as a dict) describes.

    `where` names the file in errors. any_bits: stored bits are given elsewhere, so that a
    quantisation that is not understood does not matter. Raises CrispError for a missing or
    impossible field, keys that are not understood, and a model without a single MoE layer.
    """
    f = layouts.text_fields(Fields(where, config))
    model_type = f.values.get("model_type")
    family = FAMILIES.get(model_type) if isinstance(model_type, str) else None
    if not isinstance(model_type, str):
        raise f.wrong("model_type", f"a name such as {', '.join(FAMILIES)}")
    if family is None and not layouts.is_moe_config(f):
        raise CrispError(
            f"{where}: {unknown_name(model_type, FAMILIES, 'model_type')}; others are read by "
            f"their keys, such as {layouts.EXPERTS[0]} and {layouts.TOP_K[0]}, which it lacks"
        )
    n_layers, d = layouts.layer_count(f), f.count(layouts.need(f, layouts.WIDTH, "its width"))
    experts = layouts.need(f, layouts.EXPERTS, "the number of experts")
    top = layouts.need(f, layouts.TOP_K, "the experts of a token")
    n_experts, top_k = f.one_count(experts), f.one_count(top)
    if top_k > n_experts:
        raise f.wrong(top, f"at most {experts}, {n_experts}")
    if family is None:
        moe_layers = layouts.moe_layers(f, n_layers)
    else:
        moe_layers = tuple(i for i in range(n_layers) if family.is_moe(f, i))
    if not moe_layers:
        raise CrispError(f"{where}: no layer of this model is an MoE layer")
    notes: tuple[str, ...] = ()
    if family is None:
        d_ff = f.one_count(layouts.need(f, layouts.NEURONS, "the neurons of an expert"))
        moe, dense = layouts.estimated_dense_params(f, d, d_ff, n_experts)
        notes = (ESTIMATED,)
        d = f.count(f.first(layouts.INSIDE) or layouts.need(f, layouts.WIDTH, "its width"))
    else:
        d_ff = f.count(family.d_ff)
        dense = family.attention(f) + 2 * family.norm * d
        moe = dense + (d + family.router_bias) * n_experts + family.shared(f)
        if len(moe_layers) < n_layers:
            dense += 3 * d * f.count("intermediate_size")
    dtype_bits = f.dtype_bits()
    matrices = 2 if f.values.get("mlp_hidden_act") == "relu2" else 3
    shape = ExpertShape(d, d_ff, matrices, moe_layers, model_type)
    try:
        stored = stored_bits(f, dtype_bits, shape)
    except CrispError:
        if not any_bits:
            raise
        stored = StoredBits((Fraction(dtype_bits),) * len(moe_layers), None)
    return ConfigGeometry(
        n_layers=n_layers,
        moe_layers=moe_layers,
        n_experts=n_experts,
        top_k=top_k,
        d_model=d,
        d_ff=d_ff,
        dtype_bits=dtype_bits,
        bits=Fraction(sum(stored.each), len(stored.each)),
        biases=family is not None and family.biases,
        dense_params=tuple(moe if i in set(moe_layers) else dense for i in range(n_layers)),
        layer_bits=stored.each if len(set(stored.each)) > 1 else None,
        matrices=matrices,
        listed=family is not None,
        notes=(*notes, *([stored.note] if stored.note else [])),
    )


def read_config(
    source: str | Path | Mapping[str, Any], name: str | None = None, *, any_bits: bool = False
) -> tuple[ConfigGeometry, str]:
    """Return the geometry in a Hugging Face config, and the model's name.

    Both are those of `ModelSpec.from_config`.

    any_bits: see `read_geometry`.
    """
    if isinstance(source, Mapping):
        config: Mapping[str, Any] = source
        name = name or Path(str(config.get("_name_or_path") or "")).name
        name = name or str(config.get("model_type", "unnamed model"))
        where = f"config of {name}"
    else:
        path = Path(source)
        path = path / "config.json" if path.is_dir() else path
        config, where = read_json(path), str(path)
        name = name or (path.resolve().parent.name if path.stem == "config" else path.stem)
    return read_geometry(config, where, any_bits=any_bits), name


def read_json(path: Path) -> dict[str, Any]:
    """Read the object in a JSON file; CrispError names the file."""
    check_readable(path)
    try:
        config = json.loads(path.read_text(encoding="utf-8"))
    except OSError as error:
        raise CrispError(f"{path}: cannot be read: {error.strerror or error}") from error
    except (ValueError, RecursionError) as error:
        raise CrispError(f"{path}: is not JSON: {reason_of(error)}") from error
    if not isinstance(config, dict):
        raise CrispError(f"{path}: holds a {type(config).__name__}, expected a config object")
    return config
