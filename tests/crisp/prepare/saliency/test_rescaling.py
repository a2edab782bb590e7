"""Factors by which narrow outputs are multiplied, against least squares over the outputs."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest

torch = pytest.importorskip("torch", reason="needs the extra hf")
pytest.importorskip("transformers", reason="needs the extra hf")

from crisp.adapter import Experts, expert_layout  # noqa: E402
from crisp.prepare.saliency import rescaling  # noqa: E402
from crisp.prepare.saliency.rescaling import measure_rescaling  # noqa: E402
from crisp.text_windows import TokenWindows  # noqa: E402
from tests.crisp.prepare.test_layerwise import build, some_windows  # noqa: E402
from tests.crisp.tiny import mixtral, windows  # noqa: E402

HALF = 2.0**-11  # of the last bit of a float16, relative


def inputs(model: Any, text: TokenWindows) -> dict[int, Any]:
    """What each layer's experts were called with, all windows in a row: (hidden, index)."""
    seen: dict[int, list[Any]] = {}
    layout = expert_layout(model)
    hooks = [
        layer.experts.register_forward_pre_hook(
            lambda _, args, at=layer.index: seen.setdefault(at, []).append(args[:2])
        )
        for layer in layout.layers
    ]
    with torch.no_grad():
        for tokens in text.tokens:
            model(torch.from_numpy(tokens)[None])
    for hook in hooks:
        hook.remove()
    return {
        at: [torch.cat(part) for part in zip(*calls, strict=True)] for at, calls in seen.items()
    }


def least_squares(full: Any, part: Any) -> float:
    """The x for which part * x is nearest to full."""
    (factor,) = np.linalg.lstsq(part.reshape(-1, 1), full.ravel(), rcond=None)[0]
    return float(factor)


def test_they_are_least_squares_over_the_tokens_of_an_expert() -> None:
    """Of 24 neurons in blocks of 5: four, and one of 4."""
    model, text = mixtral(), windows([12] * 8 + [9])
    result = measure_rescaling(model, text, 5)
    inside = 0
    for layer, (hidden, index) in inputs(model, text).items():
        module = model.model.layers[layer].mlp.experts
        for expert in range(4):
            x = hidden[(index == expert).any(dim=1)]
            found = result[layer][expert]
            assert found.shape == (6,) and found[0] == found[5] == 1
            if len(x) < 16:
                assert (found == 1).all()
                continue
            gate, up = module.gate_up_proj[expert].detach().chunk(2)
            act = torch.nn.functional.silu(x @ gate.T) * (x @ up.T)
            down = module.down_proj[expert].detach()
            for width in range(1, 5):
                part = act[:, : 5 * width] @ down[:, : 5 * width].T
                factor = least_squares((act @ down.T).numpy(), part.numpy())
                inside += 0.5 < factor < 3
                assert found[width] == pytest.approx(np.clip(factor, 0.5, 3), rel=HALF)
    assert inside > 16


@pytest.mark.parametrize("family", ["gpt_oss", "nemotron_h", "deepseek_v3"])
def test_biases_belong_to_every_width(family: str) -> None:
    """gpt_oss has them; nemotron_h has no gates, and deepseek_v3 layers without experts."""
    model, text = build(family), some_windows((24,) * 8)
    result = measure_rescaling(model, text, 6)
    layers = {layer.index: Experts.of(layer) for layer in expert_layout(model).layers}
    assert result.keys() == layers.keys()
    compared = 0
    for layer, (hidden, index) in inputs(model, text).items():
        experts = layers[layer]
        for expert in range(6):
            x = hidden[(index == expert).any(dim=1)]
            if len(x) < 16:
                continue
            compared += 1
            with torch.no_grad():
                full, part = (
                    experts.output(expert, experts.activation(expert, x, neurons)).double().numpy()
                    for neurons in (experts.d_ff, 12)
                )
            factor = np.clip(least_squares(full, part), 0.5, 3)
            # Outputs are float32 here, of sums of some ten products.
            assert result[layer][expert, 2] == pytest.approx(factor, rel=2 * HALF)
    assert compared > 4


def test_a_second_half_that_repeats_the_first_is_foretold_exactly() -> None:
    """It adds three quarters of what the first half adds, so the half stands for 1.75 of itself."""
    model, text = mixtral(), windows([12] * 8)
    module = model.model.layers[1].mlp.experts
    with torch.no_grad():
        for first in (0, 24):  # gates, ups
            module.gate_up_proj[:, first + 12 : first + 24] = module.gate_up_proj[
                :, first : first + 12
            ]
        module.down_proj[:, :, 12:] = 0.75 * module.down_proj[:, :, :12]
    counts = inputs(model, text)[1][1].flatten().bincount(minlength=4)
    expected = np.where(counts.numpy() >= 16, 1.75, 1)
    assert (expected == 1.75).any()
    np.testing.assert_array_equal(measure_rescaling(model, text, 4)[1][:, 3], expected)


def test_an_interruption_changes_no_bit(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("crisp.prepare.calibration.BATCH_TOKENS", 24)
    monkeypatch.setattr(rescaling, "SAVE_EVERY", 2)
    model, text = mixtral(), windows([12] * 9)
    expected, reports = measure_rescaling(model, text, 4), []

    def progress(done: int, total: int) -> None:
        reports.append((done, total))
        if len(reports) == 3:
            raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        measure_rescaling(model, text, 4, tmp_path, progress)
    for _ in range(2):  # the second time nothing is left to do
        result = measure_rescaling(model, text, 4, tmp_path, progress)
        for layer, factors in expected.items():
            np.testing.assert_array_equal(result[layer], factors)
    assert reports == [(done, 108) for done in (24, 48, 72, 96, 108)]


def test_an_expert_with_few_tokens_is_left_as_it_is() -> None:
    """24 tokens of two experts each: some of the four have fewer than 16."""
    model, text = mixtral(), windows([12, 12])
    result = measure_rescaling(model, text, 4)
    few = 0
    for layer, (_, index) in inputs(model, text).items():
        counts = index.flatten().bincount(minlength=4).numpy()
        few += int(((counts > 0) & (counts < 16)).sum())
        np.testing.assert_array_equal((result[layer] == 1).all(axis=1), counts < 16)
    assert few > 0
