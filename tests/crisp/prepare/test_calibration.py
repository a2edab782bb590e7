"""What calibration adds up, against a plain loop over tokens."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest

torch = pytest.importorskip("torch", reason="needs the extra hf")
transformers = pytest.importorskip("transformers", reason="needs the extra hf")

from crisp.capture import Recipe, capture  # noqa: E402
from crisp.checkpoint.loading import load_model  # noqa: E402
from crisp.errors import CrispError  # noqa: E402
from crisp.prepare import calibration  # noqa: E402
from crisp.prepare.calibration import CalibrationSums, LayerSums, batch_windows, calibrate  # noqa: E402
from crisp.profile import Profile  # noqa: E402
from crisp.text_windows import TokenWindows  # noqa: E402
from tests.crisp.tiny import mixtral, windows  # noqa: E402

ROOT = Path(__file__).parents[3]


def by_hand(model: Any, text: TokenWindows) -> dict[int, LayerSums]:
    """The same sums, token by token in numpy, from what the experts modules are given."""
    given: list[tuple[int, list[Any]]] = []
    hooks = [
        layer.mlp.experts.register_forward_pre_hook(
            lambda _, args, at=at: given.append((at, [value.numpy() for value in args]))
        )
        for at, layer in enumerate(model.model.layers)
    ]
    with torch.no_grad():
        for tokens in text.tokens:
            model(torch.from_numpy(tokens)[None])
    for hook in hooks:
        hook.remove()
    shape = model.model.layers[0].mlp.experts.down_proj.shape
    sums = {at: LayerSums.empty(shape[0], *shape[:0:-1]) for at in range(len(model.model.layers))}
    for at, (hidden, index, weights) in given:
        experts, layer_sums = model.model.layers[at].mlp.experts, sums[at]
        for x, ids, w in zip(hidden, index, weights, strict=True):
            added = {}
            layer_sums.squares += x**2
            for expert, weight in zip(ids, w, strict=True):
                gate, up = np.split(experts.gate_up_proj[expert].detach().numpy() @ x, 2)
                activation = gate / (1 + np.exp(-gate)) * up
                layer_sums.activation[expert] += abs(activation)
                layer_sums.tokens[expert] += 1
                output = experts.down_proj[expert].detach().numpy() @ activation
                added[expert] = np.sqrt(((weight * output) ** 2).sum())
            anchor = ids[w.argmax()]
            for other in ids:
                if other != anchor:
                    layer_sums.anchored[anchor, other] += 1
                    layer_sums.removed[anchor, other] += added[anchor]
                    layer_sums.removed[other, anchor] += added[other]
    return sums


@pytest.mark.parametrize("k", [2, 3])
def test_sums_equal_those_of_a_loop_over_tokens(k: int) -> None:
    model, text = mixtral(k=k), windows([12, 12, 7])
    calibration = calibrate(model, text)
    assert (calibration.windows, calibration.tokens) == (3, 31)
    for layer, expected in by_hand(model, text).items():
        sums = calibration.layers[layer]
        np.testing.assert_allclose(sums.activation, expected.activation, rtol=1e-12)
        np.testing.assert_allclose(sums.squares, expected.squares, rtol=1e-12)
        moments = expected.squares / expected.squares.mean()
        np.testing.assert_allclose(sums.input_moments, moments, rtol=1e-12)
        np.testing.assert_allclose(sums.removed, expected.removed, rtol=1e-6)  # norms are float32
        assert sums.tokens.tolist() == expected.tokens.tolist()
        assert sums.anchored.tolist() == expected.anchored.tolist()
        assert sums.tokens.sum() == 31 * k and sums.anchored.sum() == 31 * (k - 1)
        mean = expected.activation / np.maximum(expected.tokens, 1)[:, None]
        np.testing.assert_allclose(sums.importance, mean, rtol=1e-12)


def test_large_sums_are_kept_in_float64() -> None:
    """2**24 + 1 is no float32: one neuron's sum over 3 x 2**16 rows would lose its ones there."""
    activation = torch.ones(3 * 2**16, 2)
    activation[0] = 2**24
    assert calibration._magnitude(-activation).tolist() == [2**24 + 3 * 2**16 - 1] * 2


@pytest.mark.parametrize("dtype", ["float32", "float64", "bfloat16"])
def test_the_model_computes_what_it_would_have(dtype: str) -> None:
    model, text = mixtral().to(getattr(torch, dtype)), windows([10, 10])
    seen: list[Any] = []
    hook = model.model.register_forward_hook(lambda _, __, output: seen.append(output[0].clone()))
    with torch.inference_mode():
        model(torch.from_numpy(np.stack(text.tokens)))
    calibrate(model, text)
    hook.remove()
    assert len(seen) == 2 and torch.equal(*seen)
    assert not any("forward" in vars(layer.mlp.experts) for layer in model.model.layers)


def test_counts_are_those_of_a_captured_trace(tmp_path: Path) -> None:
    loaded = load_model(str(ROOT / "traces" / "tiny-mixtral"))
    loaded.model.float().set_experts_implementation("eager")
    text = tmp_path / "a.txt"
    text.write_text((ROOT / "README.md").read_text(encoding="utf-8"), encoding="utf-8")
    recipe = Recipe(prompt_tokens=48, new_tokens=0, sequences=6, token_ids=True)
    trace = capture(loaded, [text], recipe)
    assert trace.token is not None
    cut = list(trace.token.astype(np.int64).reshape(6, 48))
    calibration = calibrate(loaded.model, TokenWindows(cut, [47] * 6, [0] * 6, [], 48, 48))
    profile = Profile.from_trace(trace)
    for layer, sums in calibration.layers.items():
        assert sums.tokens.tolist() == profile.expert_counts[layer].tolist()
        assert sums.pair_counts.tolist() == profile.pair_counts[layer].tolist()


def test_experts_that_no_token_reached_are_reported() -> None:
    """Two tokens with two experts each leave at least four of eight."""
    calibration = calibrate(mixtral(experts=8), windows([2]))
    for layer, sums in calibration.layers.items():
        silent = [expert for at, expert in calibration.unreached if at == layer]
        assert len(silent) >= 4
        assert silent == [e for e in range(8) if not sums.activation[e].any()]
        assert not sums.importance[silent].any() and not sums.tokens[silent].any()


# -- batches, and going on -------------------------------------------------------------------------


def test_neighbours_of_equal_length_share_a_batch(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(calibration, "BATCH_TOKENS", 20)
    cut = windows([8, 8, 8, 5, 5, 30]).tokens
    assert [[len(w) for w in batch] for batch in batch_windows(cut)] == [[8, 8], [8], [5, 5], [30]]
    assert [w.tolist() for batch in batch_windows(cut) for w in batch] == [w.tolist() for w in cut]
    assert [[len(w) for w in batch] for batch in batch_windows(cut, 4)] == [[5], [30]]


def test_going_on_from_a_saved_state_changes_no_bit(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(calibration, "BATCH_TOKENS", 16)
    monkeypatch.setattr(calibration, "SAVE_EVERY", 4)
    model, text, file = mixtral(), windows([8] * 9), tmp_path / "state.npz"
    progress: list[tuple[int, int]] = []
    whole = calibrate(model, text, lambda *now: progress.append(now))
    assert progress == [(16, 72), (32, 72), (48, 72), (64, 72), (72, 72)]

    def save(state: CalibrationSums) -> None:
        state.save(file)
        if state.windows == 8:
            raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        calibrate(model, text, save=save)
    state = CalibrationSums.load(file)
    assert (state.windows, state.tokens) == (8, 64)
    resumed = calibrate(model, text, state=state)
    assert (resumed.windows, resumed.tokens) == (9, 72)
    for layer, sums in whole.layers.items():
        for name, value in vars(sums).items():
            again = getattr(resumed.layers[layer], name)
            assert again.dtype == value.dtype and np.array_equal(again, value)


def test_a_state_of_another_model_or_no_state_is_refused(tmp_path: Path) -> None:
    state = calibrate(mixtral(d_ff=8), windows([4]))
    with pytest.raises(CrispError, match=r"another model.*\(4, 8\).*expected.*\(4, 24\)"):
        calibrate(mixtral(), windows([4]), state=state)
    file = tmp_path / "state.npz"
    state.save(file)
    whole = file.read_bytes()
    for content in (whole[: len(whole) // 2], b"", b"nothing of the kind"):
        file.write_bytes(content)
        with pytest.raises(CrispError, match=r"state\.npz: is no saved calibration"):
            CalibrationSums.load(file)
    np.savez(file, read=np.array([1, 2]), **{"0.tokens": np.zeros(4)})
    with pytest.raises(CrispError, match="is no saved calibration"):
        CalibrationSums.load(file)
    with pytest.raises(CrispError, match="is no saved calibration"):
        CalibrationSums.load(tmp_path / "absent.npz")


# -- damaged weights -------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("parameter", "value"), [("gate_up_proj", "nan"), ("down_proj", "nan"), ("down_proj", "inf")]
)
def test_damaged_weights_name_layer_and_expert(parameter: str, value: str) -> None:
    model, text = mixtral(), windows([20])
    expert = int(calibrate(model, text).layers[1].tokens.argmax())
    with torch.no_grad():
        getattr(model.model.layers[1].mlp.experts, parameter)[expert, 3, 3] = float(value)
    message = rf"model\.layers\.1\.mlp\.experts: expert {expert} gives values .* not finite"
    with pytest.raises(CrispError, match=message):
        calibrate(model, text)


def test_damage_before_the_experts_is_not_blamed_on_them() -> None:
    model = mixtral()
    with torch.no_grad():
        model.model.layers[1].self_attn.o_proj.weight[0, 0] = float("nan")
    with pytest.raises(CrispError, match=r"model\.layers\.1\.mlp\.experts: its input is not"):
        calibrate(model, windows([6]))
