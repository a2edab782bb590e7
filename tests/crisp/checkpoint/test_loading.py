from __future__ import annotations

import json
import shutil
import sys
from pathlib import Path
from typing import Any

import pytest

from crisp.checkpoint.loading import load_model
from crisp.errors import CrispError

pytest.importorskip("torch", reason="needs the extra hf")
pytest.importorskip("transformers", reason="needs the extra hf")

TINY = Path(__file__).resolve().parents[3] / "traces" / "tiny-mixtral"


def damaged(tmp_path: Path, *, without: str = "", **config: Any) -> str:
    folder = tmp_path / "model"
    shutil.copytree(TINY, folder)
    for path in folder.glob(f"{without}*") if without else ():
        path.unlink()
    path = folder / "config.json"
    if config:
        path.write_text(json.dumps({**json.loads(path.read_text()), **config}))
    return str(folder)


@pytest.mark.parametrize(
    ("damage", "message"),
    [
        ({"without": "config"}, "has no config.json"),
        ({"without": "tokenizer"}, "its tokenizer"),
        ({"without": "model"}, "has no weights"),
        ({"num_local_experts": 9}, "the weights do not fit the config"),
        ({"model_type": "llama"}, "has no routed experts"),
        ({"model_type": "switch_transformers"}, "is no decoder-only language model"),
        ({"model_type": "no_such_family"}, "no_such_family"),
    ],
)
def test_a_checkpoint_that_cannot_be_used_gets_one_line(
    tmp_path: Path, damage: dict[str, Any], message: str
) -> None:
    folder = damaged(tmp_path, **damage)
    with pytest.raises(CrispError) as error:
        load_model(folder)
    assert str(error.value).startswith(f"{folder}: ")
    assert message in str(error.value)
    assert "\n" not in str(error.value)


def test_weights_that_are_missing_are_never_made_up(tmp_path: Path) -> None:
    from safetensors.torch import load_file, save_file

    folder = damaged(tmp_path)
    weights = load_file(f"{folder}/model.safetensors")
    del weights["model.layers.2.input_layernorm.weight"]
    save_file(weights, f"{folder}/model.safetensors", {"format": "pt"})
    with pytest.raises(CrispError, match=r"lacks 1 .* model\.layers\.2\.input_layernorm\.weight"):
        load_model(folder)


def test_a_missing_folder_is_said_at_once(tmp_path: Path) -> None:
    for name in (str(tmp_path / "none"), "./none", "none", f"{TINY}/config.json"):
        with pytest.raises(CrispError, match="is no folder"):
            load_model(name)


def test_a_missing_extra_is_named(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "torch", None)
    with pytest.raises(CrispError, match=r"torch is needed.*pip install '\.\[hf\]'"):
        load_model(str(TINY))
