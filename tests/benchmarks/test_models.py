"""Every command on tiny random models: a few layouts quickly, every family when there is time."""

from __future__ import annotations

from pathlib import Path

import pytest

pytest.importorskip("torch", reason="needs the extra hf")
pytest.importorskip("transformers", reason="needs the extra hf")

from benchmarks.models.every import try_all
from benchmarks.models.page import PAGE, between, insert, render
from benchmarks.models.tiny import model_types
from benchmarks.models.trial import Trial, try_family

ROOT = Path(__file__).resolve().parents[2]
LAYOUTS = {
    "glm4_moe": "silu, first layers dense",  # sigmoid and grouped router
    "gpt_oss": "gpt_oss, biases, transposed, interleaved",
    "nemotron_h": "relu2, no gate",
    "gemma4_text": "gelu_tanh, on the layer itself",
    "llama4_text": "silu, transposed, weights scale inputs",
    "granitemoe": "silu",  # matrices of names of their own on disk
}


@pytest.mark.seconds
@pytest.mark.parametrize("model_type", LAYOUTS)
def test_the_whole_way(model_type: str, tmp_path: Path) -> None:
    """Also that widths are prefixes, and that text and logits are those of transformers."""
    trial = try_family(model_type, tmp_path)
    assert trial is not None
    assert trial.refusals == {}
    assert trial.layout.startswith(LAYOUTS[model_type])


def test_a_family_without_experts_is_left_out(tmp_path: Path) -> None:
    assert try_family("llama", tmp_path) is None


def test_the_table() -> None:
    reason = "its Xs are not understood"
    told = render([Trial("b", "", {"pack": reason, "generate": reason}), Trial("a", "silu")])
    assert told.startswith("Of 2 families with routed experts, 1 go the whole way.\n")
    assert "| a | silu | yes | yes | yes | yes | yes | yes |\n" in told
    assert "| b |  | yes | yes | yes | yes | no | no |\n" in told
    assert told.endswith(f"- b, pack, generate: {reason}\n")
    alone = render([Trial("c", "silu", untried=True), Trial("d", "", {"pack": reason}, True)])
    assert alone.startswith("Of 0 families")
    assert alone.endswith(f"| c | silu |  |\n| d |  | {reason} |\n")
    page = insert("# Models\n\nBy hand.\n", told)
    assert page.startswith("# Models\n\nBy hand.\n\n<!--")
    assert between(page) == told
    assert insert(page, told) == page


@pytest.mark.slow
def test_the_page_is_what_happens() -> None:
    page = (ROOT / PAGE).read_text(encoding="utf-8")
    assert between(page) == render(try_all(model_types()))
