"""The geometry in a GGUF file, its bits exact to the byte."""

from __future__ import annotations

from fractions import Fraction
from pathlib import Path

import numpy as np
import pytest

gguf = pytest.importorskip("gguf", reason="needs the extra gguf")

from crisp.checkpoint.gguf import GgufExperts, read_geometry, read_model  # noqa: E402
from crisp.errors import CrispError  # noqa: E402
from tests.crisp.checkpoint.gguf.made import (  # noqa: E402
    D_FF,
    EXPERTS,
    SCALES,
    D,
    dequantised,
    write,
)


def test_geometry(tmp_path: Path) -> None:
    path = tmp_path / "m.gguf"
    write(path, layers=4, dense=1, fields={"nextn_predict_layers": 1})
    model = read_model(path)
    spec = model.spec
    assert (spec.name, spec.n_layers, spec.moe_layers) == ("Tiny Experts", 3, (1, 2))
    assert (spec.n_experts, spec.top_k, spec.d_model, spec.d_ff) == (EXPERTS, 2, D, D_FF)
    # Q4_K: 144 bytes for 256 weights, Q6_K: 210
    assert spec.bits == Fraction(8 * (144 + 144 + 210), 3 * 256)
    assert spec.layer_bits is None  # the same in both layers
    assert model.types == {"Q4_K": 4, "Q6_K": 2}
    assert spec.dense_params == (D + D * D + 128 * D, *[D + D * D + EXPERTS * D] * 2)
    # Q8_0 is 8.5 bits a weight, F16 16, and a few are F32
    weights = 3 * D * D * Fraction(17, 2) + 128 * D * 16 + (3 * D + 2 * EXPERTS * D) * 32
    assert spec.dtype_bits == round(weights / sum(spec.dense_params)) == 10
    assert (spec.matrices, spec.biases, spec.block) == (3, False, 64)
    assert read_geometry(path) == spec


def test_bits_differ_by_layer(tmp_path: Path) -> None:
    path = tmp_path / "m.gguf"
    write(path, ("Q8_0", "Q8_0", "Q8_0"))
    assert read_geometry(path).bits == Fraction(17, 2)
    write(path, ("MXFP4", "MXFP4", "MXFP4"), arch="gpt-oss", biases=True, d_ff=D_FF)
    spec = read_geometry(path)
    assert spec.bits == 4 + Fraction(8, 32)
    assert spec.biases


def test_gate_and_up_in_one_tensor(tmp_path: Path) -> None:
    path = tmp_path / "m.gguf"
    stored = write(path, fused=True)
    model = read_model(path)
    assert (model.spec.d_ff, model.spec.matrices) == (D_FF, 3)
    with GgufExperts(model) as experts:
        gate, up, _ = experts.matrices(1, 2)
    both = dequantised(stored, "blk.1.ffn_gate_up_exps.weight")[2]
    assert (np.concatenate([gate, up]) == both).all()


@pytest.mark.parametrize("kind", ["F32", "F16", "BF16", *SCALES])
def test_experts_as_the_package_dequantises(tmp_path: Path, kind: str) -> None:
    path = tmp_path / "m.gguf"
    stored = write(path, (kind, kind, kind), layers=1)
    model = read_model(path)
    with GgufExperts(model) as experts:
        for expert in range(EXPERTS):
            found = experts.matrices(0, expert)
            for part, matrix in zip(("gate", "up", "down"), found, strict=True):
                whole = dequantised(stored, f"blk.0.ffn_{part}_exps.weight")[expert]
                assert (matrix == (whole.T if part == "down" else whole)).all()
                assert matrix.shape == (D_FF, D)
                assert matrix.std() > 0.005


def test_layers_that_are_not_there(tmp_path: Path) -> None:
    write(tmp_path / "m.gguf", layers=2, fields={"block_count": 3})
    with pytest.raises(CrispError, match=r"says 3 layers \(block_count\), but has no .* layer 2"):
        read_geometry(tmp_path / "m.gguf")


def test_what_is_no_moe(tmp_path: Path) -> None:
    path = tmp_path / "m.gguf"
    write(path, layers=2, dense=2)
    with pytest.raises(CrispError, match="has no routed experts"):
        read_geometry(path)
    write(path, fields={"expert_count": 5})
    with pytest.raises(CrispError, match=r"blk\.0.*matrices of 5 experts that fit"):
        read_geometry(path)
    write(path, fields={"embedding_length": 128})
    with pytest.raises(
        CrispError, match="its experts take 256 numbers, and embedding_length is 128"
    ):
        read_geometry(path)
    write(path, fields={"block_count": 2**31})
    with pytest.raises(CrispError, match="block_count: found 2147483648"):
        read_geometry(path)


def test_infinite_weights(tmp_path: Path) -> None:
    path = tmp_path / "m.gguf"
    stored = write(path, ("F16", "F16", "F16"), layers=1)
    model = read_model(path)
    tensor = model.routed[0]["up"]
    content = bytearray(path.read_bytes())
    content[tensor.offset : tensor.offset + 2] = b"\0\x7c"
    path.write_bytes(content)
    with GgufExperts(model) as experts:
        with pytest.raises(CrispError, match=r"ffn_up_exps.*expert 0 has NaN or infinite"):
            experts.matrices(0, 0)
        assert len(experts.matrices(0, 1)) == len(stored)
