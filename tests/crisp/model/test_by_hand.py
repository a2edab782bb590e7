"""A geometry in a TOML file."""

from __future__ import annotations

import os
from fractions import Fraction
from pathlib import Path

import pytest

from crisp.errors import CrispError
from crisp.model.geometry import read_named
from crisp.model.spec import ModelSpec

TEXT = """
layers = 3
experts = 8
top_k = 2
d_model = 512
d_ff = 320
dense_params = 1000
"""


def written(folder: Path, text: str) -> Path:
    path = folder / "mine.toml"
    path.write_text(text)
    return path


def test_a_geometry_stated_by_hand(tmp_path: Path) -> None:
    path = written(tmp_path, TEXT)
    spec = ModelSpec.named(path)
    assert (spec.name, spec.n_layers, spec.moe_layers) == ("mine", 3, (0, 1, 2))
    assert (spec.n_experts, spec.top_k, spec.d_model, spec.d_ff) == (8, 2, 512, 320)
    assert (spec.bits, spec.matrices, spec.biases, spec.block) == (16, 3, False, 48)
    assert spec.dense_params == (1000, 1000, 1000)
    assert read_named(str(path)).source == "a geometry stated by hand"
    assert read_named(path, Fraction(4)).spec.bits == 4


def test_everything_can_be_stated(tmp_path: Path) -> None:
    more = """
name = "a model"
moe_layers = [1, 2]
gate = false
biases = true
bits = [4.25, 8]
dtype_bits = 32
block = 64
"""
    text = TEXT.replace("= 1000", "= [3, 2, 1]") + more
    spec = ModelSpec.named(written(tmp_path, text))
    assert (spec.name, spec.moe_layers, spec.matrices, spec.biases) == ("a model", (1, 2), 2, True)
    assert spec.layer_bits == (Fraction(17, 4), Fraction(8))
    assert spec.bits == Fraction(49, 8)
    assert (spec.dtype_bits, spec.block, spec.dense_params) == (32, 64, (3, 2, 1))
    assert ModelSpec.from_dict(spec.to_dict()) == spec


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("layers = ", "is not TOML"),
        (TEXT.replace("experts = 8", ""), "experts: found nothing, expected a whole number"),
        (TEXT.replace("dense_params = 1000", ""), "dense_params: found nothing"),
        (TEXT + "layer = 3", "unknown key 'layer'; did you mean 'layers'?"),
        (TEXT + "bits = [4, 8]", "bits: found .* expected 3 numbers"),
        (TEXT + "bits = nan", "bits: found"),
        (TEXT + "bits = 1e400", "bits: found"),
        (TEXT + "bits = 0", "bits: found"),
        (TEXT + "moe_layers = [5]", "moe_layers is"),
        (TEXT.replace("layers = 3", "layers = 100000000"), "layers: found 100000000"),
        (TEXT + "gate = 1", "gate: found 1, expected true or false"),
        (TEXT + "name = 3", "name: found 3"),
    ],
)
def test_what_is_wrong_is_said_in_one_line(tmp_path: Path, text: str, message: str) -> None:
    with pytest.raises(CrispError, match=message) as error:
        ModelSpec.named(written(tmp_path, text))
    assert "\n" not in str(error.value)


def test_a_pipe_without_a_writer_is_not_waited_for(tmp_path: Path) -> None:
    os.mkfifo(tmp_path / "pipe.toml")
    with pytest.raises(CrispError, match=r"pipe\.toml: is not an ordinary file"):
        ModelSpec.named(tmp_path / "pipe.toml")


def test_a_file_that_is_not_there(tmp_path: Path) -> None:
    with pytest.raises(CrispError, match=r"none\.toml: cannot be read"):
        ModelSpec.named(tmp_path / "none.toml")
