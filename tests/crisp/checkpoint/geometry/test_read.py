"""The geometry of folders: config and tensors, what wins, and what is said of it."""

from __future__ import annotations

import json
import os
from fractions import Fraction
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from safetensors.numpy import save_file

from crisp.checkpoint.geometry.read import read_model
from crisp.errors import CrispError
from crisp.model.spec import BUILTIN, ModelSpec

ROOT = Path(__file__).parents[4]

D, FF, E = 64, 48, 4
MIXTRAL: dict[str, Any] = {
    "model_type": "mixtral",
    "hidden_size": D,
    "intermediate_size": FF,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "num_local_experts": E,
    "num_experts_per_tok": 2,
    "dtype": "float16",
}


def weights(dtype: Any = np.float16, layers: int = 2, d_ff: int = FF) -> dict[str, Any]:
    tensors = {}
    for layer in range(layers):
        at = f"model.layers.{layer}."
        tensors[f"{at}self_attn.q_proj.weight"] = np.zeros((D, D), np.float16)
        tensors[f"{at}block_sparse_moe.gate.weight"] = np.zeros((E, D), np.float16)
        for expert in range(E):
            inside = f"{at}block_sparse_moe.experts.{expert}."
            for name, shape in {"w1": (d_ff, D), "w3": (d_ff, D), "w2": (D, d_ff)}.items():
                tensors[f"{inside}{name}.weight"] = np.zeros(shape, dtype)
    return tensors


def folder(
    path: Path, config: dict[str, Any], tensors: dict[str, Any] | None = None, name: str = "m"
) -> Path:
    model = path / name
    model.mkdir()
    (model / "config.json").write_text(json.dumps(config))
    if tensors is not None:
        save_file(tensors, model / "model.safetensors")
    return model


def test_config_and_tensors_agree_on_a_listed_family(tmp_path: Path) -> None:
    model = folder(tmp_path, MIXTRAL, weights())
    found = read_model(model)
    assert found.spec == ModelSpec.from_config(model)
    assert (found.source, found.notes) == ("its config and its tensors", ())


def test_stored_bits_are_those_of_the_tensors(tmp_path: Path) -> None:
    found = read_model(folder(tmp_path, MIXTRAL, weights(np.float32)))
    assert (found.spec.bits, found.spec.layer_bits) == (32, None)
    assert found.spec.config_hash == ModelSpec.from_config(tmp_path / "m").config_hash
    assert found.notes == ("stored bits: as the checkpoint's tensors have them",)
    stated = read_model(tmp_path / "m", Fraction(4))
    assert (stated.spec.bits, stated.notes) == (4, ())
    assert stated.spec.config_hash == found.spec.config_hash


def test_stored_bits_may_differ_by_layer(tmp_path: Path) -> None:
    tensors = weights()
    for name in tensors:
        if "layers.1." in name and ".experts." in name:
            tensors[name] = tensors[name].astype(np.float32)
    spec = read_model(folder(tmp_path, MIXTRAL, tensors)).spec
    assert (spec.bits, spec.layer_bits) == (24, (Fraction(16), Fraction(32)))
    assert spec.row_block_bytes == (2 * 4096, 3 * 4096)  # 16 x 3 x 64 x 2 and x 4, in pages


def test_tensors_that_contradict_the_config_are_refused(tmp_path: Path) -> None:
    with pytest.raises(CrispError, match=r"config\.json: d_ff is 48, but the tensors have 32"):
        read_model(folder(tmp_path, MIXTRAL, weights(d_ff=32)))


def test_layers_beyond_the_model_are_left_alone(tmp_path: Path) -> None:
    found = read_model(folder(tmp_path, MIXTRAL, weights(layers=3)))
    assert found.spec.moe_layers == (0, 1)


def test_a_family_nobody_listed_is_read_from_its_tensors(tmp_path: Path) -> None:
    config = {**MIXTRAL, "model_type": "a_new_moe", "moe_intermediate_size": FF}
    found = read_model(folder(tmp_path, config, weights()))
    spec = found.spec
    assert (spec.n_experts, spec.top_k, spec.d_model, spec.d_ff) == (E, 2, D, FF)
    assert spec.dense_params == (D * D + E * D,) * 2  # what the tensors hold, no estimate
    assert found.notes == ()
    alone = read_model(folder(tmp_path, config, name="alone"))
    assert alone.spec.config_hash == spec.config_hash
    assert "estimated" in alone.notes[0]


def test_weights_that_are_not_all_there_leave_the_config(tmp_path: Path) -> None:
    model = folder(tmp_path, MIXTRAL)
    index = {"weight_map": {"x": "model-00001-of-00002.safetensors"}}
    (model / "model.safetensors.index.json").write_text(json.dumps(index))
    found = read_model(model)
    assert found.spec == ModelSpec.from_config(model)
    assert "its tensors were not looked at" in found.notes[0]
    assert "model-00001-of-00002.safetensors: is missing" in found.notes[0]


def test_a_key_that_a_config_omits_is_transformers_default(tmp_path: Path) -> None:
    pytest.importorskip("transformers", reason="needs the extra hf")
    config = {key: value for key, value in MIXTRAL.items() if key != "num_experts_per_tok"}
    model = folder(tmp_path, config, weights())
    found = read_model(model)
    assert found.spec.top_k == 2
    said = "the experts of a token, 2: transformers' default, for"
    assert found.notes == (f"{said} {model}/config.json does not say it",)
    assert (
        found.spec.config_hash == read_model(folder(tmp_path, MIXTRAL, name="n")).spec.config_hash
    )


def test_names_and_files(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    assert read_model("gpt-oss-20b").spec is BUILTIN["gpt-oss-20b"]
    model = folder(tmp_path, MIXTRAL)
    assert read_model(model / "config.json").spec == ModelSpec.from_config(model)
    for name in ("mixtral-8x", "acme/None"):
        with pytest.raises(CrispError, match="unknown model"):
            read_model(name)
    snapshot = tmp_path / "hub" / "models--acme--Tiny" / "snapshots" / "abc"
    snapshot.mkdir(parents=True)
    (snapshot / "config.json").write_text(json.dumps(MIXTRAL))
    (tmp_path / "hub/models--acme--Tiny/refs").mkdir()
    (tmp_path / "hub/models--acme--Tiny/refs/main").write_text("abc")
    monkeypatch.setenv("HF_HUB_CACHE", str(tmp_path / "hub"))
    assert read_model("acme/Tiny").spec.name == "acme/Tiny"
    assert read_model(snapshot).spec.name == "acme/Tiny"


def test_an_unknown_quantisation_needs_bits(tmp_path: Path) -> None:
    model = folder(tmp_path, {**MIXTRAL, "quantization_config": {"quant_method": "hqq"}})
    with pytest.raises(CrispError, match=r"how many bits hqq .* --bits B says it"):
        read_model(model)
    assert read_model(model, Fraction("4.5")).spec.bits == Fraction("4.5")


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"num_hidden_layers": 10**30}, "num_hidden_layers: found 1000000000000000000000000000000"),
        ({"num_hidden_layers": 10_001}, "num_hidden_layers: found 10001, expected at most 10,000"),
        ({"num_local_experts": 10**12}, "num_local_experts: found 1000000000000, expected a whole"),
        ({"model_type": ["mixtral"]}, r"model_type: found \['mixtral'\], expected a name such as"),
        ({"model_type": {"a": 1}}, "model_type: found "),
    ],
)
def test_configs_that_would_take_for_ever(
    tmp_path: Path, change: dict[str, Any], message: str
) -> None:
    config = json.loads(
        (ROOT / "traces" / "tiny-mixtral" / "config.json").read_text(encoding="utf-8")
    )
    file = tmp_path / "config.json"
    file.write_text(json.dumps(config | change), encoding="utf-8")
    with pytest.raises(CrispError, match=message):
        read_model(file)


def test_what_is_no_file_is_not_waited_for(tmp_path: Path) -> None:
    pipe = tmp_path / "pipe.json"
    os.mkfifo(pipe)
    with pytest.raises(CrispError, match=r"pipe\.json: is not an ordinary file"):
        read_model(pipe)
    nested = tmp_path / "nested.json"
    nested.write_text("[" * 200_000, encoding="utf-8")
    with pytest.raises(CrispError, match=r"nested\.json: is not JSON: "):
        read_model(nested)
