"""Tiny random models of every family that transformers has, with a tokenizer of 96 characters."""

from __future__ import annotations

import inspect
from pathlib import Path
from typing import Any

import torch
import transformers
from tokenizers import Tokenizer, decoders, models, pre_tokenizers
from transformers.models.auto.modeling_auto import (
    MODEL_FOR_CAUSAL_LM_MAPPING_NAMES,
    MODEL_FOR_IMAGE_TEXT_TO_TEXT_MAPPING_NAMES,
)

from crisp.checkpoint.deepseek import register
from crisp.checkpoint.library import auto_class

register()  # what transformers lacks
WORDS = 96
MOST = 5_000_000  # parameters of a tiny model
D_FF = 48  # neurons of an expert: three blocks of 16

# What a config is made of, by the names that families give it; only those that a family has count.
SMALL: dict[str, Any] = {
    "vocab_size": WORDS, "hidden_size": 64, "d_model": 64, "n_layers": 4, "num_hidden_layers": 4,
    "num_attention_heads": 4, "n_heads": 4, "num_key_value_heads": 2, "head_dim": 16,
    "intermediate_size": D_FF, "moe_intermediate_size": D_FF, "expert_ffn_hidden_size": D_FF,
    "ffn_hidden_size": 80, "dense_intermediate_size": 80, "intermediate_size_mlp": 80,
    "shared_expert_intermediate_size": 32, "shared_intermediate_size": 32,
    "moe_shared_expert_intermediate_size": 32, "max_position_embeddings": 256, "max_seq_len": 256,
    "num_experts": 8, "num_local_experts": 8, "n_routed_experts": 8, "moe_num_experts": 8,
    "num_experts_per_tok": 2, "moe_topk": 2, "moe_k": 2, "top_k_experts": 2, "topk": 2,
    "moe_top_k": 2,
    "n_group": 2, "topk_group": 1, "first_k_dense_replace": 1, "num_dense_layers": 1,
    "kv_lora_rank": 16, "q_lora_rank": 16, "qk_rope_head_dim": 8, "qk_nope_head_dim": 8,
    "v_head_dim": 16, "pad_token_id": 0, "bos_token_id": 1, "eos_token_id": 2,
}  # fmt: skip
"""Sizes by the names of a config's fields."""

_LATENT = {"num_key_value_heads": 4}
_SECTIONS = {"rope_type": "default", "rope_theta": 1e4, "mrope_section": [2, 1, 1]}
_HYBRID = ["linear_attention", "full_attention"] * 2
_LINEAR: dict[str, Any] = {
    "linear_num_key_heads": 2, "linear_num_value_heads": 4, "linear_key_head_dim": 16,
    "linear_value_head_dim": 16,
}  # fmt: skip
_INKLING: dict[str, Any] = {
    "unpadded_vocab_size": WORDS, "swa_num_attention_heads": 4, "swa_num_key_value_heads": 2,
    "swa_head_dim": 16, "rel_extent": 64, "sliding_window_size": 32,
}  # fmt: skip
VISION: dict[str, Any] = {
    "hidden_size": 32, "depth": 2, "num_hidden_layers": 2, "num_layers": 2, "num_heads": 2,
    "num_attention_heads": 2, "num_key_value_heads": 2, "head_dim": 16, "intermediate_size": 48,
    "out_hidden_size": 64, "text_hidden_size": 64, "adapter_out_dim": 64, "image_size": 28,
    "patch_size": 14, "global_head_dim": 16, "vision_output_dim": 64, "projector_input_dim": 32,
    "projector_output_dim": 32, "deepstack_visual_indexes": [1], "num_position_embeddings": 16,
    "position_embedding_size": 16, "projection_hidden_dim": 32,
}  # fmt: skip
"""Sizes of a part that reads images, in the same way."""

# What a family needs besides, mostly because its fields depend on one another.
FAMILIES: dict[str, dict[str, Any]] = {
    "bailing_hybrid": {"layer_types": _HYBRID, "n_shared_experts": 1},
    "granitemoehybrid": {
        "layer_types": _HYBRID, "mamba_n_heads": 8, "mamba_d_state": 16, "mamba_chunk_size": 16,
    },
    "jamba": {"attn_layer_period": 2, "attn_layer_offset": 0},
    "dbrx": {
        "attn_config": {"kv_n_heads": 2, "rope_theta": 1e4, "clip_qkv": 8.0},
        "ffn_config": {
            "hidden_size": 64, "ffn_hidden_size": D_FF, "moe_num_experts": 8, "moe_top_k": 2,
        },
    },
    "dots1": {"n_shared_experts": 1},
    "dots3_note_text": {
        "swa_num_attention_heads": 4, "swa_num_key_value_heads": 4, "swa_q_lora_rank": 16,
        "swa_kv_lora_rank": 16, "swa_head_dim": 16, "swa_qk_nope_head_dim": 8, "swa_v_head_dim": 16,
        "index_n_heads": 2, "index_head_dim": 16, "shared_experts_intermediate_size": 32,
    },
    "gemma4_text": {
        "enable_moe_block": True, "vocab_size_per_layer_input": WORDS,
        "hidden_size_per_layer_input": 0, "global_head_dim": 16, "intermediate_size": 80,
    },
    "ernie4_5_vl_moe_text": {"moe_intermediate_size": [D_FF, D_FF // 3]},
    "glm5_next_text": {"qk_rope_head_dim": 0, "index_n_heads": 2, "index_head_dim": 16},
    "hy_v4_vl_text": {"rope_parameters": _SECTIONS},
    "glm4v_moe_text": {"rope_parameters": _SECTIONS | {"partial_rotary_factor": 0.5}},
    "inkling_text": _INKLING | {"intermediate_size": 80},
    "inkling2_text": _INKLING,
    "inkling2_loop_text": _INKLING | {"loop_layer_index_start": 1, "loop_layer_index_end": 3,
        "n_layers_per_attn_res_block": 1,
    },
    "kimi_linear": {"layer_types": _HYBRID, "linear_head_dim": 16, "linear_num_heads": 4},
    "lfm2_moe": {"layer_types": ["conv", "full_attention"] * 2},
    "llama4_text": {"num_experts_per_tok": 1},  # as all published ones
    "longcat_flash": {"num_layers": 2, "zero_expert_num": 2, "head_dim": 8},
    "qwen4_exp_text": _LINEAR | {
        "layer_types": _HYBRID, "ple_embed_dim": 16, "indexer_n_heads": 2, "indexer_kv_heads": 1,
        "indexer_head_dim": 16, "indexer_budget": 64, "indexer_compress_ratio": 4,
        "ngram_vocab_size_base": 100, "split_ngram_parts": 2, "hc_lowrank": 8,
        "ple_layer_ids": [1],
    },
    "step3p7_text": {"sliding_window": 32},
    "zaya": {"num_experts_per_tok": 1, "router_hidden_size": 32},
}  # fmt: skip


def model_types() -> list[str]:
    """Return the types of all models of transformers that write text, and of CRISP's own."""
    whole = MODEL_FOR_IMAGE_TEXT_TO_TEXT_MAPPING_NAMES
    return sorted({*MODEL_FOR_CAUSAL_LM_MAPPING_NAMES, *whole, "deepseek"})


def small_config(model_type: str) -> Any:
    """Return the config of a tiny model: fields that are not sizes are as the family has them."""
    kind = transformers.CONFIG_MAPPING[model_type]
    parts = {name: _small_part(name, part) for name, part in kind.sub_configs.items()}
    if "text_config" in parts:
        return kind(**{**parts, **FAMILIES.get(model_type, {})})
    fields = {*inspect.signature(kind.__init__).parameters}
    for parent in kind.__mro__:
        fields |= {*getattr(parent, "__annotations__", {})}
    fields |= {*getattr(kind, "attribute_map", {})}
    values = {name: value for name, value in SMALL.items() if name in fields}
    if "kv_lora_rank" in fields:
        values |= _LATENT
    if "linear_num_key_heads" in fields:
        values |= _LINEAR
    return kind(**{**values, **FAMILIES.get(model_type, {})})


def _small_part(name: str, kind: Any) -> dict[str, Any]:
    """Return the fields of a part of a multimodal config: its text, images or sound."""
    if name == "text_config":
        return dict(small_config(kind.model_type).to_dict())
    fields = {field for parent in kind.__mro__ for field in getattr(parent, "__annotations__", {})}
    return {key: value for key, value in VISION.items() if key in fields}


def has_experts(model_type: str) -> bool:
    """Return whether the fields of a family's own config speak of experts."""
    kind = transformers.CONFIG_MAPPING[model_type]
    kinds = [kind, *kind.sub_configs.values()]
    names = [name for own in kinds for name in vars(own).get("__annotations__", {})]
    return any("expert" in name or name.startswith("moe_") for name in names)


def auto_of(config: Any) -> Any:
    """Return transformers' class of the whole model of a config, as it is published."""
    whole = transformers.AutoModelForImageTextToText
    return whole if type(config) in whole._model_mapping else auto_class(config)


def check_size(model_type: str) -> None:
    """Raise ValueError if the tiny model is not small, and what its family raises."""
    config = small_config(model_type)
    with torch.device("meta"):
        model = auto_of(config).from_config(config)
    count = sum(value.numel() for value in model.parameters())
    if count > MOST:
        raise ValueError(f"{model_type}: {count:,} parameters; its config is not small yet")


def save_tiny(model_type: str, folder: Path, dtype: Any = torch.float32) -> Any:
    """Write a tiny model with its tokenizer to ``folder``; return the model."""
    config = small_config(model_type)
    torch.manual_seed(0)
    model = auto_of(config).from_config(config, dtype=torch.float32).eval()
    drawn = dict(model.named_parameters())
    drawn |= {k: v for k, v in model.named_buffers() if k.endswith("correction_bias")}
    with torch.no_grad():
        for name, value in drawn.items():
            if value.dim() > 1 or name.endswith("bias"):
                torch.nn.init.normal_(value, std=0.2)
        for name, value in model.named_buffers():
            if name.endswith("tid2eid"):  # the experts of each token, in layers that have no router
                chosen = torch.rand(len(value), 8).argsort(1)[:, : value.shape[1]]
                value.copy_(chosen)
    model.to(dtype).save_pretrained(folder)
    save_tokenizer(folder)
    return model


def save_tokenizer(folder: Path) -> None:
    """Write a tokenizer of single characters, which families that have one of their own read too.

    Lower-case letters, figures and the space are tokens.
    """
    letters = [chr(code) for code in range(33, 127)]
    pieces = ["<pad>", "<s>", "</s>", "\u0120", *letters][:WORDS]
    own = Tokenizer(models.BPE({piece: i for i, piece in enumerate(pieces)}, []))
    own.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)
    own.decoder = decoders.ByteLevel()
    special = {"pad_token": pieces[0], "bos_token": pieces[1], "eos_token": pieces[2]}
    tokenizer = transformers.PreTrainedTokenizerFast(tokenizer_object=own, **special)
    tokenizer.save_pretrained(folder)
