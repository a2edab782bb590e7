"""A reordered checkpoint is the same function in other bytes of the same places."""

from __future__ import annotations

import json
import os
import resource
import shutil
import tracemalloc
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import numpy as np
import pytest

torch = pytest.importorskip("torch", reason="needs the extra hf")
transformers = pytest.importorskip("transformers", reason="needs the extra hf")

from safetensors import safe_open  # noqa: E402
from safetensors.torch import load_file, save_file  # noqa: E402

from crisp.adapter import ExpertLayout, Experts, expert_layout  # noqa: E402
from crisp.checkpoint.deepseek import register  # noqa: E402
from crisp.checkpoint.expert_tensors import expert_tensors  # noqa: E402
from crisp.checkpoint.files import open_checkpoint, weights_digest  # noqa: E402
from crisp.errors import CrispError  # noqa: E402
from crisp.prepare.reorder import reorder  # noqa: E402
from tests.crisp.adapter.test_families import CASES, SMALL, built  # noqa: E402

INDEX = "model.safetensors.index.json"
E, D, F, LAYERS = 4, 16, 24, 3  # of the Mixtral below; experts, d_model, d_ff, layers
GATE, UP, DOWN = (
    f"model.layers.1.block_sparse_moe.experts.2.{x}.weight" for x in ("w1", "w3", "w2")
)


def save(model: Any, folder: Path, **how: Any) -> Path:
    model.save_pretrained(folder, **how)
    return folder


def load(folder: Path, dtype: Any = torch.float64) -> Any:
    auto = transformers.AutoModelForCausalLM
    return auto.from_pretrained(folder, dtype=dtype, experts_implementation="eager").eval()


def skeleton(folder: Path) -> ExpertLayout:
    """What is known of a model before its weights are."""
    config = transformers.AutoConfig.from_pretrained(folder)
    with torch.device("meta"):
        model = transformers.AutoModelForCausalLM.from_config(config)
    return expert_layout(model)


def orders(found: ExpertLayout, seed: int = 0) -> dict[int, Any]:
    random = np.random.default_rng(seed)
    sizes = {layer.index: Experts.of(layer) for layer in found.layers}
    return {
        index: np.stack([random.permutation(x.d_ff) for _ in range(x.n_experts)])
        for index, x in sizes.items()
    }


def reordered(source: Path, out: Path, seed: int = 0, **more: Any) -> str:
    out.mkdir(exist_ok=True)
    layout = skeleton(source)
    return reorder(source, out, orders(layout, seed), layout, **more)


def mixtral(dtype: Any = torch.float32) -> Any:
    config = transformers.MixtralConfig(
        vocab_size=32,
        hidden_size=D,
        intermediate_size=F,
        num_hidden_layers=LAYERS,
        num_attention_heads=2,
        num_key_value_heads=1,
        num_local_experts=E,
        max_position_embeddings=64,
    )
    torch.manual_seed(0)
    return transformers.AutoModelForCausalLM.from_config(config).to(dtype)


@pytest.fixture(scope="module")
def original(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A Mixtral of three shards, one tensor per expert."""
    folder = save(mixtral(), tmp_path_factory.mktemp("model"), max_shard_size="28KB")
    assert len(list(folder.glob("model-*.safetensors"))) == 3
    return folder


@pytest.fixture
def source(original: Path, tmp_path: Path) -> Path:
    """A copy to spoil."""
    return Path(shutil.copytree(original, tmp_path / "source"))


def files(folder: Path) -> dict[str, bytes]:
    return {path.name: path.read_bytes() for path in folder.iterdir()}


def same_function(source: Path, out: Path) -> None:
    ids = torch.randint(3, 32, (2, 20), generator=torch.Generator().manual_seed(1))
    one, other = load(source), load(out)
    with torch.no_grad():  # the head by hand: some models make float32 of their logits
        before, after = (x.lm_head(x.model(ids, use_cache=False)[0]) for x in (one, other))
    assert before.dtype == torch.float64
    assert float(before.std()) > 0.01
    assert float((before - after).abs().max()) < 1e-10


# -- the same function, in every family and spelling -----------------------------------------------


@pytest.mark.parametrize("name", [*CASES, "deepseek"])
def test_every_family_computes_the_same_with_its_neurons_elsewhere(
    name: str, tmp_path: Path
) -> None:
    source, out = tmp_path / "source", tmp_path / "out"
    save(deepseek() if name == "deepseek" else built(name), source)
    assert reordered(source, out) == weights_digest(out) != weights_digest(source)
    same_function(source, out)
    # In the model's own modules every expert has got its permutation, and nothing else has changed.
    mine, theirs = load(source, torch.float32), load(out, torch.float32)
    layout = expert_layout(mine)
    for index, permutation in orders(layout).items():
        (layer,) = [layer for layer in layout.layers if layer.index == index]
        for expert, order in enumerate(permutation):
            Experts.of(layer).shuffle(expert, torch.from_numpy(order))
    after = theirs.state_dict()
    assert all(torch.equal(value, after[key]) for key, value in mine.state_dict().items())


def deepseek() -> Any:
    register()
    config = transformers.AutoConfig.for_model(
        "deepseek",
        **SMALL,
        moe_intermediate_size=16,
        n_routed_experts=6,
        n_shared_experts=1,
        num_experts_per_tok=3,
        first_k_dense_replace=1,
    )
    torch.manual_seed(0)
    return transformers.AutoModelForCausalLM.from_config(config)


def test_experts_fused_on_disk(tmp_path: Path) -> None:
    model, source, out = mixtral(torch.bfloat16), tmp_path / "source", tmp_path / "out"
    model.config.save_pretrained(source)
    save_file({k: v.clone() for k, v in model.state_dict().items()}, source / "model.safetensors")
    names = set(expert_tensors(open_checkpoint(source), skeleton(source)))
    assert names == {
        f"model.layers.{layer}.mlp.experts.{matrix}"
        for layer in range(LAYERS)
        for matrix in ("gate_up_proj", "down_proj")
    }
    assert reordered(source, out) == weights_digest(out)
    same_function(source, out)
    before, after = (load_file(x / "model.safetensors") for x in (source, out))
    order = orders(skeleton(source))[2][3]
    name = "model.layers.2.mlp.experts.gate_up_proj"
    assert torch.equal(after[name][3, :F], before[name][3, order])
    assert torch.equal(after[name][3, F:], before[name][3, F + order])


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16, torch.float32, torch.float64])
def test_neurons_are_where_the_permutation_puts_them(tmp_path: Path, dtype: Any) -> None:
    source, out = save(mixtral(dtype), tmp_path / "source"), tmp_path / "out"
    reordered(source, out)
    before, after = (load_file(x / "model.safetensors") for x in (source, out))
    order = orders(skeleton(source))[1][2]
    assert before[GATE].dtype == dtype
    for neuron in range(F):
        assert torch.equal(after[GATE][neuron], before[GATE][order[neuron]])
        assert torch.equal(after[UP][neuron], before[UP][order[neuron]])
        assert torch.equal(after[DOWN][:, neuron], before[DOWN][:, order[neuron]])


def test_matrices_larger_than_a_tile(tmp_path: Path) -> None:
    # 1.2 MB: gate and up are written in several pieces, down is read a few rows at a time.
    config = transformers.MixtralConfig(
        vocab_size=8, hidden_size=200, intermediate_size=3001, num_hidden_layers=1,
        num_attention_heads=2, num_key_value_heads=1, num_local_experts=2, head_dim=8,
    )  # fmt: skip
    torch.manual_seed(0)
    model = transformers.AutoModelForCausalLM.from_config(config).bfloat16()
    source, out = save(model, tmp_path / "source"), tmp_path / "out"
    assert reordered(source, out) == weights_digest(out)
    before, after = (load_file(x / "model.safetensors") for x in (source, out))
    for expert, order in enumerate(orders(skeleton(source))[0]):
        prefix = f"model.layers.0.block_sparse_moe.experts.{expert}"
        assert torch.equal(after[f"{prefix}.w1.weight"], before[f"{prefix}.w1.weight"][order])
        assert torch.equal(after[f"{prefix}.w2.weight"], before[f"{prefix}.w2.weight"][:, order])


# -- the same files --------------------------------------------------------------------------------


def test_files_keep_their_names_and_sizes_and_all_else_its_bytes(
    original: Path, tmp_path: Path
) -> None:
    reordered(original, tmp_path)
    before, after = files(original), files(tmp_path)
    assert {name: len(x) for name, x in before.items()} == {n: len(x) for n, x in after.items()}
    for name in before:
        if not name.endswith(".safetensors"):
            assert after[name] == before[name]
    checkpoint = open_checkpoint(original)
    for shard in checkpoint.shards:  # header and what belongs to no expert, byte by byte
        start = checkpoint.tensors_of(shard)[0].offset
        assert after[shard][:start] == before[shard][:start]
        for tensor in checkpoint.tensors_of(shard):
            place = slice(tensor.offset, tensor.offset + tensor.nbytes)
            assert (after[shard][place] == before[shard][place]) == (".experts." not in tensor.name)


def test_the_digest_does_not_depend_on_the_shards(original: Path, tmp_path: Path) -> None:
    whole = save(mixtral(), tmp_path / "whole")
    assert reordered(whole, tmp_path / "1") == reordered(original, tmp_path / "3")


def test_the_order_that_is_there_changes_nothing(original: Path, tmp_path: Path) -> None:
    layout = skeleton(original)
    same = {layer: np.tile(np.arange(F), (E, 1)) for layer in range(LAYERS)}
    assert reorder(original, tmp_path, same, layout) == weights_digest(original)
    assert files(tmp_path) == files(original)


def test_what_belongs_to_the_folder_comes_along_but_no_other_weights(
    source: Path, tmp_path: Path
) -> None:
    for name in ("tokenizer.json", "README.md", "modeling_own.py", "templates/chat.jinja"):
        (source / name).parent.mkdir(exist_ok=True)
        (source / name).write_text(name)
    for name in ("pytorch_model.bin", "consolidated.safetensors", "x.gguf", ".git/config",
                 "pytorch_model.bin.index.json", "original/params.pth"):  # fmt: skip
        (source / name).parent.mkdir(exist_ok=True)
        (source / name).write_text(name)
    out = source / "prepared"
    reordered(source, out)
    extra = {str(x.relative_to(out)) for x in out.rglob("*") if x.is_file()}
    assert extra == set(files_of(open_checkpoint(source))) | {
        "tokenizer.json", "modeling_own.py", "templates/chat.jinja",
        "config.json", "generation_config.json",
    }  # fmt: skip
    assert (out / "templates" / "chat.jinja").read_text() == "templates/chat.jinja"


def files_of(checkpoint: Any) -> list[str]:
    return [*checkpoint.shards, checkpoint.index]


def test_progress_counts_the_bytes_of_all_tensors(original: Path, tmp_path: Path) -> None:
    progress: list[tuple[int, int]] = []
    reordered(original, tmp_path, progress=lambda *counts: progress.append(counts))
    tensors = open_checkpoint(original).tensors.values()
    total = sum(tensor.nbytes for tensor in tensors)
    assert len(progress) == len(tensors)
    assert progress == sorted(progress)
    assert progress[-1] == (total, total)


def test_memory_does_not_grow_with_the_number_of_experts(tmp_path: Path) -> None:
    config = transformers.MixtralConfig(
        vocab_size=8, hidden_size=128, intermediate_size=256, num_hidden_layers=1,
        num_attention_heads=2, num_key_value_heads=1, num_local_experts=128,
    )  # fmt: skip
    config.save_pretrained(tmp_path)
    model = transformers.AutoModelForCausalLM.from_config(config)
    save_file(model.state_dict(), tmp_path / "model.safetensors")  # one tensor of 33 MB
    del model
    layout, out = skeleton(tmp_path), tmp_path / "out"
    permutations = orders(layout)
    out.mkdir()
    tracemalloc.start()
    try:
        reorder(tmp_path, out, permutations, layout)
        _, peak = tracemalloc.get_traced_memory()
    finally:
        tracemalloc.stop()
    assert peak < 6e6  # each of up to 4 threads: an expert's gate and up, 262 kB, and two tiles
    assert (out / "model.safetensors").stat().st_size > 50e6


# -- a run that was stopped ------------------------------------------------------------------------


class Stop(Exception):
    pass


def stopping_after(count: int, source: Path) -> Callable[[int, int], None]:
    """Progress that stops the run when so many shards are finished, and in the next."""
    checkpoint = open_checkpoint(source)
    bytes_of = [sum(x.nbytes for x in checkpoint.tensors_of(shard)) for shard in checkpoint.shards]
    limit = sum(bytes_of[:count])

    def progress(done: int, _: int) -> None:
        if done > limit:
            raise Stop

    return progress


def test_a_stopped_run_goes_on_at_the_last_finished_shard(original: Path, tmp_path: Path) -> None:
    out, done = tmp_path / "out", tmp_path / "done.json"
    with pytest.raises(Stop):
        reordered(original, out, progress=stopping_after(2, original), done=done)
    first, second, third = open_checkpoint(original).shards
    assert set(files(out)) == {first, second}  # nothing that could pass for a checkpoint
    stamps = [(out / name).stat().st_mtime_ns for name in (first, second)]
    (out / f".{third}.4711.part").write_text("of a process that was killed")
    progress: list[int] = []
    digest = reordered(original, out, done=done, progress=lambda now, _: progress.append(now))
    assert [(out / name).stat().st_mtime_ns for name in (first, second)] == stamps
    assert progress == sorted(progress)
    assert digest == weights_digest(out) == reordered(original, tmp_path / "at once")
    assert files(out) == files(tmp_path / "at once")


def test_a_shard_that_is_gone_is_written_again(original: Path, tmp_path: Path) -> None:
    out, done = tmp_path / "out", tmp_path / "done.json"
    digest = reordered(original, out, done=done)
    before = files(out)
    first, second, _ = open_checkpoint(original).shards
    (out / first).unlink()
    (out / second).write_bytes(b"cut off")
    assert reordered(original, out, done=done) == digest
    assert files(out) == before


def test_what_is_done_is_void_for_another_job(source: Path, tmp_path: Path) -> None:
    out, done = tmp_path / "out", tmp_path / "done.json"
    reordered(source, out, done=done)
    assert reordered(source, out, seed=1, done=done) == reordered(source, tmp_path / "1", seed=1)
    # Weights of another model in the same place.
    for path in source.glob("model-*"):
        tensors = {name: value * 2 for name, value in load_file(path).items()}
        save_file(tensors, path, {"format": "pt"})
    again = reordered(source, out, seed=1, done=done)
    assert again == weights_digest(out) == reordered(source, tmp_path / "2", seed=1)


@pytest.mark.parametrize("text", ["", "[]", "{}", '{"job": 3}', "\0"])
def test_a_damaged_note_of_what_is_done_is_void(original: Path, tmp_path: Path, text: str) -> None:
    done, out = tmp_path / "done.json", tmp_path / "out"
    done.write_text(text)
    assert reordered(original, out, done=done) == weights_digest(out)


# -- bad input -------------------------------------------------------------------------------------


@contextmanager
def limited(nbytes: int) -> Iterator[None]:
    """No file grows beyond so many bytes: as on a disk that is full."""
    soft, hard = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (nbytes, hard))
    try:
        yield
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, (soft, hard))


@pytest.mark.parametrize("foreseen", [True, False])
def test_a_full_disk_leaves_nothing_half_written(
    original: Path, tmp_path: Path, foreseen: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    if not foreseen:  # as on a file system that cannot set space aside
        monkeypatch.setattr(os, "posix_fallocate", lambda *_: None)
    layout = skeleton(original)
    shard = open_checkpoint(original).shards[0]
    with (
        pytest.raises(CrispError, match=f"{shard}: cannot be written: File too large") as caught,
        limited(20_000),
    ):
        reorder(original, tmp_path, orders(layout), layout)
    assert str(tmp_path / shard) in str(caught.value)
    assert "\n" not in str(caught.value)
    assert files(tmp_path) == {}


def edit(folder: Path, name: str, change: Callable[[Any], Any | None]) -> None:
    """Replace a tensor, or leave it out, in its shard and in the index."""
    shard = folder / open_checkpoint(folder).tensors[name].shard
    tensors = load_file(shard)
    value = change(tensors.pop(name))
    if value is not None:
        tensors[name] = value
    save_file(tensors, shard, {"format": "pt"})
    index = json.loads((folder / INDEX).read_text())
    index["weight_map"] = {k: v for k, v in index["weight_map"].items() if v != shard.name}
    index["weight_map"].update(dict.fromkeys(tensors, shard.name))
    (folder / INDEX).write_text(json.dumps(index))


def renamed(folder: Path, old: str, new: str) -> None:
    """Every name with ``old`` in it, spelled with ``new``."""
    for shard in open_checkpoint(folder).shards:
        tensors = load_file(folder / shard)
        save_file({k.replace(old, new): v for k, v in tensors.items()}, folder / shard)
    (folder / INDEX).write_text((folder / INDEX).read_text().replace(old, new))


def spoilt(value: float, *place: int) -> Callable[[Any], Any]:
    def change(tensor: Any) -> Any:
        tensor[place] = value
        return tensor

    return change


EXPERT = "model.layers.1.block_sparse_moe.experts"
WRONG: dict[str, tuple[Callable[[Path], Any], str]] = {
    "a matrix missing": (
        lambda f: edit(f, DOWN, lambda x: None),
        rf"{INDEX}: lacks tensor '{DOWN}'",
    ),
    "a matrix of another shape": (
        lambda f: edit(f, DOWN, lambda x: x[:, :-1].clone()),
        rf"tensor '{DOWN}': is \[16, 23\]; \[16, 24\] was expected from the config",
    ),
    "a matrix transposed": (
        lambda f: edit(f, UP, lambda x: x.T.contiguous()),
        rf"tensor '{UP}': is \[16, 24\]; \[24, 16\] was expected",
    ),
    "integers": (
        lambda f: edit(f, GATE, lambda x: x.to(torch.int8)),
        rf"tensor '{GATE}': is I8: quantised in a way that config.json does not name",
    ),
    "float8": (
        lambda f: edit(f, GATE, lambda x: x.to(torch.float8_e4m3fn)),
        rf"tensor '{GATE}': is F8_E4M3: quantised",
    ),
    "NaN": (
        lambda f: edit(f, DOWN, spoilt(float("nan"), 3, 5)),
        rf"tensor '{DOWN}': expert 2 has NaN or infinite weights",
    ),
    "infinity": (
        lambda f: edit(f, UP, spoilt(-float("inf"), 23, 15)),
        rf"tensor '{UP}': expert 2 has NaN or infinite weights",
    ),
    "one expert too many": (
        lambda f: renamed(f, f"{EXPERT}.2.w1", f"{EXPERT}.4.w1"),
        rf"tensor '{EXPERT}.4.w1.weight': is not expected among routed experts",
    ),
    "a bias": (
        lambda f: renamed(f, f"{EXPERT}.2.w1.weight", f"{EXPERT}.2.w1.bias"),
        rf"tensor '{EXPERT}.2.w1.bias': is not expected among routed experts",
    ),
    "a spelling nobody knows": (
        lambda f: renamed(f, ".w1.", ".fc_in."),
        r"'model.layers.0.block_sparse_moe.experts.0.fc_in.weight': is not expected among routed",
    ),
    "no spelling that is known": (
        lambda f: renamed(f, ".block_sparse_moe.experts.", ".ffn."),
        r"the experts of layer 0 are not in a known spelling \(its largest tensor: model.layers.0",
    ),
    "experts elsewhere in a layer": (
        lambda f: renamed(f, ".block_sparse_moe.experts.", ".other.experts."),
        r"tensor 'model.layers.0.other.experts.0.w1.weight': is not expected; not understood",
    ),
    "two spellings at once": (
        lambda f: renamed(f, f"{EXPERT}.3", "model.layers.1.mlp.experts.3"),
        r"tensor 'model.layers.1.mlp.experts.3.w1.weight': there is 'model.layers.1.block_sparse",
    ),
    "a shard missing": (
        lambda f: next(f.glob("model-00002*")).unlink(),
        r"model-00002-of-00003.safetensors: is missing",
    ),
    "prepared already": (
        lambda f: (f / "crisp.safetensors").touch(),
        "is prepared already",
    ),
}


@pytest.mark.parametrize("case", WRONG)
def test_what_is_wrong_is_one_line_naming_it(source: Path, tmp_path: Path, case: str) -> None:
    spoil, message = WRONG[case]
    spoil(source)
    with pytest.raises(CrispError, match=message) as caught:
        reordered(source, tmp_path / "out")
    assert "\n" not in str(caught.value)
    assert str(source) in str(caught.value)
    # Of bad weights, which are found on the way, whole shards may be there, but no half of one.
    assert {path.suffix for path in (tmp_path / "out").iterdir()} <= {".safetensors"}


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16, torch.float64])
@pytest.mark.parametrize("value", [float("nan"), float("inf")])
def test_bad_numbers_are_found_in_every_type(tmp_path: Path, dtype: Any, value: float) -> None:
    model = mixtral(dtype)
    big = torch.finfo(dtype).max  # the largest finite number is one
    model.model.layers[1].mlp.experts.down_proj.data[:] = big
    source = save(model, tmp_path / "source")
    reordered(source, tmp_path / "finite")
    model.model.layers[1].mlp.experts.down_proj.data[2, 3, 5] = value
    save(model, source)
    with pytest.raises(CrispError, match=f"'{DOWN}': expert 2 has NaN or infinite weights"):
        reordered(source, tmp_path / "out")
    assert files(tmp_path / "out") == {}


def test_experts_beyond_the_decoder_layers_are_left_alone(source: Path, tmp_path: Path) -> None:
    # DeepSeek-V3 keeps the layer that predicts the token after next there; transformers skips it.
    extra = {f"model.layers.{LAYERS}.block_sparse_moe.experts.0.w1.weight": torch.ones(3, 4)}
    save_file(extra, source / "model-extra.safetensors")
    index = json.loads((source / INDEX).read_text())
    index["weight_map"].update(dict.fromkeys(extra, "model-extra.safetensors"))
    (source / INDEX).write_text(json.dumps(index))
    out = tmp_path / "out"
    assert reordered(source, out) == weights_digest(out)
    assert files(out)["model-extra.safetensors"] == files(source)["model-extra.safetensors"]


def test_biases_one_by_one_are_not_understood(tmp_path: Path) -> None:
    model = built("gpt_oss")
    source = save(model, tmp_path / "source")
    tensors = load_file(source / "model.safetensors")
    name = "model.layers.0.mlp.experts"
    for matrix in ("gate_up_proj", "down_proj"):
        del tensors[f"{name}.{matrix}"]
    tensors[f"{name}.0.up_proj.weight"] = torch.zeros(4, 4)
    save_file(tensors, source / "model.safetensors")
    with pytest.raises(CrispError, match=r"up_proj.weight': is not expected among routed experts"):
        reordered(source, tmp_path / "out")


def test_onto_itself_is_refused(source: Path) -> None:
    before = files(source)
    with pytest.raises(CrispError, match="is the checkpoint itself"):
        reordered(source, source / ".." / source.name)
    assert files(source) == before


IDENTITY = np.tile(np.arange(F), (E, 1))


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({2: None}, r"permutations are of layers \[0, 1\]; \[0, 1, 2\] were expected"),
        ({3: IDENTITY}, r"layers \[0, 1, 2, 3\]; \[0, 1, 2\]"),
        ({1: IDENTITY[:3]}, "layer 1: a permutation of 24 neurons for each of 4 experts"),
        ({1: IDENTITY[:, :-1]}, "layer 1: a permutation of 24 neurons"),
        ({1: np.maximum(IDENTITY, 1)}, "layer 1: a permutation of 24 neurons"),
        ({1: IDENTITY - 1}, "layer 1: a permutation of 24 neurons"),
    ],
)
def test_what_is_no_permutation(
    original: Path, tmp_path: Path, change: Mapping[int, Any], message: str
) -> None:
    permutations = {0: IDENTITY, 1: IDENTITY, 2: IDENTITY, **change}
    permutations = {layer: order for layer, order in permutations.items() if order is not None}
    with pytest.raises(CrispError, match=message):
        reorder(original, tmp_path, permutations, skeleton(original))
    assert files(tmp_path) == {}


def test_the_trained_model_of_the_repository(tmp_path: Path) -> None:
    source = Path(__file__).parents[3] / "traces" / "tiny-mixtral"
    assert reordered(source, tmp_path) == weights_digest(tmp_path)
    same_function(source, tmp_path)
    with safe_open(tmp_path / "model.safetensors", "pt") as file:
        assert file.metadata() == {"format": "pt"}
