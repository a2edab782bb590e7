"""Every plugin of docs/extending.md works, in every command of the page."""

from __future__ import annotations

import re
from pathlib import Path
from types import SimpleNamespace

import pytest

from crisp.adapter import expert_layout
from crisp.errors import CrispError
from crisp.extensions import load_file
from tests.consoles import check_console
from tests.plugged import plugged

torch = pytest.importorskip("torch")
pytest.importorskip("transformers")

ROOT = Path(__file__).parents[2]
PAGE = (ROOT / "docs" / "extending.md").read_text(encoding="utf-8")
FILES = {
    text[2:].partition(".py")[0] + ".py": text
    for text in re.findall(r"```python\n(.*?)```", PAGE, re.DOTALL)
}


@pytest.fixture(autouse=True)
def files(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "traces").symlink_to(ROOT / "traces")
    monkeypatch.chdir(tmp_path)
    for name, text in FILES.items():
        Path(name).write_text(text, encoding="utf-8")
    Path("routing.txt").write_text("0 0 0 3 1\n0 0 1 2 0\n0 1 0 1 2\n0 1 1 0 3\n", encoding="utf-8")


def test_the_console(capsys: pytest.CaptureFixture[str]) -> None:
    with plugged():
        assert len(check_console(PAGE, capsys)) == 6


class MyMoeBlock(torch.nn.Module):  # type: ignore[misc, name-defined]
    def __init__(self) -> None:
        super().__init__()
        self.experts = torch.nn.Identity()
        self.experts.num_experts = 4


def test_the_layout() -> None:
    model = torch.nn.Module()
    model.config = SimpleNamespace(model_type="mine", is_encoder_decoder=False)
    model.config.get_text_config = lambda: model.config
    model.layers = torch.nn.ModuleList([torch.nn.Module() for _ in range(3)])
    for layer in (1, 2):
        model.layers[layer].mlp = MyMoeBlock()
    with pytest.raises(CrispError, match="has no routed experts"):
        expert_layout(model)
    with plugged():
        load_file(Path("my_layout.py"))
        layout = expert_layout(model)
    assert (layout.n_layers, layout.n_experts) == (3, 4)
    assert [(layer.index, layer.name) for layer in layout.layers] == [
        (1, "layers.1.mlp.experts"), (2, "layers.2.mlp.experts"),
    ]  # fmt: skip
    assert layout.layers[0].block is model.layers[1].mlp
    assert layout.layers[0].experts is model.layers[1].mlp.experts
