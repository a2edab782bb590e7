"""A store of a quantised checkpoint is that of its plain weights, byte for byte."""

from __future__ import annotations

import json
import shutil
from pathlib import Path
from typing import Any

import numpy as np
import pytest

torch = pytest.importorskip("torch", reason="needs the extra hf")
transformers = pytest.importorskip("transformers", reason="needs the extra hf")

from crisp.checkpoint.files import weights_digest  # noqa: E402
from crisp.errors import CrispError  # noqa: E402
from crisp.hw.store.packing import pack  # noqa: E402
from crisp.hw.store.reader import Store  # noqa: E402
from tests.crisp.checkpoint.quantised.made import (  # noqa: E402
    KINDS,
    plain_copy,
    quantised_gpt_oss,
    quantised_mixtral,
)


def weights_of(store: Store) -> list[bytes]:
    return [path.read_bytes() for path in store.files]


@pytest.mark.parametrize("kind", [*KINDS, "mxfp4"])
@pytest.mark.parametrize("dtype", [None, "int4"])
def test_a_store_of_each_format(tmp_path: Path, kind: str, dtype: str | None) -> None:
    source = tmp_path / "source"
    made = quantised_gpt_oss if kind == "mxfp4" else quantised_mixtral
    plain = made(source) if kind == "mxfp4" else made(source, kind)
    plain_copy(source, tmp_path / "plain", plain)
    store = pack(source, tmp_path / "store", dtype=dtype)
    expected = pack(tmp_path / "plain", tmp_path / "expected", dtype=dtype or "bf16")
    assert store.dtype == (dtype or "bf16")
    assert weights_of(store) == weights_of(expected)
    assert store.weights == weights_digest(source)
    index = json.loads((store.path / "store.json").read_text())
    assert index["source"]["format"] == (
        "mxfp4" if kind == "mxfp4" else KINDS[kind][1]["quant_method"]
    )
    assert "source" not in json.loads((expected.path / "store.json").read_text())


def test_progress_ends_at_the_end(tmp_path: Path) -> None:
    quantised_gpt_oss(tmp_path / "source")
    seen: list[tuple[int, int]] = []
    pack(tmp_path / "source", tmp_path / "store", progress=lambda *now: seen.append(now))
    assert seen[-1][0] == seen[-1][1]
    assert [done for done, _ in seen] == sorted(done for done, _ in seen)


def test_settings_of_the_format_are_in_the_index(tmp_path: Path) -> None:
    quantised_mixtral(tmp_path / "source", "gptq")
    store = pack(tmp_path / "source", tmp_path / "store")
    settings = {"bits": 4, "group_size": 32, "desc_act": False, "sym": False}
    assert store.source == {"format": "gptq", "settings": settings}


def test_not_finite(tmp_path: Path) -> None:
    from safetensors.torch import load_file, save_file

    quantised_mixtral(tmp_path / "source", "gptq")
    file = tmp_path / "source" / "model.safetensors"
    tensors: dict[str, Any] = load_file(file)
    tensors["model.layers.1.block_sparse_moe.experts.2.w2.scales"][0, 0] = float("inf")
    save_file(tensors, file)
    with pytest.raises(CrispError, match=r"experts\.2\.w2\.weight.*expert 2 has NaN or infinite"):
        pack(tmp_path / "source", tmp_path / "store")
    assert not (tmp_path / "store").exists()


def test_a_gguf_file(tmp_path: Path) -> None:
    pytest.importorskip("gguf", reason="needs the extra gguf")
    from tests.crisp.checkpoint.gguf.made import dequantised, write

    file = tmp_path / "folder" / "tiny.gguf"
    file.parent.mkdir()
    stored = write(file, ("Q4_K", "Q5_K", "Q6_K"), biases=True, arch="gpt-oss")
    store = pack(file.parent, tmp_path / "store", dtype="fp32")
    assert (store.activation, store.spec.name, store.spec.biases) == (
        "gpt_oss",
        "Tiny Experts",
        True,
    )
    assert store.source == {
        "format": "gguf", "file": "tiny.gguf", "types": {"Q4_K": 2, "Q5_K": 2, "Q6_K": 2},
    }  # fmt: skip
    spec = store.spec
    numbers = np.fromfile(store.files[1], np.float32, offset=store.offset(1, 2, 0))
    blocks = numbers.reshape(-1, spec.block_bytes // 4)[: spec.n_blocks]
    matrices = blocks[:, : 3 * spec.block * spec.d_model].reshape(-1, 3, spec.block, spec.d_model)
    for i, part in enumerate(("gate", "up", "down")):
        expected = dequantised(stored, f"blk.1.ffn_{part}_exps.weight")[2]
        found = matrices[:, i].reshape(spec.d_ff, spec.d_model)
        assert (found == (expected.T if part == "down" else expected)).all()
    again = pack(file, tmp_path / "again")
    assert (again.dtype, again.weights) == ("bf16", store.weights)
    with pytest.raises(CrispError, match="experts of the architecture 'mystery' are not computed"):
        write(file, arch="mystery")
        pack(file, tmp_path / "other")


def test_a_gguf_file_that_is_cut_off(tmp_path: Path) -> None:
    (tmp_path / "folder").mkdir()
    (tmp_path / "folder" / "model-Q4_K_M.gguf").write_bytes(b"GGUF\3\0\0\0")
    with pytest.raises(CrispError, match=r"model-Q4_K_M\.gguf: is cut off: 8 bytes"):
        pack(tmp_path / "folder", tmp_path / "store")
    assert [path.name for path in tmp_path.iterdir()] == ["folder"]


def test_generating_from_a_quantised_folder(tmp_path: Path) -> None:
    """The store belongs to the folder, and the rest of the model is decoded from it."""
    from crisp.hw.model.resident import open_resident

    source = tmp_path / "source"
    plain = quantised_mixtral(source, "gptq")
    tokenizer = Path(__file__).parents[3] / "traces" / "tiny-mixtral"
    for name in ("tokenizer.json", "tokenizer_config.json"):
        shutil.copy(tokenizer / name, source / name)
    store = pack(source, tmp_path / "store")
    resident = open_resident(source, store, verify=True)
    name = "model.layers.1.self_attn.q_proj.weight"
    assert torch.equal(resident.loaded.model.state_dict()[name], plain[name].to(torch.bfloat16))
