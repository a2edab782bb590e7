"""The geometry of an MoE of any family, by the keys that configs have in common.

Families call the same thing by a few names; which layers are MoE they say in one of seven ways. A
config whose keys are none of these is refused: a guessed geometry silently gives wrong bytes. What
keys do not say exactly, the parameters beside the routed experts, is estimated, and told.
"""

from __future__ import annotations

from collections.abc import Callable

from crisp.model.fields import Fields

LAYERS = ("num_hidden_layers", "n_layer", "num_layers", "n_layers")
WIDTH = ("hidden_size", "n_embd", "d_model", "dim")
EXPERTS = (
    "num_experts", "num_local_experts", "n_routed_experts", "moe_num_experts", "num_routed_experts",
)  # fmt: skip
TOP_K = (
    "num_experts_per_tok", "top_k_experts", "moe_topk", "moe_k", "moe_top_k",
    "num_experts_per_token", "experts_per_token", "num_selected_experts",
)  # fmt: skip
NEURONS = (
    "moe_intermediate_size", "expert_intermediate_size", "moe_ffn_hidden_size",
    "expert_ffn_hidden_size", "intermediate_size", "ffn_hidden_size",
)  # fmt: skip
INSIDE = ("moe_latent_size", "moe_hidden_size")  # experts that work in a space of their own
TEXT = ("text_config", "llm_config", "language_config")
SPARSE = ("sparse", "moe", "hash_moe", "mixture_of_experts", "deepseek_moe")
DENSE_FIRST = ("first_k_dense_replace", "num_dense_layers", "n_dense_layers")


QUANTISATION = ("quantization_config", "compression_config")
"""Keys under which a config says how its weights are quantised."""

COMMON = ("dtype", "torch_dtype", *QUANTISATION)
"""What a multimodal config may say of its language model."""


def quantisation(f: Fields) -> Fields | None:
    """Return what a config says of how its language model's weights are quantised.

    None: nothing. Raises CrispError for what is no table.
    """
    for place in (text_fields(f), f.section("text_config")):
        key = None if place is None else place.first(QUANTISATION)
        if place is not None and key is not None:
            return place.section(key)
    return None


def text_fields(f: Fields) -> Fields:
    """Return the fields of the language model inside a multimodal config, else the config's own.

    What is said of the whole, its dtype and its quantisation, is said of the part too.
    """
    thinker = f.section("thinker_config")
    if thinker is not None:
        return text_fields(Fields(thinker.where, _with_common(f, thinker)))
    for key in TEXT:
        inner = f.section(key)
        if inner is not None and inner.first(LAYERS) is not None:
            return Fields(inner.where, _with_common(f, inner))
    return f


def _with_common(outer: Fields, inner: Fields) -> dict[str, object]:
    own = dict(inner.values)
    common = QUANTISATION if inner.has("dtype") or inner.has("torch_dtype") else COMMON
    for key in common:
        if outer.has(key) and not inner.has(key):
            own[key] = outer.values[key]
    own.setdefault("model_type", f"the text model of {outer.values.get('model_type')}")
    return own


def need(f: Fields, keys: tuple[str, ...], what: str) -> str:
    """Return the key that says ``what``; CrispError naming the usual ones."""
    key = f.first(keys)
    if key is None:
        named = next((key for key in keys if key in f.values), keys[0])
        others = ", ".join(key for key in keys[:4] if key != named)
        raise f.wrong(named, f"{what}, a whole number (also as {others})")
    return key


def layer_count(f: Fields) -> int:
    """Return the number of decoder layers."""
    key = f.first(LAYERS)
    if key is None:
        for kinds in ("layers_block_type", "hybrid_override_pattern"):
            value = f.values.get(kinds)
            if isinstance(value, list | str) and value:
                return len(value)
    return f.layer_count(key or LAYERS[0])


def is_moe_config(f: Fields) -> bool:
    """Return whether a config says that there are routed experts."""
    return f.first(EXPERTS) is not None


def moe_layers(f: Fields, n_layers: int) -> tuple[int, ...]:
    """Return the numbers of the MoE layers; CrispError where the config's way is not understood."""
    for read in _WAYS:
        layers = read(f, n_layers)
        if layers is not None:
            return tuple(layer for layer in layers if 0 <= layer < n_layers)
    return tuple(range(n_layers))


def _by_types(f: Fields, n: int) -> list[int] | None:
    """A list with the kind of each layer's FFN, or of each block."""
    pattern = f.values.get("hybrid_override_pattern")
    if isinstance(pattern, str) and "E" in pattern:  # Nemotron-H: M, E, * or - for each block
        return [layer for layer, kind in enumerate(pattern) if kind == "E"]
    for key in ("mlp_layer_types", "layers_block_type", "layer_types", "block_types"):
        kinds = f.words(key)
        if len(kinds) >= n and any(kind in SPARSE for kind in kinds):
            return [layer for layer, kind in enumerate(kinds[:n]) if kind in SPARSE]
    return None


def _by_frequencies(f: Fields, n: int) -> list[int] | None:
    """A list with 0 (dense) or 1 (MoE) for each layer."""
    kinds = f.values.get("moe_layer_freq")
    if not isinstance(kinds, list):
        return None
    if len(kinds) < n or any(kind not in (0, 1) for kind in kinds):
        raise f.wrong("moe_layer_freq", f"{n} of 0 or 1")
    return [layer for layer, kind in enumerate(kinds[:n]) if kind]


def _by_numbers(f: Fields, n: int) -> list[int] | None:
    """The layers' numbers, as a list or as text."""
    if isinstance(f.values.get("moe_layers"), list):
        return sorted(f.layers("moe_layers"))
    text = f.values.get("moe_layers_enum")
    if not isinstance(text, str):
        return None
    if not all(part.strip().isdecimal() for part in text.split(",")):
        raise f.wrong("moe_layers_enum", "layer numbers with commas between them")
    return sorted(int(part) for part in text.split(","))


def _by_interval(f: Fields, n: int) -> list[int] | None:
    """Every so many layers between a first and a last one (ERNIE 4.5)."""
    if not f.has("moe_layer_start_index"):
        return None
    first, every = f.count("moe_layer_start_index", least=0), f.count("moe_layer_interval", 1)
    last = f.values.get("moe_layer_end_index")
    end = n - 1 if not isinstance(last, int) or last < 0 else last
    return [i for i in range(n) if (i + 1) % every == 0 and first <= i <= end]


def _by_period(f: Fields, n: int) -> list[int] | None:
    """Every so many layers from an offset on (Jamba), or every so many (Llama 4)."""
    if f.has("expert_layer_period"):
        period, offset = f.count("expert_layer_period"), f.count("expert_layer_offset", 0, least=0)
        return [i for i in range(n) if i % period == offset]
    if f.has("interleave_moe_layer_step"):
        step = f.count("interleave_moe_layer_step")
        return list(range(step - 1, n, step))
    return None


def _by_step(f: Fields, n: int) -> list[int] | None:
    """Every so many layers, but for some that are named (Qwen)."""
    if not (f.has("decoder_sparse_step") or f.has("mlp_only_layers")):
        return None
    step, dense = f.count("decoder_sparse_step", 1), f.layers("mlp_only_layers")
    return [i for i in range(n) if i not in dense and (i + 1) % step == 0]


def _after_dense_ones(f: Fields, n: int) -> list[int] | None:
    """All, or every so many, after so many dense ones (DeepSeek)."""
    key = f.first(DENSE_FIRST)
    if key is None:
        return None
    first, every = f.count(key, least=0), f.count("moe_layer_freq", 1)
    return [i for i in range(n) if i >= first and i % every == 0]


_WAYS: tuple[Callable[[Fields, int], list[int] | None], ...] = (
    _by_types, _by_frequencies, _by_numbers, _by_interval, _by_period, _by_step, _after_dense_ones,
)  # fmt: skip


def estimated_dense_params(f: Fields, d_model: int, d_ff: int, n_experts: int) -> tuple[int, int]:
    """Return the parameters beside the routed experts of (a MoE layer, a dense layer), estimated.

    Attention counts as grouped-query attention with the heads that the config says, or as latent
    attention; norms, biases and what a family has of its own are left out.
    """
    d = f.count(need(f, WIDTH, "the model's width"))
    heads = f.count("num_attention_heads", 1)
    attention = 4 * d * d
    if f.has("kv_lora_rank"):
        rope, nope = f.count("qk_rope_head_dim", 64, least=0), f.count("qk_nope_head_dim", 128)
        rank, value = f.count("kv_lora_rank"), f.count("v_head_dim", 128)
        query = f.count("q_lora_rank", 0, least=0)
        per_head = heads * (nope + rope)
        attention = query * (d + per_head) if query else d * per_head
        attention += d * (rank + rope) + rank * heads * (nope + value) + heads * value * d
    elif f.has("num_attention_heads"):
        size = f.count("head_dim", max(d // heads, 1))
        kv = f.count("num_key_value_heads", heads)
        attention = d * (2 * heads + 2 * kv) * size
    return attention + d * n_experts + 3 * d * _shared(f, d_ff), attention + 3 * d * _dense(f, d_ff)


def _shared(f: Fields, d_ff: int) -> int:
    """Return the neurons of all shared experts of a layer."""
    for key in (
        "shared_expert_intermediate_size",
        "moe_shared_expert_intermediate_size",
        "shared_intermediate_size",
        "shared_experts_intermediate_size",
    ):
        if f.has(key):
            return f.count(key, least=0)
    for key in ("n_shared_experts", "num_shared_experts", "moe_num_shared_experts"):
        if f.has(key):
            return d_ff * f.count(key, least=0)
    return 0


def _dense(f: Fields, d_ff: int) -> int:
    key = f.first(("dense_intermediate_size", "prefix_dense_intermediate_size"))
    return f.count(key or "intermediate_size", d_ff, least=0)
