from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest

from crisp.checkpoint.loading import LoadedModel, load_model, to_float32
from crisp.errors import CrispError
from crisp.quality import Scores, perplexity, score_windows
from crisp.text_windows import TokenWindows, read_windows

torch = pytest.importorskip("torch", reason="needs the extra hf")
transformers = pytest.importorskip("transformers", reason="needs the extra hf")

ROOT = Path(__file__).resolve().parents[3]
VOCABULARY = 300


@pytest.fixture(scope="module")
def tiny() -> LoadedModel:
    return to_float32(load_model(str(ROOT / "traces" / "tiny-mixtral")))


@pytest.fixture(scope="module")
def windows(tiny: LoadedModel) -> TokenWindows:
    texts = [
        ROOT / "tests" / "data" / "texts" / "contract.md",
        ROOT / "tests" / "data" / "texts" / "traces.md",
    ]
    return read_windows(tiny.tokenizer, texts, 24, 10, limit=120)


def small(**config: Any) -> Any:
    """A model of random weights whose vocabulary is a round number."""
    torch.manual_seed(0)
    sizes = {
        "vocab_size": VOCABULARY,
        "hidden_size": 16,
        "intermediate_size": 16,
        "num_hidden_layers": 2,
        "num_attention_heads": 2,
        "num_key_value_heads": 2,
        "num_local_experts": 4,
        "num_experts_per_tok": 2,
        "max_position_embeddings": 64,
    }
    kind = config.pop("kind", "mixtral")
    return transformers.AutoModelForCausalLM.from_config(
        transformers.AutoConfig.for_model(kind, **(sizes | config))
    ).eval()


def drawn(*lengths: int, scored: int = 3) -> TokenWindows:
    draw = np.random.default_rng(0)
    tokens = [draw.integers(0, VOCABULARY, n) for n in lengths]
    return TokenWindows(
        tokens, [scored] * len(lengths), [0] * len(lengths), ["a sha256:0"], 9, scored
    )


def straight(model: Any, windows: TokenWindows) -> list[tuple[float, int]]:
    """Token by token, in float64, from all the logits of one window."""
    expected = []
    for tokens, scored in zip(windows.tokens, windows.scored, strict=True):
        logits = model(input_ids=torch.tensor(tokens)[None]).logits[0].double()
        for place in range(len(tokens) - scored, len(tokens)):
            row = logits[place - 1].tolist()
            top = max(range(len(row)), key=row.__getitem__)
            total = sum(np.exp(value - row[top]) for value in row)
            expected.append((row[top] + np.log(total) - row[tokens[place]], top))
    return expected


def test_a_model_that_knows_nothing_is_as_perplexed_as_its_vocabulary_is_large() -> None:
    model = small()
    torch.nn.init.zeros_(model.lm_head.weight)
    actual = perplexity(score_windows(model, drawn(9, 9, 5)))
    assert actual.value == pytest.approx(VOCABULARY)
    assert actual.interval == pytest.approx((VOCABULARY, VOCABULARY))


def test_a_straight_loop_finds_the_same(tiny: LoadedModel, windows: TokenWindows) -> None:
    assert len({len(tokens) for tokens in windows.tokens}) > 1  # a short one at the end
    scores = score_windows(tiny.model, windows, batch=4)
    with torch.inference_mode():
        expected = straight(tiny.model, windows)
    assert scores.nll == pytest.approx(np.array([nll for nll, _ in expected]), rel=1e-4, abs=1e-5)
    assert scores.top.tolist() == [top for _, top in expected]
    mean = np.mean([nll for nll, _ in expected])
    assert perplexity(scores).value == pytest.approx(np.exp(mean), rel=1e-5)
    assert np.bincount(scores.window).tolist() == windows.scored
    assert np.bincount(scores.text).tolist() == [
        sum(n for n, text in zip(windows.scored, windows.text, strict=True) if text == number)
        for number in (0, 1)
    ]


def test_one_token_at_a_time_finds_the_same(tiny: LoadedModel, windows: TokenWindows) -> None:
    whole, singly = (
        score_windows(tiny.model, windows),
        score_windows(tiny.model, windows, singly=True),
    )
    assert singly.nll == pytest.approx(whole.nll, rel=1e-3, abs=1e-4)
    assert (singly.top == whole.top).all()


# granitemoe divides its logits, which taking its head alone would miss
@pytest.mark.parametrize("config", [{}, {"kind": "granitemoe", "logits_scaling": 4.0}])
def test_logits_in_pieces_are_the_models_own(
    config: dict[str, Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    model, windows = small(**config), drawn(9, 9, 9, 5, scored=4)
    with torch.inference_mode():
        expected = straight(model, windows)
    passes = 0

    def counted(*_: Any) -> None:
        nonlocal passes
        passes += 1

    model.model.layers[0].register_forward_hook(counted)
    pieces: list[Scores] = []
    for size in (1, 2 * VOCABULARY * 3, 1 << 25):
        monkeypatch.setattr("crisp.quality.scoring._LOGITS", size)
        pieces.append(score_windows(model, windows, batch=2))
    assert passes == 3 * 3  # batches of 2, 1 and 1 windows, each computed once
    for piece in pieces:
        assert piece.nll == pytest.approx(np.array([nll for nll, _ in expected]), rel=1e-5)
        assert piece.top.tolist() == [top for _, top in expected]
    assert "forward" not in vars(model.model)  # left as it was


def test_progress_counts_tokens(windows: TokenWindows, tiny: LoadedModel) -> None:
    told: list[tuple[int, int]] = []
    score_windows(tiny.model, windows, lambda done, total: told.append((done, total)), batch=3)
    assert told[-1] == (windows.n_fed, windows.n_fed)
    assert [done for done, _ in told] == sorted(done for done, _ in told)


def test_weights_that_are_no_numbers_are_told_by_the_text() -> None:
    model = small()
    torch.nn.init.constant_(model.lm_head.weight, float("nan"))
    with pytest.raises(CrispError, match="a: the model gives a token no finite likelihood"):
        score_windows(model, drawn(9))


def test_on_a_cpu_everything_is_computed_in_float32(tiny: LoadedModel) -> None:
    assert tiny.model.dtype == torch.float32
    assert tiny.how.startswith("float32 (published in bfloat16) on cpu, torch ")
    assert to_float32(tiny) is tiny
