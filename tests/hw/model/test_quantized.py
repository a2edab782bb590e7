"""Stores of int8 and int4: what is in a block, and what a model writes with its experts in one."""

from __future__ import annotations

import dataclasses
import json
import re
import shutil
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from safetensors.numpy import load_file

torch = pytest.importorskip("torch", reason="needs the extra hf")
transformers = pytest.importorskip("transformers", reason="needs the extra hf")

from crisp.adapter import Experts, expert_layout  # noqa: E402
from crisp.checkpoint.loading import load_model, load_tokenizer, quantize_experts  # noqa: E402
from crisp.errors import CrispError  # noqa: E402
from crisp.hw.devices.options import DeviceOptions  # noqa: E402
from crisp.hw.model.resident import open_resident  # noqa: E402
from crisp.hw.replay import replay  # noqa: E402
from crisp.hw.store.packing import pack, pack_synthetic  # noqa: E402
from crisp.hw.store.reader import Store  # noqa: E402
from crisp.model.spec import ModelSpec  # noqa: E402
from crisp.policy import Budget, named  # noqa: E402
from crisp.profile import Profile  # noqa: E402
from crisp.run.case import Case, Conditions  # noqa: E402
from crisp.sim.hardware import hardware_profile  # noqa: E402
from crisp.sim.simulate import simulate  # noqa: E402
from tests.hw.exact import Exact  # noqa: E402
from tests.hw.model.test_generate import (  # noqa: E402
    PROMPT,
    ROUNDING,
    Pair,
    check_in_bfloat16,
    differ,
)
from tests.hw.store.test_packing import (  # noqa: E402
    DEEPSEEK,
    MIXTRAL,
    gpt_oss,
    original,
    prepared,
    saved,
)

DTYPES = ("int8", "int4")
TRAINED = {"tiny-mixtral": MIXTRAL, "tiny-deepseek": DEEPSEEK}
SPELLED = {
    "tiny-mixtral": ("block_sparse_moe", "w1", "w3", "w2"),
    "tiny-deepseek": ("mlp", "gate_proj", "up_proj", "down_proj"),
}


def read(store: Store, layer: int, expert: int) -> tuple[Any, Any, Any, Any]:
    """(q int64 [3, d_ff, d], steps float64 [3, d_ff, d], biases [2 or 0, d_ff], what a short last
    block lacks and its padding), by the page docs/store.md."""
    spec, d = store.spec, store.spec.d_model
    raw = load_file(store.path / f"layer-{layer:03}.safetensors")[f"expert.{expert}"]
    size = 3 * spec.block * d * (8 if store.dtype == "int8" else 4) // 8
    numbers = raw[:, :size]
    if store.dtype == "int4":
        numbers = np.stack([numbers % 16, numbers // 16], -1)  # the even column is low
        q = numbers.astype(np.int64)
        q[q > 7] -= 16
    else:
        q = numbers.view(np.int8).astype(np.int64)
    halves = np.ascontiguousarray(raw[:, size:]).view(np.float16)
    biases = halves[:, : 2 * spec.block * spec.biases]
    biases = biases.reshape(len(raw), 2 * spec.biases, spec.block)
    halves = halves[:, 2 * spec.block * spec.biases :]
    scales = halves[:, : 3 * spec.block * d // 64].reshape(len(raw), 3, spec.block, -1)
    behind = halves[:, 3 * spec.block * d // 64 :]

    def rows(part: Any) -> Any:
        """[blocks, parts, block, ...] as [parts, neurons, ...]."""
        shape = part.shape[1], len(raw) * spec.block, *part.shape[3:]
        return np.moveaxis(part, 0, 1).reshape(shape)

    whole = rows(q.reshape(len(raw), 3, spec.block, d))
    steps = np.repeat(rows(scales).astype(np.float64), 64, -1)
    lacks = [whole[:, spec.d_ff :], steps[:, spec.d_ff :], behind]
    return whole[:, : spec.d_ff], steps[:, : spec.d_ff], rows(biases)[:, : spec.d_ff], lacks


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("name", TRAINED)
def test_every_weight_is_found_again_within_half_a_step(
    tmp_path: Path, name: str, dtype: str
) -> None:
    store, tensors = pack(TRAINED[name], tmp_path / "store", dtype=dtype), original(TRAINED[name])
    spec, (block, *parts) = store.spec, SPELLED[name]
    # 48 or 16 neurons of 3 x 128 numbers, and a scale of two bytes for each 64
    each = spec.block * 3 * 128 * (8 if dtype == "int8" else 4) // 8 + spec.block * 3 * 2 * 2
    assert spec.block_bytes == 4096 * -(-each // 4096)
    assert spec.bits == (8.25 if dtype == "int8" else 4.25)
    farthest = 0.0
    for layer in spec.moe_layers:
        for expert in range(0, spec.n_experts, 7):
            q, steps, _, lacks = read(store, layer, expert)
            own = f"model.layers.{layer}.{block}.experts.{expert}"
            gate, up, down = (tensors[f"{own}.{part}.weight"].double().numpy() for part in parts)
            for i, weights in enumerate((gate, up, down.T)):
                off = np.abs(q[i] * steps[i] - weights) / np.abs(steps[i])
                assert off.max() <= 0.5 * (1 + 2**-20)
                farthest = max(farthest, off.max())
            assert not any(part.any() for part in lacks)
            assert (np.abs(q).max(-1) >= (127 if dtype == "int8" else 7)).all()
    assert farthest > 0.49


@pytest.mark.parametrize("dtype", DTYPES)
def test_with_biases_transposed_and_interleaved(tmp_path: Path, dtype: str) -> None:
    model = gpt_oss(tmp_path / "model", d_model=64)
    store, tensors = pack(model, tmp_path / "store", dtype=dtype), original(model)
    for layer in range(2):
        own = f"model.layers.{layer}.mlp.experts."
        for e in range(3):
            both, down = (tensors[own + x][e].double() for x in ("gate_up_proj", "down_proj"))
            q, steps, biases, lacks = read(store, layer, e)
            for i, weights in enumerate((both[:, ::2].T, both[:, 1::2].T, down)):
                off = np.abs(q[i] * steps[i] - weights.numpy()) / np.abs(steps[i])
                assert off.max() <= 0.5 * (1 + 2**-20)
            bias = tensors[own + "gate_up_proj_bias"][e].half().numpy()
            assert (biases == np.stack([bias[::2], bias[1::2]])).all()
            assert not any(part.any() for part in lacks)


@pytest.mark.parametrize("dtype", DTYPES)
def test_the_type_of_the_checkpoint_does_not_matter(tmp_path: Path, dtype: str) -> None:
    """bfloat16 is exact in float32 and in float64."""
    config = json.loads((MIXTRAL / "config.json").read_text())
    one = pack(MIXTRAL, tmp_path / "one", dtype=dtype)
    for kind in (torch.float32, torch.float64):
        tensors = {name: tensor.to(kind) for name, tensor in original(MIXTRAL).items()}
        model = saved(tmp_path / str(kind), tensors, config)
        other = pack(model, tmp_path / f"{kind}.store", dtype=dtype)
        for a, b in zip(one.files, other.files, strict=True):
            assert a.read_bytes() == b.read_bytes()


@pytest.mark.parametrize("dtype", DTYPES)
def test_leading_blocks_are_a_narrower_model(tmp_path: Path, dtype: str) -> None:
    """A model that has only the first 96 neurons of each expert has the first two of 7 blocks."""
    tensors = original(MIXTRAL)
    for name, tensor in tensors.items():
        if ".experts." in name:
            tensors[name] = (tensor[:, :96] if ".w2." in name else tensor[:96]).contiguous()
    config = json.loads((MIXTRAL / "config.json").read_text()) | {"intermediate_size": 96}
    narrow = saved(tmp_path / "narrow", tensors, config)
    whole = pack(MIXTRAL, tmp_path / "whole", dtype=dtype)
    prefix = pack(narrow, tmp_path / "prefix", dtype=dtype, block=whole.spec.block)
    assert (whole.spec.n_blocks, prefix.spec.n_blocks) == (7, 2)
    assert whole.spec.block_bytes == prefix.spec.block_bytes
    for a, b in zip(whole.files, prefix.files, strict=True):
        ours, theirs = load_file(a), load_file(b)
        for expert, blocks in theirs.items():
            assert (ours[expert][:2] == blocks).all()


def test_a_prepared_model_brings_its_block(tmp_path: Path) -> None:
    store = pack(prepared(tmp_path / "model", 64), tmp_path / "store", dtype="int4")
    assert (store.spec.block, store.spec.n_blocks, store.spec.bits) == (64, 5, 4.25)


@pytest.mark.parametrize("dtype", DTYPES)
def test_random_weights(tmp_path: Path, dtype: str) -> None:
    spec = ModelSpec.from_config(MIXTRAL)
    store = pack_synthetic(spec, tmp_path / "store", dtype=dtype)
    assert pack_synthetic(spec, tmp_path / "again", dtype=dtype).digest == store.digest
    hashes = np.stack([store.hashes(row) for row in range(6)])
    assert len(np.unique(hashes)) == 6 * 8 * 7  # no two blocks are alike
    found = [read(store, layer, 7) for layer in range(6)]
    numbers = np.stack([q * steps for q, steps, _, _ in found])
    for part, inputs in enumerate((128, 128, 320)):
        own = numbers[:, part] * inputs**0.5
        assert abs(own.mean()) < 0.01
        assert abs(own.std() - 1) < 0.02
    assert not any(part.any() for _, _, _, lacks in found for part in lacks)


# -- what is refused -------------------------------------------------------------------------------


def test_neurons_that_are_no_whole_groups(tmp_path: Path) -> None:
    words = "--dtype int8: needs a d_model that is a multiple of 64; that of .* is 24"
    model = gpt_oss(tmp_path / "model")
    with pytest.raises(CrispError, match=words):
        pack(model, tmp_path / "store", dtype="int8")
    with pytest.raises(CrispError, match=words):
        pack_synthetic(ModelSpec.from_config(model), tmp_path / "store", dtype="int8")
    assert {path.name for path in tmp_path.iterdir()} == {"model"}


@pytest.mark.parametrize("dtype", DTYPES)
def test_weights_too_large_for_a_scale(tmp_path: Path, dtype: str) -> None:
    tensors = original(MIXTRAL)
    tensors["model.layers.2.block_sparse_moe.experts.5.w2.weight"][3, 7] = 1e7
    model = saved(tmp_path / "model", tensors, json.loads((MIXTRAL / "config.json").read_text()))
    words = f"layer 2: expert 5 has weights too large for {dtype}; --dtype fp32 or bf16 was"
    with pytest.raises(CrispError, match=words):
        pack(model, tmp_path / "store", dtype=dtype)
    assert {path.name for path in tmp_path.iterdir()} == {"model"}


def test_biases_too_large_for_float16(tmp_path: Path) -> None:
    model = gpt_oss(tmp_path / "model", d_model=64)
    tensors = original(model)
    tensors["model.layers.1.mlp.experts.gate_up_proj_bias"][2, 3] = 1e6
    other = saved(tmp_path / "other", tensors, json.loads((model / "config.json").read_text()))
    with pytest.raises(CrispError, match="layer 1: expert 2 has weights too large for int8"):
        pack(other, tmp_path / "store", dtype="int8")


@pytest.mark.parametrize(
    ("keys", "value", "words"),
    [
        (("dtype",), "int4", "3 matrices of 8.25 bits; 3 of int4 were expected"),
        (("spec", "bits"), "8", "3 matrices of 8 bits; 3 of int8 were expected"),
        (("spec", "d_model"), 96, "d_model is 96, expected a multiple of 64 in int8"),
        (("spec", "d_model"), 64, "is 1150976 bytes, expected"),
    ],
)
def test_an_index_that_says_something_else(
    tmp_path: Path, keys: tuple[str, ...], value: object, words: str
) -> None:
    store = pack_synthetic(ModelSpec.from_config(MIXTRAL), tmp_path / "store", dtype="int8").path
    index = json.loads((store / "store.json").read_text())
    place = index if len(keys) == 1 else index["spec"]
    place[keys[-1]] = value
    (store / "store.json").write_text(json.dumps(index))
    with pytest.raises(CrispError, match=re.escape(words)):
        Store.open(store)


# -- a model that writes ---------------------------------------------------------------------------


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("models")


_PAIRS: dict[str, Pair] = {}


def trained(folder: Path, name: str, dtype: str, kind: str) -> Pair:
    """A trained model in fp32 or bf16: with its experts in a store, and whole with the weights that
    are in the store."""
    key = f"{name}-{dtype}-{kind}"
    if key not in _PAIRS:
        source, whole = TRAINED[name], load_model(str(TRAINED[name]))
        if kind == "fp32":
            source = folder / f"{name}-fp32"
            whole = dataclasses.replace(whole, model=whole.model.float())
            if not source.exists():
                whole.model.save_pretrained(source)
                load_tokenizer(TRAINED[name]).save_pretrained(source)
        store = pack(source, folder / f"{key}.store", dtype=dtype)
        rounded = quantize_experts(whole, dtype).model
        _PAIRS[key] = Pair(source, rounded, open_resident(source, store), PROMPT)
    return _PAIRS[key]


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("name", TRAINED)
def test_the_store_writes_what_the_model_with_its_weights_writes(
    folder: Path, name: str, dtype: str
) -> None:
    pair = trained(folder, name, dtype, "fp32")
    tokens, reference = pair.reference
    first = None
    for policy, budget, granularity in (("fo", "5%", "expert"), ("lru", "30%", "block")):
        made, logits = pair.generate(named(policy), budget, granularity)
        first = logits if first is None else first
        assert torch.equal(logits, first)
        assert list(made.tokens) == tokens
    assert differ(first, reference) < ROUNDING
    # and not what the model writes whose weights were not rounded: that is not within a rounding
    plain = Pair(pair.folder, load_model(str(pair.folder)).model, pair.model, PROMPT)
    assert differ(first[:1], plain.reference[1][:1]) > 10 * ROUNDING


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("name", TRAINED)
def test_in_bfloat16_experts_and_tokens_are_those_of_float64_within_rounding(
    folder: Path, tmp_path: Path, name: str, dtype: str
) -> None:
    pair = trained(folder, name, dtype, "bf16")
    whole = load_model(str(pair.folder))
    whole = quantize_experts(dataclasses.replace(whole, model=whole.model.double()), dtype)
    check_in_bfloat16(pair, Exact(whole.model), tmp_path)


@pytest.mark.parametrize("dtype", DTYPES)
def test_widths_are_prefixes_of_the_rounded_weights(folder: Path, dtype: str) -> None:
    from crisp.adapter import attach

    pair = trained(folder, "tiny-mixtral", dtype, "fp32")
    for policy in (named("up"), named("lru", width="single")):
        with attach(pair.whole, policy, spec=pair.model.store.spec):
            tokens, expected = pair.written()
        made, logits = pair.generate(policy, "30%", "block")
        assert list(made.tokens) == tokens
        assert differ(logits, expected) < ROUNDING


@pytest.mark.parametrize("dtype", DTYPES)
def test_a_run_loads_what_its_simulation_loads(folder: Path, dtype: str) -> None:
    """Bytes of a block are those of the store: 20,480 or 12,288, of 36,864 in bf16."""
    pair = trained(folder, "tiny-mixtral", dtype, "fp32")
    store, policy = pair.model.store, named("lru", unit="block")
    conditions = Conditions("block", "all")
    made, _ = pair.generate(policy, "30%", conditions=conditions)
    spec = store.spec
    case = Case(made.trace, spec, policy, Budget.parse("30%"), Profile.empty(spec), conditions)
    size = 20480 if dtype == "int8" else 12288
    for run in (
        simulate(case, hardware_profile("rtx4090-pcie4")),
        replay(case, store, DeviceOptions()),
    ):
        for metric in ("tasks", "hits", "partial_hits", "blocks_loaded", "bytes_loaded"):
            assert run.metrics[metric] == made.run.metrics[metric]
        assert run.metrics["bytes_loaded"] == size * run.metrics["blocks_loaded"] > 0


def test_weights_in_place_are_those_of_the_store(folder: Path) -> None:
    """What crisp eval measures: the numbers, and the biases as float16, which is coarse near 0."""
    drawn = gpt_oss(folder / "drawn", d_model=64)
    tensors = original(drawn)
    for name, tensor in tensors.items():
        if name.endswith("gate_up_proj_bias"):
            tensor *= 1e-6
    config = json.loads((drawn / "config.json").read_text())
    model = saved(folder / "gpt-oss", tensors, config)
    shutil.copy(MIXTRAL / "tokenizer.json", model)
    shutil.copy(MIXTRAL / "tokenizer_config.json", model)
    loaded = load_model(str(model))
    loaded = quantize_experts(dataclasses.replace(loaded, model=loaded.model.float()), "int4")
    assert loaded.how.endswith(", experts in int4")
    store = pack(model, folder / "gpt-oss.store", dtype="int4")
    for layer in expert_layout(loaded.model).layers:
        experts = Experts.of(layer)
        for e in range(experts.n_experts):
            q, steps, biases, _ = read(store, layer.index, e)
            both, down = experts.neurons(e)
            assert (torch.cat([both, down[None]]).numpy() == q * steps).all()
            bias = layer.experts.gate_up_proj_bias[e].detach().numpy()
            assert (bias == np.stack([biases[0], biases[1]], -1).reshape(-1)).all()


@pytest.mark.parametrize("dtype", DTYPES)
def test_a_store_of_other_weights_is_refused(folder: Path, tmp_path: Path, dtype: str) -> None:
    pair = trained(folder, "tiny-mixtral", dtype, "fp32")
    model = load_model(str(pair.folder)).model
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            if "experts" in name:
                parameter.mul_(1.01)
    model.save_pretrained(tmp_path)
    load_tokenizer(pair.folder).save_pretrained(tmp_path)
    with pytest.raises(CrispError, match="was packed from other weights than those in"):
        open_resident(tmp_path, pair.model.store)
    open_resident(pair.folder, pair.model.store, verify=True)
