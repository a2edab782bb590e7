"""docs/quantised.md says what docs/quantised.json holds, and formats are what it says of them."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

pytest.importorskip("torch")
pytest.importorskip("transformers")

from benchmarks.quantised.checkpoints import KINDS, write
from benchmarks.quantised.differences import differences
from benchmarks.quantised.page import CONTENT, PAGE, render
from crisp.checkpoint.quantised import open_decoded
from crisp.checkpoint.quantised.view import FORMATS

ROOT = Path(__file__).parents[2]


@pytest.fixture(scope="module")
def content() -> dict[str, Any]:
    found: dict[str, Any] = json.loads((ROOT / CONTENT).read_text(encoding="utf-8"))
    return found


def test_the_page_is_made_of_the_readings(content: dict[str, Any]) -> None:
    assert (ROOT / PAGE).read_text(encoding="utf-8") == render(content)


def test_every_format_is_on_the_page() -> None:
    page = (ROOT / PAGE).read_text(encoding="utf-8")
    for method in FORMATS:
        assert f"`{method}`" in page


def test_no_number_differs_from_the_libraries(content: dict[str, Any]) -> None:
    pytest.importorskip("compressed_tensors", reason="needs compressed-tensors")
    assert differences() == content["differences"]
    assert all(row["difference"] == 0 for row in content["differences"])


def test_memory_is_of_a_few_experts_however_large_the_checkpoint(content: dict[str, Any]) -> None:
    assert [row["kind"] for row in content["memory"]] == list(KINDS)
    assert all(row["checkpoint"] >= 2e9 for row in content["memory"])
    assert all(row["above"] < 3 * row["expert"] for row in content["memory"])


def test_what_is_said_of_the_fit_follows_from_the_figures(content: dict[str, Any]) -> None:
    for model in content["scales"]:
        rows = {row["name"]: row for row in model["rows"]}
        assert rows["int4, scales fitted"]["over_nearest"]["interval"][1] < 1
        for name in ("int4", "3 bits"):
            assert rows[f"{name}, scales fitted"]["error"] < rows[name]["error"]
        three, four = (rows[f"{name}, scales fitted"]["ratio"] for name in ("3 bits", "int4"))
        assert three["value"] - 1 > 2 * (four["value"] - 1)
        fitted, *searched = model["tried"]
        assert all(fitted["choice"]["value"] < row["choice"]["value"] for row in searched)
        assert all(row["heldout"]["value"] > 1 for row in searched)  # none gains


@pytest.mark.parametrize("kind", [kind for kind in KINDS if "GGUF" not in kind])
def test_random_checkpoints_are_of_their_format(
    tmp_path: Path, kind: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    import benchmarks.quantised.checkpoints as checkpoints

    monkeypatch.setattr(checkpoints, "D_MODEL", 256)
    monkeypatch.setattr(checkpoints, "D_FF", 512)
    checkpoint = open_decoded(write(kind, tmp_path, 1))
    with checkpoint.decoder() as decoder:
        for name in list(checkpoint.weights)[:3]:
            assert 0.001 < abs(decoder.read_matrix(name, 0)).mean() < 10
