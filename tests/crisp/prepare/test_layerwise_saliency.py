"""Rescaling and sensitivities measured layer by layer, against the whole model in memory."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest

torch = pytest.importorskip("torch", reason="needs the extra hf")
pytest.importorskip("transformers", reason="needs the extra hf")

from crisp.adapter import Experts, expert_layout  # noqa: E402
from crisp.prepare.calibration import calibrate  # noqa: E402
from crisp.prepare.importance import (  # noqa: E402
    NeuronOrder,
    block_contributions,
    neuron_scores,
    permutations,
)
from crisp.prepare.layerwise.calibration import calibrate_layerwise  # noqa: E402
from crisp.prepare.layerwise.saliency import SaliencyPlan  # noqa: E402
from crisp.prepare.saliency.magnitudes import measure_magnitudes  # noqa: E402
from crisp.prepare.saliency.measured import SaliencyMeasurements  # noqa: E402
from crisp.prepare.saliency.rescaling import measure_rescaling  # noqa: E402
from crisp.prepare.saliency.sensitivities import measure_sensitivities  # noqa: E402
from crisp.prepare.width_losses import sample_windows, temporarily_reordered  # noqa: E402
from tests.crisp.prepare.test_layerwise import FAMILIES, Killed, build, some_windows  # noqa: E402

PLAN = SaliencyPlan(NeuronOrder(), {}, 6, magnitudes=True)
WINDOWS = some_windows((24,) * 8 + (9,))


def in_memory(model: Any, carried: int, rescaled: int) -> SaliencyMeasurements:
    """What the whole model gives, its neurons in their order."""
    calibration = calibrate(model, WINDOWS)
    experts = {layer.index: Experts.of(layer) for layer in expert_layout(model).layers}
    orders = permutations(neuron_scores(PLAN.order, calibration, experts))
    sizes = block_contributions(calibration, orders, experts, PLAN.block)
    sample = sample_windows(WINDOWS, carried)
    with temporarily_reordered(experts, orders):
        factors = measure_rescaling(model, sample_windows(WINDOWS, rescaled), PLAN.block)
        sensitivities = measure_sensitivities(model, sample, PLAN.block, sizes, factors)
        magnitudes = measure_magnitudes(model, WINDOWS)
    return SaliencyMeasurements(factors, sensitivities, sample.n_fed, magnitudes)


def same(found: SaliencyMeasurements | None, expected: SaliencyMeasurements) -> None:
    """Up to the rounding of inputs, which are sums of neurons in another order."""
    assert found is not None and found.tokens == expected.tokens
    assert found.rescaling.keys() == expected.rescaling.keys()
    for layer, factors in expected.rescaling.items():
        np.testing.assert_allclose(found.rescaling[layer], factors, rtol=2**-10)  # of float16
    assert found.sensitivities == pytest.approx(expected.sensitivities, rel=1e-4)
    assert found.magnitudes is not None and expected.magnitudes is not None
    for layer, coefficients in expected.magnitudes.items():
        np.testing.assert_allclose(found.magnitudes[layer], coefficients, rtol=2**-7, atol=1e-3)


@pytest.mark.parametrize("family", FAMILIES)
def test_the_whole_model_in_memory_gives_the_same(
    family: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Every kind of head: qwen2_moe's is its table of embeddings."""
    monkeypatch.setattr("crisp.prepare.layerwise.saliency.CARRIED", 75)  # 3 of 9 windows
    monkeypatch.setattr("crisp.prepare.layerwise.saliency.TOKENS", 150)  # 6
    monkeypatch.setattr("crisp.prepare.calibration.BATCH_TOKENS", 48)
    model, reports = build(family), list[tuple[int, int]]()
    expected = in_memory(model, 75, 150)
    model.to(torch.bfloat16).save_pretrained(tmp_path / "model")
    result = calibrate_layerwise(
        tmp_path / "model", WINDOWS, tmp_path / "spill", lambda *now: reports.append(now), PLAN
    )
    same(result.saliency, expected)
    assert any((factors != 1).any() for factors in expected.rescaling.values())
    assert [done for done, _ in reports] == sorted({done for done, _ in reports})
    assert {total for _, total in reports} == {reports[-1][0]}  # it comes to its end


def test_a_kill_changes_no_bit(tmp_path: Path) -> None:
    """At every report in turn: each run goes on after what the one before had finished."""
    build("deepseek_v3").save_pretrained(tmp_path / "model")
    whole = calibrate_layerwise(tmp_path / "model", WINDOWS, tmp_path / "whole", plan=PLAN).saliency
    assert whole is not None
    kills = 0

    def stop(done: int, total: int) -> None:
        if done > kills * total // 12:
            raise Killed

    while kills < 12:
        try:
            calibrate_layerwise(tmp_path / "model", WINDOWS, tmp_path / "spill", stop, PLAN)
        except Killed:
            kills += 1
    result = calibrate_layerwise(
        tmp_path / "model", WINDOWS, tmp_path / "spill", plan=PLAN
    ).saliency
    assert result is not None and result.sensitivities == whole.sensitivities
    for layer, factors in whole.rescaling.items():
        np.testing.assert_array_equal(result.rescaling[layer], factors)
    # The inputs of layers that are finished are gone.
    assert [path.name for path in (tmp_path / "spill").glob("copies-*")] == ["copies-4.npy"]
    assert not list((tmp_path / "spill").glob("hidden-*"))
