"""The measurement of a loss curve."""

from __future__ import annotations

from dataclasses import replace
from fractions import Fraction
from pathlib import Path

import numpy as np
import pytest

pytest.importorskip("torch", reason="needs the extra hf")
pytest.importorskip("transformers", reason="needs the extra hf")

from crisp.checkpoint.loading import LoadedModel, load_model, to_float32
from crisp.errors import CrispError
from crisp.policy import Budget, named
from crisp.profile import Profile
from crisp.quality import Scores, evaluate, geometry, loss_curve
from crisp.quality.loss_curve import loss_of
from crisp.text_windows import TokenWindows, read_windows
from crisp.trace import RoutingTrace

ROOT = Path(__file__).resolve().parents[3]
TENTH, HALF = Fraction(1, 10), Fraction(1, 2)


@pytest.fixture(scope="module")
def tiny() -> LoadedModel:
    return to_float32(load_model(str(ROOT / "traces" / "tiny-mixtral")))


@pytest.fixture(scope="module")
def windows(tiny: LoadedModel) -> TokenWindows:
    text = ROOT / "tests" / "data" / "texts" / "contract.md"
    return read_windows(tiny.tokenizer, [text], 32, limit=96)


@pytest.fixture(scope="module")
def profile() -> Profile:
    counted = Profile.from_trace(
        RoutingTrace.load(ROOT / "traces" / "tiny-mixtral-docs.trace.safetensors")
    )
    draw = np.random.default_rng(0)
    layers, experts = counted.expert_counts.shape
    return replace(
        counted,
        contributions=draw.random((layers, experts, 20)).astype(np.float32),
        sensitivities=draw.random(layers).astype(np.float32),
        rescaling=np.ones((layers, experts, 21), np.float32),
    )


def test_a_point_is_what_the_evaluation_finds(
    tiny: LoadedModel, windows: TokenWindows, profile: Profile, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(loss_curve, "SHARES", (TENTH, HALF))
    monkeypatch.setattr(loss_curve, "MOST", 1e9)  # all of them are measured
    spec, done = geometry(tiny, 16), list[tuple[int, int]]()
    curve = loss_curve.measure_loss_curve(
        tiny, windows, profile, spec, [TENTH, HALF], lambda *how_far: done.append(how_far)
    )
    assert (curve.tokens, curve.budgets, curve.shares) == (93, (TENTH, HALF), (TENTH, HALF))
    assert done == [(1, 4), (2, 4), (3, 4), (4, 4)]
    full = evaluate(tiny, windows, named("fo"), spec=spec)
    for row, budget in enumerate(("10%", "50%")):
        for place, width in enumerate(("saliency(.1)", "saliency(.5)")):
            policy = named("saliency", width=width)
            found = evaluate(
                tiny, windows, policy, spec=spec, profile=profile, budget=Budget.parse(budget),
                reference=full.scores,
            )  # fmt: skip
            ratio = found.whole.ratio
            assert ratio is not None and ratio.interval is not None
            assert curve.losses[row, place] == ratio.value - 1
            assert curve.highs[row, place] == ratio.interval[1] - 1


def test_what_is_beyond_the_most_is_not_measured(
    tiny: LoadedModel, windows: TokenWindows, profile: Profile, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Every loss is above -1: the largest share is measured, and stands for the others."""
    monkeypatch.setattr(loss_curve, "SHARES", (TENTH, 2 * TENTH, HALF))
    monkeypatch.setattr(loss_curve, "MOST", -1.0)
    readings: list[object] = []
    read = loss_curve.score_windows
    monkeypatch.setattr(
        loss_curve, "score_windows", lambda *args, **how: readings.append(how) or read(*args, **how)
    )
    curve = loss_curve.measure_loss_curve(tiny, windows, profile, geometry(tiny, 16), [TENTH])
    assert len(readings) == 2  # the model as it is, and share 1/2
    assert len(set(curve.losses[0])) == len(set(curve.highs[0])) == 1


def test_a_single_window_is_refused(
    tiny: LoadedModel, windows: TokenWindows, profile: Profile
) -> None:
    one = replace(windows, tokens=windows.tokens[:1], scored=windows.scored[:1], text=[0])
    with pytest.raises(CrispError, match="--loss-curve: a single window"):
        loss_curve.measure_loss_curve(tiny, one, profile, geometry(tiny, 16), [HALF])


def test_the_end_is_that_of_the_text_that_loses_most() -> None:
    """Two texts of twenty windows of a token each: one loses 1 %, the other 5 %, everywhere."""
    window, text = np.arange(40, dtype=np.int32), np.repeat(np.arange(2, dtype=np.int32), 20)
    top, plain = np.zeros(40, np.int32), np.ones(40, np.float32)
    lost = np.log(np.where(text == 0, 1.01, 1.05)).astype(np.float32)
    found = loss_of(Scores(plain + lost, top, window, text), Scores(plain, top, window, text))
    assert found == pytest.approx((np.sqrt(1.01 * 1.05) - 1, 0.05), abs=1e-6)


def test_a_text_of_one_window_has_no_end_of_its_own() -> None:
    window, text = np.arange(3, dtype=np.int32), np.array([0, 0, 1], np.int32)
    top, plain = np.zeros(3, np.int32), np.ones(3, np.float32)
    lost = np.log([1.01, 1.01, 1.01]).astype(np.float32)
    found = loss_of(Scores(plain + lost, top, window, text), Scores(plain, top, window, text))
    assert found == pytest.approx((0.01, 0.01), abs=1e-6)
