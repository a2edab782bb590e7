"""The names of the engines whose logs are read: those of `crisp.trace.importing.engines.ENGINES`.

They stand apart from the readers, so that a list of them, as in a command's help, imports none.
"""

from __future__ import annotations

ENGINE_NAMES = (
    "bigmoeonedge", "vllm", "sglang", "llama.cpp", "colibri", "moe-policylang", "moe-cache-eval",
    "array", "moe-infinity", "router-logits",
)  # fmt: skip
"""In the order in which a file is held against them."""
