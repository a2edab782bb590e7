"""A small trace of a small model."""

from __future__ import annotations

import numpy as np

from crisp.model.spec import ModelSpec
from crisp.trace import Header, RoutingTrace

CONFIG = {
    "model_type": "mixtral",
    "hidden_size": 64,
    "intermediate_size": 256,
    "num_hidden_layers": 3,
    "num_attention_heads": 4,
    "num_key_value_heads": 4,
    "num_local_experts": 8,
    "num_experts_per_tok": 2,
    "torch_dtype": "bfloat16",
}


def toy_trace(rows: int = 40, sequences: int = 4, *, guess: bool = True) -> RoutingTrace:
    """Each sequence: a fifth of its rows prefill, the others decode; drawn, as a mixtral's."""
    draw = np.random.default_rng(0)
    layers, experts = CONFIG["num_hidden_layers"], CONFIG["num_local_experts"]
    ids = draw.random((rows, layers, experts)).argsort(axis=2)[:, :, :2].astype(np.int16)
    each = rows // sequences
    position = (np.arange(rows) % each).astype(np.int32)
    spec = ModelSpec.from_config(CONFIG, "toy")
    return RoutingTrace(
        experts=ids,
        sequence=(np.arange(rows) // each).astype(np.int32),
        position=position,
        phase=(position >= each // 5).astype(np.uint8),
        guess=np.roll(ids, 1, axis=0) if guess else None,
        header=Header(
            n_experts=8,
            top_k=2,
            ordered=True,
            origin="captured",
            model="toy",
            config_hash=spec.config_hash,
            spec=spec.to_dict(),
        ),
    )
