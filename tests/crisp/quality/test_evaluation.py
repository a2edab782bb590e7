from __future__ import annotations

import json
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from crisp.adapter import record_routing
from crisp.checkpoint.loading import LoadedModel, load_model, to_float32
from crisp.errors import CrispError
from crisp.policy import Budget, named
from crisp.profile import Profile
from crisp.quality import Quality, evaluate, geometry, score_windows, to_json
from crisp.text_windows import TokenWindows, read_windows
from crisp.trace import RoutingTrace

torch = pytest.importorskip("torch", reason="needs the extra hf")
pytest.importorskip("transformers", reason="needs the extra hf")

ROOT = Path(__file__).resolve().parents[3]
LAYERS, K, BLOCKS = 6, 2, 20  # of tiny-mixtral, in blocks of 16 neurons
BLOCK = 3 * 16 * 128 * 2  # bytes: three matrices, 16 neurons, d_model, bfloat16; whole pages


@pytest.fixture(scope="module")
def tiny() -> Iterator[LoadedModel]:
    loaded = to_float32(load_model(str(ROOT / "traces" / "tiny-mixtral")))
    loaded.model.set_experts_implementation("eager")
    yield loaded


@pytest.fixture(scope="module")
def windows(tiny: LoadedModel) -> TokenWindows:
    texts = [
        ROOT / "tests" / "data" / "texts" / "contract.md",
        ROOT / "tests" / "data" / "texts" / "traces.md",
    ]
    return read_windows(tiny.tokenizer, texts, 64, limit=512)


@pytest.fixture(scope="module")
def profile() -> Profile:
    trace = ROOT / "traces" / "tiny-mixtral-docs.trace.safetensors"
    return Profile.from_trace(RoutingTrace.load(trace))


@pytest.fixture(scope="module")
def full(tiny: LoadedModel, windows: TokenWindows) -> Quality:
    return evaluate(tiny, windows, named("fo"), spec=geometry(tiny, 16))


def measured(
    tiny: LoadedModel, windows: TokenWindows, full: Quality, width: str, **how: Any
) -> Quality:
    policy = named("lru", width=width)
    return evaluate(tiny, windows, policy, spec=geometry(tiny, 16), reference=full.scores, **how)


def test_full_width_is_the_plain_model(
    tiny: LoadedModel, windows: TokenWindows, full: Quality
) -> None:
    plain = score_windows(tiny.model, windows)
    assert (plain.nll == full.scores.nll).all()
    again = measured(tiny, windows, full, "full")
    assert again.whole.ratio is not None
    assert (again.whole.ratio.value, again.whole.ratio.interval) == (1, (1, 1))
    assert again.whole.retention is not None
    assert (again.whole.retention.value, again.whole.retention.interval) == (1, (1, 1))


def test_what_widths_touch(tiny: LoadedModel, windows: TokenWindows, full: Quality) -> None:
    whole = LAYERS * K * BLOCKS * BLOCK
    for width, share, skipped in (("full", 1, 0), ("uniform(.5)", 0.5, 0), ("single", 0.5, LAYERS)):
        costs = measured(tiny, windows, full, width).costs
        assert costs["bytes_touched_per_token"] == share * whole
        assert costs["touched_share"] == share
        assert costs["skipped_per_token"] == skipped


def test_narrow_experts_cost_more_than_a_skipped_second_one(
    tiny: LoadedModel, windows: TokenWindows, full: Quality
) -> None:
    half = measured(tiny, windows, full, "uniform(.5)")
    single = measured(tiny, windows, full, "single")
    most = measured(tiny, windows, full, "uniform(.75)")
    losses = [quality.whole.ratio for quality in (most, single, half)]
    assert all(loss is not None and loss.interval is not None for loss in losses)
    # the neurons are in no particular order: pruning half of each hurts most
    assert losses[2].interval[0] > losses[1].interval[1]  # type: ignore[union-attr,index]
    assert losses[2].interval[0] > losses[0].interval[1]  # type: ignore[union-attr,index]
    assert half.whole.retention is not None
    assert half.whole.retention.value < 0.8


def test_texts_are_told_apart(tiny: LoadedModel, windows: TokenWindows, full: Quality) -> None:
    one, two = measured(tiny, windows, full, "single").by_text
    assert (one.text, two.text) == ("contract.md", "traces.md")
    assert one.tokens + two.tokens == windows.n_scored
    together = measured(tiny, windows, full, "single").whole.perplexity.value
    nll = (
        one.tokens * np.log(one.perplexity.value) + two.tokens * np.log(two.perplexity.value)
    ) / (windows.n_scored)
    assert together == pytest.approx(np.exp(nll))


def test_tiers_are_those_of_the_profile(
    tiny: LoadedModel, windows: TokenWindows, full: Quality, profile: Profile
) -> None:
    quality = measured(tiny, windows, full, "tiered", profile=profile)
    assert sum(row.events for row in quality.by_tier) == LAYERS * windows.n_scored
    assert sum(row.share or 0 for row in quality.by_tier) == pytest.approx(1)
    assert all(row.retention is not None for row in quality.by_tier)
    # Tokens whose pairs are all hot would keep everything; widths that skip nothing in cold too.
    same = measured(tiny, windows, full, "tiered(warm=1,cold=1)", profile=profile)
    assert [row.retention.value for row in same.by_tier if row.retention] == [1, 1, 1]
    assert measured(tiny, windows, full, "single", profile=profile).by_tier == []


def test_renormalizing_changes_the_loss(
    tiny: LoadedModel, windows: TokenWindows, full: Quality
) -> None:
    dropped = measured(tiny, windows, full, "single").whole.perplexity.value
    renormalized = measured(tiny, windows, full, "single", renormalize=True).whole.perplexity.value
    assert dropped != renormalized


def distinct(tiny: LoadedModel, windows: TokenWindows) -> int:
    """(layer, expert)s that any token is routed to."""
    seen: set[tuple[int, int]] = set()
    with torch.inference_mode(), record_routing(tiny.model) as recorder:
        for tokens in windows.tokens:
            tiny.model(input_ids=torch.tensor(tokens)[None])
            for row in recorder.take().experts:
                seen |= {(layer, int(e)) for layer, experts in enumerate(row) for e in experts}
    return len(seen)


@pytest.mark.parametrize("scope", ["layer", "global"])
def test_a_cache_that_holds_all_loads_each_expert_once(
    tiny: LoadedModel, windows: TokenWindows, full: Quality, scope: str
) -> None:
    few = replace(
        windows,
        tokens=[tokens[:8] for tokens in windows.tokens[:3]],
        scored=[7] * 3,
        text=[0] * 3,
        dataset=windows.dataset[:1],
    )
    policy = named("lru", scope=scope)
    quality = evaluate(tiny, few, policy, spec=geometry(tiny, 16), budget=Budget.parse("100%"))
    once = distinct(tiny, few)
    assert quality.costs["tasks_per_token"] == LAYERS * K
    assert quality.costs["bytes_loaded_per_token"] == once * BLOCKS * BLOCK / 24
    assert quality.costs["hit_rate"] == pytest.approx(1 - once / (24 * LAYERS * K))
    assert quality.settings["batch"] == 1


def test_everything_is_said_as_json(
    tiny: LoadedModel, windows: TokenWindows, full: Quality
) -> None:
    other = measured(tiny, windows, full, "single")
    text = to_json([full, other])
    assert text == to_json([full, other])
    content = json.loads(text)
    first, second = content["results"]
    assert (content["version"], first["metrics"]["tokens"]) == (1, windows.n_scored)
    assert first["metrics"]["ratio"] is None
    assert set(first["unavailable"]) == {
        "ratio", "ratio_interval", "retention", "retention_interval",
        "tasks_per_token", "hit_rate", "partial_hit_rate", "bytes_loaded_per_token",
    }  # fmt: skip
    assert second["metrics"]["ratio_interval"][0] < second["metrics"]["ratio"]
    for quality in (first, second):
        nulls = {name for name, value in quality["metrics"].items() if value is None}
        assert nulls == set(quality["unavailable"])
    settings = second["settings"]
    assert settings["policy"]["width"] == "single"
    assert (settings["window"], settings["stride"], settings["windows"]) == (64, 64, 8)
    assert settings["run"].startswith("float32 (published in bfloat16) on cpu")
    assert [text.split()[0] for text in settings["texts"]] == ["contract.md", "traces.md"]


def test_a_single_window_has_no_interval(tiny: LoadedModel, windows: TokenWindows) -> None:
    one = replace(windows, tokens=windows.tokens[:1], scored=[63], text=[0])
    result = evaluate(tiny, replace(one, dataset=windows.dataset[:1]), named("fo")).to_dict()
    assert result["metrics"]["perplexity_interval"] is None
    assert result["unavailable"]["perplexity_interval"] == "there is a single window"


def test_tiers_need_counts(tiny: LoadedModel, windows: TokenWindows) -> None:
    with pytest.raises(CrispError, match="width tiered needs counts of combinations"):
        evaluate(tiny, windows, named("crisp"))


def test_a_trained_model_predicts_as_well_as_was_found_before(shared: Path) -> None:
    """Between the rough figures of its README, measured on other windows of the same texts."""
    loaded = to_float32(load_model(str(shared / "models" / "tiny-mixtral")))
    for kind, rough in (("code", 13.61), ("docs", 18.5), ("kjv", 27.12)):
        text = shared / "data" / f"{kind}.heldout.txt"
        windows = read_windows(loaded.tokenizer, [text], 256, limit=8192)
        perplexity = evaluate(loaded, windows, named("fo")).whole.perplexity
        assert perplexity.value == pytest.approx(rough, rel=0.2)
