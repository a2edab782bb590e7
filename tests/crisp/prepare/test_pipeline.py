"""A model prepared from end to end, killed and resumed, refreshed, refused."""

from __future__ import annotations

import json
import resource
import shutil
import signal
import subprocess
import sys
import time
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest

torch = pytest.importorskip("torch")
transformers = pytest.importorskip("transformers")

from safetensors.torch import load_file, save_file  # noqa: E402

from crisp.checkpoint.files import weights_digest  # noqa: E402
from crisp.errors import CrispError  # noqa: E402
from crisp.prepare.importance import NeuronOrder  # noqa: E402
from crisp.prepare.pipeline import prepare, refresh  # noqa: E402
from crisp.prepare.request import PreparationRequest  # noqa: E402
from crisp.prepare.roles import read_method  # noqa: E402
from crisp.profile.metadata import FILE, Metadata  # noqa: E402

ROOT = Path(__file__).parents[3]
TOKENIZER = ROOT / "traces" / "tiny-mixtral"
TEXTS = [
    ROOT / "tests" / "data" / "texts" / "contract.md",
    ROOT / "tests" / "data" / "texts" / "traces.md",
]
ASKED = PreparationRequest(
    TEXTS, read_method("grouped(passes=2,least=4)"), NeuronOrder(), 128, tokens=1024, block=16
)
LAYERS, EXPERTS = 3, 4


def silent(stage: str, done: int, total: int) -> None:
    pass


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A small Mixtral with random weights, in bfloat16."""
    config = transformers.MixtralConfig(
        vocab_size=2048,
        hidden_size=32,
        intermediate_size=64,
        num_hidden_layers=LAYERS,
        num_attention_heads=2,
        num_key_value_heads=1,
        num_local_experts=EXPERTS,
        max_position_embeddings=512,
        initializer_range=0.3,
    )
    torch.manual_seed(0)
    folder = tmp_path_factory.mktemp("source") / "toy"
    transformers.MixtralForCausalLM(config).to(torch.bfloat16).save_pretrained(folder)
    for name in ("tokenizer.json", "tokenizer_config.json"):
        (folder / name).write_bytes((TOKENIZER / name).read_bytes())
    return folder


@pytest.fixture(scope="module")
def prepared(model: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    out = tmp_path_factory.mktemp("prepared") / "model"
    prepare(model, out, ASKED, silent)
    return out


def plain_logits(folder: Path) -> Any:
    """As anybody's transformers computes them, in float64."""
    model = transformers.AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float64).eval()
    model.set_experts_implementation("eager")
    with torch.inference_mode():
        return model(input_ids=torch.arange(7, 71)[None] * 29 % 2048, use_cache=False).logits


def same(a: Metadata, b: Metadata, apart: set[str] = frozenset()) -> None:  # type: ignore[assignment]
    """All but the time it took, and the provenance entries in ``apart``."""
    for name, value in vars(a).items():
        if isinstance(value, np.ndarray):
            np.testing.assert_array_equal(value, getattr(b, name), err_msg=name)
        elif name != "provenance":
            assert value == getattr(b, name), name
    left, right = dict(a.provenance), dict(b.provenance)
    for key in {"seconds", *apart}:
        left.pop(key, None)
        right.pop(key, None)
    assert left == right


def test_plain_transformers_loads_it_and_computes_the_same(model: Path, prepared: Path) -> None:
    assert (plain_logits(prepared) - plain_logits(model)).abs().max() < 1e-10


def test_files_keep_their_names_and_sizes(model: Path, prepared: Path) -> None:
    sizes = {path.name: path.stat().st_size for path in model.iterdir()}
    found_sizes = {path.name: path.stat().st_size for path in prepared.iterdir()}
    assert found_sizes.pop(FILE) < 2_000_000
    assert found_sizes.pop("README.md")
    assert found_sizes == sizes
    page = (prepared / "README.md").read_text()
    assert page.startswith("# toy, prepared\n")
    assert "neurons by importance, roles grouped(passes=2,share=0.25,seed=0,least=4) of" in page
    assert not list(prepared.parent.glob("*.partial"))


def test_the_metadata_says_what_was_found_and_how(model: Path, prepared: Path) -> None:
    metadata = Metadata.load(prepared / FILE)
    assert metadata.weights == weights_digest(prepared) != weights_digest(model)
    assert (metadata.spec.name, metadata.spec.block, metadata.order) == ("toy", 16, "importance")
    facts = metadata.provenance
    assert facts["tokens"] == 1024
    assert [text.partition(" ")[0] for text in facts["texts"]] == ["contract.md", "traces.md"]
    stages = {"calibration", "roles", "rescaling", "sensitivities", "reordering"}
    assert set(facts["seconds"]) == stages
    assert facts["saliency"] == {"tokens": 1024, "least": 16}
    sensitivities, rescaling = metadata.sensitivities, metadata.rescaling
    assert sensitivities is not None and (sensitivities > 0).all()
    assert rescaling is not None and (rescaling[:, :, [0, -1]] == 1).all()
    few = metadata.expert_counts < 16
    assert (rescaling[few] == 1).all() and (rescaling[~few][:, 1:-1] != 1).any(axis=1).all()
    assert (metadata.expert_counts.sum(1) == 2 * 1024).all()  # top-2 in every layer
    assert (metadata.pair_counts.sum((1, 2)) == 1024).all()
    roles = facts["roles"]
    assert 0 < roles["measured"] <= roles["pairs"] == int((metadata.pair_counts > 0).sum())
    # Leading neurons hold most of the importance, and more than half of them all of it at the end.
    reached = metadata.expert_counts > 0
    assert (np.diff(metadata.curves[reached]) >= 0).all()
    np.testing.assert_allclose(metadata.curves[reached][:, -1], 1, rtol=1e-6)
    assert (metadata.curves[reached][:, 15] > 0.5).all()
    # The same importance orders blocks: the first of an expert contributes more than the last.
    assert (metadata.contributions[reached][:, 0] > metadata.contributions[reached][:, -1]).all()
    unreached = {(layer, expert) for layer, expert in facts["unreached"]}
    assert unreached == set(zip(*map(np.ndarray.tolist, np.nonzero(~reached)), strict=True))


@pytest.mark.parametrize(
    ("stage", "at"),
    [
        ("calibration", 0.5),
        ("roles", 0.6),
        ("rescaling", 0.5),
        ("sensitivities", 0.5),
        ("reordering", 0.0),
    ],
)
def test_it_goes_on_after_an_interruption(
    model: Path, prepared: Path, tmp_path: Path, stage: str, at: float
) -> None:
    out = tmp_path / "model"

    def interrupt(now: str, done: int, total: int) -> None:
        if now == stage and done >= at * total:
            raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        prepare(model, out, ASKED, interrupt)
    assert not out.exists()
    first: dict[str, float] = {}

    def watch(now: str, done: int, total: int) -> None:
        first.setdefault(now, done / total)

    prepare(model, out, ASKED, watch)
    if stage != "calibration":
        assert "calibration" not in first  # done before, not repeated
    if stage == "reordering":
        assert first.keys() == {"reordering"}
    same(Metadata.load(out / FILE), Metadata.load(prepared / FILE))
    assert weights_digest(out) == weights_digest(prepared)
    assert [path.name for path in tmp_path.iterdir()] == ["model"]


def command(model: Path, out: Path) -> list[str]:
    options = ["--roles", "grouped(passes=2,least=4)", "--window", "128", "--tokens", "1024"]
    texts = ["--text", *map(str, TEXTS)]
    return [
        *(sys.executable, "-m", "crisp", "prepare", str(model), *texts, *options),
        *("--block", "16", "--out", str(out)),
    ]


def waited(what: Callable[[], Any]) -> None:
    end = time.monotonic() + 600  # ten seconds do on an idle machine
    while not what():
        assert time.monotonic() < end
        time.sleep(0.02)


@pytest.mark.slow
def test_a_kill_costs_the_layer_under_way(model: Path, prepared: Path, tmp_path: Path) -> None:
    out = tmp_path / "model"
    work = tmp_path / "model.partial"
    process = subprocess.Popen(command(model, out), cwd=ROOT, stderr=subprocess.PIPE)
    waited(lambda: (work / "roles-1.npy").exists() or process.poll() is not None)
    process.send_signal(signal.SIGKILL)
    process.communicate()
    times = {path.name: path.stat().st_mtime_ns for path in work.glob("*.np*")}
    assert {"calibration.npz", "roles-0.npy", "roles-1.npy"} <= set(times)
    assert not out.exists()

    process = subprocess.Popen(command(model, out), cwd=ROOT, stdout=subprocess.PIPE)
    waited(lambda: (work / "roles-2.npy").exists() or process.poll() is not None)
    now = {path.name: path.stat().st_mtime_ns for path in work.glob("roles-*.npy")}
    printed, _ = process.communicate()
    assert process.returncode == 0
    assert all(now.get(name, when) == when for name, when in times.items() if "roles" in name)
    assert f"{out}: toy, prepared".encode() in printed
    same(Metadata.load(out / FILE), Metadata.load(prepared / FILE))


def test_losses_of_widths_are_measured_layer_by_layer(model: Path, tmp_path: Path) -> None:
    """Of neurons in their new order; a refresh from the same text measures the same."""
    request = replace(ASKED, method=read_method("weight"), width_losses=256)
    out, work = tmp_path / "out", tmp_path / "out.partial"
    progress: list[tuple[int, int]] = []

    def interrupt(stage: str, done: int, total: int) -> None:
        if stage == "widths" and done > 10:  # a layer has 4 experts, 2 roles
            raise KeyboardInterrupt

    def watch(stage: str, done: int, total: int) -> None:
        if stage == "widths":
            progress.append((done, total))

    with pytest.raises(KeyboardInterrupt):
        prepare(model, out, request, interrupt)
    assert [path.name for path in work.glob("widths-*")] == ["widths-0.npz"]
    metadata = prepare(model, out, request, watch)
    assert progress == [(done, 16) for done in range(1, 17)]
    facts = metadata.provenance
    assert facts["width_losses"] == {"tokens": 256, "widths": [0, 1, 2, 3], "least": 16}
    assert "widths" in facts["seconds"]
    losses, counts = metadata.width_losses, metadata.role_counts
    assert losses is not None and counts is not None
    assert (counts.sum(axis=1) == 256).all()  # top-2: every token has one in each role
    assert np.array_equal(np.isnan(losses).all(axis=3), counts < 16)
    assert (losses[counts >= 16][:, 0] > 0).all() and (losses[counts >= 16][:, -1] == 0).all()
    same(Metadata.load(out / FILE), metadata)
    again = refresh(out, request, silent)
    np.testing.assert_array_equal(again.role_counts, counts)
    np.testing.assert_allclose(again.width_losses, losses, rtol=1e-3, atol=1e-7)
    assert refresh(out, replace(request, width_losses=None), silent).width_losses is None


def test_roles_may_be_left_to_the_router(model: Path, tmp_path: Path) -> None:
    request = replace(ASKED, method=read_method("weight"))
    metadata = prepare(model, tmp_path / "out", request, silent)
    assert (metadata.profile().dominant == -1).all()
    assert metadata.provenance["roles"]["measured"] == 0 < metadata.provenance["roles"]["pairs"]


def test_layer_by_layer_gives_the_same_model(model: Path, tmp_path: Path) -> None:
    request = replace(ASKED, method=read_method("local"))
    whole = prepare(model, tmp_path / "whole", request, silent)
    parts = prepare(model, tmp_path / "parts", replace(request, layerwise=True), silent)
    # Inputs are of neurons in the old order and the new, whose sums round otherwise.
    np.testing.assert_allclose(parts.rescaling, whole.rescaling, rtol=2**-10)
    np.testing.assert_allclose(parts.sensitivities, whole.sensitivities, rtol=1e-2)
    apart = {"sensitivities": whole.sensitivities, "rescaling": whole.rescaling}
    same(replace(parts, **apart), whole, {"layerwise"})
    assert parts.provenance["layerwise"] is True


def test_refreshing_from_the_same_text_finds_the_same(prepared: Path) -> None:
    before = Metadata.load(prepared / FILE)
    contents = {path: path.read_bytes() for path in prepared.iterdir()}
    after = refresh(prepared, ASKED, silent)
    for name in ("expert_counts", "pair_counts"):
        np.testing.assert_array_equal(getattr(after, name), getattr(before, name))
    # The sums of another order of neurons round otherwise.
    np.testing.assert_allclose(after.curves, before.curves, rtol=1e-5)
    np.testing.assert_allclose(after.contributions, before.contributions, rtol=1e-4, atol=1e-6)
    np.testing.assert_allclose(after.rescaling, before.rescaling, rtol=2**-10)  # of float16
    # Where two blocks are nearly equal, rounding decides which of them is left out.
    np.testing.assert_allclose(after.sensitivities, before.sensitivities, rtol=1e-2)
    assert (after.weights, after.order) == (before.weights, before.order)
    assert after.provenance["refreshed"] is True
    ordered_from = after.provenance["ordered_from"]
    assert ordered_from == {k: before.provenance[k] for k in ("texts", "tokens", "window")}
    assert {path: path.read_bytes() for path in prepared.iterdir()} == contents


def test_refreshing_from_other_text_finds_other_counts(prepared: Path) -> None:
    request = replace(
        ASKED, texts=[ROOT / "crisp" / "model" / "config.py"], method=read_method("local")
    )
    after = refresh(prepared, request, silent)
    assert not np.array_equal(after.pair_counts, Metadata.load(prepared / FILE).pair_counts)


def test_refreshing_a_model_whose_weights_changed_is_refused(
    prepared: Path, tmp_path: Path
) -> None:
    folder = tmp_path / "model"
    folder.mkdir()
    for path in prepared.iterdir():
        (folder / path.name).write_bytes(path.read_bytes())
    weights = bytearray((folder / "model.safetensors").read_bytes())
    weights[-1] ^= 1
    (folder / "model.safetensors").write_bytes(weights)
    with pytest.raises(CrispError, match="are not those the metadata belongs to"):
        refresh(folder, ASKED, silent)


def test_preparing_a_prepared_model_is_refused(prepared: Path, tmp_path: Path) -> None:
    with pytest.raises(CrispError, match="is prepared already"):
        prepare(prepared, tmp_path / "again", ASKED, silent)
    assert not list(tmp_path.iterdir())


def copied(model: Path, folder: Path) -> Path:
    folder.mkdir()
    for path in model.iterdir():
        (folder / path.name).write_bytes(path.read_bytes())
    return folder


def without(name: str) -> Callable[[Path], None]:
    return lambda folder: (folder / name).unlink()


def with_config(**changes: Any) -> Callable[[Path], None]:
    def change(folder: Path) -> None:
        path = folder / "config.json"
        path.write_text(json.dumps(json.loads(path.read_text()) | changes))

    return change


@pytest.mark.parametrize(
    ("damage", "words"),
    [
        (without("tokenizer.json"), "its tokenizer"),
        (without("model.safetensors"), "no weights|safetensors"),
        (without("config.json"), "config.json"),
        (with_config(quantization_config={"quant_method": "awq"}), "awq"),
        (with_config(model_type="unheard_of"), "unheard_of"),
        (with_config(num_local_experts=9), "n_experts is 9, but the tensors have 4"),
    ],
)
def test_a_damaged_model_is_refused_in_one_line(
    model: Path, damage: Callable[[Path], None], words: str, tmp_path: Path
) -> None:
    folder = copied(model, tmp_path / "source")
    damage(folder)
    with pytest.raises(CrispError, match=words) as found:
        prepare(folder, tmp_path / "out", ASKED, silent)
    assert "\n" not in str(found.value)
    assert not (tmp_path / "out").exists()


@pytest.mark.parametrize(
    ("asked", "words"),
    [
        ({"texts": [ROOT / "missing.txt"]}, "missing.txt: no such file"),
        ({"texts": [ROOT / "crisp" / "__main__.py"]}, "__main__.py: .* shorter than a window"),
        ({"window": 513}, "--window 513: the model's context is 512"),
        ({"block": 336}, "block is 336"),
    ],
)
def test_what_cannot_be_done_is_refused(
    model: Path, asked: Any, words: str, tmp_path: Path
) -> None:
    with pytest.raises(CrispError, match=words):
        prepare(model, tmp_path / "out", replace(ASKED, **asked), silent)
    assert not (tmp_path / "out").exists()


def test_a_folder_that_is_not_empty_is_left_alone(model: Path, tmp_path: Path) -> None:
    (tmp_path / "note").write_text("mine")
    with pytest.raises(CrispError, match="is not empty"):
        prepare(model, tmp_path, ASKED, silent)
    assert [path.name for path in tmp_path.iterdir()] == ["note"]


def test_another_request_does_not_go_on_with_the_first(model: Path, tmp_path: Path) -> None:
    def interrupt(stage: str, done: int, total: int) -> None:
        if stage == "roles":
            raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        prepare(model, tmp_path / "out", ASKED, interrupt)
    with pytest.raises(CrispError, match=r"out\.partial: holds a preparation begun with other"):
        prepare(model, tmp_path / "out", replace(ASKED, tokens=4096), silent)


def test_a_mistake_does_not_stand_in_the_way_of_the_corrected_command(
    model: Path, tmp_path: Path
) -> None:
    for wrong in ({"window": 513}, {"texts": [ROOT / "crisp" / "__main__.py"]}):
        with pytest.raises(CrispError):
            prepare(model, tmp_path / "out", replace(ASKED, **wrong), silent)
        assert not list(tmp_path.iterdir())
    folder = copied(model, tmp_path / "source")
    weights = load_file(folder / "model.safetensors")
    name = next(name for name in weights if "experts.1.w2" in name)
    good = weights[name].clone()
    weights[name][0, 0] = float("nan")
    save_file(weights, folder / "model.safetensors", {"format": "pt"})
    with pytest.raises(CrispError, match="not finite"):
        prepare(folder, tmp_path / "out", ASKED, silent)
    weights[name] = good
    save_file(weights, folder / "model.safetensors", {"format": "pt"})
    prepare(folder, tmp_path / "out", ASKED, silent)


def test_what_others_left_beside_the_result_is_left_alone(model: Path, tmp_path: Path) -> None:
    work = tmp_path / "out.partial"
    work.mkdir()
    (work / "precious").write_text("mine")
    with pytest.raises(CrispError, match=r"out\.partial: is in the way"):
        prepare(model, tmp_path / "out", ASKED, silent)
    assert (work / "precious").read_text() == "mine"
    shutil.rmtree(work)
    work.symlink_to(copied(model, tmp_path / "source"))
    with pytest.raises(CrispError, match="is in the way"):
        prepare(model, tmp_path / "out", ASKED, silent)


def test_one_process_at_a_time_prepares(model: Path, tmp_path: Path) -> None:
    def inside(*_: Any) -> None:
        prepare(model, tmp_path / "out", ASKED, silent)

    with pytest.raises(CrispError, match="another process is preparing there"):
        prepare(model, tmp_path / "out", ASKED, inside)


def test_a_kill_while_tidying_up_leaves_a_finished_model(
    model: Path, prepared: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def killed(path: Path) -> None:
        raise KeyboardInterrupt

    with monkeypatch.context() as patch, pytest.raises(KeyboardInterrupt):
        patch.setattr("crisp.prepare.folder.shutil.rmtree", killed)
        prepare(model, tmp_path / "out", ASKED, silent)
    assert (tmp_path / "out.partial").exists()
    same(prepare(model, tmp_path / "out", ASKED, silent), Metadata.load(prepared / FILE))
    assert [path.name for path in tmp_path.iterdir()] == ["out"]


def test_the_result_does_not_go_into_the_model(model: Path, tmp_path: Path) -> None:
    folder = copied(model, tmp_path / "source")
    for out in (folder / "sub", folder):
        with pytest.raises(CrispError, match="is inside the model"):
            prepare(folder, out, ASKED, silent)
    (tmp_path / "loop").symlink_to(tmp_path / "loop")
    with pytest.raises(CrispError, match="cannot be followed"):
        prepare(folder, tmp_path / "loop", ASKED, silent)
    with pytest.raises(CrispError, match="is no name in UTF-8"):
        prepare(folder, tmp_path / "x\udcff", ASKED, silent)


def test_a_tokenizer_of_another_model_is_refused(model: Path, tmp_path: Path) -> None:
    folder = copied(model, tmp_path / "source")
    weights = load_file(folder / "model.safetensors")
    for name in ("model.embed_tokens.weight", "lm_head.weight"):
        if name in weights:
            weights[name] = weights[name][:500].clone()
    save_file(weights, folder / "model.safetensors", {"format": "pt"})
    with_config(vocab_size=500)(folder)
    for request in (ASKED, replace(ASKED, method=read_method("local"), layerwise=True)):
        with pytest.raises(CrispError, match=r"its tokenizer gives token .* knows 500 tokens"):
            prepare(folder, tmp_path / "out", request, silent)


def test_a_full_disk_keeps_the_old_metadata(prepared: Path, tmp_path: Path) -> None:
    before = (prepared / FILE).read_bytes()
    metadata = Metadata.load(prepared / FILE)
    limits = resource.getrlimit(resource.RLIMIT_FSIZE)
    handler = signal.signal(signal.SIGXFSZ, signal.SIG_IGN)
    try:
        resource.setrlimit(resource.RLIMIT_FSIZE, (500, limits[1]))
        with pytest.raises(CrispError, match=r"crisp\.safetensors: cannot be written"):
            metadata.save(prepared / FILE)
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, limits)
        signal.signal(signal.SIGXFSZ, handler)
    assert (prepared / FILE).read_bytes() == before


def test_layer_by_layer_goes_with_local_roles_only() -> None:
    with pytest.raises(CrispError, match="--layerwise goes with --roles local or weight"):
        replace(ASKED, layerwise=True)
