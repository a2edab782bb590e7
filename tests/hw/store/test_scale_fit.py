"""int4 with fitted scales: what a store holds and says of it, and that a model computes so."""

from __future__ import annotations

import dataclasses
import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest

torch = pytest.importorskip("torch", reason="needs the extra hf")
pytest.importorskip("transformers", reason="needs the extra hf")

from crisp.adapter import Experts, expert_layout  # noqa: E402
from crisp.checkpoint.loading import load_model, quantize_experts  # noqa: E402
from crisp.errors import CrispError  # noqa: E402
from crisp.hw.model.resident import open_resident  # noqa: E402
from crisp.hw.store.packing import pack  # noqa: E402
from crisp.hw.store.reader import Store  # noqa: E402
from crisp.model.quantization import quantize  # noqa: E402
from crisp.profile.metadata import FILE, Metadata  # noqa: E402
from tests.hw.store.test_packing import prepared  # noqa: E402


def with_moments(folder: Path, seed: int = 0) -> Path:
    """tiny-mixtral as if prepared, with moments some of which are large."""
    metadata = Metadata.load(prepared(folder, 16) / FILE)
    shape = (metadata.spec.n_layers, metadata.spec.d_model)
    moments = np.exp(np.random.default_rng(seed).standard_normal(shape)).astype(np.float16)
    dataclasses.replace(metadata, input_moments=moments).save(folder / FILE)
    return folder


def dequantised(store: Store, layer: int, expert: int) -> Any:
    """An int4 expert by the page docs/store.md: gate, up and down, float32 [3, d_ff, d_model]."""
    spec, row = store.spec, store.spec.moe_layers.index(layer)
    data = np.fromfile(store.files[row], np.uint8, offset=store.offset(row, expert, 0))
    blocks = data[: spec.expert_bytes].reshape(spec.n_blocks, spec.block_bytes)
    size = spec.block * spec.d_model // 2
    packed = blocks[:, : 3 * size].reshape(-1, 3, spec.block, spec.d_model // 2)
    both = np.stack([packed << 4, packed & 0xF0], -1).view(np.int8) >> 4
    groups = spec.d_model // 64
    scales = blocks[:, 3 * size : 3 * size + 6 * spec.block * groups].copy().view(np.float16)
    steps = scales.reshape(-1, 3, spec.block, groups, 1).astype(np.float32)
    weights = both.reshape(*steps.shape[:-1], 64) * steps
    whole = weights.reshape(-1, 3, spec.block, spec.d_model).swapaxes(0, 1)
    return whole.reshape(3, -1, spec.d_model)[:, : spec.d_ff]


def test_a_store_holds_what_the_model_is_rounded_to(tmp_path: Path) -> None:
    folder = with_moments(tmp_path / "model")
    store = pack(folder, tmp_path / "store", dtype="int4")
    moments = Metadata.load(folder / FILE).moments()
    loaded = quantize_experts(load_model(str(folder)), "int4", moments)
    assert "experts in int4, scales fitted" in loaded.how
    layer = expert_layout(loaded.model).layers[4]
    up, down = Experts.of(layer).neurons(3)
    gate, up_, down_ = (torch.from_numpy(x).bfloat16() for x in dequantised(store, layer.index, 3))
    assert torch.equal(up, torch.stack([gate, up_]))
    assert torch.equal(down, down_)


def test_errors_of_experts_are_in_the_index(tmp_path: Path) -> None:
    folder = with_moments(tmp_path / "model")
    store = pack(folder, tmp_path / "store", dtype="int4")
    index = json.loads((tmp_path / "store" / "store.json").read_text())
    assert store.fitted
    assert store.errors == index["errors"]
    metadata, experts = Metadata.load(folder / FILE), load_model(str(folder)).model
    moments = metadata.moments()
    assert moments is not None
    layer = expert_layout(experts).layers[2]
    up, down = Experts.of(layer).neurons(5)
    exact = torch.cat([up, down[None]]).float().numpy().astype(np.float64)
    counts = np.stack([moments[layer.index]] * 2 + [np.ones_like(moments[layer.index])])[:, None]
    whole = (exact**2 * counts).sum()
    left = ((dequantised(store, layer.index, 5) - exact) ** 2 * counts).sum()
    assert index["errors"]["fitted"][2][5] == pytest.approx((left / whole) ** 0.5, rel=1e-3)
    assert np.shape(index["errors"]["fitted"]) == (6, 8)
    better = np.array(index["errors"]["fitted"]) / np.array(index["errors"]["nearest"])
    assert (better < 0.997).all()


def test_without_moments_a_store_is_as_it_was(tmp_path: Path) -> None:
    folder = prepared(tmp_path / "model", 16)
    store = pack(folder, tmp_path / "store", dtype="int4")
    assert not store.fitted
    index = json.loads((tmp_path / "store" / "store.json").read_text())
    assert not {"errors", "source"} & index.keys()
    up = Experts.of(expert_layout(load_model(str(folder)).model).layers[0]).neurons(0)[0]
    q, scales = quantize(up[0].float().numpy(), "int4")
    found = dequantised(store, 0, 0)[0]
    assert (found == (q.reshape(*scales.shape, 64) * scales[..., None].astype(np.float32)).reshape(
        found.shape
    )).all()  # fmt: skip
    assert not pack(with_moments(tmp_path / "other"), tmp_path / "int8", dtype="int8").fitted


def test_wider_blocks_hold_the_same_numbers(tmp_path: Path) -> None:
    """Leading neurons are packed as they are in a wider expert: scales depend on no other row."""
    folder = with_moments(tmp_path / "model")
    one = pack(folder, tmp_path / "one", dtype="int4")
    other = pack(folder, tmp_path / "other", dtype="int4", block=64)
    assert (dequantised(one, 1, 2) == dequantised(other, 1, 2)).all()


def test_generating_knows_a_fitted_store(tmp_path: Path) -> None:
    folder = with_moments(tmp_path / "model")
    store = pack(folder, tmp_path / "store", dtype="int4")
    assert open_resident(folder, store).store is store
    plain = Path(__file__).parents[3] / "traces" / "tiny-mixtral"
    with pytest.raises(CrispError, match="was packed from other weights"):
        open_resident(plain, store)


def test_a_damaged_index(tmp_path: Path) -> None:
    pack(with_moments(tmp_path / "model"), tmp_path / "store", dtype="int4")
    file = tmp_path / "store" / "store.json"
    index = json.loads(file.read_text())
    file.write_text(json.dumps(index | {"errors": 3}))
    with pytest.raises(CrispError, match=r"store\.json: errors is 3, expected dict"):
        Store.open(tmp_path / "store")
