"""Sensitivities of layers, against a run token by token, and where they are known beforehand."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest

torch = pytest.importorskip("torch", reason="needs the extra hf")
pytest.importorskip("transformers", reason="needs the extra hf")

from crisp.prepare.saliency.sensitivities import measure_sensitivities, upper_half  # noqa: E402
from crisp.text_windows import TokenWindows  # noqa: E402
from tests.crisp.tiny import mixtral, windows  # noqa: E402

BLOCKS = 6  # of 4 neurons


def drawn(layers: int = 2, experts: int = 4, seed: int = 0) -> tuple[Any, Any]:
    """Contributions, not in descending order, and factors, by layer."""
    draw = np.random.default_rng(seed)
    contributions = draw.random((layers, experts, BLOCKS)).astype(np.float32)
    factors = draw.uniform(0.5, 2, (layers, experts, BLOCKS + 1)).astype(np.float16)
    factors[:, :, [0, -1]] = 1
    return dict(enumerate(contributions)), dict(enumerate(factors))


def by_hand(
    model: Any, text: TokenWindows, layer: int, contributions: Any, factors: Any
) -> tuple[Any, Any]:
    """Predictions of scored tokens, and the sums left out in ``layer``, token by token."""
    module, sums = model.model.layers[layer].mlp.experts, []

    def forward(hidden: Any, index: Any, weights: Any) -> Any:
        out = torch.zeros_like(hidden)
        for row in range(len(hidden)):
            pairs = [
                (-float(weights[row, column]) * contributions[e, : b + 1].min(), column, b, e)
                for column, e in enumerate(index[row].tolist())
                for b in range(BLOCKS)
            ]
            kept = sorted(pairs)[: len(pairs) // 2]
            rest = sorted(pairs)[len(pairs) // 2 :]
            sums.append(
                sum(float(weights[row, c]) * float(contributions[e, b]) for _, c, b, e in rest)
            )
            for column, e in enumerate(index[row].tolist()):
                width = sum(c == column for _, c, _, _ in kept)
                neurons = [4 * b + i for _, c, b, _ in kept if c == column for i in range(4)]
                assert sorted(neurons) == list(range(4 * width))  # the leading ones
                gate, up = module.gate_up_proj[e].chunk(2)
                act = torch.nn.functional.silu(gate @ hidden[row]) * (up @ hidden[row])
                part = module.down_proj[e][:, neurons] @ act[neurons]
                out[row] += weights[row, column] * float(factors[e, width]) * part
        return out

    predictions = []
    plain = module.forward
    for replaced in (False, True):
        module.forward = forward if replaced else plain
        with torch.no_grad():
            for tokens, scored in zip(text.tokens, text.scored, strict=True):
                logits = model(torch.from_numpy(tokens)[None]).logits[0][:-1][-scored:]
                predictions.append(logits.softmax(-1).numpy())
    module.forward = plain
    half = len(predictions) // 2
    return [np.concatenate(part) for part in (predictions[:half], predictions[half:])], sums


@pytest.mark.parametrize("k", [1, 2, 3])
def test_they_are_what_a_run_token_by_token_gives(k: int, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("crisp.prepare.calibration.BATCH_TOKENS", 24)
    model, text = mixtral(k=k), windows([12, 12, 12, 9])
    text.scored[1] = 5  # the window's first half only gives context
    contributions, factors = drawn()
    result = measure_sensitivities(model, text, 4, contributions, factors)
    assert list(result) == [0, 1]
    for layer, sensitivity in result.items():
        (plain, halved), sums = by_hand(model, text, layer, contributions[layer], factors[layer])
        assert len(plain) == 35 and len(sums) == 45
        increase = (plain * np.log(plain / halved)).sum(axis=1).mean()
        assert sensitivity == pytest.approx(np.sqrt(increase / np.square(sums).mean()), rel=1e-6)


def test_a_layer_that_adds_less_is_less_sensitive() -> None:
    """The divergence of predictions goes by the square of a small change, and so do the sums.

    Outputs of a hundredth and a thousandth, from the same contributions: a tenth of the
    sensitivity. Where the contributions are a tenth as well, it is the same.
    """
    text, (contributions, _) = windows([12] * 4), drawn()
    factors = {layer: np.ones((4, BLOCKS + 1), np.float16) for layer in (0, 1)}
    found = []
    for share in (1e-2, 1e-3):
        model = mixtral()
        with torch.no_grad():
            model.model.layers[1].mlp.experts.down_proj.mul_(share)
        scaled = contributions | {1: (contributions[1] * share).astype(np.float32)}
        found += [
            measure_sensitivities(model, text, 4, sizes, factors)[1]
            for sizes in (contributions, scaled)
        ]
    assert found[2] == pytest.approx(found[0] / 10, rel=0.05)  # what is left of higher powers
    assert found[3] == pytest.approx(found[1], rel=0.05)
    assert found[0] > 0


def test_the_upper_half_is_a_prefix_of_each_expert() -> None:
    contributions = np.array([[[3.0, 1, 2], [4, 4, 4]], [[3, 1, 2], [4, 4, 4]]])
    weights, absent = np.array([[1.0, 0.5], [1, 0]]), np.array([[False, False], [False, True]])
    widths, rest = upper_half(weights, contributions, absent)
    # First token: 3, 1, 1 and 2, 2, 2. Kept are 3, 2, 2, so left out are 1, 2 and 4 x .5.
    # The second has one expert: of three blocks one is kept.
    assert widths.tolist() == [[1, 2], [1, 0]]
    assert rest.tolist() == [5, 3]
    widths, rest = upper_half(np.array([[0.5]]), np.array([[[2.0]]]), np.array([[False]]))
    assert (widths.tolist(), rest.tolist()) == ([[0]], [1])  # of one block, that one is left out


def test_a_layer_that_contributes_nothing_is_not_sensitive() -> None:
    contributions, factors = drawn()
    contributions[0][:] = 0
    model = mixtral()
    result = measure_sensitivities(model, windows([6]), 4, contributions, factors)
    assert result[0] == 0 < result[1]


def test_an_interruption_changes_no_bit(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("crisp.prepare.calibration.BATCH_TOKENS", 24)
    model, text, reports = mixtral(), windows([12] * 5), []
    expected = measure_sensitivities(model, text, 4, *drawn())

    def progress(done: int, total: int) -> None:
        reports.append((done, total))
        if len(reports) == 3:
            raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        measure_sensitivities(model, text, 4, *drawn(), tmp_path, progress)
    for _ in range(2):  # the second time nothing is left to do
        assert measure_sensitivities(model, text, 4, *drawn(), tmp_path, progress) == expected
    # Two windows at a time in two layers; the second batch is begun again.
    assert reports == [(done, 120) for done in (24, 48, 72, 72, 96, 108, 120)]
