"""A small trace, changed as a test needs it."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np
import pytest

from crisp.trace import Header, RoutingTrace

Make = Callable[..., RoutingTrace]


@pytest.fixture
def make() -> Make:
    """``make(rows=, layers=, k=, n_experts=, sequences=, seed=, **tensors)``: a valid trace."""

    def build(
        rows: int = 12,
        layers: int = 3,
        k: int = 2,
        n_experts: int = 8,
        sequences: int = 3,
        seed: int = 0,
        **changes: Any,
    ) -> RoutingTrace:
        random = np.random.default_rng(seed)
        sequence = np.sort(np.arange(rows) % sequences)
        first = np.searchsorted(sequence, sequence)  # row where this row's sequence begins
        header = {"n_experts": n_experts, "top_k": k, "ordered": True, "origin": "captured"}
        header |= changes.pop("header", {})
        shape = (rows, layers, k)
        tensors: dict[str, Any] = {
            "experts": random.permuted(
                np.tile(np.arange(n_experts, dtype=np.int16), (rows, layers, 1)), axis=2
            )[..., :k],
            "sequence": sequence.astype(np.int32) * 2 + 5,
            "position": (np.arange(rows) - first + 7).astype(np.int32),
            "phase": (np.arange(rows) - first > 1).astype(np.uint8),
            "weights": -np.sort(-random.random(shape), axis=2).astype(np.float16),
            "guess": None,
            "token": None,
        }
        return RoutingTrace(header=Header(**header), **(tensors | changes))

    return build
