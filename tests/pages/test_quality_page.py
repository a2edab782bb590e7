"""docs/quality.md says what docs/quality.json holds, and the benchmark measures what it says."""

from __future__ import annotations

import doctest
import json
import re
from dataclasses import replace
from fractions import Fraction
from pathlib import Path
from typing import Any

import numpy as np
import pytest

torch = pytest.importorskip("torch", reason="needs the extra hf")
transformers = pytest.importorskip("transformers", reason="needs the extra hf")

from benchmarks.quality import estimates  # noqa: E402
from benchmarks.quality.experiments import (  # noqa: E402
    EXPERIMENTS,
    expert_controls,
    masking,
    policy_controls,
    tiers,
)
from benchmarks.quality.experiments.expert_controls import quantized  # noqa: E402
from benchmarks.quality.page import claims, tables  # noqa: E402
from benchmarks.quality.page.page import CONTENT, IMAGES, PAGE, render, write  # noqa: E402
from benchmarks.quality.page.pictures import PICTURES  # noqa: E402
from benchmarks.quality.page.sections import SECTIONS  # noqa: E402
from benchmarks.quality.setting import KINDS, Amounts  # noqa: E402
from benchmarks.quality.study import Study  # noqa: E402
from crisp.checkpoint.deepseek import register  # noqa: E402
from crisp.checkpoint.loading import load_model, to_float32  # noqa: E402
from crisp.policy import named  # noqa: E402
from crisp.policy.widths.base import Tiered  # noqa: E402
from crisp.policy.widths.contribution import Contribution  # noqa: E402
from crisp.prepare.ablation import Ablation  # noqa: E402
from crisp.prepare.calibration import calibrate  # noqa: E402
from crisp.prepare.importance import NeuronOrder  # noqa: E402
from crisp.prepare.pipeline import prepare  # noqa: E402
from crisp.prepare.request import PreparationRequest  # noqa: E402
from crisp.prepare.roles import Exact, Local, measure_increases  # noqa: E402
from crisp.quality import Scores, evaluate, score_windows  # noqa: E402

ROOT = Path(__file__).resolve().parents[2]
TOKENIZER = ROOT / "traces" / "tiny-mixtral"
FEW = Amounts(heldout=512, calibration=1024, roles=512, exact=512, masking=512)
COMMON = {
    "vocab_size": 2048,
    "hidden_size": 32,
    "num_attention_heads": 2,
    "num_key_value_heads": 2,
    "max_position_embeddings": 256,
    "initializer_range": 0.3,
}
SHAPES: dict[str, dict[str, Any]] = {  # two experts a token, and three
    "two": {
        "model_type": "mixtral",
        "num_hidden_layers": 2,
        "intermediate_size": 48,
        "num_local_experts": 4,
    },
    "three": {
        "model_type": "deepseek",
        "num_hidden_layers": 3,
        "intermediate_size": 64,
        "moe_intermediate_size": 48,
        "n_routed_experts": 6,
        "n_shared_experts": 1,
        "num_experts_per_tok": 3,
        "first_k_dense_replace": 1,
    },
}


@pytest.fixture(scope="module")
def data(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Three kinds of text, of documents that are there."""
    folder = tmp_path_factory.mktemp("texts")
    (folder / "data").mkdir()
    for kind, page in zip(KINDS.values(), ("contract", "traces", "hardware"), strict=True):
        text = (ROOT / "docs" / f"{page}.md").read_text(encoding="utf-8")
        (folder / "data" / f"{kind}.calibration.txt").write_text(text, encoding="utf-8")
        (folder / "data" / f"{kind}.heldout.txt").write_text(text[::-1], encoding="utf-8")
    return folder


@pytest.fixture(scope="module")
def studies(data: Path, tmp_path_factory: pytest.TempPathFactory) -> dict[str, Study]:
    """A small Mixtral and a small DeepSeek-MoE with random weights."""
    register()
    root, found = tmp_path_factory.mktemp("models"), {}
    for name, shape in SHAPES.items():
        torch.manual_seed(0)
        config = transformers.AutoConfig.for_model(**COMMON, **shape)
        transformers.AutoModelForCausalLM.from_config(config).save_pretrained(root / name)
        for file in ("tokenizer.json", "tokenizer_config.json"):
            (root / name / file).write_bytes((TOKENIZER / file).read_bytes())
        found[name] = Study(root / name, data, root / "work", FEW)
    return found


@pytest.fixture(scope="module")
def two(studies: dict[str, Study]) -> Study:
    return studies["two"]


@pytest.fixture(scope="module")
def content(studies: dict[str, Study]) -> dict[str, Any]:
    """Everything, measured of both."""
    models = [
        {
            **study.facts(),
            "experiments": {name: make(study) for name, make in EXPERIMENTS.items()},
        }
        for study in studies.values()
    ]
    return {"version": 1, "models": models}


def test_the_page_is_made_of_its_figures() -> None:
    held = json.loads((ROOT / CONTENT).read_text(encoding="utf-8"))
    assert (ROOT / PAGE).read_text(encoding="utf-8") == render(held)
    for name in PICTURES:
        assert (ROOT / IMAGES / f"quality-{name}.png").stat().st_size > 1000


def test_everything_is_measured_and_printed_of_both_models(
    content: dict[str, Any], tmp_path: Path
) -> None:
    content = json.loads(json.dumps(estimates.rounded(content)))
    write(tmp_path, content)
    page = (tmp_path / PAGE).read_text(encoding="utf-8")
    for section in SECTIONS:
        assert page.count(section.title) >= 1
        for name in SHAPES:
            assert f"### {name}: {section.title[0].lower()}{section.title[1:]}" in page
    assert not re.search(r"\bnan\b", page)
    assert {claim.section for claim in claims.CLAIMS} <= EXPERIMENTS.keys()
    assert {path.name for path in (tmp_path / IMAGES).iterdir()} == {
        f"quality-{name}.png" for name in PICTURES
    }


def test_figures_agree_with_one_another(content: dict[str, Any]) -> None:
    for model in content["models"]:
        found = model["experiments"]
        rows = {row["label"]: row for row in found["strategies"]["rows"]}
        assert rows["full"]["increase"]["value"] == 0
        assert rows["all 50 %"]["share"] == pytest.approx(2 / 3)  # two blocks of three
        half = found["orders"]["uniform(.5)"]["rows"][3]
        assert half["label"] == "importance"
        assert half["increase"] == rows["all 50 %"]["increase"]
        for held in (found["classes"], found["tiers"]):
            assert sum(row["share"] for row in held["rows"]) == pytest.approx(1)
        assert found["settling"]["rows"][-1]["same_tier"] == 1
        if model["name"] == "two":
            assert rows["single"]["share"] == 0.5
            assert rows["asymmetric 100 + 50"]["share"] == pytest.approx(5 / 6)


def test_doctests() -> None:
    for module in (claims, estimates, tables, tiers):
        assert doctest.testmod(module).failed == 0, module.__name__


def test_orders_are_applied_and_undone(two: Study) -> None:
    layer, own = next(iter(two.experts.items()))
    two.arrange(two.original)
    before = [weight.detach().clone() for _, weight in own.matrices()]
    drawn = two.order("random(5)", two.sums)
    two.arrange(two.orders)
    two.arrange(drawn)
    first, down = (weight.detach() for _, weight in own.matrices())
    moved = torch.from_numpy(drawn[layer][1])
    assert torch.equal(down[1], before[1][1][:, moved])
    assert torch.equal(first[1], before[0][1][torch.cat([moved, moved + own.d_ff])])
    two.arrange(two.original)
    for (_, weight), held in zip(own.matrices(), before, strict=True):
        assert torch.equal(weight, held)


def test_sums_of_parts_are_those_of_the_whole(two: Study) -> None:
    two.arrange(two.original)
    whole = calibrate(two.loaded.model, two.samples["docs"])
    parts = two.calibration(["docs"])
    assert parts.tokens == whole.tokens
    # Other numbers of rows may be multiplied in another order: float32 sums of up to d_ff products.
    # A window that is missing would change a sum by its share of the windows, some hundredths.
    rtol = two.spec.d_ff * 2**-24
    for layer, sums in whole.layers.items():
        for name, value in vars(sums).items():
            np.testing.assert_allclose(getattr(parts.layers[layer], name), value, rtol=rtol)
    assert two.calibration(["docs"], upto=2).windows == 2


def test_a_reading_is_kept(two: Study, monkeypatch: pytest.MonkeyPatch) -> None:
    first = two.read("uniform(.5)", two.orders)
    monkeypatch.setattr(two, "_read", None)
    again = two.read("uniform(.5)", two.orders)
    np.testing.assert_array_equal(again.scores.nll, first.scores.nll)
    with pytest.raises(TypeError):
        two.read("uniform(.5)", two.order("random(9)", two.sums))


def test_a_full_reading_is_the_model_itself(two: Study) -> None:
    plain = score_windows(two.loaded.model, two.heldout)
    np.testing.assert_allclose(two.full.scores.nll, plain.nll, atol=1e-4)
    assert two.full.share == 1
    spec = two.spec
    assert two.full.bytes == 2 * spec.top_k * spec.expert_bytes


def test_a_prepared_model_measures_the_same(two: Study, data: Path, tmp_path: Path) -> None:
    texts = [data / "data" / f"{kind}.calibration.txt" for kind in KINDS.values()]
    asked = PreparationRequest(texts, Local(), NeuronOrder(), 256, 3 * FEW.calibration, 16)
    source, out = two.work.parents[1] / "two", tmp_path / "prepared"
    metadata = prepare(source, out, asked, lambda stage, done, total: None)
    profile = two.profile(two.sums, two.local(two.sums))
    width = "tiered(.6,.9)"
    ours = estimates.row("", two.read(width, two.orders, profile), two.full, KINDS)
    loaded = to_float32(load_model(str(out)))
    quality = evaluate(
        loaded, two.heldout, named("lru", width=width), metadata.profile(), spec=two.spec
    )
    assert quality.costs["touched_share"] == pytest.approx(ours["share"])
    for kind, told in zip(KINDS.values(), quality.by_text, strict=True):
        mine = ours["by_kind"][kind]["perplexity"]["value"]
        assert told.perplexity.value == pytest.approx(mine, rel=1e-4)


def test_what_is_done_to_the_weights_is_undone(two: Study) -> None:
    bits = {layer: np.full(two.spec.n_experts, 2) for layer in two.spec.moe_layers}
    two.arrange(two.original)
    weights = [weight for own in two.experts.values() for _, weight in own.matrices()]
    before = [weight.detach().clone() for weight in weights]
    model = two.loaded.model  # the reading puts the neurons into another order
    two.read("full", two.orders, within=("2 bits", lambda: quantized(model, bits)), bits=bits)
    two.arrange(two.original)
    assert all(map(torch.equal, weights, before))


def test_quantized_bytes_follow_the_bits(two: Study) -> None:
    bits = {layer: np.full(two.spec.n_experts, 4) for layer in two.spec.moe_layers}
    reading = two.read("full", two.orders, bits=bits)
    assert reading.share == pytest.approx((4 + 0.25) / two.spec.dtype_bits)


def test_rules_meet_the_bytes_on_the_text_of_their_thresholds(studies: dict[str, Study]) -> None:
    for study in studies.values():
        routes, spec = study.routed, study.spec
        for target in (0.9, 0.75):
            for rule in (policy_controls.skip_to(target, routes), Contribution(Fraction(target))):
                bound = rule.bind(spec, study.weighed, True)
                widths = np.stack([
                    bound.widths(layer, ids, weights, None)
                    for layer, ids, weights in zip(
                        spec.moe_layers, routes.ids, routes.weights, strict=True
                    )
                ])  # fmt: skip
                assert widths.mean() / spec.n_blocks == pytest.approx(target, abs=0.01)


def test_controls_are_what_they_say() -> None:
    worth = {3: np.array([5.0, 1.0, 9.0, 2.0, 3.0, 4.0, 8.0, 7.0])}
    assert expert_controls.bits_by_rank(worth)[3].tolist() == [4, 2, 8, 2, 4, 4, 8, 4]
    assert np.flatnonzero(expert_controls.least(worth, 2)[3]).tolist() == [1, 3]


def test_tiers_at_random_touch_as_many_bytes(two: Study) -> None:
    spec, even = two.spec, np.zeros_like(two.prepared.pair_counts)
    even[:, *np.triu_indices(spec.n_experts, 1)] = 7
    profile = replace(two.prepared, pair_counts=even)
    own = Tiered()
    dealt = [
        policy_controls.DealtTiers(seed, own).bind(spec, profile, True).blocks for seed in range(3)
    ]
    for blocks in dealt:
        assert sorted(blocks[0].ravel()) == sorted(own.bind(spec, profile, True).blocks[0].ravel())
        assert (blocks == blocks.swapaxes(1, 2)).all()
    assert not np.array_equal(dealt[0], dealt[1]) or not np.array_equal(dealt[0], dealt[2])


@pytest.mark.parametrize("name", SHAPES)
def test_pairs_masked_one_by_one_are_the_exact_form(studies: dict[str, Study], name: str) -> None:
    own = studies[name]
    text = own.windows("calibration", KINDS.values(), 512)
    own.arrange(own.original)
    exact = dict(measure_increases(Exact(), own.loaded.model, text))
    pairs = masking.most_frequent(own.prepared, 3)
    plain, gained = masking.pair_by_pair(Ablation(own.loaded.model, text), pairs)
    tokens, loss = plain.sum(0)
    for place, (layer, i, j) in enumerate(pairs):
        for side, (hidden, other) in enumerate(((i, j), (j, i))):
            gain = gained[:, place, side].sum() / tokens
            cost = np.exp(loss / tokens) * np.expm1(gain)
            assert cost == pytest.approx(exact[layer][hidden, other], rel=1e-6, abs=1e-9)


def test_comparisons_are_paired_and_within_kinds() -> None:
    draw = np.random.default_rng(0)
    window = np.repeat(np.arange(40, dtype=np.int32), 10)
    text = (window >= 20).astype(np.int32)
    nll = (draw.random(400) * 5 + 3 * text).astype(np.float32)
    scores = Scores(nll, np.zeros(400, np.int32), window, text)
    one = estimates.Reading(scores, 1.0, 10.0, np.zeros((1, 1), np.int64))
    worse = replace(one, scores=replace(scores, nll=(nll + 0.1).astype(np.float32)), share=0.5)
    kinds = {0: "a", 1: "b"}
    found = estimates.row("worse", worse, one, kinds)
    assert found["increase"]["value"] == pytest.approx(np.exp(0.1) - 1, rel=1e-5)
    low, high = found["increase"]["interval"]
    assert high - low < 1e-6  # the same everywhere, however windows are drawn
    means = [np.exp(nll[text == kind].mean()) for kind in (0, 1)]
    told = [found["by_kind"][kind]["perplexity"]["value"] for kind in "ab"]
    assert told == pytest.approx(means, rel=1e-3 + 0.11)
    assert estimates.contrast(one, worse, kinds)["value"] == pytest.approx(np.exp(-0.1) - 1)
    events = np.zeros(400)
    events[:20] = 3
    assert estimates.conditional(nll, events, window)["value"] == pytest.approx(nll[:20].mean())
