"""Packing: every weight is found again, in any spelling; what fails leaves nothing."""

from __future__ import annotations

import dataclasses
import errno
import fcntl
import json
import os
import re
import resource
import shutil
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from safetensors import safe_open
from safetensors.numpy import load_file

from crisp.checkpoint.files import weights_digest
from crisp.errors import CrispError
from crisp.hw.store.dtypes import NAMES, all_finite, convert_bits
from crisp.hw.store.packing import pack, pack_synthetic, read_activation
from crisp.hw.store.reader import Store
from crisp.model.spec import ModelSpec
from crisp.profile.metadata import FILE
from tests.crisp.profile.test_metadata import made as metadata_of

torch = pytest.importorskip("torch")
transformers = pytest.importorskip("transformers")

TRACES = Path(__file__).parents[3] / "traces"
MIXTRAL, DEEPSEEK = TRACES / "tiny-mixtral", TRACES / "tiny-deepseek"


def original(folder: Path) -> dict[str, Any]:
    """Every tensor of a checkpoint."""
    with safe_open(folder / "model.safetensors", "pt") as file:
        return {name: file.get_tensor(name) for name in file.keys()}  # noqa: SIM118


def bits(tensor: Any) -> Any:
    """The bits of a tensor's numbers."""
    kind = torch.int32 if tensor.dtype == torch.float32 else torch.int16
    return tensor.contiguous().view(kind).numpy()


def matrices(store: Path, layer: int, expert: int) -> tuple[list[Any], Any, Any]:
    """(gate, up and down [d_ff, d], their padding, what stands behind [blocks, ...]) as bits."""
    index = json.loads((store / "store.json").read_text())
    spec, kind = index["spec"], np.int32 if index["dtype"] == "fp32" else np.int16
    d, d_ff, block = spec["d_model"], spec["d_ff"], spec["block"]
    stored = load_file(store / f"layer-{layer:03}.safetensors")[f"expert.{expert}"].view(kind)
    three = stored[:, : 3 * block * d].reshape(len(stored), 3, block, d)
    whole = three.transpose(1, 0, 2, 3).reshape(3, len(stored) * block, d)
    return list(whole[:, :d_ff]), whole[:, d_ff:], stored[:, 3 * block * d :]


@pytest.mark.parametrize(
    ("model", "spelled", "layers", "experts", "short"),
    [
        (MIXTRAL, ("block_sparse_moe", "w1", "w3", "w2"), range(6), 8, 7 * 48 - 320),
        (DEEPSEEK, ("mlp", "gate_proj", "up_proj", "down_proj"), range(1, 5), 32, 0),
    ],
)
def test_every_weight_is_found_again(
    tmp_path: Path, model: Path, spelled: tuple[str, ...], layers: range, experts: int, short: int
) -> None:
    store = pack(model, tmp_path / "store")
    assert (store.dtype, store.activation, store.origin) == ("bf16", "silu", "checkpoint")
    assert store.weights == weights_digest(model)
    assert store.spec == ModelSpec.from_config(model)
    tensors, (block, *parts) = original(model), spelled
    for layer in layers:
        for expert in range(experts):
            name = f"model.layers.{layer}.{block}.experts.{expert}"
            found, padding, behind = matrices(store.path, layer, expert)
            gate, up, down = (bits(tensors[f"{name}.{part}.weight"]) for part in parts)
            assert (found[0] == gate).all()
            assert (found[1] == up).all()
            assert (found[2] == down.T).all()
            assert padding.shape[1] == short
            assert not padding.any()
            assert not behind.any()


def test_both_spellings_give_the_same_store(tmp_path: Path) -> None:
    tensors, fused = original(MIXTRAL), tmp_path / "fused"
    for layer in range(6):
        own = f"model.layers.{layer}.block_sparse_moe"
        w1, w3, w2 = (
            torch.stack([tensors.pop(f"{own}.experts.{e}.{w}.weight") for e in range(8)])
            for w in ("w1", "w3", "w2")
        )
        tensors[f"model.layers.{layer}.mlp.experts.gate_up_proj"] = torch.cat([w1, w3], 1)
        tensors[f"model.layers.{layer}.mlp.experts.down_proj"] = w2
    saved(fused, tensors, json.loads((MIXTRAL / "config.json").read_text()))
    one, other = pack(MIXTRAL, tmp_path / "a"), pack(fused, tmp_path / "b")
    assert other.weights == weights_digest(fused) != one.weights
    for a, b in zip(one.files, other.files, strict=True):
        assert a.read_bytes() == b.read_bytes()


def saved(folder: Path, tensors: dict[str, Any], config: dict[str, Any]) -> Path:
    """A checkpoint of one file."""
    from safetensors.torch import save_file

    folder.mkdir()
    save_file(tensors, folder / "model.safetensors")
    (folder / "config.json").write_text(json.dumps(config))
    return folder


def gpt_oss(folder: Path, d_model: int = 24, **changed: Any) -> Path:
    """A tiny random one: 3 experts of 40 neurons, biases not zero."""
    config = transformers.GptOssConfig(
        vocab_size=16, hidden_size=d_model, intermediate_size=40, num_hidden_layers=2, head_dim=8,
        num_attention_heads=2, num_key_value_heads=1, num_local_experts=3, num_experts_per_tok=2,
        **changed,
    )  # fmt: skip
    torch.manual_seed(0)
    model = transformers.AutoModelForCausalLM.from_config(config)
    for weight in model.parameters():
        torch.nn.init.normal_(weight)
    model.to(torch.bfloat16).save_pretrained(folder)
    return folder


@pytest.mark.parametrize("dtype", ["bf16", "fp32"])
def test_interleaved_transposed_and_with_biases(tmp_path: Path, dtype: str) -> None:
    model = gpt_oss(tmp_path / "model")
    store = pack(model, tmp_path / "store", dtype=dtype)
    item = 2 if dtype == "bf16" else 4
    assert store.activation == "gpt_oss"
    # blocks of 16 neurons of 3 x 24 numbers and 2 biases
    assert store.spec.block_bytes == 4096 * -(-16 * 74 * item // 4096)
    kind = torch.bfloat16 if dtype == "bf16" else torch.float32
    tensors = {name: tensor.to(kind) for name, tensor in original(model).items()}
    for layer in range(2):
        own = f"model.layers.{layer}.mlp.experts."
        for e in range(3):
            both, bias = (tensors[own + x][e] for x in ("gate_up_proj", "gate_up_proj_bias"))
            found, padding, behind = matrices(store.path, layer, e)
            assert (found[0] == bits(both[:, ::2].T)).all()
            assert (found[1] == bits(both[:, 1::2].T)).all()
            assert (found[2] == bits(tensors[own + "down_proj"][e])).all()
            assert padding.shape == (3, 8, 24)
            assert not padding.any()
            for part in range(2):
                stored = behind[:, part * 16 : part * 16 + 16].reshape(-1)
                assert (stored[:40] == bits(bias[part::2])).all()
                assert not stored[40:].any()
            assert not behind[:, 32:].any()


@pytest.mark.parametrize("dtype", ["bf16", "fp16", "fp32"])
def test_another_type_and_another_block(tmp_path: Path, dtype: str) -> None:
    store = pack(DEEPSEEK, tmp_path / "store", dtype=dtype, block=48)
    kind = {"bf16": torch.bfloat16, "fp16": torch.float16, "fp32": torch.float32}[dtype]
    assert (store.dtype, store.spec.bits, store.spec.block) == (dtype, store.spec.bits, 48)
    assert store.spec.bits == (32 if dtype == "fp32" else 16)
    tensors = original(DEEPSEEK)
    for expert in (0, 31):
        found, padding, _ = matrices(store.path, 4, expert)
        name = f"model.layers.4.mlp.experts.{expert}"
        assert (found[0] == bits(tensors[f"{name}.gate_proj.weight"].to(kind))).all()
        assert (found[2] == bits(tensors[f"{name}.down_proj.weight"].to(kind).T)).all()
        assert padding.shape[1] == 3 * 48 - 128
        assert not padding.any()


KINDS = {"BF16": torch.bfloat16, "F16": torch.float16, "F32": torch.float32, "F64": torch.float64}


@given(
    st.sampled_from(sorted(KINDS)),
    st.sampled_from(sorted(NAMES)),
    st.lists(st.binary(min_size=8, max_size=8), min_size=1, max_size=20),
)
def test_numbers_are_rounded_as_torch_does(kind: str, dtype: str, raw: list[bytes]) -> None:
    given = torch.frombuffer(bytearray(b"".join(raw)), dtype=KINDS[kind])
    given = torch.where(given.isfinite(), given, torch.zeros_like(given))
    unsigned = given.view({2: torch.int16, 4: torch.int32, 8: torch.int64}[given.itemsize]).numpy()
    unsigned = unsigned.view(f"u{given.itemsize}")
    through = given.float() if kind == "F64" and dtype == "bf16" else given
    expected = through.to(KINDS[NAMES[dtype]])
    found = convert_bits(unsigned, kind, NAMES[dtype])
    assert (found == bits(expected).view(found.dtype)).all()
    assert all_finite(found, NAMES[dtype]) == bool(expected.isfinite().all())


def prepared(folder: Path, block: int) -> Path:
    """tiny-mixtral, with metadata as if it had been prepared."""
    shutil.copytree(MIXTRAL, folder)
    spec = ModelSpec.from_config(MIXTRAL).with_(block=block)
    found = dataclasses.replace(metadata_of(spec), weights=weights_digest(MIXTRAL))
    found.save(folder / FILE)
    return folder


def test_a_prepared_model_brings_its_block(tmp_path: Path) -> None:
    model = prepared(tmp_path / "model", 16)
    store = pack(model, tmp_path / "store")
    assert (store.spec.block, store.spec.n_blocks, store.spec.name) == (16, 20, "tiny-mixtral")
    assert pack(model, tmp_path / "other", block=64).spec.block == 64


def test_metadata_of_other_weights(tmp_path: Path) -> None:
    model = prepared(tmp_path / "model", 16)
    with (model / "model.safetensors").open("r+b") as file:
        file.seek(-2, os.SEEK_END)
        file.write(b"\0\0")
    with pytest.raises(CrispError, match="are not those the metadata belongs to"):
        pack(model, tmp_path / "store")
    assert {path.name for path in tmp_path.iterdir()} == {"model"}


def test_random_weights(tmp_path: Path) -> None:
    spec = ModelSpec.from_config(MIXTRAL)
    one, again, other = (
        pack_synthetic(spec, tmp_path / str(i), seed=seed) for i, seed in enumerate((3, 3, 4))
    )
    assert one.digest == again.digest != other.digest
    hashes = np.stack([one.hashes(row) for row in range(6)])
    assert len(np.unique(hashes)) == 6 * 8 * 7  # no two blocks are alike
    weights = np.stack([matrices(one.path, layer, 7)[0] for layer in range(6)])
    assert not np.stack([matrices(one.path, layer, 7)[1] for layer in range(6)]).any()
    numbers = (weights.astype(np.uint32) << 16).view(np.float32).astype(np.float64)
    for part, inputs in enumerate((128, 128, 320)):
        own = numbers[:, part] * inputs**0.5
        assert abs(own.mean()) < 0.01
        assert abs(own.std() - 1) < 0.01
    assert abs(np.corrcoef(numbers[:, 0].ravel(), numbers[:, 1].ravel())[0, 1]) < 0.01


@pytest.mark.parametrize("name", ["gpt-oss-20b", "mixtral-8x7b"])
def test_random_weights_of_a_published_geometry(tmp_path: Path, name: str) -> None:
    # two experts stand for all of them
    whole = ModelSpec.named(name)
    spec = dataclasses.replace(whole.first_layers(1), n_experts=2, top_k=1, d_ff=96, block=16)
    store = pack_synthetic(spec, tmp_path / "store", dtype="fp16")
    assert store.spec.bits == 16  # of gpt-oss too, which is published in 4.25
    assert store.activation == ("gpt_oss" if name == "gpt-oss-20b" else "silu")
    used = 16 * (3 * spec.d_model + 2 * spec.biases) * 2
    stored = load_file(store.files[0])["expert.1"]
    assert (stored[:, used:] == 0).all()
    assert np.isfinite(stored[:, :used].view(np.float16)).all()
    assert (stored[:, used - 16 :].any(axis=1)).all()  # up to the last of them


# -- what is refused -------------------------------------------------------------------------------


def changed(folder: Path, **config: Any) -> Path:
    """tiny-mixtral with something else in its config."""
    shutil.copytree(MIXTRAL, folder)
    found = json.loads((folder / "config.json").read_text()) | config
    (folder / "config.json").write_text(json.dumps(found))
    return folder


@pytest.mark.parametrize(
    ("config", "words"),
    [
        ({"hidden_act": "tanh"}, "(MixtralExperts): its activation is not understood"),
        ({"hidden_act": None}, "cannot be used (its config)"),
        ({"quantization_config": {"quant_method": "awq"}}, "says awq, and no tensor is quantised"),
        ({"model_type": "nemotron_h"}, "cannot be used (its config)"),
        ({"intermediate_size": 336}, "d_ff is 336, but the tensors have 320"),
        ({"num_hidden_layers": 7}, "but the tensors have (0, 1, 2, 3, 4, 5)"),
    ],
)
def test_models_that_are_not_understood(tmp_path: Path, config: dict[str, Any], words: str) -> None:
    model = changed(tmp_path / "model", **config)
    with pytest.raises(CrispError, match=re.escape(words)) as caught:
        pack(model, tmp_path / "store")
    assert "\n" not in str(caught.value)
    assert {path.name for path in tmp_path.iterdir()} == {"model"}


def test_a_clamp_of_its_own_is_in_the_store(tmp_path: Path) -> None:
    model = gpt_oss(tmp_path / "model", swiglu_limit=5.0)
    assert pack(model, tmp_path / "store").activation == "gpt_oss(1.702,5)"


def test_activations() -> None:
    for config, expected in (
        ({"hidden_act": "swish"}, "silu"),
        ({"hidden_act": "gelu"}, "gelu"),
        ({"hidden_activation": "gelu_pytorch_tanh"}, "gelu_tanh"),
        ({"mlp_hidden_act": "relu2", "hidden_act": "silu"}, "relu2"),
        ({"model_type": "gpt_oss", "hidden_act": "silu"}, "gpt_oss"),
        ({}, "silu"),
    ):
        assert read_activation(config, "config") == expected


def test_a_gate_with_gelu(tmp_path: Path) -> None:
    assert pack(changed(tmp_path / "m", hidden_act="gelu"), tmp_path / "s").activation == "gelu"


@pytest.mark.parametrize(
    ("value", "dtype", "words"),
    [
        (1e30, "fp16", "layer 2: expert 5 has weights too large for fp16"),
        (float("nan"), None, "w2.weight': expert 5 has NaN or infinite weights"),
        (float("inf"), "fp32", "w2.weight': expert 5 has NaN or infinite weights"),
    ],
)
def test_weights_that_no_store_can_hold(
    tmp_path: Path, value: float, dtype: str | None, words: str
) -> None:
    tensors = original(MIXTRAL)
    tensors["model.layers.2.block_sparse_moe.experts.5.w2.weight"][3, 7] = value
    model = saved(tmp_path / "model", tensors, json.loads((MIXTRAL / "config.json").read_text()))
    with pytest.raises(CrispError, match=re.escape(words)):
        pack(model, tmp_path / "store", dtype=dtype)
    assert {path.name for path in tmp_path.iterdir()} == {"model"}


def test_types_of_experts(tmp_path: Path) -> None:
    tensors, config = original(MIXTRAL), json.loads((MIXTRAL / "config.json").read_text())
    name = "model.layers.2.block_sparse_moe.experts.5.w2.weight"
    model = saved(tmp_path / "mixed", tensors | {name: tensors[name].float()}, config)
    with pytest.raises(CrispError, match="is BF16, and other experts' weights are F32"):
        pack(model, tmp_path / "store")
    doubles = {key: tensor.double() for key, tensor in tensors.items()}
    model = saved(tmp_path / "doubles", doubles, config)
    with pytest.raises(CrispError, match="its experts are F64; --dtype has to be given"):
        pack(model, tmp_path / "store")
    store = pack(model, tmp_path / "store", dtype="bf16")
    same = pack(MIXTRAL, tmp_path / "same")
    assert (store.hashes(3) == same.hashes(3)).all()
    with pytest.raises(CrispError, match="--dtype fp8: expected bf16, fp16, fp32"):
        pack(model, tmp_path / "other", dtype="fp8")


# -- what fails on the way -------------------------------------------------------------------------

SPEC = ModelSpec.from_config(MIXTRAL)


def test_a_full_disk_leaves_nothing(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    written, pwrite = 0, os.pwrite

    def full(file: int, data: Any, offset: int) -> int:
        nonlocal written
        written += len(data)
        if written > 5_000_000:
            raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))
        return pwrite(file, data, offset)

    monkeypatch.setattr(os, "pwrite", full)
    for packing in (lambda out: pack(MIXTRAL, out), lambda out: pack_synthetic(SPEC, out)):
        written = 0
        with pytest.raises(CrispError, match=r"--out .*store: cannot be written: the disk is full"):
            packing(tmp_path / "store")
        assert written > 5_000_000
        assert not list(tmp_path.iterdir())


def test_a_limit_of_the_system_leaves_nothing(tmp_path: Path) -> None:
    program = (
        "import sys; from pathlib import Path; from crisp.model.spec import ModelSpec\n"
        "from crisp.hw.store.packing import pack_synthetic\n"
        "pack_synthetic(ModelSpec.from_config(sys.argv[1]), Path(sys.argv[2]))\n"
    )
    done = subprocess.run(
        [sys.executable, "-c", program, str(MIXTRAL), str(tmp_path / "store")],
        cwd=TRACES.parent,
        capture_output=True,
        text=True,
        preexec_fn=lambda: resource.setrlimit(resource.RLIMIT_FSIZE, (1 << 20, 1 << 20)),
    )
    assert "CrispError: --out" in done.stderr
    assert "cannot be written: File too large" in done.stderr
    assert not list(tmp_path.iterdir())


def test_too_little_room_is_found_before_the_work(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(shutil, "disk_usage", lambda path: shutil._ntuple_diskusage(9, 8, 10**6))
    with pytest.raises(CrispError, match=r"12.4 MB are needed, 1 MB are free"):
        pack_synthetic(SPEC, tmp_path / "store")
    assert not list(tmp_path.iterdir())


def test_an_interrupt_leaves_nothing(tmp_path: Path) -> None:
    def interrupt(done: int, total: int) -> None:
        assert len(list(tmp_path.iterdir())) == 1  # under another name
        assert not (tmp_path / "store").exists()
        if done > total / 2:
            raise KeyboardInterrupt

    calls: list[Callable[[], Store]] = [
        lambda: pack(MIXTRAL, tmp_path / "store", progress=interrupt),
        lambda: pack_synthetic(SPEC, tmp_path / "store", progress=interrupt),
    ]
    for call in calls:
        with pytest.raises(KeyboardInterrupt):
            call()
        assert not list(tmp_path.iterdir())


def test_progress_counts_every_byte(tmp_path: Path) -> None:
    told: list[tuple[int, int]] = []
    pack(MIXTRAL, tmp_path / "a", progress=lambda *both: told.append(both))
    total = sum(tensor.nbytes for tensor in original(MIXTRAL).values())
    assert told[-1] == (total, total)
    told.clear()
    pack_synthetic(SPEC, tmp_path / "b", progress=lambda *both: told.append(both))
    assert told[-1] == (SPEC.routed_bytes, SPEC.routed_bytes)
    assert [done for done, _ in told] == sorted({done for done, _ in told})


def test_where_a_store_may_go(tmp_path: Path) -> None:
    out = tmp_path / "store"
    out.mkdir()
    pack_synthetic(SPEC, out)  # an empty folder is nothing
    before = (out / "store.json").stat().st_mtime_ns
    with pytest.raises(CrispError, match="is not empty; a new folder was expected"):
        pack_synthetic(SPEC, out)
    assert (out / "store.json").stat().st_mtime_ns == before
    with pytest.raises(CrispError, match="is a file; a new folder was expected"):
        pack_synthetic(SPEC, out / "store.json")
    with pytest.raises(CrispError, match=r"the folder .*nowhere does not exist"):
        pack_synthetic(SPEC, tmp_path / "nowhere" / "store")
    assert [path.name for path in tmp_path.iterdir()] == ["store"]
    (tmp_path / "elsewhere").mkdir()
    (tmp_path / "link").symlink_to("elsewhere")
    pack_synthetic(SPEC, tmp_path / "link")
    assert (tmp_path / "link").is_symlink()
    assert (tmp_path / "elsewhere" / "store.json").is_file()


def test_what_a_killed_process_left_goes(tmp_path: Path) -> None:
    left = tmp_path / ".store.part"
    left.mkdir()
    (left / "layer-000.safetensors").write_bytes(b"half")
    (left / "layer-099.safetensors").write_bytes(b"of another model")
    store = pack_synthetic(SPEC, tmp_path / "store")
    assert len(list(store.path.iterdir())) == 6 + 2
    assert not left.exists()


def test_nothing_foreign_is_touched(tmp_path: Path) -> None:
    left = tmp_path / ".store.part"
    left.mkdir()
    for name in ("layer-000.safetensors", "letter.txt"):
        (left / name).write_text("mine")
    with pytest.raises(CrispError, match="is in the way, and was not left by crisp pack"):
        pack_synthetic(SPEC, tmp_path / "store")
    assert {path.read_text() for path in left.iterdir()} == {"mine"}
    assert len(list(left.iterdir())) == 2


def test_one_process_at_a_time(tmp_path: Path) -> None:
    left = tmp_path / ".store.part"
    left.mkdir()
    (left / "layer-000.safetensors").write_bytes(b"half")
    lock = os.open(left, os.O_RDONLY)
    try:
        fcntl.flock(lock, fcntl.LOCK_EX)
        with pytest.raises(CrispError, match="another process is packing there"):
            pack_synthetic(SPEC, tmp_path / "store")
    finally:
        os.close(lock)
    assert (left / "layer-000.safetensors").read_bytes() == b"half"
