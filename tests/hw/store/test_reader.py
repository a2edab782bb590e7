"""Opening a store: what it says, and what is refused."""

from __future__ import annotations

import copy
import hashlib
import json
import os
import re
import shlex
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from safetensors.numpy import load_file

from crisp.cli.main import main
from crisp.errors import CrispError
from crisp.hw.store.format import header
from crisp.hw.store.packing import pack_synthetic
from crisp.hw.store.reader import Store, view_blocks
from crisp.model.spec import ModelSpec
from crisp.units import format_bytes

pytest.importorskip("xxhash")

ROOT = Path(__file__).parents[3]
SMALL = {
    "model_type": "deepseek", "vocab_size": 8, "hidden_size": 32, "intermediate_size": 64,
    "moe_intermediate_size": 40, "num_hidden_layers": 3, "num_attention_heads": 2,
    "n_routed_experts": 3, "n_shared_experts": 1, "num_experts_per_tok": 2,
    "first_k_dense_replace": 1, "torch_dtype": "bfloat16",
}  # fmt: skip
SPEC = ModelSpec.from_config(SMALL, "small")  # MoE layers 1 and 2; blocks of 16, 16 and 8 neurons


@pytest.fixture(scope="module")
def made(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A store that nobody changes."""
    return pack_synthetic(SPEC, tmp_path_factory.mktemp("made") / "store").path


@pytest.fixture
def store(tmp_path: Path) -> Path:
    """A store to be changed."""
    return pack_synthetic(SPEC, tmp_path / "store").path


def test_what_a_store_says(made: Path) -> None:
    store = Store.open(made)
    assert store.spec == SPEC
    assert (store.dtype, store.activation, store.origin) == ("bf16", "silu", "synthetic")
    assert (store.weights, store.seed) == (None, 0)
    assert [path.name for path in store.files] == ["layer-001.safetensors", "layer-002.safetensors"]
    # 16 neurons of 3 x 32 numbers of 2 bytes are 3,072 bytes: a stride of 4,096, 3 blocks an expert
    assert store.offsets == ((4096, 4096 + 3 * 4096, 4096 + 6 * 4096),) * 2
    assert store.offset(1, 2, 1) == 4096 + 7 * 4096
    assert {path.stat().st_size for path in store.files} == {10 * 4096}
    index = (made / "store.json").read_bytes()
    assert store.describe() == {
        "dtype": "bf16",
        "activation": "silu",
        "origin": "synthetic",
        "weights": None,
        "seed": 0,
        "digest": hashlib.sha256(index).hexdigest(),
    }
    json.dumps(store.describe())


def test_every_block_has_its_hash(made: Path) -> None:
    import xxhash

    store = Store.open(made)
    for row, path in enumerate(store.files):
        tensors = load_file(path)
        assert store.hashes(row).tolist() == [
            [xxhash.xxh3_64_intdigest(block.tobytes()) for block in tensors[f"expert.{e}"]]
            for e in range(3)
        ]


def test_views_are_of_the_buffer_itself(made: Path) -> None:
    torch = pytest.importorskip("torch")
    store = Store.open(made)
    expert = load_file(store.files[0])["expert.1"]
    pool = torch.from_numpy(expert.copy())  # [blocks, stride]
    whole, one = view_blocks(pool, store), view_blocks(pool[2], store)
    assert whole.gate.shape == whole.up.shape == whole.down.shape == (3, 16, 32)
    assert whole.gate.dtype == torch.bfloat16
    assert whole.gate_bias is None
    assert whole.up_bias is None
    bits = expert[:, : 3 * 16 * 32 * 2].view(np.int16).reshape(3, 3, 16, 32)
    for part, (many, single) in enumerate(zip(whole[:3], one[:3], strict=True)):
        assert (many.view(torch.int16).numpy() == bits[:, part]).all()
        assert single.data_ptr() == pool[2].data_ptr() + part * 16 * 32 * 2
        assert torch.equal(single, many[2])


def test_a_run_needs_a_store_of_its_geometry(made: Path) -> None:
    store = Store.open(made)
    store.check(SPEC)
    store.check(SPEC.with_(top_k=1).first_layers(2))
    for other, words in (
        (SPEC.with_(block=32), "the store's block is 16, that of small is 32"),
        (ModelSpec.from_config(SMALL | {"first_k_dense_replace": 0}), "MoE layers are 1 to 2 (2)"),
        (ModelSpec.from_config(SMALL | {"n_routed_experts": 4}), "n_experts is 3"),
    ):
        with pytest.raises(CrispError, match=re.escape(words)):
            store.check(other)


@pytest.mark.parametrize(
    ("key", "value"), [("block", 15), ("d_ff", 47), ("activation", "gelu"), ("dtype", "fp16")]
)
def test_weights_are_read_as_they_were_written(store: Path, key: str, value: object) -> None:
    """None of these changes a size: blocks are padded to whole pages."""
    index = json.loads((store / "store.json").read_text())
    place = index["spec"] if key in index["spec"] else index
    assert place[key] != value
    place[key] = value
    (store / "store.json").write_text(json.dumps(index))
    with pytest.raises(CrispError, match=r"layer-001\.safetensors: its header is none of"):
        Store.open(store)


def _cut(store: Path) -> None:
    with (store / "layer-002.safetensors").open("r+b") as file:
        file.truncate(9 * 4096)


def _cut_in_header(store: Path) -> None:
    with (store / "layer-002.safetensors").open("r+b") as file:
        file.truncate(100)


def _emptied(store: Path) -> None:
    (store / "layer-002.safetensors").write_bytes(b"")


def _grown(store: Path) -> None:
    with (store / "layer-002.safetensors").open("ab") as file:
        file.write(bytes(4096))


def _swapped(store: Path) -> None:
    one, other = store / "layer-001.safetensors", store / "layer-002.safetensors"
    one.rename(store / "x")
    other.rename(one)
    (store / "x").rename(other)


def _foreign(store: Path) -> None:
    other = pack_synthetic(SPEC, store.parent / "other", seed=1)
    other.files[1].replace(store / "layer-002.safetensors")


def _absent(store: Path) -> None:
    (store / "layer-002.safetensors").unlink()


def _folder(store: Path) -> None:
    (store / "layer-002.safetensors").unlink()
    (store / "layer-002.safetensors").mkdir()


def _no_index(store: Path) -> None:
    (store / "store.json").unlink()


def _pipe(store: Path) -> None:
    (store / "store.json").unlink()
    os.mkfifo(store / "store.json")


@pytest.mark.parametrize(
    ("change", "words"),
    [
        (_cut, "layer-002.safetensors: is 36864 bytes, expected 40960"),
        (_cut_in_header, "layer-002.safetensors: is no whole safetensors file (100 bytes)"),
        (_emptied, "layer-002.safetensors: is no whole safetensors file (0 bytes)"),
        (_grown, "is 45056 bytes, expected 40960: 4096 of header and 36864 of weights"),
        (_swapped, "layer-001.safetensors: its header is not the one store.json names"),
        (_foreign, "layer-002.safetensors: its header is not the one store.json names"),
        (_absent, "layer-002.safetensors: is missing"),
        (_folder, "layer-002.safetensors: is no file"),
        (_no_index, "store: lacks store.json; an expert store was expected"),
        (_pipe, "store: lacks store.json"),
    ],
)
def test_files_that_are_not_the_stores(
    store: Path, change: Callable[[Path], None], words: str
) -> None:
    change(store)
    with pytest.raises(CrispError, match=re.escape(words)) as caught:
        Store.open(store)
    assert "\n" not in str(caught.value)


def test_no_folder(tmp_path: Path) -> None:
    with pytest.raises(CrispError, match="nowhere: is no folder; an expert store was expected"):
        Store.open(tmp_path / "nowhere")


@pytest.mark.parametrize(
    ("content", "words"),
    [
        (b"", "is not JSON"),
        (b"\xff", "is not JSON"),
        (b"[" * 100_000, "is not JSON"),
        (b"[]", "is of version None"),
        (b'{"version": 2}', "is of version 2, expected an expert store of 1"),
        (b'{"version": true}', "version is True, expected int"),
    ],
)
def test_an_index_that_is_none(store: Path, content: bytes, words: str) -> None:
    (store / "store.json").write_bytes(content)
    with pytest.raises(CrispError, match=re.escape(words)):
        Store.open(store)


@pytest.mark.parametrize(
    ("keys", "value", "words"),
    [
        (("spec", "d_model"), 0, "d_model is 0"),
        (("spec", "d_model"), 10**4000, "d_model: expected at most"),
        (("spec", "d_model"), 64, "is 40960 bytes, expected"),
        (("spec", "n_experts"), 2, "is 40960 bytes, expected 28672"),
        (("spec", "bits"), "8", "3 matrices of 8 bits"),
        (("spec", "matrices"), 2, "its header is none of layer 1"),
        (("spec", "block"), 32, "is 40960 bytes, expected 53248"),
        (("spec", "moe_layers"), [2], "names 2 files, expected one for each of 1 MoE layers"),
        (("spec", "moe_layers"), [0, 2], "expected one with {'layer': 0"),
        (("dtype",), "fp32", "of 16 bits; 3 of fp32 were expected"),
        (("dtype",), "fp8", "dtype: found 'fp8'"),
        (("activation",), "relu", "its header is none of layer 1"),
        (("activation",), "tanh", "activation: found 'tanh', expected silu or gelu or gelu_tanh"),
        (("origin",), None, "origin is None, expected str"),
        (("files", 0, "name"), "../layer-001.safetensors", "expected one with"),
        (("files", 1), 7, "found 7, expected one with"),
        (("files", 1, "header_sha256"), None, "header is not the one store.json names"),
    ],
)
def test_an_index_that_says_something_else(
    store: Path, keys: tuple[Any, ...], value: object, words: str
) -> None:
    index = json.loads((store / "store.json").read_bytes())
    _set(index, keys, value)
    (store / "store.json").write_text(json.dumps(index))
    with pytest.raises(CrispError, match=re.escape(words)) as caught:
        Store.open(store)
    assert "\n" not in str(caught.value)


def _set(index: Any, keys: tuple[Any, ...], value: object) -> None:
    for key in keys[:-1]:
        index = index[key]
    index[keys[-1]] = value


def test_weights_that_begin_anywhere_are_refused(store: Path) -> None:
    # a file that safetensors takes, and an index that goes with it
    path = store / "layer-001.safetensors"
    content = path.read_bytes()
    text = content[8:4096].rstrip()
    path.write_bytes(len(text).to_bytes(8, "little") + text + content[4096:])
    assert load_file(path)["expert.0"].shape == (3, 4096)
    _renamed(store, 0, path.read_bytes()[: 8 + len(text)])
    with pytest.raises(CrispError, match=rf"weights begin at byte {8 + len(text)}, no multiple"):
        Store.open(store)


def test_a_header_of_another_layout_is_refused(store: Path) -> None:
    path = store / "layer-001.safetensors"
    content = path.read_bytes()
    first = content[:4096].replace(b"expert.0", b"expert.x").replace(b"expert.1", b"expert.0")
    path.write_bytes(first + content[4096:])
    _renamed(store, 0, first)
    with pytest.raises(CrispError, match="its header is none of layer 1, 3 experts of 3 blocks"):
        Store.open(store)


def _renamed(store: Path, row: int, first: bytes) -> None:
    """Let the index name another header."""
    index = json.loads((store / "store.json").read_bytes())
    index["files"][row]["header_sha256"] = hashlib.sha256(first).hexdigest()
    (store / "store.json").write_text(json.dumps(index))


def test_hashes_that_are_not_the_stores(store: Path) -> None:
    opened, path = Store.open(store), store / "hashes.safetensors"
    content = path.read_bytes()
    path.write_bytes(content[:-1] + bytes([content[-1] ^ 1]))
    with pytest.raises(CrispError, match=r"hashes.safetensors: layer.2 is not what was written"):
        [opened.hashes(row) for row in range(2)]
    path.write_bytes(content[:-1])
    with pytest.raises(CrispError, match=r"hashes.safetensors: is no table of hashes"):
        opened.hashes(0)
    path.unlink()
    with pytest.raises(CrispError, match=r"hashes.safetensors: cannot be read: No such file"):
        opened.hashes(0)
    os.mkfifo(path)  # reading it would never end
    with pytest.raises(CrispError, match=r"hashes.safetensors: is not an ordinary file"):
        opened.hashes(0)


JSON = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats() | st.text(max_size=4),
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.text(max_size=4), inner),
    max_leaves=4,
)
PLACES = [
    *(("spec", key) for key in SPEC.to_dict()),
    *((key,) for key in ("version", "spec", "dtype", "activation", "weights", "seed", "files")),
    *(("files", 0, key) for key in ("layer", "name", "bytes", "header_sha256")),
    ("files", 0),
]  # fmt: skip


@given(st.sampled_from(PLACES), JSON)
def test_a_hostile_index_is_refused_in_one_line(
    made: Path, tmp_path_factory: pytest.TempPathFactory, keys: tuple[Any, ...], value: object
) -> None:
    folder = made.parent / "hostile"
    folder.mkdir(exist_ok=True)
    for path in made.iterdir():
        if path.suffix == ".safetensors" and not (folder / path.name).exists():
            (folder / path.name).symlink_to(path)
    index = copy.deepcopy(json.loads((made / "store.json").read_bytes()))
    _set(index, keys, value)
    (folder / "store.json").write_text(json.dumps(index))
    try:
        Store.open(folder)
    except CrispError as error:
        assert "\n" not in str(error)


def test_a_header_ends_at_a_page() -> None:
    for n in (1, 40, 60):
        spec = ModelSpec.from_config(SMALL | {"n_routed_experts": n, "num_experts_per_tok": 1})
        first = header(spec, 1, "0" * 64, "bf16", "silu")
        assert len(first) % 4096 == 0
        assert int.from_bytes(first[:8], "little") == len(first) - 8
        assert len(first) - len(first.rstrip()) < 4096


def test_the_page(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    torch = pytest.importorskip("torch")
    pytest.importorskip("transformers")
    from safetensors import safe_open

    page = (ROOT / "docs" / "store.md").read_text(encoding="utf-8")
    (tmp_path / "traces").symlink_to(ROOT / "traces")
    monkeypatch.chdir(tmp_path)
    (console,) = re.findall(r"```console\n(.*?)```", page, re.DOTALL)
    (command, expected), (other, told) = re.findall(
        r"^\$ crisp (.*)\n((?:(?!\$ ).*\n)*)", console, re.M
    )
    with pytest.raises(SystemExit):
        main(shlex.split(command))
    assert capsys.readouterr() == (expected, "")

    assert other == "pack --synthetic deepseek-moe-16b --layers 2 --block 64 --out random"
    spec = ModelSpec.named("deepseek-moe-16b").first_layers(2).with_(block=64)  # not written here
    assert f"{spec.name}, {format_bytes(spec.routed_bytes)} of random weights in bf16" in told
    assert (
        f"{spec.n_experts} in each of 1 MoE layer, {format_bytes(spec.expert_bytes)} each" in told
    )
    assert f"{spec.n_blocks} an expert, of 64 neurons and {spec.block_bytes:,} bytes" in told

    (program,) = re.findall(r"```python\n(.*?)```", page, re.DOTALL)
    (printed,) = re.findall(r"```\n(\[.*?)```", page, re.DOTALL)
    names: dict[str, Any] = {}
    exec(program, names)
    assert capsys.readouterr().out == printed
    with safe_open(ROOT / "traces/tiny-mixtral/model.safetensors", "pt") as file:
        original = file.get_tensor("model.layers.3.block_sparse_moe.experts.5.w1.weight")
    assert torch.equal(torch.from_numpy(names["row"]), original[300].float())
