"""Calibration layer by layer gives what the whole model in memory gives, and takes a fraction."""

from __future__ import annotations

import json
import os
import resource
import shutil
import subprocess
import sys
import time
from collections.abc import Iterator
from contextlib import suppress
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from safetensors.numpy import load_file, save_file

torch = pytest.importorskip("torch", reason="needs the extra hf")
transformers = pytest.importorskip("transformers", reason="needs the extra hf")

from crisp.adapter import Experts, expert_layout  # noqa: E402
from crisp.checkpoint.deepseek import register  # noqa: E402
from crisp.checkpoint.files import SINGLE as NAME  # noqa: E402
from crisp.checkpoint.files import open_checkpoint  # noqa: E402
from crisp.checkpoint.skeleton import open_skeleton  # noqa: E402
from crisp.errors import CrispError  # noqa: E402
from crisp.prepare.calibration import CalibrationSums, calibrate  # noqa: E402
from crisp.prepare.layerwise.calibration import calibrate_layerwise  # noqa: E402
from crisp.profile.metadata import FILE, Metadata  # noqa: E402
from crisp.text_windows import TokenWindows  # noqa: E402

ROOT = Path(__file__).parents[3]
SMALL = {
    "vocab_size": 96,
    "hidden_size": 32,
    "intermediate_size": 24,
    "moe_intermediate_size": 16,
    "num_hidden_layers": 4,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "num_experts_per_tok": 2,
    "max_position_embeddings": 64,
    "pad_token_id": 0,
    "eos_token_id": 1,
    "bos_token_id": 2,
}
LATENT = {
    "n_routed_experts": 6,
    "n_shared_experts": 1,
    "first_k_dense_replace": 1,
    "n_group": 2,
    "topk_group": 1,
    "kv_lora_rank": 8,
    "q_lora_rank": 16,
    "qk_rope_head_dim": 8,
    "qk_nope_head_dim": 8,
    "v_head_dim": 8,
    "num_key_value_heads": 4,
}
# Without experts: layer 2 of qwen2_moe and layer 0 of the deepseeks. Every other layer of gpt_oss
# sees 4 tokens only; nemotron_h has layers without attention, and experts without a gate.
FAMILIES: dict[str, dict[str, Any]] = {
    "mixtral": {"num_local_experts": 6, "router_jitter_noise": 0.5},  # only while training
    "qwen2_moe": {
        "num_experts": 6,
        "shared_expert_intermediate_size": 16,
        "mlp_only_layers": [2],
        "tie_word_embeddings": True,
    },
    "gpt_oss": {"num_local_experts": 6, "head_dim": 8, "sliding_window": 4},
    "deepseek_v3": LATENT,
    "olmoe": {"num_experts": 6},
    "deepseek": {"n_routed_experts": 6, "n_shared_experts": 2, "first_k_dense_replace": 1},
    "nemotron_h": {
        "n_routed_experts": 6,
        "layers_block_type": ["mamba", "moe", "attention", "moe"],
        "head_dim": 8,
        "mamba_num_heads": 4,
        "mamba_head_dim": 8,
        "ssm_state_size": 8,
        "n_groups": 2,
        "moe_shared_expert_intermediate_size": 16,
    },
}
# Names in a checkpoint whose experts are fused as they are in memory.
FUSED = {"mixtral": "mlp", "qwen2_moe": "mlp", "deepseek_v3": "mlp", "olmoe": "mlp"}


def build(family: str) -> Any:
    """A small random model, in float32, whose weights are bf16 numbers."""
    register()
    config = transformers.AutoConfig.for_model(family, **{**SMALL, **FAMILIES[family]})
    torch.manual_seed(0)
    model = transformers.AutoModelForCausalLM.from_config(config).eval()
    with torch.no_grad():
        for weight in model.state_dict().values():
            if weight.is_floating_point():
                weight.copy_(torch.randn(weight.shape).mul(0.2).add(weight.dim() == 1))
                weight.copy_(weight.bfloat16())
    return model


def some_windows(lengths: tuple[int, ...] = (24, 24, 24, 9)) -> TokenWindows:
    draw = np.random.default_rng(1)
    tokens = [draw.integers(3, 96, length) for length in lengths]
    scored = [length - 1 for length in lengths]
    return TokenWindows(
        tokens, scored, [0] * len(tokens), ["text sha256:0"], max(lengths), max(lengths)
    )


def same(found: Any, expected: Any) -> None:
    """Both calibrations are equal: counts exactly, sums up to the rounding of float32."""
    assert (found.windows, found.tokens) == (expected.windows, expected.tokens)
    assert found.layers.keys() == expected.layers.keys()
    for layer, sums in expected.layers.items():
        layer_sums = found.layers[layer]
        assert np.array_equal(layer_sums.tokens, sums.tokens)
        assert np.array_equal(layer_sums.anchored, sums.anchored)
        assert np.allclose(layer_sums.activation, sums.activation, rtol=1e-5, atol=1e-6)
        assert np.allclose(layer_sums.removed, sums.removed, rtol=1e-5, atol=1e-6)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=["float32", "bf16"])
@pytest.mark.parametrize("family", FAMILIES)
def test_the_whole_model_in_memory_gives_the_same(family: str, dtype: Any, tmp_path: Path) -> None:
    model = build(family)
    expected = calibrate(model, some_windows())
    experts = {layer.index: Experts.of(layer) for layer in expert_layout(model).layers}
    norms = {layer: [own.norms(expert) for expert in range(6)] for layer, own in experts.items()}
    model.to(dtype).save_pretrained(tmp_path / "model")
    result = calibrate_layerwise(tmp_path / "model", some_windows(), tmp_path / "spill")
    same(result.calibration, expected)
    assert result.norms.keys() == norms.keys()
    for layer, each in norms.items():
        assert (result.norms[layer].name, result.norms[layer].n_experts) == (experts[layer].name, 6)
        for expert, (first, down) in enumerate(each):
            up_norms, down_norms = result.norms[layer].norms(expert)
            assert torch.equal(up_norms, first) and torch.equal(down_norms, down)


@pytest.mark.parametrize("family", FUSED)
def test_experts_fused_on_disk(family: str, tmp_path: Path) -> None:
    model = build(family)
    expected = calibrate(model, some_windows())
    model.config.save_pretrained(tmp_path)
    save_file(
        {name: tensor.numpy() for name, tensor in model.state_dict().items()}, tmp_path / NAME
    )
    assert any(name.endswith("experts.gate_up_proj") for name in load_file(tmp_path / NAME))
    same(calibrate_layerwise(tmp_path, some_windows(), tmp_path / "spill").calibration, expected)


def test_one_layer_at_a_time_is_in_memory(tmp_path: Path) -> None:
    build("qwen2_moe").to(torch.bfloat16).save_pretrained(tmp_path)
    skeleton = open_skeleton(tmp_path)

    def held() -> dict[str, Any]:
        return {n: p.dtype for n, p in skeleton.model.named_parameters() if not p.is_meta}

    # The table of embeddings is a view of the file, in the file's type.
    outside = {"model.embed_tokens.weight": torch.bfloat16, "model.norm.weight": torch.float32}
    assert held() == outside
    for index in (3, 0):
        prefix = f"model.layers.{index}."
        with skeleton.loaded_layer(index):
            inside = {n for n, _ in skeleton.model.named_parameters() if n.startswith(prefix)}
            assert inside and held() == outside | dict.fromkeys(inside, torch.float32)
        assert held() == outside


class Killed(Exception):
    pass


def killed(*_: object) -> None:
    raise Killed


def files(folder: Path) -> list[str]:
    return sorted(path.name for path in folder.iterdir())


def poison(folder: Path, prefix: str) -> None:
    """Turn the weights whose names start with ``prefix`` into NaN; no date and no size change."""
    for tensor in open_checkpoint(folder).tensors.values():
        if tensor.name.startswith(prefix):
            path = folder / tensor.shard
            times = path.stat()
            with path.open("r+b") as file:
                file.seek(tensor.offset)
                file.write(b"\xff" * tensor.nbytes)
            os.utime(path, ns=(times.st_atime_ns, times.st_mtime_ns))


def test_after_a_kill_finished_layers_are_not_run_again(tmp_path: Path) -> None:
    model, windows = build("deepseek_v3"), some_windows()
    expected = calibrate(model, windows)
    model.save_pretrained(tmp_path / "model")
    reports: list[tuple[int, int]] = []

    def progress(done: int, total: int) -> None:
        reports.append((done, total))
        if done > 2 * 81:
            raise Killed

    with pytest.raises(Killed):
        calibrate_layerwise(tmp_path / "model", windows, tmp_path / "spill", progress)
    assert reports == [(72, 324), (81, 324), (153, 324), (162, 324), (234, 324)]  # 3 x 24, then 9
    remaining = ["hidden-2.npy", "norms-1.npy", "source", "sums-0.npz", "sums-1.npz"]
    assert files(tmp_path / "spill") == remaining
    hidden = np.load(tmp_path / "spill" / "hidden-2.npy")
    assert (hidden.shape, hidden.dtype) == ((81, 32), np.float32)

    # What a kill by the system may leave besides.
    (tmp_path / "spill" / ".hidden-3.npy.1.part").touch()
    (tmp_path / "spill" / "hidden-1.npy").touch()
    for layer in (0, 1):
        poison(tmp_path / "model", f"model.layers.{layer}.")
    result = calibrate_layerwise(
        tmp_path / "model", windows, tmp_path / "spill", lambda *args: reports.append(args)
    )
    same(result.calibration, expected)
    assert reports[5:] == [(234, 324), (243, 324), (315, 324), (324, 324)]
    done = ["norms-1.npy", "norms-2.npy", "norms-3.npy", "source"]
    done += [f"sums-{layer}.npz" for layer in range(4)]
    assert files(tmp_path / "spill") == done
    again = calibrate_layerwise(tmp_path / "model", windows, tmp_path / "spill", killed)
    same(again.calibration, expected)


def test_a_kill_between_the_files_of_one_layer(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    model, windows = build("mixtral"), some_windows()
    expected = calibrate(model, windows)
    model.save_pretrained(tmp_path / "model")
    save = CalibrationSums.save

    def fail(self: CalibrationSums, path: Path) -> None:
        if path.name == "sums-1.npz":
            raise Killed
        save(self, path)

    with monkeypatch.context() as patch, pytest.raises(Killed):
        patch.setattr(CalibrationSums, "save", fail)
        calibrate_layerwise(tmp_path / "model", windows, tmp_path / "spill")
    assert {"hidden-1.npy", "hidden-2.npy", "norms-1.npy"} <= set(files(tmp_path / "spill"))
    poison(tmp_path / "model", "model.layers.0.")
    same(calibrate_layerwise(tmp_path / "model", windows, tmp_path / "spill").calibration, expected)


def test_a_full_disk_leaves_what_was_finished(
    tmp_path: Path, request: pytest.FixtureRequest
) -> None:
    build("mixtral").save_pretrained(tmp_path / "model")
    soft, hard = resource.getrlimit(resource.RLIMIT_FSIZE)
    request.addfinalizer(lambda: resource.setrlimit(resource.RLIMIT_FSIZE, (soft, hard)))
    resource.setrlimit(resource.RLIMIT_FSIZE, (5000, hard))  # hidden states are 81 x 32 x 4 bytes
    with pytest.raises(CrispError, match=r"hidden-1\.npy: cannot be written: File too large$"):
        calibrate_layerwise(tmp_path / "model", some_windows(), tmp_path / "spill")
    assert files(tmp_path / "spill") == ["source"]


def test_a_folder_of_another_calibration_is_refused(tmp_path: Path) -> None:
    build("mixtral").save_pretrained(tmp_path / "model")
    windows = some_windows()
    with pytest.raises(Killed):
        calibrate_layerwise(tmp_path / "model", windows, tmp_path / "spill", killed)
    other = some_windows((24, 24, 33))  # the first tokens are the same
    assert np.array_equal(other.tokens[1], windows.tokens[1])
    with pytest.raises(
        CrispError, match=f"^{tmp_path}/spill: holds a calibration begun with other"
    ):
        calibrate_layerwise(tmp_path / "model", other, tmp_path / "spill")
    os.utime(tmp_path / "model" / NAME, (0, 0))
    with pytest.raises(CrispError, match="other weights or other text; remove it"):
        calibrate_layerwise(tmp_path / "model", windows, tmp_path / "spill")


def test_damaged_state_is_one_line(tmp_path: Path) -> None:
    build("mixtral").save_pretrained(tmp_path / "model")
    windows, spill = some_windows(), tmp_path / "spill"
    calibrate_layerwise(tmp_path / "model", windows, spill)
    (spill / "norms-3.npy").write_bytes(b"")
    with pytest.raises(CrispError, match=r"norms-3\.npy: cannot be read; remove .*spill"):
        calibrate_layerwise(tmp_path / "model", windows, spill)
    (spill / "sums-2.npz").unlink()
    with pytest.raises(CrispError, match=r"hidden-2\.npy: cannot be read"):
        calibrate_layerwise(tmp_path / "model", windows, spill)


EXPERT = "model.layers.1.block_sparse_moe.experts.3.w2.weight"
LIKE, DOWN = EXPERT.replace("3", "0"), "model.layers.1.mlp.experts.down_proj"
EXTRA = "model.layers.2.self_attn.q_norm.weight"
QUERY = "model.layers.2.self_attn.q_proj.weight"


@pytest.mark.parametrize(
    ("change", "complaint"),
    [
        (
            {EXPERT: None},
            rf"model: tensor '{LIKE}' and 4 like it: {DOWN} becomes \[5, 32, 24\]; \[6, ",
        ),
        ({EXPERT: (16, 24)}, rf"model: tensor '{LIKE}' and 5 like it: cannot become {DOWN}: "),
        (
            {QUERY: (32, 31)},
            rf"'{QUERY}': {QUERY} becomes \[32, 31\]; \[32, 32\] was expected from",
        ),
        ({DOWN: (6, 32, 24)}, rf"tensor '{DOWN}': makes {DOWN}, and so does tensor '{LIKE}'"),
        ({EXTRA: (32,)}, f"model: holds {EXTRA}, which the model does not have"),
        ({"model.norm.weight": None}, "model: lacks the model's model.norm.weight"),
        ({"lm_head.weight": None}, "model: lacks the model's lm_head.weight"),
    ],
)
def test_weights_that_do_not_fit_are_named_before_any_work(
    change: dict[str, tuple[int, int] | None], complaint: str, tmp_path: Path
) -> None:
    build("mixtral").save_pretrained(tmp_path / "model")
    tensors = load_file(tmp_path / "model" / NAME)
    for name, shape in change.items():
        tensors.pop(name, None)
        if shape is not None:
            tensors[name] = np.zeros(shape, np.float32)
    save_file(tensors, tmp_path / "model" / NAME)
    with pytest.raises(CrispError, match=complaint):
        calibrate_layerwise(tmp_path / "model", some_windows(), tmp_path / "spill", killed)
    assert not (tmp_path / "spill").exists()


def test_what_old_checkpoints_hold_besides_is_left_alone(tmp_path: Path) -> None:
    model = build("mixtral")
    expected = calibrate(model, some_windows())
    model.save_pretrained(tmp_path / "model")
    tensors = load_file(tmp_path / "model" / NAME)
    tensors["model.layers.0.self_attn.rotary_emb.inv_freq"] = np.ones(4, np.float32)
    save_file(tensors, tmp_path / "model" / NAME)
    result = calibrate_layerwise(tmp_path / "model", some_windows(), tmp_path / "spill")
    same(result.calibration, expected)


def test_damaged_weights_are_named(tmp_path: Path) -> None:
    build("mixtral").save_pretrained(tmp_path / "model")
    poison(tmp_path / "model", EXPERT)
    complaint = r"model\.layers\.1\.mlp\.experts: expert 3 gives values that are not finite"
    with pytest.raises(CrispError, match=complaint):
        calibrate_layerwise(tmp_path / "model", some_windows(), tmp_path / "spill")


def test_layers_that_hand_on_more_than_hidden_states_are_refused(tmp_path: Path) -> None:
    build("mixtral").save_pretrained(tmp_path)
    skeleton = open_skeleton(tmp_path)
    layer = skeleton.model.model.layers[0]
    layer.forward = lambda hidden, **_: (hidden, None)
    with pytest.raises(
        CrispError, match=r"^model\.layers\.0 \(MixtralDecoderLayer\): returns more"
    ):
        skeleton.run_layer(0, torch.zeros(1, 4, dtype=torch.int64), None)


# -- memory ----------------------------------------------------------------------------------------

LIMIT = 1.5e9  # bytes, anonymous
ROOM = 8e9  # of disk
LAYERS, D, D_FF = 12, 1024, 5120


def write_large(folder: Path) -> int:
    """A Mixtral of random weights, two experts in memory at most; returns the size of its file.

    Sign and mantissa are drawn, the exponent is such that sizes are in [1/64, 1/32).
    """
    config = transformers.MixtralConfig(
        vocab_size=2048, hidden_size=D, intermediate_size=D_FF, num_hidden_layers=LAYERS,
        num_attention_heads=8, num_key_value_heads=2, num_local_experts=8, num_experts_per_tok=2,
    )  # fmt: skip
    config.save_pretrained(folder)
    for name in ("tokenizer.json", "tokenizer_config.json"):
        shutil.copy(ROOT / "traces" / "tiny-mixtral" / name, folder)
    with torch.device("meta"):
        model = transformers.AutoModelForCausalLM.from_config(config)
    shapes = {n: p.shape for n, p in model.named_parameters() if "experts" not in n}
    shapes = {n.replace(".mlp.", ".block_sparse_moe."): shape for n, shape in shapes.items()}
    for layer in range(LAYERS):
        for expert in range(8):
            for part, shape in {"w1": (D_FF, D), "w2": (D, D_FF), "w3": (D_FF, D)}.items():
                name = f"model.layers.{layer}.block_sparse_moe.experts.{expert}.{part}.weight"
                shapes[name] = torch.Size(shape)
    header, end = {}, 0
    for name, shape in shapes.items():
        start, end = end, end + 2 * shape.numel()
        header[name] = {"dtype": "BF16", "shape": list(shape), "data_offsets": [start, end]}
    text = json.dumps(header).encode()
    draw = np.random.default_rng(0)
    with (folder / NAME).open("wb") as file:
        file.write(len(text).to_bytes(8, "little") + text)
        for shape in shapes.values():
            drawn = draw.integers(1 << 64, size=shape.numel() // 4, dtype=np.uint64).view(np.uint16)
            drawn &= 0x807F
            drawn |= 121 << 7
            file.write(drawn.data)
    return end


def peak_anonymous(command: list[str], **options: Any) -> int:
    """The most anonymous memory that a process held, looked at every 20 ms: bytes."""
    process = subprocess.Popen(command, stderr=subprocess.PIPE, text=True, **options)
    peak = 0
    while process.poll() is None:
        with suppress(OSError, StopIteration):  # it has ended
            lines = Path(f"/proc/{process.pid}/status").read_text().splitlines()
            line = next(line for line in lines if line.startswith("RssAnon"))
            peak = max(peak, int(line.split()[1]) * 1024)
        time.sleep(0.02)
    assert process.stderr is not None
    assert process.returncode == 0, process.stderr.read()
    return peak


@pytest.fixture
def large(tmp_path: Path) -> Iterator[Path]:
    """A checkpoint of 3 GB, removed at once when the test is over."""
    if not Path("/proc/self/status").exists():
        pytest.skip("needs Linux's /proc")
    if shutil.disk_usage(tmp_path).free < ROOM:
        pytest.skip(f"needs {ROOM:.0e} bytes of disk in {tmp_path}")
    folder = tmp_path / "large"
    folder.mkdir()
    try:
        assert write_large(folder) > 3e9
        yield folder
    finally:
        shutil.rmtree(folder)


@pytest.mark.slow
def test_a_model_of_3_gb_is_prepared_in_half_of_that_memory(large: Path, tmp_path: Path) -> None:
    out = tmp_path / "prepared"
    options = ["--layerwise", "--window", "64", "--tokens", "256"]
    text = ["--text", str(ROOT / "tests" / "data" / "texts" / "contract.md")]
    command = [sys.executable, "-m", "crisp", "prepare", str(large), *text, "--out", str(out)]
    peak = peak_anonymous([*command, *options], cwd=ROOT)
    assert 4e8 < peak < LIMIT  # less than that would be less than a layer: nothing was measured
    assert (out / NAME).stat().st_size == (large / NAME).stat().st_size
    assert Metadata.load(out / FILE).expert_counts.sum() == LAYERS * 256 * 2
