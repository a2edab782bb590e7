from __future__ import annotations

import importlib
import json
from pathlib import Path
from typing import Any

import pytest

pytest.importorskip("torch", reason="needs the extra hf")
pytest.importorskip("transformers", reason="needs the extra hf")

RECIPE = Path(__file__).resolve().parents[1] / "traces" / "recipe"
THIRTEEN = "one two three four five six seven eight nine ten eleven twelve thirteen"
TWELVE = THIRTEEN.removesuffix(" thirteen")


@pytest.fixture
def corpus(monkeypatch: pytest.MonkeyPatch) -> Any:
    monkeypatch.syspath_prepend(str(RECIPE))
    return importlib.import_module("corpus")


@pytest.fixture
def train(monkeypatch: pytest.MonkeyPatch) -> Any:
    monkeypatch.syspath_prepend(str(RECIPE))
    return importlib.import_module("train")


# -- the text ------------------------------------------------------------------------------------


def test_the_last_twentieth_is_held_out_from_the_start_of_a_line(corpus: Any) -> None:
    """100 lines of 10 characters: 95 and 5, wherever documents end; a cut line goes with the last
    part."""
    lines = [f"line {i:04d}\n" for i in range(100)]
    whole = [f"{''.join(lines[:30])}", "".join(lines[30:])]
    first, last = corpus.split(whole)
    assert "".join(first) == "".join(lines[:95])
    assert last == ["".join(lines[95:])]
    first, last = corpus.split(["".join(lines), "x" * 9])  # 958.55 of 1009 characters
    assert first == ["".join(lines[:95])]
    assert last == ["".join(lines[95:]), "x" * 9]
    assert corpus.split(["y" * 100]) == (["y" * 95], ["y" * 5])


def test_a_paragraph_that_shares_13_words_with_what_is_held_out_is_dropped(corpus: Any) -> None:
    shingles = corpus.shingles([f"Before. {THIRTEEN}! After."])
    expected = f"kept above\n\n{TWELVE} and no more\n\nkept below"
    assert corpus.without(expected, shingles) == expected
    # However the words are written and whatever stands between them.
    copied = (
        "now ONE, two\nthree four (five) six seven -- eight nine ten eleven twelve thirteen end"
    )
    assert corpus.without(f"above\n\n{copied}\n\nbelow", shingles) == "above\n\nbelow"


def test_every_paragraph_that_a_shared_run_of_words_touches_is_dropped(corpus: Any) -> None:
    shingles = corpus.shingles([THIRTEEN])
    split = THIRTEEN.replace("six seven", "six\n\nseven").replace("nine ten", "nine\n\n\nten")
    assert corpus.without(f"above\n\n{split}\n\nbelow", shingles) == "above\n\nbelow"


def test_a_very_long_paragraph_is_dropped_line_by_line(corpus: Any) -> None:
    lines = [f"verse {i} is {'so ' * 10}it was\n" for i in range(50)]
    text = "".join([*lines[:25], f"verse {THIRTEEN}\n", *lines[25:]])
    assert corpus.without(text, corpus.shingles([THIRTEEN])) == "".join(lines)


def test_what_is_held_out_of_one_text_stands_in_no_other(corpus: Any) -> None:
    body = "".join(f"word{i} other{i}\n\n" for i in range(200))
    other = " ".join(f"elsewhere{i}" for i in range(20))
    unique = "".join(f"third{i} text{i}\n" for i in range(90))
    whole = {"a": [body, THIRTEEN], "b": [f"{THIRTEEN}\n\n{body}"], "c": [f"{other}\n\n{unique}"]}
    first, held = corpus.prepare(whole, {"d": [f"A file left out: {other}."]})
    a, b, c = first
    assert a.held[-1] == THIRTEEN
    assert THIRTEEN not in "".join(b.train)
    assert 0 < b.dropped < 0.2
    assert "elsewhere0" not in "".join(c.train)
    assert "third0" in "".join(c.train)
    assert [(text.name, text.train) for text in held] == [("d", ())]
    held_shingles = corpus.shingles([*a.held, *b.held, *c.held, *held[0].held])
    for text in first:
        assert not held_shingles & corpus.shingles(text.train)


def test_docstrings_come_in_the_order_of_the_source(corpus: Any) -> None:
    source = (
        '"""Module."""\nclass A:\n    """Class."""\n    def f(self):\n        """Method."""\n'
        'async def g():\n    """Function."""\n\ndef h():\n    return "no docstring"\n'
    )
    assert corpus.docstrings(source) == "Module.\n\nClass.\n\nMethod.\n\nFunction."


# -- the training --------------------------------------------------------------------------------


def test_the_learning_rate_rises_stays_and_falls(train: Any) -> None:
    plan = train.Plan(steps=100, rise=10, fall=0.2, tail=0.1, short=4, long=8)
    assert [plan.share(step) for step in (0, 4, 9, 50, 80)] == [0.1, 0.5, 1, 1, 1]
    assert [plan.share(step) for step in (85, 90, 95)] == [0.75, 0.5, 0.25]
    assert [plan.window(step) for step in (0, 89, 90, 99)] == [4, 4, 8, 8]


def test_a_plan_by_time_settles_its_steps_when_the_fall_begins(train: Any) -> None:
    """Three quarters of 100 s went by for 30 steps: 40 in all, and the first 30 as if known."""
    plan = train.Plan(seconds=100, rise=5)
    assert plan.settled(29, 74.9) is plan
    settled = plan.settled(30, 75.0)
    assert settled.steps == 40
    assert settled.settled(31, 90) is settled
    for step in range(31):
        assert settled.share(step) == plan.share(step)
        assert settled.window(step) == plan.window(step)


def test_imbalance_is_1_when_even_and_the_number_of_experts_when_one_gets_all(train: Any) -> None:
    import torch

    config = train.make_config("mixtral", num_experts_per_tok=1)
    even = torch.eye(8) * 100
    alone = torch.zeros(8, 8)
    alone[:, 3] = 100
    assert train.imbalance((even,), config).item() == pytest.approx(1)
    assert train.imbalance((alone,), config).item() == pytest.approx(8)
    # Two layers that favour different experts are not even together.
    assert train.imbalance((alone, alone.roll(1, 1)), config).item() == pytest.approx(8)


@pytest.mark.parametrize("shape", ["mixtral", "deepseek"])
def test_the_shapes_are_small_enough_to_be_committed(train: Any, shape: str) -> None:
    import torch

    with torch.device("meta"):
        model = train.transformers.AutoModelForCausalLM.from_config(train.make_config(shape))
    assert 2 * sum(p.numel() for p in model.parameters()) <= 16_000_000
    assert all(
        block.experts.down_proj.shape[-1] % 128 == 0
        for block in (layer.mlp for layer in model.model.layers)
        if hasattr(block, "experts")
    )


@pytest.mark.parametrize("shape", ["mixtral", "deepseek"])
def test_a_training_gives_a_folder_that_loads_and_repeats(
    tmp_path: Path, corpus: Any, train: Any, shape: str
) -> None:
    import torch
    from transformers import AutoModelForCausalLM, AutoTokenizer

    source = [path.read_text() for path in sorted(RECIPE.glob("*.py"))]
    texts, held = corpus.prepare({"a": source}, {"b": ["Grüße, \n\tand some text left out. " * 9]})
    small = {"vocab_size": 400, "hidden_size": 32, "num_hidden_layers": 2}
    sizes = {"tokens": 64, "short": 16, "long": 32, "rise": 1, "check": 100}
    by_time = train.Plan(seconds=0, **sizes)  # over after the first step: 2 steps
    model, tokenizer, record = train.train(shape, texts, held, by_time, 3, **small)
    train.save(model, tokenizer, record, tmp_path / "out")

    assert [path.name for path in tmp_path.iterdir()] == ["out"]
    saved = json.loads((tmp_path / "out" / "training.json").read_text())
    assert (saved["plan"]["steps"], saved["tokens"], saved["seed"]) == (2, 128, 3)
    assert 1 < saved["held_out_bits_per_byte"]["a"] < 8.5
    assert set(saved["held_out_bits_per_byte"]) == {"a", "b"}

    loaded = AutoModelForCausalLM.from_pretrained(tmp_path / "out", dtype="auto")
    assert loaded.dtype == torch.bfloat16
    tokens = AutoTokenizer.from_pretrained(tmp_path / "out")
    assert loaded.config.eos_token_id == tokens.eos_token_id == 0
    text = "def f(x):\n\treturn  'Grüße' \n"
    assert tokens.decode(tokens(text).input_ids) == text
    assert tokens("<|endoftext|>").input_ids == [0]

    again, _, _ = train.train(shape, texts, held, train.Plan(steps=2, **sizes), 3, **small)
    for name, value in again.to(torch.bfloat16).state_dict().items():
        assert torch.equal(value, loaded.state_dict()[name]), name


def test_an_interrupted_save_leaves_nothing(tmp_path: Path, train: Any) -> None:
    class Interrupted:
        def to(self, _: Any) -> Interrupted:
            return self

        def save_pretrained(self, folder: Path) -> None:
            (folder / "model.safetensors").write_bytes(b"half")
            raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        train.save(Interrupted(), None, {}, tmp_path / "out")
    assert list(tmp_path.iterdir()) == []


def test_a_text_too_short_for_a_window_is_refused(corpus: Any, train: Any) -> None:
    texts, held = corpus.prepare({"a": ["short " * 40]}, {})
    with pytest.raises(SystemExit, match=r"a: .* at least one window of 2048 was expected"):
        train.train("mixtral", texts, held, train.Plan(steps=1), 0)
