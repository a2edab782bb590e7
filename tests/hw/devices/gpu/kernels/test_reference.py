"""What the kernels are compared with on a GPU, itself against double precision."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from crisp.hw.devices.gpu.kernels import add_blocks, jitted
from tests.hw.devices.gpu.kernels.cases import Case, check, piece

CASES = [
    Case(dtype, x, d, 48, (48, 48, 21), (3, 2, 2), 4, activation)
    for dtype, x, d in (
        ("fp32", "fp32", 80), ("fp16", "fp16", 80), ("bf16", "bf16", 80), ("bf16", "fp32", 192),
        ("int8", "bf16", 128), ("int4", "fp32", 192),
    )
    for activation in ("silu", "gelu", "gpt_oss")
]  # fmt: skip


@pytest.mark.parametrize("case", CASES, ids=str)
def test_the_reference_is_right_and_touches_nothing_else(case: Case) -> None:
    """Where Triton neither compiles nor interprets, it is what add_blocks does."""
    assert not jitted(torch.zeros(1))
    given = piece(case)
    together = check(given, add_blocks)

    def one_by_one(layout: Any, pool: Any, *rest: Any) -> None:
        *table, x, sums, _ = rest
        for i in range(len(case.neurons)):
            add_blocks(layout, pool, *(t[i : i + 1] for t in table), x, sums)

    assert torch.equal(check(given, one_by_one), together)
