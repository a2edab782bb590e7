"""The kernels as a GPU runs them: what the interpreter checks, once more."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from crisp.hw.devices.gpu.kernels import BlockLayout, add_blocks, jitted
from tests.hw.devices.gpu.kernels.cases import Case, check, piece
from tests.hw.devices.gpu.kernels.interpreted import CASES

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(not torch.cuda.is_available(), reason="needs an NVIDIA GPU"),
]


@pytest.mark.parametrize("case", CASES, ids=str)
def test_a_piece_is_right_and_the_same_block_by_block(case: Case) -> None:
    def together(layout: BlockLayout, *given: Any) -> None:
        *rest, x, sums, hidden = (tensor.cuda() for tensor in given)
        assert jitted(x)
        add_blocks(layout, *rest, x, sums, hidden)
        given[-2].copy_(sums)

    def one_by_one(layout: BlockLayout, *given: Any) -> None:
        pool, *table, x, sums, hidden = (tensor.cuda() for tensor in given)
        for i in range(len(case.neurons)):
            add_blocks(layout, pool, *(t[i : i + 1] for t in table), x, sums, hidden)
        given[-2].copy_(sums)

    given = piece(case)
    assert torch.equal(check(given, together), check(given, one_by_one))
