"""``crisp pack``: what it prints, and its mistakes in one line."""

from __future__ import annotations

import json
import signal
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path

import pytest

from crisp.hw.store.reader import Store
from tests.crisp.cli.conftest import Done

pytest.importorskip("xxhash")

MODEL = Path(__file__).parents[4] / "traces" / "tiny-mixtral"

Crisp = Callable[..., Done]


def test_a_checkpoint(crisp: Crisp, tmp_path: Path) -> None:
    pytest.importorskip("transformers")
    out = tmp_path / "store"
    done = crisp("pack", MODEL, "--out", out, "--dtype", "fp32", "--block", 64)
    assert (done.code, done.err) == (0, "")
    # 6 layers x 8 experts x 320 neurons x 3 x 128 numbers x 4 bytes = 23.6 MB
    assert done.out.splitlines() == [
        f"{out}: tiny-mixtral, 23.6 MB of weights in fp32",
        "experts   8 in each of 6 MoE layers, 492 kB each",
        "blocks    5 an expert, of 64 neurons and 98,304 bytes",
    ]
    assert Store.open(out).origin == "checkpoint"
    done = crisp("pack", MODEL, "--out", out)
    assert (done.code, done.out) == (2, "")
    assert done.err == f"error: --out {out}: is not empty; a new folder was expected\n"


def test_in_groups(crisp: Crisp, tmp_path: Path) -> None:
    pytest.importorskip("transformers")
    out = tmp_path / "store"
    done = crisp("pack", MODEL, "--out", out, "--dtype", "int4")
    assert (done.code, done.err) == (0, "")
    # 48 neurons of 3 x 128 numbers in 4.25 bits are 9,792 bytes, in pages 12,288
    assert done.out.splitlines() == [
        f"{out}: tiny-mixtral, 4.13 MB of weights in int4",
        "experts   8 in each of 6 MoE layers, 86 kB each",
        "blocks    7 an expert, of 48 neurons and 12,288 bytes",
    ]


def test_random_weights(crisp: Crisp, tmp_path: Path) -> None:
    config = MODEL / "config.json"
    for i, spec in enumerate((MODEL, config)):
        done = crisp(
            "pack", "--synthetic", spec, "--layers", 2, "--seed", 5, "--out", tmp_path / str(i)
        )
        assert (done.code, done.err) == (0, "")
        assert done.out.splitlines()[:2] == [
            f"{tmp_path / str(i)}: tiny-mixtral, 4.13 MB of random weights in bf16",
            "experts   8 in each of 2 MoE layers, 258 kB each",
        ]
    one, other = Store.open(tmp_path / "0"), Store.open(tmp_path / "1")
    assert (one.seed, one.activation, one.spec.n_layers) == (5, "silu", 2)
    assert one.digest == other.digest


def test_random_weights_of_a_gguf_files_geometry_and_of_a_stores(
    crisp: Crisp, tmp_path: Path
) -> None:
    pytest.importorskip("gguf", reason="needs the extra gguf")
    from tests.crisp.checkpoint.gguf.made import write

    write(tmp_path / "m.gguf", ("Q4_K", "Q4_K", "Q4_K"), arch="grok")
    for name, source in (("one", tmp_path / "m.gguf"), ("other", tmp_path / "one")):
        done = crisp("pack", "--synthetic", source, "--dtype", "int4", "--out", tmp_path / name)
        assert (done.code, done.err) == (0, "")
    one, other = (Store.open(tmp_path / name) for name in ("one", "other"))
    assert (one.spec.n_experts, one.spec.d_ff, one.spec.d_model) == (3, 512, 256)
    assert (one.activation, other.activation) == ("gelu_tanh", "gelu_tanh")
    assert one.spec.routed_bytes == other.spec.routed_bytes


def test_the_configs_activation_is_kept(crisp: Crisp, tmp_path: Path) -> None:
    config = json.loads((MODEL / "config.json").read_text())
    (tmp_path / "gelu.json").write_text(json.dumps(config | {"hidden_act": "gelu"}))
    (tmp_path / "selu.json").write_text(json.dumps(config | {"hidden_act": "selu"}))
    out = tmp_path / "store"
    assert crisp("pack", "--synthetic", tmp_path / "gelu.json", "--out", out).code == 0
    assert Store.open(out).activation == "gelu"
    done = crisp("pack", "--synthetic", tmp_path / "selu.json", "--out", tmp_path / "other")
    assert "selu.json: hidden_act: found 'selu', expected silu or gelu or gelu_tanh or " in done.err


@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        ((), "MODEL, --synthetic: neither given; one of them was expected"),
        ((MODEL, "--synthetic", "olmoe-1b-7b"), "MODEL, --synthetic: both given"),
        ((MODEL, "--layers", 2), "--layers 2: goes with --synthetic, not with a model"),
        ((MODEL, "--seed", 0), "--seed 0: goes with --synthetic, not with a model"),
        (("--synthetic", "olmo-1b-7b"), "did you mean 'olmoe-1b-7b'?"),
        (("--synthetic", MODEL, "--layers", 7), "has 6 layers, 7 were requested"),
        (("--synthetic", MODEL, "--layers", 0), "has 6 layers, 0 were requested"),
        (("--synthetic", MODEL, "--seed", -1), "--seed -1: must be at least 0"),
        (("--synthetic", MODEL, "--seed", -1, "--dry-run"), "--seed -1: must be at least 0"),
        (("--synthetic", MODEL, "--dtype", "fp8"), "--dtype fp8: expected bf16, fp16, fp32"),
        (("--synthetic", MODEL, "--block", 0), "block is 0, expected at least 1"),
        (("--synthetic", MODEL, "--block", 321), "block is 321, expected at most 320"),
        (("--synthetic", "deepseek-v2-lite", "--layers", 1), "at least one"),
        (("nowhere",), "nowhere: is no folder"),
        ((MODEL.parent,), "has no config.json"),
    ],
)
def test_what_is_wrong_is_said_in_one_line(
    crisp: Crisp, tmp_path: Path, arguments: tuple[object, ...], words: str
) -> None:
    done = crisp("pack", *arguments, "--out", tmp_path / "out")
    assert (done.code, done.out) == (2, "")
    assert words in done.err
    assert done.err.count("\n") == 1
    assert not list(tmp_path.iterdir())


@pytest.mark.parametrize("place", ["", "inside", "link/deep"])
def test_a_store_inside_the_model_is_refused(crisp: Crisp, tmp_path: Path, place: str) -> None:
    model = tmp_path / "model"
    model.mkdir()
    (tmp_path / "link").symlink_to(model)
    out = tmp_path / place if place.startswith("link") else model / place
    done = crisp("pack", model, "--out", out)
    assert (done.code, done.out) == (2, "")
    assert done.err == (
        f"error: --out {out}: is inside the model {model}; another place was expected\n"
    )
    assert not list(model.iterdir())


def test_ctrl_c_leaves_nothing(tmp_path: Path) -> None:
    command = [sys.executable, "-m", "crisp", "pack", "--synthetic", "olmoe-1b-7b", "--layers", 1]
    process = subprocess.Popen(
        [*map(str, command), "--out", str(tmp_path / "store")],
        cwd=MODEL.parents[1],
        stderr=subprocess.PIPE,
        text=True,
    )
    while process.poll() is None and not list(tmp_path.glob(".store.part/layer-000.safetensors")):
        time.sleep(0.01)
    process.send_signal(signal.SIGINT)
    assert process.communicate(timeout=60)[1] == "interrupted\n"
    assert process.returncode == 130
    assert not list(tmp_path.iterdir())
