"""What widths cost, against straightforward computations of the same."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest

torch = pytest.importorskip("torch", reason="needs the extra hf")
pytest.importorskip("transformers", reason="needs the extra hf")

from crisp.adapter import Experts, expert_layout  # noqa: E402
from crisp.errors import CrispError  # noqa: E402
from crisp.model.spec import ModelSpec  # noqa: E402
from crisp.prepare import calibration, width_losses  # noqa: E402
from crisp.prepare.ablation import Ablation  # noqa: E402
from crisp.prepare.width_losses import measured_widths, sample_windows, temporarily_reordered  # noqa: E402
from crisp.text_windows import TokenWindows  # noqa: E402
from tests.crisp.tiny import mixtral, windows  # noqa: E402


def geometry(model: Any, block: int = 4) -> ModelSpec:
    """24 neurons in 6 blocks."""
    return ModelSpec.from_config(model.config.to_dict()).with_(block=block)


def chances(model: Any, text: TokenWindows, layer: int, expert: int, role: int, left: int) -> Any:
    """Of every token that may follow each scored one, and how often the expert has the role.

    Expert by expert and token by token; with its ``left`` first neurons where it has the role.
    """
    module, calls = model.model.layers[layer].mlp.experts, []

    def forward(hidden: Any, index: Any, weights: Any) -> Any:
        out = torch.zeros_like(hidden)
        for row in range(len(hidden)):
            for column in range(index.shape[1]):
                e, w = int(index[row, column]), weights[row, column]
                is_anchor = bool(w == weights[row].max())
                here = e == expert and is_anchor == (role == 0)
                calls.append(here)
                n = left if here else 24
                gate, up = module.gate_up_proj[e, :n], module.gate_up_proj[e, 24 : 24 + n]
                x = hidden[row]
                act = torch.nn.functional.silu(gate @ x) * (up @ x)
                out[row] += w * (module.down_proj[e, :, :n] @ act)
        return out

    module.forward = forward
    probabilities = []
    with torch.no_grad():
        for tokens, scored in zip(text.tokens, text.scored, strict=True):
            logits = model(torch.from_numpy(tokens)[None]).logits[0].numpy()[:-1][-scored:]
            shifted = np.exp(logits - logits.max(1, keepdims=True))
            probabilities.append(shifted / shifted.sum(1, keepdims=True))
    del module.forward
    return np.concatenate(probabilities), sum(calls)


@pytest.mark.parametrize("k", [2, 3])
def test_it_is_how_far_predictions_move(k: int, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(calibration, "BATCH_TOKENS", 32)
    monkeypatch.setattr(width_losses, "LEAST", 8)
    model, text = mixtral(k=k), windows([12, 12, 12, 9])
    text.scored[1] = 5  # the window's first half only gives context
    spec = geometry(model)
    assert measured_widths(spec) == [0, 1, 2, 3, 5]  # 0, 1/8, 1/4 and 3/8, 1/2, 3/4; rounded up
    by_layer = dict(width_losses.each_width_losses(model, text, spec))
    assert list(by_layer) == [0, 1]
    for layer, layer_losses in by_layer.items():
        assert layer_losses.counts.sum() == 45 * k and layer_losses.counts[:, 0].sum() == 45
        measured = 0
        for expert, role in np.ndindex(4, 2):
            plain, count = chances(model, text, layer, expert, role, 24)
            losses = layer_losses.losses[expert, role]
            assert layer_losses.counts[expert, role] == count
            if count < 8:
                assert np.isnan(losses).all()
                continue
            measured += 1
            for width in (0, 3, 5):
                moved, _ = chances(model, text, layer, expert, role, 4 * width)
                each = (plain * np.log(plain / moved)).sum(axis=1)
                assert losses[width] == pytest.approx(each.mean(), rel=1e-6)
            assert losses[4] == pytest.approx((losses[3] + losses[5]) / 2)
            assert losses[6] == 0 < losses[5] < losses[0]
        assert measured >= 2


def test_only_windows_with_such_a_token_run_from_the_layer_up(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """One run in full of these windows, and one for each measured width."""
    model, text = mixtral(layers=3), windows([4] * 40)
    spec, calls = geometry(model), []
    for at, layer in enumerate(model.model.layers):
        layer.self_attn.register_forward_hook(
            lambda _, __, out, at=at: calls.append((at, len(out[0])))
        )
    measured = width_losses.each_width_losses(model, text, spec, skip={0, 2})
    (batch,) = Ablation(model, text).plain(1)
    calls.clear()
    ((layer, own),) = measured
    assert layer == 1 and calls.pop(0) == (0, 40)  # the plain run
    runs = 0
    for expert, role in np.ndindex(4, 2):
        columns = batch.experts[:, :1] if role == 0 else batch.experts[:, 1:]
        routed = (columns == expert).any(axis=1)
        if routed.sum() >= width_losses.LEAST:
            runs += int(routed.reshape(40, 4).any(axis=1).sum())
    assert not any(at == 0 for at, _ in calls)
    assert sum(n for at, n in calls if at == 1) == 40 + runs * (1 + len(measured_widths(spec)))
    assert np.isfinite(own.losses).any()


def test_progress_comes_to_its_end() -> None:
    progress: list[tuple[int, int]] = []
    model = mixtral(layers=3)
    measured = width_losses.each_width_losses(
        model, windows([6, 6]), geometry(model, 16), {1}, lambda *now: progress.append(now)
    )
    assert [layer for layer, _ in measured] == [0, 2]
    assert progress == [(done, 16) for done in range(1, 17)]  # two layers, 4 experts, 2 roles


def test_windows_are_taken_from_all_over_the_text() -> None:
    text = windows([10] * 8 + [7])
    for number, tokens in enumerate(text.tokens):
        tokens[0] = number
    for tokens, first_tokens in (
        (10, [4]),
        (39, [1, 4, 7]),
        (80, [0, 1, 2, 3, 5, 6, 7, 8]),
        (999, range(9)),
    ):
        sample = sample_windows(text, tokens)
        assert [one[0] for one in sample.tokens] == list(first_tokens)
        assert sample.scored == [len(one) - 1 for one in sample.tokens]
    with pytest.raises(CrispError, match="--width-losses 9: at least a window of 10 tokens"):
        sample_windows(text, 9)


def test_neurons_stand_in_their_order_for_a_while() -> None:
    model = mixtral()
    experts = {layer.index: Experts.of(layer) for layer in expert_layout(model).layers}
    before = {name: weight.clone() for name, weight in model.state_dict().items()}
    draw = np.random.default_rng(0)
    orders = {layer: draw.permuted(np.tile(np.arange(24), (4, 1)), axis=1) for layer in (0, 1)}
    x = torch.randn(5, 16, dtype=torch.float64)
    whole = experts[1].activation(2, x, 24)
    with pytest.raises(KeyboardInterrupt), temporarily_reordered(experts, orders):
        first = experts[1].activation(2, x, 3)
        torch.testing.assert_close(first, whole[:, orders[1][2, :3]])
        raise KeyboardInterrupt
    assert all(torch.equal(weight, before[name]) for name, weight in model.state_dict().items())
