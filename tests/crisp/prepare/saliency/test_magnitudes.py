"""What an input foretells of an expert's contribution: the regression, and a model's."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest

torch = pytest.importorskip("torch", reason="needs the extra hf")
pytest.importorskip("transformers", reason="needs the extra hf")

from crisp.adapter import MagnitudePredictor, expert_layout, record_routing  # noqa: E402
from crisp.checkpoint.loading import load_model  # noqa: E402
from crisp.model.spec import ModelSpec  # noqa: E402
from crisp.prepare.saliency.magnitudes import (  # noqa: E402
    best_ridge,
    logs,
    measure_magnitudes,
    regress,
)
from crisp.profile import Profile  # noqa: E402
from tests.crisp.prepare.test_layerwise import some_windows  # noqa: E402

MODEL = Path(__file__).parents[4] / "traces" / "tiny-mixtral"


def test_a_line_is_found() -> None:
    """y = 2 a - b + 3, without noise; a ridge draws the slope towards 0 and keeps the mean."""
    x = np.random.default_rng(0).normal(1, 2, (400, 2)).astype(np.float32)
    y = 2 * x[:, 0] - x[:, 1] + 3.0
    slope, intercept = regress(x, y, 0)
    assert (*slope, intercept) == pytest.approx((2, -1, 3), abs=1e-5)
    drawn, shifted = regress(x, y, 1)
    assert np.abs(drawn).sum() < 2.5
    assert float((x @ drawn + shifted).mean()) == pytest.approx(float(y.mean()), rel=1e-6)


def test_noise_asks_for_a_stronger_ridge() -> None:
    """With hardly more tokens than numbers of an input, what is fitted to noise foretells badly."""
    random = np.random.default_rng(0)
    x = random.normal(size=(120, 80)).astype(np.float32)
    signal, noise = x[:, 0].astype(float), random.normal(size=120)
    assert best_ridge([(x, signal)]) < best_ridge([(x, noise)])


def test_logarithms_are_of_the_size_over_its_mean() -> None:
    assert logs(np.array([1.0, 3.0])) == pytest.approx(np.log([0.5, 1.5]))
    assert logs(np.array([0.0, 1.0]))[0] == pytest.approx(-np.log(8))


@pytest.fixture(scope="module")
def model() -> Any:
    return load_model(str(MODEL)).model.float()


def test_a_models_own_contributions_are_foretold(model: Any) -> None:
    """Of text that nothing was fitted on, against activations computed here one token at a time."""
    spec = ModelSpec.from_config(model.config.to_dict())
    windows, others = some_windows((128,) * 12), some_windows((128,) * 14).tokens[12:]
    found = measure_magnitudes(model, windows)
    assert {coefficients.shape for coefficients in found.values()} == {(8, 129)}
    whole = np.zeros((spec.n_layers, 8, 129), np.float16)
    for layer, coefficients in found.items():
        whole[layer] = coefficients
    profile = replace(Profile.empty(spec), magnitudes=whole)

    inputs: list[Any] = []
    hooks = [
        layer.experts.register_forward_pre_hook(lambda _, args: inputs.append(args))
        for layer in expert_layout(model).layers
    ]
    ids = torch.from_numpy(np.stack(others))
    predictor = MagnitudePredictor(spec, profile)
    with torch.inference_mode(), record_routing(model, predict=predictor) as recorder:
        model(input_ids=ids.long(), use_cache=False)
        routing = recorder.take()
    for hook in hooks:
        hook.remove()
    assert routing.magnitudes is not None and routing.magnitudes.shape == routing.experts.shape
    for layer in range(spec.n_layers):
        experts, hidden = model.model.layers[layer].mlp.experts, inputs[layer][0]
        for expert in range(8):
            rows, ranks = np.nonzero(routing.experts[:, layer] == expert)
            if len(rows) < 60:
                continue
            gate, up = experts.gate_up_proj[expert].chunk(2)
            x = hidden[torch.from_numpy(rows)]
            z = (torch.nn.functional.silu(x @ gate.T) * (x @ up.T)).abs()
            size = (z @ experts.down_proj[expert].norm(dim=0)).detach().numpy()
            predicted = routing.magnitudes[rows, layer, ranks].astype(float)
            assert np.corrcoef(np.log(size), np.log(predicted))[0, 1] > 0.3
            by_hand = np.exp(x.numpy().astype(float) @ whole[layer, expert, :-1].astype(float)
                             + float(whole[layer, expert, -1]))  # fmt: skip
            np.testing.assert_allclose(predicted, by_hand, rtol=2e-3)  # float16
