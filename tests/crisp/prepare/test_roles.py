"""What masking an expert costs, against straightforward computations of the same."""

from __future__ import annotations

from itertools import permutations
from pathlib import Path
from typing import Any

import numpy as np
import pytest

torch = pytest.importorskip("torch", reason="needs the extra hf")
transformers = pytest.importorskip("transformers", reason="needs the extra hf")

from crisp.checkpoint.loading import load_model  # noqa: E402
from crisp.errors import CrispError  # noqa: E402
from crisp.prepare import calibration, roles  # noqa: E402
from crisp.prepare.ablation import Ablation  # noqa: E402
from crisp.prepare.calibration import CalibrationSums, LayerSums, calibrate  # noqa: E402
from crisp.prepare.roles import (  # noqa: E402
    Exact,
    Grouped,
    Local,
    local_increases,
    measure_increases,
    read_method,
)
from crisp.profile.roles import agreement  # noqa: E402
from crisp.text_windows import TokenWindows, read_windows  # noqa: E402
from tests.crisp.tiny import mixtral, windows  # noqa: E402

ROOT = Path(__file__).parents[3]


def perplexity(model: Any, text: TokenWindows, layer: int = 0, masked: Any = None) -> float:
    """Window by window, with the weights of ``masked(ids [k], w [k]) -> [k]`` set to zero."""
    experts = model.model.layers[layer].mlp.experts
    original = experts.forward

    def forward(hidden: Any, index: Any, weights: Any) -> Any:
        weights = weights.clone()
        for row in range(len(index)):
            if masked is not None:
                weights[row, masked(index[row].tolist(), weights[row].tolist())] = 0
        return original(hidden, index, weights)

    experts.forward = forward
    losses = []
    with torch.no_grad():
        for tokens, scored in zip(text.tokens, text.scored, strict=True):
            logits = model(torch.from_numpy(tokens)[None]).logits[0].numpy()
            shifted = np.exp(logits - logits.max(1, keepdims=True))
            chance = shifted / shifted.sum(1, keepdims=True)
            of_next = chance[np.arange(len(tokens) - 1), tokens[1:]]
            losses += (-np.log(of_next)).tolist()[-scored:]
    del experts.forward
    return float(np.exp(np.mean(losses)))


def of_pair(own: int, other: int) -> Any:
    """Masks ``own`` in tokens that have both, one of them the highest-weighted."""

    def masked(ids: list[int], w: list[float]) -> list[bool]:
        pair = {own, other} <= set(ids) and ids[int(np.argmax(w))] in (own, other)
        return [pair and expert == own for expert in ids]

    return masked


@pytest.mark.parametrize("k", [2, 3])
def test_exact_is_the_perplexity_with_the_expert_masked_less_that_without(k: int) -> None:
    model, text = mixtral(k=k), windows([12, 12, 9])
    text.scored[1] = 5  # the window's first half only gives context
    increases = dict(measure_increases(Exact(1), model, text))
    assert list(increases) == [0, 1]
    plain = perplexity(model, text)
    for layer, increase in increases.items():
        assert np.isnan(increase.diagonal()).all() and np.isfinite(increase).sum() >= 6
        for i, j in np.argwhere(np.isfinite(increase)).tolist():
            cost = perplexity(model, text, layer, of_pair(i, j)) - plain
            assert increase[i, j] == pytest.approx(cost, rel=1e-6, abs=1e-6)


@pytest.mark.parametrize("k", [2, 3])
@pytest.mark.parametrize(("share", "rounds"), [("1", 1), ("1", 2), ("0.5", 1)])
def test_grouped_is_exact_where_tokens_do_not_meet(k: int, share: str, rounds: int) -> None:
    """In windows of two tokens only the first is scored, and it sees none but itself. After
    k / share passes each has had each of its experts masked: nothing is left to chance.
    """
    model, text = mixtral(k=k), windows([2] * 60)
    passes = rounds * round(k / float(share))
    grouped = dict(
        measure_increases(read_method(f"grouped({passes},share={share},least=1)"), model, text)
    )
    for layer, exact in measure_increases(Exact(1), model, text):
        np.testing.assert_allclose(grouped[layer], exact, rtol=1e-9, atol=1e-9)
        assert np.isfinite(exact).any()


def test_grouped_is_exact_in_the_last_layer() -> None:
    """After it no token looks at another."""
    model, text = mixtral(), windows([24] * 6)
    method = read_method("grouped(4,share=.5,least=1)")
    grouped = dict(measure_increases(method, model, text, {0}))[1]
    exact = dict(measure_increases(Exact(1), model, text, {0}))[1]
    np.testing.assert_allclose(grouped, exact, rtol=1e-9, atol=1e-9)


def test_grouped_and_exact_name_the_same_experts_in_a_trained_model(shared: Path) -> None:
    loaded = load_model(str(ROOT / "traces" / "tiny-mixtral"))
    model, rest = loaded.model.float(), {0, 1, 2, 3, 5}
    texts = sorted((shared / "data").glob("*.calibration.txt"))
    text = read_windows(loaded.tokenizer, texts, 256, limit=1536)
    increases = []
    for method in (Exact(8), Grouped(8, least=8)):
        increase = np.full((6, 8, 8), np.nan)
        increase[4] = dict(measure_increases(method, model, text, rest))[4]
        increases.append(increase)
    close = agreement(increases[0], increases[1])
    assert close.pairs >= 8 and close.rank > 0.9 and close.same > 0.85


def test_every_token_has_each_expert_masked_once_in_a_round() -> None:
    model, text = mixtral(k=2), windows([40, 40])
    batch = Ablation(model, text).plain(0)[0]
    method = read_method("grouped(passes=16,share=0.25)")
    slots = roles._slots(method, 0, batch)
    assert slots.shape == (80, 16)
    for half in (slots[:, :8], slots[:, 8:]):
        assert (np.sort(half, axis=1) == np.arange(8)).all()
    assert not np.array_equal(slots[:, :8], slots[:, 8:])
    assert (slots[:40] != slots[40:]).any()  # windows draw for themselves
    shares = (slots < 2).mean(0)
    assert (abs(shares - 0.25) < 0.2).all() and shares.mean() == 0.25


def test_what_is_masked_does_not_depend_on_the_batch(monkeypatch: pytest.MonkeyPatch) -> None:
    model, text = mixtral(), windows([12] * 6)
    method = Grouped(2, seed=3, least=1)
    whole = dict(measure_increases(method, model, text))
    assert all(np.isfinite(increase).sum() >= 4 for increase in whole.values())
    monkeypatch.setattr(calibration, "BATCH_TOKENS", 24)
    for layer, increase in measure_increases(method, model, text):
        np.testing.assert_allclose(increase, whole[layer], rtol=1e-9, atol=1e-9)


def test_too_few_tokens_are_no_measurement() -> None:
    model, text = mixtral(), windows([12] * 5)
    sums = calibrate(model, windows([12] * 5)).layers[0]
    first = dict(measure_increases(Exact(8), model, text))[0]
    scored = np.zeros((4, 4), int)  # windows' last tokens are not scored
    for batch in Ablation(model, text).plain(0):
        for ids in batch.experts[batch.scored]:
            scored[ids[0], ids[1]] += 1
            scored[ids[1], ids[0]] += 1
    assert np.array_equal(np.isfinite(first), scored >= 8)
    assert (scored > 0).sum() > (scored >= 8).sum() > 0
    sizes = local_increases(Local(8), CalibrationSums({0: sums}))[0]
    assert np.array_equal(np.isfinite(sizes), sums.anchored + sums.anchored.T >= 8)
    masked = dict(measure_increases(read_method("grouped(1,share=1,least=8)"), model, text))[0]
    assert 0 < np.isfinite(masked).sum() < np.isfinite(first).sum()


def test_local_by_hand() -> None:
    """Pair {0, 1}: three tokens whose anchor is 0, one whose anchor is 1; {0, 2}: one token."""
    sums = LayerSums.empty(3, 8, 4)
    sums.anchored[0, 1], sums.anchored[1, 0], sums.anchored[2, 0] = 3, 1, 1
    sums.removed[0, 1], sums.removed[1, 0], sums.removed[0, 2] = 10, 6, 5
    sizes = local_increases(Local(2), CalibrationSums({7: sums}))[7]
    assert sizes[0, 1] == 2.5 and sizes[1, 0] == 1.5
    assert np.isnan(sizes).sum() == 7


# -- where a masked run starts ---------------------------------------------------------------------


def test_a_run_that_starts_at_the_layer_is_the_whole_run() -> None:
    """With nothing masked not a bit differs; with everything, it is a model without experts."""
    model, text = mixtral(layers=3).float(), windows([10, 10])
    ablation = Ablation(model, text)
    calls: list[int] = []
    for at, layer in enumerate(model.model.layers):
        layer.self_attn.register_forward_hook(lambda *_, at=at: calls.append(at))
    for layer in ablation.layers:
        (batch,) = ablation.plain(layer)
        calls.clear()
        assert not ablation.masked(layer, batch, np.zeros((20, 2), bool)).any()
        assert calls == list(range(layer, 3))
        gained = ablation.masked(layer, batch, np.ones((20, 2), bool))
        assert gained[batch.scored].all() and not gained[~batch.scored].any()
        both = perplexity(model, text, layer, lambda ids, w: [True] * 2)
        loss = (batch.loss + gained)[batch.scored].mean()
        assert np.exp(loss) == pytest.approx(both, rel=1e-5)
    assert not any("forward" in vars(module) for module in model.modules())


def test_layers_are_skipped_and_progress_comes_to_its_end() -> None:
    model, text = mixtral(layers=3), windows([12, 12])
    whole = dict(measure_increases(Grouped(2), model, text))
    for method in (Grouped(2), Exact()):
        told: list[tuple[int, int]] = []
        rest = dict(
            measure_increases(method, model, text, {0}, lambda *now, to=told: to.append(now))
        )
        assert list(rest) == [1, 2]
        assert [done for done, _ in told] == list(range(1, told[-1][1] + 1))
        assert told[-1][1] == 2 * (2 if isinstance(method, Grouped) else 6)
        if isinstance(method, Grouped):
            assert all(np.array_equal(rest[at], whole[at], equal_nan=True) for at in rest)


# -- mistakes --------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("exakt", "unknown roles 'exakt'; did you mean 'exact'"),
        ("grouped(share=0)", "share 0: 0.001 to 1"),
        ("grouped(share=1.5)", "share 1.5: 0.001 to 1"),
        ("grouped(passes=0)", "passes 0: a whole number"),
        ("grouped(seed=.5)", "seed 0.5: a whole number"),
        ("local(least=0)", "least 0: a whole number"),
    ],
)
def test_spellings_that_are_refused(text: str, message: str) -> None:
    with pytest.raises(CrispError, match=message):
        read_method(text)


def test_a_loss_that_is_no_number_is_refused() -> None:
    model = mixtral()
    with torch.no_grad():
        model.lm_head.weight[0, 0] = float("nan")
    with pytest.raises(CrispError, match="its loss is not finite"):
        next(measure_increases(Grouped(), model, windows([6])))


def test_two_experts_stand_for_the_pair_in_either_order() -> None:
    """Of k = 3, a token belongs to its anchor's pairs only."""
    experts = np.array([[0, 1, 2], [1, 0, 2], [2, 0, 1], [0, 2, -1]])
    places = {pair: roles._of_pair(experts, *pair) for pair in permutations(range(3), 2)}
    assert places[0, 1].tolist() == [[True, True, False]] * 2 + [[False] * 3] * 2
    assert places[0, 2].tolist() == [
        [True, False, True],
        [False] * 3,
        [True, True, False],
        [True, True, False],
    ]
    assert np.array_equal(places[1, 0], places[0, 1])
