"""Quantised checkpoints: which stored tensors make up a weight, and its value in float32."""

from crisp.checkpoint.quantised.view import (
    DecodedCheckpoint,
    open_any,
    open_decoded,
    read_quantization,
)

__all__ = ["DecodedCheckpoint", "open_any", "open_decoded", "read_quantization"]
