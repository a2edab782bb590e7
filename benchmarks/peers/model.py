"""Make a checkpoint of Mixtral's shape with random weights, and a tokenizer of numbered words.

All contestants run the same weights, packed or converted. Run alone:
`python -m benchmarks.peers.model FOLDER LAYERS`.
"""

from __future__ import annotations

import random
import sys
from pathlib import Path

D_MODEL, D_FF, EXPERTS, TOP_K, VOCABULARY = 1024, 3584, 8, 2, 2048
PROMPT, CONTEXT, SEED = 64, 512, 0

EXPERT_BYTES = 2 * 3 * D_MODEL * D_FF
"""Bytes of an expert in bf16."""


def prompt() -> list[int]:
    """Return random tokens, so many that nearly every expert is used before the clock starts."""
    return random.Random(SEED).choices(range(VOCABULARY), k=PROMPT)


def words(tokens: list[int]) -> str:
    """Return the text of some tokens."""
    return " ".join(f"w{token}" for token in tokens)


def write(folder: Path, layers: int) -> None:
    """Write the checkpoint, in as much memory as it takes on disk."""
    import torch
    from tokenizers import Tokenizer
    from tokenizers.models import WordLevel
    from tokenizers.pre_tokenizers import WhitespaceSplit
    from transformers import MixtralConfig, MixtralForCausalLM, PreTrainedTokenizerFast

    config = MixtralConfig(
        vocab_size=VOCABULARY,
        hidden_size=D_MODEL,
        intermediate_size=D_FF,
        num_hidden_layers=layers,
        num_attention_heads=16,
        num_key_value_heads=4,
        num_local_experts=EXPERTS,
        num_experts_per_tok=TOP_K,
        max_position_embeddings=CONTEXT,
        bos_token_id=None,
        eos_token_id=None,
        dtype=torch.bfloat16,
    )
    torch.manual_seed(SEED)
    torch.set_default_dtype(torch.bfloat16)
    MixtralForCausalLM(config).save_pretrained(folder)
    vocabulary = {f"w{token}": token for token in range(VOCABULARY)}
    tokenizer = Tokenizer(WordLevel(vocabulary, unk_token="w0"))
    tokenizer.pre_tokenizer = WhitespaceSplit()
    PreTrainedTokenizerFast(tokenizer_object=tokenizer).save_pretrained(folder)


if __name__ == "__main__":
    write(Path(sys.argv[1]), int(sys.argv[2]))
