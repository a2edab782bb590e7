"""Convert the checkpoint to GGUF for llama.cpp: to bf16, number for number, or to Q4_0.

Run alone: `python -m benchmarks.peers.to_gguf FOLDER FILE BF16|Q4_0`.
(The module is not called gguf.py, which would hide the package of that name.)
"""

from __future__ import annotations

import json
import sys
from pathlib import Path
from typing import Any

_NAMES = {
    "input_layernorm": "attn_norm",
    "post_attention_layernorm": "ffn_norm",
    "self_attn.q_proj": "attn_q",
    "self_attn.k_proj": "attn_k",
    "self_attn.v_proj": "attn_v",
    "self_attn.o_proj": "attn_output",
    "block_sparse_moe.gate": "ffn_gate_inp",
}
_EXPERTS = {"w1": "ffn_gate_exps", "w3": "ffn_up_exps", "w2": "ffn_down_exps"}
_OUTSIDE = {"model.embed_tokens": "token_embd", "model.norm": "output_norm", "lm_head": "output"}


def convert(folder: Path, out: Path, kind: str) -> None:
    """Convert a checkpoint; norms and routers become float32, as llama.cpp wants them.

    kind: of all other matrices, BF16 (as they are) or Q4_0 (by the quantiser of GGUF's package).
    """
    import gguf
    import torch
    from safetensors import safe_open

    config = json.loads((folder / "config.json").read_text("utf-8"))
    heads, kv_heads = config["num_attention_heads"], config["num_key_value_heads"]
    n_experts = config["num_local_experts"]
    theta = config.get("rope_theta") or config["rope_parameters"]["rope_theta"]
    where = {}
    for path in sorted(folder.glob("*.safetensors")):
        file = safe_open(path, "pt")
        where |= dict.fromkeys(file.keys(), file)

    def read(name: str) -> Any:
        return where[f"{name}.weight"].get_tensor(f"{name}.weight")

    writer = gguf.GGUFWriter(out, "llama")
    writer.add_context_length(config["max_position_embeddings"])
    writer.add_embedding_length(config["hidden_size"])
    writer.add_block_count(config["num_hidden_layers"])
    writer.add_feed_forward_length(config["intermediate_size"])
    writer.add_head_count(heads)
    writer.add_head_count_kv(kv_heads)
    writer.add_layer_norm_rms_eps(config["rms_norm_eps"])
    writer.add_rope_freq_base(theta)
    writer.add_rope_dimension_count(config["hidden_size"] // heads)
    writer.add_expert_count(n_experts)
    writer.add_expert_used_count(config["num_experts_per_tok"])
    writer.add_vocab_size(config["vocab_size"])
    writer.add_file_type(gguf.LlamaFileType[f"MOSTLY_{kind}"])
    writer.add_tokenizer_model("llama")  # of words as they are: nothing is tokenised
    writer.add_token_list([f"w{token}" for token in range(config["vocab_size"])])
    writer.add_token_scores([0.0] * config["vocab_size"])
    writer.add_token_types([gguf.TokenType.NORMAL] * config["vocab_size"])
    dtype = gguf.GGMLQuantizationType[kind]

    def add(name: str, tensor: Any) -> None:
        if tensor.ndim == 1 or "ffn_gate_inp" in name:
            writer.add_tensor(f"{name}.weight", tensor.float().numpy())
            return
        if kind == "BF16":
            raw = tensor.contiguous().view(torch.uint8).numpy()
        else:
            raw = gguf.quantize(tensor.float().numpy(), dtype)
        writer.add_tensor(f"{name}.weight", raw, raw_dtype=dtype)

    for theirs, ours in _OUTSIDE.items():
        add(ours, read(theirs))
    for layer in range(config["num_hidden_layers"]):
        for theirs, ours in _NAMES.items():
            tensor = read(f"model.layers.{layer}.{theirs}")
            if ours in ("attn_q", "attn_k"):
                tensor = _pairs(tensor, heads if ours == "attn_q" else kv_heads)
            add(f"blk.{layer}.{ours}", tensor)
        for theirs, ours in _EXPERTS.items():
            name = f"model.layers.{layer}.block_sparse_moe.experts.{{}}.{theirs}"
            add(
                f"blk.{layer}.{ours}", torch.stack([read(name.format(e)) for e in range(n_experts)])
            )
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()


def _pairs(tensor: Any, heads: int) -> Any:
    """Reorder rotary dimensions as neighbours; transformers has them as halves of a head."""
    return tensor.view(heads, 2, -1, tensor.shape[1]).transpose(1, 2).reshape(tensor.shape)


if __name__ == "__main__":
    convert(Path(sys.argv[1]), Path(sys.argv[2]), sys.argv[3])
