"""A random Mixtral that a test can follow by hand, and windows for it."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np

from crisp.text_windows import TokenWindows


def mixtral(experts: int = 4, k: int = 2, d_ff: int = 24, layers: int = 2) -> Any:
    """In float64 and with routers that are sure of their choice."""
    import torch
    import transformers

    config = transformers.MixtralConfig(
        vocab_size=64,
        hidden_size=16,
        intermediate_size=d_ff,
        num_hidden_layers=layers,
        num_attention_heads=2,
        num_key_value_heads=1,
        num_local_experts=experts,
        num_experts_per_tok=k,
        max_position_embeddings=64,
    )
    torch.manual_seed(0)
    model = transformers.AutoModelForCausalLM.from_config(config, experts_implementation="eager")
    for weight in model.parameters():
        if weight.dim() > 1:
            torch.nn.init.normal_(weight, std=0.3)
    return model.double().eval()


def windows(lengths: Sequence[int], seed: int = 0) -> TokenWindows:
    """Random tokens; all but the first of each window are scored."""
    random = np.random.default_rng(seed)
    return TokenWindows(
        tokens=[random.integers(3, 64, length) for length in lengths],
        scored=[length - 1 for length in lengths],
        text=[0] * len(lengths),
        dataset=["random sha256:0"],
        window=max(lengths),
        stride=max(lengths),
    )
