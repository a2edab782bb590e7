"""An order carried by a format is that order of its weights, bit for bit."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest

torch = pytest.importorskip("torch", reason="needs the extra hf")
pytest.importorskip("transformers", reason="needs the extra hf")

from crisp.checkpoint.quantised import open_decoded  # noqa: E402
from crisp.checkpoint.quantised.numbers import StoredPart  # noqa: E402
from tests.crisp.checkpoint.quantised.made import (  # noqa: E402
    KINDS,
    quantised_gpt_oss,
    quantised_mixtral,
)

# Rows and columns that keep together, of w1 [128, 64] and w2 [64, 128]; None: no order at all
RUNS = {
    "gptq": ((1, 1), (1, 1)),
    "gptq desc_act": ((1, 1), (1, 1)),
    "gptq v2": ((1, 1), (1, 1)),
    "gptq 8 bits": ((1, 1), (1, 1)),
    "gptq one group": ((1, 1), (1, 1)),
    "awq": ((1, 32), (1, 32)),
    "fp8 blocks": ((48, 48), (48, 48)),
    "fp8 tensor": ((1, 1), (1, 1)),
    "fp8 rows": ((1, 1), (1, 1)),
    "w4a16": ((1, 32), (1, 32)),
    "w4a16 asymmetric": ((1, 32), (1, 32)),
    "w4a16 act order": ((1, None), (1, None)),
    "w8a16": ((1, 32), (1, 32)),
    "w8a8": ((1, 1), (1, 1)),
    "compressed fp8": ((1, 1), (1, 1)),
    "compressed fp8 blocks": ((48, 48), (48, 48)),
    "nf4": ((1, 64), (1, 64)),
    "nf4 double": ((None, None), (None, None)),
    "llm.int8": ((1, 1), (1, 1)),
}


def order_of(n: int, run: int, random: Any) -> Any:
    """A random order of runs, and within each; a shorter last run stays the last."""
    whole = n // run
    runs = [*random.permutation(whole), *([whole] if n % run else [])]
    parts = [random.permutation(np.arange(i * run, min(n, (i + 1) * run))) for i in runs]
    return np.concatenate(parts)


def check_axes(folder: Path, name: str, runs: tuple[int | None, int | None]) -> None:
    checkpoint, random = open_decoded(folder), np.random.default_rng(0)
    weight = checkpoint.weights[name]
    with checkpoint.decoder() as decoder:
        parts, before = decoder.parts(name, 1), decoder.read_matrix(name, 1)
    for axis, run in enumerate(runs):
        how = weight.axes[axis]
        if run is None:
            assert how is None
            continue
        assert how is not None
        assert how.run == run
        order = order_of(before.shape[axis], run, random)
        moved = {
            part: StoredPart(how.moves[part](x.bits, order), x.dtype) if part in how.moves else x
            for part, x in parts.items()
        }
        for part, x in parts.items():
            assert moved[part].bits.shape == x.bits.shape
            assert moved[part].bits.dtype == x.bits.dtype
        assert (weight.decode(moved) == np.take(before, order, axis)).all()


@pytest.mark.parametrize("kind", KINDS)
def test_rows_and_columns_of_each_format(tmp_path: Path, kind: str) -> None:
    quantised_mixtral(tmp_path, kind)
    for part, runs in zip(("w1", "w2"), RUNS[kind], strict=True):
        check_axes(tmp_path, f"model.layers.1.block_sparse_moe.experts.2.{part}.weight", runs)


def test_mxfp4(tmp_path: Path) -> None:
    quantised_gpt_oss(tmp_path)
    for part in ("gate_up_proj", "down_proj"):
        check_axes(tmp_path, f"model.layers.1.mlp.experts.{part}", (32, 1))
