"""A quantised checkpoint becomes the model of its plain weights, by one way for every format."""

from __future__ import annotations

import shutil
from pathlib import Path
from typing import Any

import pytest

torch = pytest.importorskip("torch", reason="needs the extra hf")
transformers = pytest.importorskip("transformers", reason="needs the extra hf")

from crisp.checkpoint.loading import load_model  # noqa: E402
from crisp.checkpoint.skeleton import open_skeleton  # noqa: E402
from tests.crisp.checkpoint.quantised.made import (  # noqa: E402
    FP8,
    KINDS,
    fp8_blocks,
    plain_copy,
    quantised_gpt_oss,
    quantised_mixtral,
)

TINY = Path(__file__).parents[4] / "traces" / "tiny-mixtral"


def with_tokenizer(folder: Path) -> Path:
    for name in ("tokenizer.json", "tokenizer_config.json"):
        shutil.copy(TINY / name, folder / name)
    return folder


def theirs(folder: Path) -> Any:
    return transformers.AutoModelForCausalLM.from_pretrained(folder, dtype="auto").eval()


def same(one: Any, other: Any) -> None:
    """Equal weights, types and logits."""
    before, after = one.state_dict(), other.state_dict()
    assert before.keys() == after.keys()
    for name, tensor in before.items():
        assert tensor.dtype == after[name].dtype, name
        assert torch.equal(tensor, after[name]), name
    ids = torch.arange(3, 40)[None]
    with torch.no_grad():
        assert torch.equal(one(ids).logits, other(ids).logits)


@pytest.mark.parametrize("kind", KINDS)
def test_a_model_of_each_format(tmp_path: Path, kind: str) -> None:
    source = tmp_path / "source"
    plain = quantised_mixtral(source, kind)
    plain_copy(source, tmp_path / "plain", plain, torch.bfloat16)
    loaded = load_model(str(with_tokenizer(source)))
    assert f"decoded from {KINDS[kind][1]['quant_method']}," in loaded.how
    assert loaded.model.dtype == torch.bfloat16
    assert loaded.model.config.to_dict().get("quantization_config") is None
    same(loaded.model, theirs(tmp_path / "plain"))


def test_mxfp4_as_transformers_loads_it(tmp_path: Path) -> None:
    quantised_gpt_oss(tmp_path)
    same(load_model(str(with_tokenizer(tmp_path))).model, theirs(tmp_path))


def test_fp8_as_transformers_loads_it(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """In blocks of 32, all of which are whole: it takes no others."""
    pytest.importorskip("accelerate", reason="transformers needs it to load these")
    monkeypatch.setitem(
        KINDS,
        "fp8 of 32",
        (lambda *of: fp8_blocks(*of, block=32), FP8 | {"weight_block_size": [32, 32]}),
    )
    quantised_mixtral(tmp_path, "fp8 of 32")
    same(load_model(str(with_tokenizer(tmp_path))).model, theirs(tmp_path))


def test_one_layer_at_a_time(tmp_path: Path) -> None:
    """Decoded in float32, without rounding to the type of the model."""
    source = tmp_path / "source"
    plain = quantised_mixtral(source, "gptq")
    skeleton = open_skeleton(source)
    with skeleton.loaded_layer(1):
        experts = skeleton.model.model.layers[1].mlp.experts
        name = "model.layers.1.block_sparse_moe.experts.3"
        assert torch.equal(experts.down_proj[3], plain[f"{name}.w2.weight"])
        assert torch.equal(experts.gate_up_proj[3][:128], plain[f"{name}.w1.weight"])
