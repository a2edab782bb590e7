"""crisp.safetensors: what it holds, its size, and what is refused."""

import json
import subprocess
import sys
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from safetensors import safe_open
from safetensors.numpy import load_file, save_file

from crisp.errors import CrispError
from crisp.model.spec import ModelSpec
from crisp.profile.metadata import POINTS, Metadata


def made(spec: ModelSpec, seed: int = 0) -> Metadata:
    """Metadata of the right shapes, every pair counted and measured."""
    draw = np.random.default_rng(seed)
    moe = np.isin(np.arange(spec.n_layers), spec.moe_layers)
    layers, n = spec.n_layers, spec.n_experts
    pairs = np.triu(draw.integers(1, 10**6, (layers, n, n)), 1) * moe[:, None, None]
    increase = draw.random((layers, n, n)).astype(np.float32)
    increase[:, np.arange(n), np.arange(n)] = np.nan
    increase[~moe] = np.nan
    return Metadata(
        spec=spec,
        weights="ab" * 32,
        order="importance",
        expert_counts=(pairs + pairs.transpose(0, 2, 1)).sum(2),
        pair_counts=pairs,
        increase=increase,
        curves=draw.random((layers, n, POINTS)).astype(np.float32),
        contributions=draw.random((layers, n, spec.n_blocks)).astype(np.float32),
        router_weights=draw.random((layers, n, 32)).astype(np.float16),
        provenance={"texts": ["a.txt sha256:00"], "tokens": 5},
    )


def with_saliency(metadata: Metadata, seed: int = 1) -> Metadata:
    """With sensitivities of layers and factors of widths."""
    spec, draw = metadata.spec, np.random.default_rng(seed)
    rescaling = draw.uniform(0.5, 3, (spec.n_layers, spec.n_experts, spec.n_blocks + 1))
    rescaling[:, :, [0, -1]] = 1
    sensitivities = draw.random(spec.n_layers).astype(np.float32)
    return replace(metadata, sensitivities=sensitivities, rescaling=rescaling.astype(np.float16))


@pytest.mark.parametrize("name", ["mixtral-8x7b", "deepseek-moe-16b"])
def test_it_is_smaller_than_two_megabytes(name: str, tmp_path: Path) -> None:
    """With everything that may be in it."""
    spec = ModelSpec.named(name)
    moments = np.ones((spec.n_layers, spec.d_model), np.float16)
    assert spec.n_blocks == 8
    with_saliency(replace(with_losses(spec), input_moments=moments)).save(tmp_path / "m")
    assert (tmp_path / "m").stat().st_size < 2_000_000


def test_magnitudes_have_a_file_of_their_own(tmp_path: Path) -> None:
    spec, path = ModelSpec.named("mixtral-8x7b").first_layers(2), tmp_path / "crisp.safetensors"
    beside = tmp_path / "crisp.magnitudes.safetensors"
    magnitudes = np.random.default_rng(0).normal(size=(2, 8, 4097)).astype(np.float16)
    plain = made(spec)
    saved = replace(plain, magnitudes=magnitudes)
    saved.save(path)
    size = path.stat().st_size
    np.testing.assert_array_equal(Metadata.load(path).profile().magnitudes, magnitudes)
    replace(plain, weights="cd" * 32).save(tmp_path / "other.safetensors")
    beside.rename(tmp_path / "other.magnitudes.safetensors")
    with pytest.raises(CrispError, match=r"other.magnitudes.safetensors: is of other weights than"):
        Metadata.load(tmp_path / "other.safetensors")
    replace(saved, magnitudes=magnitudes[:1]).save(path)
    with pytest.raises(CrispError, match=r"magnitudes is float16 \(1, 8, 4097\), expected float16"):
        Metadata.load(path)
    plain.save(path)  # what was measured before goes with it
    assert not beside.exists() and path.stat().st_size == size
    assert Metadata.load(path).magnitudes is None


def test_sensitivities_and_rescaling_are_kept_together(tmp_path: Path) -> None:
    plain = made(ModelSpec.named("mixtral-8x7b"))
    saved = with_saliency(plain)
    saved.save(tmp_path / "m")
    profile = Metadata.load(tmp_path / "m").profile()
    assert profile.sensitivities is not None and profile.rescaling is not None
    np.testing.assert_array_equal(profile.sensitivities, saved.sensitivities)
    np.testing.assert_array_equal(profile.rescaling, saved.rescaling)
    assert (profile.sensitivities.dtype, profile.rescaling.dtype) == (np.float32, np.float32)
    plain.save(tmp_path / "m")  # as it was before they were measured
    profile = Metadata.load(tmp_path / "m").profile()
    assert profile.sensitivities is None and profile.rescaling is None
    for one in ("sensitivities", "rescaling"):
        replace(saved, **{one: None}).save(tmp_path / "m")
        with pytest.raises(CrispError, match=f"m: lacks {one}$"):
            Metadata.load(tmp_path / "m")


@pytest.mark.parametrize(
    ("blocks", "factor", "words"),
    [
        (1, 0.25, "not from 0.5 to 3"),
        (1, 4, "not from 0.5 to 3"),
        (0, 2, "other than 1 at no block"),
        (-1, 2, "other than 1 at no block or at all"),
    ],
)
def test_factors_that_no_preparation_measures_are_refused(
    tmp_path: Path, blocks: int, factor: float, words: str
) -> None:
    saved = with_saliency(made(ModelSpec.named("mixtral-8x7b")))
    assert saved.rescaling is not None
    saved.rescaling[3, 2, blocks] = factor
    saved.save(tmp_path / "m")
    with pytest.raises(CrispError, match=f"m: rescaling: a factor .*{words}"):
        Metadata.load(tmp_path / "m")


def test_what_was_saved_is_loaded(tmp_path: Path) -> None:
    saved = made(ModelSpec.named("deepseek-moe-16b"))
    saved.save(tmp_path / "m")
    found = Metadata.load(tmp_path / "m")
    for field, value in vars(saved).items():
        if isinstance(value, np.ndarray):
            np.testing.assert_array_equal(getattr(found, field), value)
            assert getattr(found, field).dtype == value.dtype
        else:
            assert getattr(found, field) == value


def test_moments_are_kept_where_they_were_measured(tmp_path: Path) -> None:
    spec = ModelSpec.named("mixtral-8x7b")
    moments = np.random.default_rng(0).random((32, 4096)).astype(np.float16)
    replace(made(spec), input_moments=moments).save(tmp_path / "m")
    assert (tmp_path / "m").stat().st_size < 2_000_000
    found = Metadata.load(tmp_path / "m").moments()
    assert found is not None
    assert found.keys() == set(range(32))
    assert (found[7] == moments[7]).all()
    made(spec).save(tmp_path / "m")
    assert Metadata.load(tmp_path / "m").moments() is None
    replace(made(spec), input_moments=-moments).save(tmp_path / "m")
    with pytest.raises(CrispError, match="input_moments: a value that is negative or no number"):
        Metadata.load(tmp_path / "m")


def with_losses(spec: ModelSpec) -> Metadata:
    """With losses of widths, which may be unknown and, where they are measured, negative."""
    shape = (spec.n_layers, spec.n_experts, 2)
    losses = np.linspace(-1, 1, np.prod(shape) * (spec.n_blocks + 1), dtype=np.float32)
    losses = losses.reshape(*shape, -1)
    losses[0] = np.nan
    return replace(made(spec), width_losses=losses, role_counts=np.ones(shape, np.int64))


def test_losses_of_widths_are_kept_where_they_were_measured(tmp_path: Path) -> None:
    spec = ModelSpec.named("deepseek-moe-16b")
    saved = with_losses(spec)
    saved.save(tmp_path / "m")
    assert (tmp_path / "m").stat().st_size < 2_000_000
    found = Metadata.load(tmp_path / "m")
    np.testing.assert_array_equal(found.width_losses, saved.width_losses)
    profile = found.profile()
    assert profile.width_losses is found.width_losses
    assert profile.role_counts is found.role_counts
    made(spec).save(tmp_path / "m")
    assert Metadata.load(tmp_path / "m").width_losses is None


@pytest.mark.parametrize(
    ("change", "words"),
    [
        ({"role_counts": None}, "lacks role_counts"),
        ({"width_losses": None}, "lacks width_losses"),
        ({"width_losses": np.zeros((32, 8, 2, 8), np.float32)}, "width_losses is float32"),
        ({"width_losses": np.full((32, 8, 2, 9), np.inf, np.float32)}, "an infinite value"),
        ({"role_counts": np.full((32, 8, 2), -1)}, "role_counts: a value"),
    ],
)
def test_damaged_losses_are_refused(change: dict[str, Any], words: str, tmp_path: Path) -> None:
    with_losses(ModelSpec.named("mixtral-8x7b")).save(tmp_path / "m")
    broken(tmp_path / "m", **change)
    with pytest.raises(CrispError, match=words):
        Metadata.load(tmp_path / "m")


def test_the_dominant_expert_is_the_one_whose_removal_costs_more(tmp_path: Path) -> None:
    saved = made(ModelSpec.named("mixtral-8x7b"))
    saved.increase[3, 1, 6], saved.increase[3, 6, 1] = 0.2, 0.5
    saved.increase[3, 2, 4] = np.nan
    roles = saved.profile().dominant
    assert roles is not None
    assert roles[3, 1, 6] == roles[3, 6, 1] == 6
    assert roles[3, 2, 4] == roles[3, 4, 2] == -1  # not measured: the router's weight decides
    assert saved.profile().digest() != replace(saved.profile(), dominant=None).digest()


def test_metadata_of_other_weights_is_refused() -> None:
    own = made(ModelSpec.named("mixtral-8x7b"))
    own.check_weights("ab" * 32, "model")
    with pytest.raises(CrispError, match=r"^model: its weights \(hash cdcdcdcdcdcd…\)"):
        own.check_weights("cd" * 32, "model")


def broken(path: Path, *, header: Any = None, **tensors: Any) -> None:
    """The file again, with another header or other tensors; None: without that one."""
    with safe_open(path, "np") as file:
        kept = json.loads(file.metadata()["crisp"])
    changed = {**kept, **header} if isinstance(header, dict) else header
    kept = {"crisp": json.dumps(kept if header is None else changed)}
    if isinstance(header, str):
        kept = {"crisp": header}
    content = {**load_file(path), **tensors}
    save_file({k: v for k, v in content.items() if v is not None}, path, kept)


def test_another_process_writes_the_same_bytes(tmp_path: Path) -> None:
    made(ModelSpec.named("mixtral-8x7b")).save(tmp_path / "a")
    again = (
        "import sys; from crisp.profile.metadata import Metadata; "
        "Metadata.load(sys.argv[1]).save(sys.argv[2])"
    )
    command = [sys.executable, "-c", again, str(tmp_path / "a"), str(tmp_path / "b")]
    subprocess.run(command, check=True, cwd=Path(__file__).parents[3])
    assert (tmp_path / "a").read_bytes() == (tmp_path / "b").read_bytes()


@pytest.mark.parametrize(
    ("change", "words"),
    [
        ({"header": {"version": 9}}, "is not metadata of a prepared model"),
        ({"header": [1]}, "is not metadata of a prepared model"),
        ({"header": "{"}, "its header is damaged"),
        ({"header": "[" * 100_000}, "its header is damaged"),
        ({"header": {"provenance": []}}, "its header is damaged: provenance is no dict"),
        ({"header": {"weights": None}}, "its header is damaged: weights is no str"),
        ({"curves": None}, "lacks curves"),
        ({"contributions": np.zeros((32, 8, 9), np.float32)}, "contributions is float32"),
        ({"expert_counts": np.zeros((32, 8), np.int32)}, "expert_counts is int32"),
        ({"curves": np.full((32, 8, POINTS), np.nan, np.float32)}, "curves: a value"),
        ({"increase": np.full((32, 8, 8), np.inf, np.float32)}, "increase: an infinite"),
        ({"expert_counts": np.full((32, 8), 1 << 62)}, "expert_counts: more tokens than"),
        ({"pair_counts": np.ones((32, 8, 8), np.int32)}, r"a combination \(i, j\) with i >= j"),
        ({"tiers": np.zeros((32, 8, 8), np.uint8)}, "tiers do not follow"),
    ],
)
def test_a_damaged_file_is_refused_in_one_line(
    change: dict[str, Any], words: str, tmp_path: Path
) -> None:
    path = tmp_path / "m.safetensors"
    made(ModelSpec.named("mixtral-8x7b")).save(path)
    broken(path, **change)
    with pytest.raises(CrispError, match=words) as found:
        Metadata.load(path)
    assert str(found.value).startswith(str(path))


def test_files_that_are_no_metadata_are_refused(tmp_path: Path) -> None:
    (tmp_path / "x").write_bytes(b"nonsense")
    with pytest.raises(CrispError, match="is no safetensors file"):
        Metadata.load(tmp_path / "x")
    with pytest.raises(CrispError, match="cannot be read"):
        Metadata.load(tmp_path / "missing")
