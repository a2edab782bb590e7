"""What every command that takes a model checks first, at the terminal."""

from __future__ import annotations

import importlib.util
import json
import os
import shutil
import threading
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest

pytest.importorskip("torch")
pytest.importorskip("transformers")

from safetensors.numpy import load_file, save_file

from crisp.checkpoint import library
from crisp.hw.store.reader import Store
from crisp.profile.metadata import FILE
from crisp.trace import RoutingTrace
from tests.crisp.cli.conftest import Done

ROOT = Path(__file__).parents[4]
MODEL = ROOT / "traces" / "tiny-mixtral"
TEXT = ROOT / "tests" / "data" / "texts" / "contract.md"
FEW = ("--prompt-tokens", 16, "--new-tokens", 4, "--sequences", 2)
REVISION = "4f1b0c9e2a7d4f1b0c9e2a7d4f1b0c9e2a7d4f1b"
SMALL = {
    "vocab_size": 300, "hidden_size": 32, "intermediate_size": 32, "num_hidden_layers": 2,
    "num_attention_heads": 2, "num_key_value_heads": 1, "num_local_experts": 4,
    "num_experts_per_tok": 2, "max_position_embeddings": 128,
}  # fmt: skip

Crisp = Callable[..., Done]


@pytest.fixture(scope="module")
def small(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A random Mixtral of 300 tokens, with a tokenizer of single bytes."""
    import tokenizers
    import torch
    import transformers

    folder = tmp_path_factory.mktemp("models") / "small"
    torch.manual_seed(0)
    config = transformers.MixtralConfig(**SMALL, dtype="float32")
    transformers.AutoModelForCausalLM.from_config(config).save_pretrained(folder)
    letters = sorted(tokenizers.pre_tokenizers.ByteLevel.alphabet())
    words = {letter: number for number, letter in enumerate(letters)}
    tokenizer = tokenizers.Tokenizer(tokenizers.models.BPE(vocab=words, merges=[]))
    tokenizer.pre_tokenizer = tokenizers.pre_tokenizers.ByteLevel(add_prefix_space=False)
    transformers.PreTrainedTokenizerFast(tokenizer_object=tokenizer).save_pretrained(folder)
    return folder


@pytest.fixture
def copy(small: Path, tmp_path: Path) -> Path:
    shutil.copytree(small, tmp_path / "model")
    return tmp_path / "model"


def change(folder: Path, file: str = "config.json", **values: Any) -> None:
    """Change a JSON file of a folder; an Ellipsis takes a key out."""
    path = folder / file
    content = json.loads(path.read_text()) | values
    path.write_text(json.dumps({key: x for key, x in content.items() if x is not ...}))


def commands(model: object, out: Path) -> dict[str, tuple[object, ...]]:
    """Each command that takes a model, as one would give it."""
    return {
        "capture": ("trace", "capture", model, "--text", TEXT, "--out", out / "t", *FEW),
        "eval": ("eval", model, "--policy", "up", "--text", TEXT, "--tokens", 128, "--window", 64,
                 "--block", 16),
        "prepare": ("prepare", model, "--text", TEXT, "--tokens", 128, "--window", 64, "--block",
                    16, "--roles", "weight", "--out", out / "p"),
        "pack": ("pack", model, "--block", 16, "--out", out / "s"),
    }  # fmt: skip


def refused_by_all(crisp: Crisp, model: object, out: Path, *words: str) -> None:
    """Every command refuses the model in one line, and leaves nothing behind."""
    out.mkdir()
    for command, line in commands(model, out).items():
        done = crisp(*line)
        assert (done.code, done.out) == (2, ""), (command, done)
        assert done.err.count("\n") == 1, done.err
        for word in words:
            assert word in done.err, (command, done.err)
    assert list(out.iterdir()) == []


# -- one model under all its names -----------------------------------------------------------------


def test_a_model_of_the_hub_is_called_by_its_name(
    crisp: Crisp, small: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    repository = tmp_path / "hub" / "models--acme--TinyMoE"
    snapshot = repository / "snapshots" / REVISION
    for part in (snapshot, repository / "blobs", repository / "refs"):
        part.mkdir(parents=True)
    (repository / "refs" / "main").write_text(REVISION)
    for number, file in enumerate(sorted(small.iterdir())):
        shutil.copy(file, repository / "blobs" / f"{number:040x}")
        (snapshot / file.name).symlink_to(Path("../../blobs") / f"{number:040x}")
    monkeypatch.setenv("HF_HUB_CACHE", str(tmp_path / "hub"))
    monkeypatch.chdir(tmp_path)

    for number, model in enumerate(("acme/TinyMoE", snapshot)):
        out = tmp_path / str(number)
        out.mkdir()
        for command, line in commands(model, out).items():
            done = crisp(*line)
            assert done.code == 0, (command, done.err)
        header = RoutingTrace.load(out / "t").header
        assert (header.model, header.revision) == ("acme/TinyMoE", REVISION)
        assert Store.open(out / "s").spec.name == "acme/TinyMoE"
        assert (out / "p" / "README.md").read_text().startswith("# acme/TinyMoE, prepared")
        assert (out / "p" / FILE).exists()
        done = crisp(
            "simulate",
            out / "t",
            "--model",
            out / "s",
            "--policy",
            "lru",
            "--budget",
            "50%",
            "--phase",
            "all",
        )
        assert "the routing is" not in done.out
        assert "model     acme/TinyMoE, 2 layers" in done.out
        assert crisp("model", model).out.startswith("model     acme/TinyMoE\n")


# -- refusals --------------------------------------------------------------------------------------


def test_a_token_beyond_the_vocabulary(crisp: Crisp, copy: Path, tmp_path: Path) -> None:
    tensors = load_file(copy / "model.safetensors")
    for name in ("model.embed_tokens.weight", "lm_head.weight"):
        tensors[name] = np.ascontiguousarray(tensors[name][:50])
    save_file(tensors, copy / "model.safetensors", {"format": "pt"})
    change(copy, vocab_size=50)
    for command, line in commands(copy, tmp_path).items():
        done = crisp(*line)
        if command == "pack":  # reads no text
            assert done.code == 0
            continue
        assert done.code == 2
        assert "its tokenizer gives token" in done.err
        assert "but the model knows 50 tokens" in done.err


def test_code_of_its_own_is_never_run(
    crisp: Crisp, copy: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    for name in ("configuration_tiny.py", "modeling_tiny.py"):
        (copy / name).write_text(
            f"from pathlib import Path\nPath({str(tmp_path / 'ran')!r}).touch()"
        )
    change(
        copy,
        model_type="tinykimi",
        auto_map={
            "AutoConfig": "configuration_tiny.TinyConfig",
            "AutoModelForCausalLM": "modeling_tiny.TinyForCausalLM",
        },
    )
    asked = []
    monkeypatch.setattr("builtins.input", lambda *_: asked.append(1) or "y")
    refused_by_all(crisp, copy, tmp_path / "out", "'tinykimi'", "auto_map", "never runs")
    assert not asked
    assert not (tmp_path / "ran").exists()
    done = crisp("model", copy)  # its geometry is read all the same
    assert (done.code, asked) == (0, [])
    assert "4 a layer, top-2" in done.out
    assert "capture   no: " in done.out
    assert not (tmp_path / "ran").exists()


def test_weights_that_are_missing_or_pickled(crisp: Crisp, copy: Path, tmp_path: Path) -> None:
    tensors = load_file(copy / "model.safetensors")
    (copy / "model.safetensors").rename(copy / "model-1.safetensors")
    weight_map = dict.fromkeys(tensors, "model-1.safetensors")
    weight_map["model.more.weight"] = "model-2.safetensors"
    (copy / "model.safetensors.index.json").write_text(json.dumps({"weight_map": weight_map}))
    refused_by_all(crisp, copy, tmp_path / "a", "is missing")
    for file in copy.glob("*.safetensors*"):
        file.unlink()
    (copy / "pytorch_model.bin").write_bytes(b"no pickle is opened")
    refused_by_all(crisp, copy, tmp_path / "b", "has only pickled weights (pytorch_model.bin)")


def test_no_tokenizer(crisp: Crisp, copy: Path, tmp_path: Path) -> None:
    (copy / "tokenizer.json").unlink()
    out = tmp_path / "out"
    out.mkdir()
    lines = commands(copy, out)
    for command in ("capture", "eval", "prepare"):
        done = crisp(*lines[command])
        assert done.code == 2
        assert "its tokenizer" in done.err
        assert "there is none" in done.err
    assert crisp(*lines["pack"]).code == 0


def test_a_tokenizer_of_sentencepiece_alone(
    crisp: Crisp, copy: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    sentencepiece = pytest.importorskip("sentencepiece")
    (copy / "tokenizer.json").unlink()
    sentencepiece.SentencePieceTrainer.train(
        input=str(TEXT), model_prefix=str(copy / "tokenizer"), vocab_size=150, model_type="bpe",
        minloglevel=5,
    )  # fmt: skip
    (copy / "tokenizer.vocab").unlink()
    (copy / "tokenizer_config.json").write_text(
        json.dumps({"tokenizer_class": "LlamaTokenizer", "bos_token": "<s>", "eos_token": "</s>"})
    )
    line = commands(copy, tmp_path)["capture"]
    done = crisp(*line)
    assert (done.code, done.err) == (0, "")

    find_spec = importlib.util.find_spec
    for missing, package in (("sentencepiece", "sentencepiece"), ("google.protobuf", "protobuf")):
        monkeypatch.setattr(
            library,
            "find_spec",
            lambda name, missing=missing: None if name == missing else find_spec(name),
        )
        done = crisp(*line)
        assert done.code == 2
        assert f"needs {package}" in done.err
        assert "part of the extra hf" in done.err


# -- notes -----------------------------------------------------------------------------------------


def test_a_default_that_the_config_omits_is_told(crisp: Crisp, copy: Path, tmp_path: Path) -> None:
    change(copy, num_experts_per_tok=...)
    lines = commands(copy, tmp_path)
    done = crisp(*lines["capture"])
    assert done.code == 0
    assert done.err.startswith("note: the experts of a token, 2: transformers' default")
    done = crisp("simulate", tmp_path / "t", "--policy", "lru", "--budget", "50%", "--phase", "all")
    assert (done.code, done.err) == (0, "")
    assert crisp(*lines["pack"]).code == 0


def test_layers_beyond_the_model_are_left_alone(crisp: Crisp, copy: Path, tmp_path: Path) -> None:
    tensors = load_file(copy / "model.safetensors")
    more = {
        name.replace("layers.1.", "layers.2."): x.copy()
        for name, x in tensors.items()
        if "layers.1." in name
    }
    save_file(tensors | more, copy / "model.safetensors", {"format": "pt"})
    done = crisp(*commands(copy, tmp_path)["capture"])
    assert done.code == 0
    assert "of layers beyond the model's 2 are left alone" in done.err
    assert "2, routed experts in all" in crisp("model", copy).out


# -- crisp model -----------------------------------------------------------------------------------


def test_crisp_model_says_what_is_supported(crisp: Crisp, small: Path) -> None:
    done = crisp("model", small)
    assert (done.code, done.err) == (0, "")
    assert done.out == (
        "model     small\n"
        "from      its config and its tensors\n"
        "layers    2, routed experts in all\n"
        "experts   4 a layer, top-2\n"
        "neurons   32 an expert on 32 inputs, 3 matrices; 2 blocks of 16\n"
        "stored    32 bits a routed weight; experts of 16.4 kB each, 131 kB in all\n"
        "beside    3,264 parameters a layer, in 32 bits\n"
        "simulate  yes\n"
        "capture   yes\n"
        "eval      yes\n"
        "prepare   yes\n"
        "pack      yes\n"
        "generate  yes\n"
    )
    told = json.loads(crisp("model", small, "--json", "-").out)
    assert told["supported"] == dict.fromkeys(told["supported"], True)
    assert (told["model"]["d_ff"], told["reasons"], told["notes"]) == (32, {}, [])


def test_crisp_model_of_what_has_no_weights(crisp: Crisp, tmp_path: Path) -> None:
    config = {"quantization_config": {"quant_method": "gptq", "bits": 4, "group_size": 32}}
    (tmp_path / "config.json").write_text(json.dumps({**SMALL, "model_type": "mixtral", **config}))
    done = crisp("model", tmp_path / "config.json")
    assert "4.625 bits a routed weight" in done.out
    assert "note      stored bits: quantization_config, gptq: 4 bits, scales and zeros of 32" in (
        done.out
    )
    assert "capture   no: there are no weights here" in done.out
    assert "note" not in crisp("model", tmp_path / "config.json", "--bits", 4).out
    assert "from      a built-in model" in crisp("model", "mixtral-8x7b").out


def test_simulate_takes_the_stored_bits_with_a_note(crisp: Crisp, tmp_path: Path) -> None:
    config = {"quantization_config": {"quant_method": "fp8", "activation_scheme": "static"}}
    moe = {**SMALL, "model_type": "mixtral", "num_hidden_layers": 6, "num_local_experts": 8}
    (tmp_path / "config.json").write_text(json.dumps(moe | config))
    line = (
        "simulate",
        "tiny-mixtral-docs",
        "--model",
        tmp_path,
        "--policy",
        "lru",
        "--budget",
        "30%",
        "--limit",
        20,
    )
    done = crisp(*line)
    assert done.code == 0
    assert "experts in 8 bits" in done.out
    assert "stored bits: quantization_config, fp8: a scale for each matrix" in done.out
    done = crisp(*line, "--bits", "4.25")
    assert "experts in 4.25 bits" in done.out
    assert "stored bits" not in done.out
    (tmp_path / "mine.toml").write_text(
        "layers = 6\nexperts = 8\ntop_k = 2\nd_model = 512\nd_ff = 512\ndense_params = 1\n"
        "bits = [16, 4, 4, 4, 4, 16]\n"
    )
    done = crisp(*line[:3], tmp_path / "mine.toml", *line[4:])
    assert "experts in 8 bits (4 to 16 by layer), 393 kB to 1.57 MB each" in done.out


# -- texts -----------------------------------------------------------------------------------------


def test_a_text_may_come_through_a_pipe(crisp: Crisp, small: Path, tmp_path: Path) -> None:
    """As --text /dev/stdin does."""
    for command in ("capture", "eval", "prepare"):
        read, write = os.pipe()
        text = TEXT.read_bytes()[:4000]
        sender = threading.Thread(target=os.write, args=(write, text))
        sender.start()
        out = tmp_path / command
        out.mkdir()
        line = [
            f"/dev/fd/{read}" if item == TEXT else item for item in commands(small, out)[command]
        ]
        sender.join()
        os.close(write)
        done = crisp(*line)
        os.close(read)
        assert done.code == 0, done.err
    done = crisp("eval", small, "--policy", "up", "--text", tmp_path, "--block", 16)
    assert f"{tmp_path}: is a folder; a text was expected" in done.err


# -- weights that are not plain --------------------------------------------------------------------

SUPPORT = ("simulate", "capture", "eval", "prepare", "pack", "generate")


def test_every_command_takes_a_quantised_model(crisp: Crisp, tmp_path: Path) -> None:
    from tests.crisp.checkpoint.quantised.made import quantised_mixtral

    model = tmp_path / "model"
    quantised_mixtral(model, "gptq")
    for file in ("tokenizer.json", "tokenizer_config.json"):
        shutil.copy(MODEL / file, model / file)
    told = json.loads(crisp("model", model, "--json", "-").out)
    assert told["supported"] == dict.fromkeys(SUPPORT, True)
    assert told["model"]["bits"] == "37/8"  # 4, and of 32: 16 of a scale, 4 of a zero point
    change(model, quantization_config={"quant_method": "hqq"})
    told = json.loads(crisp("model", model, "--json", "-").out)
    assert told["supported"] == dict.fromkeys(SUPPORT, False) | {"simulate": True}
    assert "quant_method: found 'hqq', expected mxfp4" in told["reasons"]["capture"]


def test_of_a_gguf_file_only_the_experts_are_read(crisp: Crisp, tmp_path: Path) -> None:
    pytest.importorskip("gguf", reason="needs the extra gguf")
    from tests.crisp.checkpoint.gguf.made import write

    file = tmp_path / "folder" / "tiny.gguf"
    file.parent.mkdir()
    write(file)
    for name in (file, file.parent):
        told = json.loads(crisp("model", name, "--json", "-").out)
        assert (told["source"], told["model"]["name"]) == ("a GGUF file", "Tiny Experts")
        taken = dict.fromkeys(SUPPORT, False) | {"simulate": True, "pack": True}
        assert told["supported"] == taken
    line = commands(file, tmp_path)
    for command in ("capture", "eval", "prepare"):
        assert "is a GGUF model, of which crisp pack reads the experts" in crisp(*line[command]).err
    write(file, arch="mystery")
    told = json.loads(crisp("model", file, "--json", "-").out)
    assert "architecture 'mystery' are not computed" in told["reasons"]["pack"]
