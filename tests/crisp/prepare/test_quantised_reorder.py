"""Quantised checkpoints with their neurons reordered: in their own format, or in plain numbers."""

from __future__ import annotations

import json
import shutil
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest

torch = pytest.importorskip("torch", reason="needs the extra hf")
transformers = pytest.importorskip("transformers", reason="needs the extra hf")

from safetensors.torch import load_file  # noqa: E402

from crisp.adapter import ExpertLayout, expert_layout  # noqa: E402
from crisp.checkpoint.expert_tensors import expert_tensors  # noqa: E402
from crisp.checkpoint.files import weights_digest  # noqa: E402
from crisp.checkpoint.loading import load_config, load_model, model_without_weights  # noqa: E402
from crisp.checkpoint.quantised import open_decoded  # noqa: E402
from crisp.errors import CrispError  # noqa: E402
from crisp.prepare.importance import NeuronOrder, permutations  # noqa: E402
from crisp.prepare.pipeline import prepare  # noqa: E402
from crisp.prepare.quantised_reorder import neuron_runs  # noqa: E402
from crisp.prepare.reorder import reorder  # noqa: E402
from crisp.prepare.request import PreparationRequest  # noqa: E402
from crisp.prepare.roles import read_method  # noqa: E402
from tests.crisp.checkpoint.quantised.made import (  # noqa: E402
    D_FF,
    EXPERTS,
    KINDS,
    plain_copy,
    quantised_gpt_oss,
    quantised_mixtral,
)

TINY = Path(__file__).parents[3] / "traces" / "tiny-mixtral"
# How many neurons stay together; None: the format carries no order
RUNS: dict[str, int | None] = {
    "gptq": 1, "gptq desc_act": 1, "gptq v2": 1, "gptq 8 bits": 1, "gptq one group": 1, "awq": 32,
    "fp8 blocks": 48, "fp8 tensor": 1, "fp8 rows": 1, "w4a16": 32, "w4a16 asymmetric": 32,
    "w4a16 act order": None, "w8a16": 32, "w8a8": 1, "compressed fp8": 1,
    "compressed fp8 blocks": 48, "nf4": 64, "nf4 double": None, "llm.int8": 1, "mxfp4": 32,
}  # fmt: skip


def made(folder: Path, kind: str) -> dict[str, Any]:
    return quantised_gpt_oss(folder) if kind == "mxfp4" else quantised_mixtral(folder, kind)


def layout_of(folder: Path) -> ExpertLayout:
    return expert_layout(model_without_weights(folder, load_config(folder)))


def orders(layout: ExpertLayout, run: int, d_ff: int) -> dict[int, Any]:
    random = np.random.default_rng(0)
    scores = {layer.index: random.random((EXPERTS, d_ff)) for layer in layout.layers}
    return permutations(scores, dict.fromkeys(scores, run))


def decoded(folder: Path) -> dict[str, Any]:
    """Every plain tensor of a quantised checkpoint."""
    checkpoint, stored = open_decoded(folder), load_file(folder / "model.safetensors")
    with checkpoint.decoder() as decoder:
        return {
            name: decoder.read_tensor(name, torch.float32)
            if name in checkpoint.weights
            else stored[name]
            for name in checkpoint.tensors
        }


@pytest.mark.parametrize("kind", [*KINDS, "mxfp4"])
def test_reordered_and_decoded_is_decoded_and_reordered(tmp_path: Path, kind: str) -> None:
    source, out, plain_out = tmp_path / "source", tmp_path / "out", tmp_path / "plain_out"
    plain = made(source, kind)
    out.mkdir()
    plain_out.mkdir()
    layout, checkpoint = layout_of(source), open_decoded(source)
    neurons, run = expert_tensors(checkpoint, layout), RUNS[kind]
    if run is None:
        with pytest.raises(CrispError, match=r"w[12]\.weight.*cannot change places.*--dequantize"):
            neuron_runs(checkpoint, neurons)
        return
    assert set(neuron_runs(checkpoint, neurons).values()) == {run}
    new = orders(layout, run, 64 if kind == "mxfp4" else D_FF)
    digest = reorder(source, out, new, layout)
    assert digest == weights_digest(out)
    plain_copy(source, tmp_path / "plain", plain)
    reorder(tmp_path / "plain", plain_out, new, layout)
    found, expected = decoded(out), load_file(plain_out / "model.safetensors")
    assert found.keys() == expected.keys()
    for name, tensor in found.items():
        assert torch.equal(tensor.float(), expected[name].float()), name
    before, after = load_file(source / "model.safetensors"), load_file(out / "model.safetensors")
    assert {n: (x.shape, x.dtype) for n, x in after.items()} == {
        n: (x.shape, x.dtype) for n, x in before.items()
    }
    assert any(not torch.equal(x.view(torch.uint8), after[n].view(torch.uint8))
               for n, x in before.items() if x.dim())  # fmt: skip
    config = json.loads((out / "config.json").read_text())["quantization_config"]
    assert config.get("desc_act") == (True if "gptq" in kind else None)


def test_runs_are_ordered_by_their_sums_and_neurons_within_each() -> None:
    scores = np.array([[1.0, 2, 9, 0, 5, 5, 3, 4]])
    assert permutations({0: scores})[0].tolist() == [[2, 4, 5, 7, 6, 1, 0, 3]]
    assert permutations({0: scores}, {0: 2})[0].tolist() == [[4, 5, 2, 3, 7, 6, 1, 0]]
    # a run of 5, and a shorter one that stays behind it
    assert permutations({0: scores}, {0: 5})[0].tolist() == [[2, 4, 1, 0, 3, 5, 7, 6]]


def test_an_order_that_breaks_runs_is_refused(tmp_path: Path) -> None:
    made(tmp_path / "source", "awq")
    (tmp_path / "out").mkdir()
    layout = layout_of(tmp_path / "source")
    with pytest.raises(CrispError, match="an order that keeps runs of 32 neurons was expected"):
        reorder(tmp_path / "source", tmp_path / "out", orders(layout, 1, D_FF), layout)


@pytest.fixture
def text(tmp_path: Path) -> Iterator[Path]:
    file = tmp_path / "text.txt"
    file.write_text("the quick brown fox jumps over the lazy dog. " * 40)
    yield file


def request(text: Path, **options: Any) -> PreparationRequest:
    return PreparationRequest(
        [text],
        read_method("weight"),
        NeuronOrder.read("importance"),
        window=32,
        block=16,
        **options,
    )


def folder_with_tokenizer(folder: Path, kind: str) -> Path:
    quantised_mixtral(folder, kind, vocabulary=2048)
    for name in ("tokenizer.json", "tokenizer_config.json"):
        shutil.copy(TINY / name, folder / name)
    return folder


def logits(folder: Path) -> Any:
    with torch.no_grad():
        model = load_model(str(folder)).model.double()
        model.set_experts_implementation("eager")
        return model(torch.arange(3, 40)[None]).logits


@pytest.mark.seconds
@pytest.mark.parametrize(
    ("kind", "dequantize", "layerwise"),
    [("gptq", False, False), ("w4a16", False, True), ("nf4 double", True, False)],
)
def test_preparation(
    tmp_path: Path, text: Path, kind: str, dequantize: bool, layerwise: bool
) -> None:
    source, out = folder_with_tokenizer(tmp_path / "source", kind), tmp_path / "out"
    options = {"dequantize": dequantize, "layerwise": layerwise}
    metadata = prepare(source, out, request(text, **options), lambda *_: None)
    assert metadata.weights == weights_digest(out)
    assert metadata.moments() is not None
    assert metadata.provenance["source"] == "source"
    assert torch.allclose(logits(out), logits(source), atol=1e-10)
    config = json.loads((out / "config.json").read_text())
    if dequantize:
        assert "quantization_config" not in config
        assert metadata.provenance["dequantised"] is True
    else:
        assert metadata.provenance["runs"] == [RUNS[kind]]
    assert not (tmp_path / "out.partial").exists()


@pytest.mark.seconds
def test_what_cannot_be_prepared(tmp_path: Path, text: Path) -> None:
    source = folder_with_tokenizer(tmp_path / "source", "nf4 double")
    with pytest.raises(CrispError, match="cannot change places in bitsandbytes"):
        prepare(source, tmp_path / "out", request(text), lambda *_: None)
    assert not (tmp_path / "out").exists()
    plain = shutil.copytree(TINY, tmp_path / "plain")
    with pytest.raises(CrispError, match=r"--dequantize: .* is not quantised"):
        prepare(plain, tmp_path / "out", request(text, dequantize=True), lambda *_: None)
