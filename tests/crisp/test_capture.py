from __future__ import annotations

import dataclasses
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import typer
from typer.testing import CliRunner

from crisp import capture as capturing
from crisp.adapter import RoutingRecorder
from crisp.capture import Recipe, capture, stop_tokens
from crisp.checkpoint.loading import LoadedModel, load_model
from crisp.cli.commands.model.capture import capture as command
from crisp.errors import CrispError
from crisp.trace import RoutingTrace

torch = pytest.importorskip("torch", reason="needs the extra hf")
pytest.importorskip("transformers", reason="needs the extra hf")

TRACES = Path(__file__).resolve().parents[2] / "traces"
TINY = TRACES / "tiny-mixtral"


@pytest.fixture(scope="module")
def tiny() -> LoadedModel:
    return load_model(str(TINY))


@pytest.fixture
def texts(tmp_path: Path) -> list[Path]:
    words = ["import", "class", "the lord", "return self", "god", "None", "unto the king"]
    draw = np.random.default_rng(0)
    paths = []
    for name in ("one.txt", "two.txt"):
        path = tmp_path / name
        path.write_text(" ".join(draw.choice(words, 400)), encoding="utf-8")
        paths.append(path)
    return paths


# -- from text to trace ----------------------------------------------------------------------------


def test_a_row_is_the_pass_that_has_the_token_as_input(
    tiny: LoadedModel, texts: list[Path]
) -> None:
    recipe = Recipe(10, 7, sequences=3, batch=2, temperature=0, token_ids=True)
    trace = capture(tiny, texts, recipe)
    trace.validate("trace")
    assert trace.experts.shape == (3 * (10 + 6), 6, 2)  # the seventh token sampled is never fed
    assert trace.sequence.tolist() == [s for s in range(3) for _ in range(16)]
    assert trace.position.tolist() == list(range(16)) * 3
    assert trace.phase.tolist() == ([0] * 10 + [1] * 6) * 3

    # All of a sequence again, in one pass, with a look at the routers instead of the experts.
    assert trace.token is not None
    tokens = torch.tensor(trace.token.reshape(3, 16).astype(np.int64))
    routers: list[Any] = []
    hooks = [
        layer.mlp.gate.register_forward_hook(lambda _, args, output: routers.append(output[2]))
        for layer in tiny.model.model.layers
    ]
    with torch.no_grad():
        logits = tiny.model(tokens).logits
    for hook in hooks:
        hook.remove()
    again = torch.stack(routers, 1).numpy()
    assert (again == trace.experts).mean() > 0.99  # another shape of batch may round otherwise
    assert (logits[:, 9:15].argmax(-1) == tokens[:, 10:]).float().mean() > 0.9  # greedy


def test_scores_are_the_routers_logits(tiny: LoadedModel, texts: list[Path]) -> None:
    recipe = Recipe(10, 7, sequences=3, batch=2, temperature=0, token_ids=True, scores=True)
    trace = capture(tiny, texts, recipe)
    trace.validate("trace")
    assert trace.scores is not None
    assert trace.scores.shape == (3 * (10 + 6), 6, 8)
    plain = capture(tiny, texts, dataclasses.replace(recipe, scores=False))
    assert plain.scores is None
    assert dataclasses.replace(trace, scores=None).digest() == plain.digest()
    # A Mixtral takes the largest scores, and its weights are their softmax.
    best = np.sort(np.argsort(-trace.scores.astype(float), axis=2)[..., :2], axis=2)
    assert (best == np.sort(trace.experts, axis=2)).mean() > 0.99  # ties of float16
    chosen = np.take_along_axis(trace.scores.astype(float), trace.experts.astype(int), 2)
    weights = np.exp(chosen) / np.exp(chosen).sum(axis=2, keepdims=True)
    np.testing.assert_allclose(trace.weights, weights, atol=0.01)

    # All of a sequence again, in one pass, as transformers returns them.
    assert trace.token is not None
    tokens = torch.tensor(trace.token.reshape(3, 16).astype(np.int64))
    with torch.no_grad():
        logits = tiny.model(tokens, output_router_logits=True).router_logits
    again = torch.stack([layer.reshape(-1, 8) for layer in logits], 1).float().numpy()
    np.testing.assert_allclose(trace.scores, again, atol=0.05, rtol=2**-6)  # bfloat16


def test_the_batch_changes_nothing_and_the_seed_everything(
    tiny: LoadedModel, texts: list[Path]
) -> None:
    def run(**more: Any) -> RoutingTrace:
        return capture(tiny, texts, Recipe(8, 6, sequences=4, token_ids=True, **more))

    one, four, other = run(batch=1), run(batch=4), run(batch=4, seed=1)
    assert one.token is not None
    assert four.token is not None
    assert other.token is not None
    assert np.array_equal(one.token, four.token)
    assert (one.experts == four.experts).mean() > 0.99
    assert not np.array_equal(one.token.reshape(4, -1)[:, :8], other.token.reshape(4, -1)[:, :8])


def test_every_sequence_draws_for_itself(tiny: LoadedModel, tmp_path: Path) -> None:
    same = [tmp_path / "a.txt", tmp_path / "b.txt"]
    for path in same:
        path.write_text("import os and sys, then return self to the king", encoding="utf-8")
    trace = capture(tiny, same, Recipe(10, 12, sequences=2, batch=2, token_ids=True))
    assert trace.token is not None
    one, two = trace.token.reshape(2, -1)
    assert np.array_equal(one[:10], two[:10])
    assert not np.array_equal(one[10:], two[10:])


def test_a_sequence_stops_at_the_end_of_text(tiny: LoadedModel, texts: list[Path]) -> None:
    recipe = Recipe(8, 8, sequences=4, batch=4, token_ids=True)
    free = capture(tiny, texts, recipe)
    assert free.token is not None
    written = free.token.reshape(4, 15)
    end = int(written[1, 11])  # the fourth token that the second sequence wrote
    expected = []
    for row in written.tolist():
        cut = next((i for i in range(8, 15) if row[i] == end), 15)
        expected.append(row[:cut])
    assert len(expected[1]) <= 11

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(capturing, "stop_tokens", lambda _: {end})
        stopped = capture(tiny, texts, recipe)
    stopped.validate("trace")
    assert stopped.token is not None
    assert stopped.token.tolist() == [token for row in expected for token in row]
    _, starts, ends = stopped.sequences()
    assert (ends - starts).tolist() == [len(row) for row in expected]
    chosen = np.concatenate([15 * i + np.arange(len(row)) for i, row in enumerate(expected)])
    assert np.array_equal(stopped.experts, free.experts[chosen])


def test_an_end_of_text_of_another_vocabulary_ends_nothing(tiny: LoadedModel) -> None:
    assert tiny.model.generation_config.eos_token_id == 2  # Mixtral's; here it is a quotation mark
    assert tiny.tokenizer.decode([2]) == '"'
    assert stop_tokens(tiny) == {0}


def test_prompts_are_distinct_windows_shared_evenly(tiny: LoadedModel, texts: list[Path]) -> None:
    prompts, dataset = capturing._prompts(tiny.tokenizer, texts, Recipe(16, 4, sequences=5))
    assert [len(prompt) for prompt in prompts] == [16] * 5
    places = []
    for path, expected_prompts in zip(texts, (prompts[:3], prompts[3:]), strict=True):
        ids = tiny.tokenizer(path.read_text())["input_ids"]
        windows = [ids[i : i + 16] for i in range(0, len(ids) - 15, 16)]
        places.append([windows.index(prompt) for prompt in expected_prompts])
    assert all(place == sorted(set(place)) for place in places)
    assert [name.split()[0] for name in dataset] == ["one.txt", "two.txt"]
    assert places != [[0, 1, 2], [0, 1]]
    some, _ = capturing._prompts(tiny.tokenizer, texts[:1], Recipe(16, 4))
    assert len(some) == 16
    every, _ = capturing._prompts(tiny.tokenizer, texts[1:], Recipe(16, 4, sequences=len(windows)))
    assert every == windows


def test_the_header_says_how_it_came_about_and_no_path(
    tiny: LoadedModel, texts: list[Path], tmp_path: Path
) -> None:
    trace = capture(tiny, texts[:1], Recipe(8, 3, sequences=2, temperature=0.5, seed=7))
    assert trace.token is None
    header = trace.header
    assert (header.model, header.origin, header.seed) == ("tiny-mixtral", "captured", 7)
    assert (header.n_experts, header.top_k, header.ordered) == (8, 2, True)
    assert header.spec is not None
    assert header.spec["d_ff"] == 320
    assert header.config_hash == header.spec["config_hash"]
    assert header.dataset is not None
    assert header.dataset.startswith("one.txt sha256:")
    assert "temperature 0.5" in (header.note or "")
    assert not any("/" in str(value) for value in header.to_metadata().values())
    trace.save(tmp_path / "t.trace.safetensors")
    assert RoutingTrace.load(tmp_path / "t.trace.safetensors").digest() == trace.digest()


def test_sampling_follows_the_distribution() -> None:
    logits = np.log(np.array([0.1, 0.0, 0.6, 0.3]), where=[1, 0, 1, 1], out=np.full(4, -np.inf))
    draw = np.random.default_rng(0)
    for temperature in (1.0, 0.5):
        counts = np.bincount(
            [capturing._sample(logits, temperature, draw) for _ in range(4000)], minlength=4
        )
        expected = np.array([0.1, 0.0, 0.6, 0.3]) ** (1 / temperature)
        assert np.allclose(counts / 4000, expected / expected.sum(), atol=0.03)
        assert counts[1] == 0
    assert capturing._sample(logits, 0, draw) == 2

    class Lowest(np.random.Generator):
        def random(self) -> float:  # type: ignore[override]
            return 0.0

    never_first = np.array([-np.inf, 0.0])
    assert capturing._sample(never_first, 1, Lowest(np.random.PCG64())) == 1


@pytest.mark.parametrize(
    ("recipe", "message"),
    [
        ({"prompt_tokens": 0}, "--prompt-tokens 0: expected 1 or more"),
        ({"new_tokens": -1}, "--new-tokens -1"),
        ({"batch": 0}, "--batch 0"),
        ({"sequences": 0}, "--sequences 0"),
        ({"temperature": float("nan")}, "--temperature nan"),
        ({"temperature": -1}, "--temperature -1"),
        ({"prompt_tokens": 500, "new_tokens": 13}, "513 together; the model's context is 512"),
        ({"prompt_tokens": 500, "new_tokens": 0}, "one.txt: "),
        ({"prompt_tokens": 16, "sequences": 1}, "--sequences 1: fewer than the 2 texts"),
        ({"prompt_tokens": 64, "sequences": 99}, "hold"),
    ],
)
def test_a_recipe_that_cannot_be_followed(
    tiny: LoadedModel, texts: list[Path], recipe: dict[str, Any], message: str
) -> None:
    texts[0].write_text("too short", encoding="utf-8")
    if recipe.get("sequences") == 99:
        texts[0].write_text(texts[1].read_text(), encoding="utf-8")
    with pytest.raises(CrispError) as error:
        capture(tiny, texts, Recipe(**recipe))
    assert message in str(error.value)


def test_texts_that_cannot_be_read(tiny: LoadedModel, tmp_path: Path) -> None:
    (tmp_path / "latin.txt").write_bytes(b"caf\xe9")
    for name, message in (("none.txt", "cannot be read"), ("latin.txt", "is not UTF-8")):
        with pytest.raises(CrispError, match=f"{name}: {message}"):
            capture(tiny, [tmp_path / name], Recipe(8, 2))


# -- the command -----------------------------------------------------------------------------------


def invoke(*arguments: str) -> Any:
    app = typer.Typer()
    app.command()(command)
    return CliRunner().invoke(app, list(arguments))


def test_the_command_writes_a_trace(texts: list[Path], tmp_path: Path) -> None:
    out = tmp_path / "t.trace.safetensors"
    one, two = map(str, texts)
    sizes = ("--prompt-tokens", "8", "--new-tokens", "3", "--sequences", "2", "--scores")
    result = invoke(str(TINY), "--text", one, two, "--out", str(out), *sizes)
    assert result.exit_code == 0, result.output
    assert result.stderr == ""  # no progress where nobody looks on
    assert "20 rows (4 decode), 2 sequences, 6 MoE layers of 6, 8 experts, top-2" in result.stdout
    trace = RoutingTrace.load(out)
    assert (trace.header.dataset or "").count("sha256:") == 2
    assert trace.scores is not None


def test_an_interrupted_capture_leaves_what_there_was(
    texts: list[Path], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    out = tmp_path / "folder" / "t.trace.safetensors"
    out.parent.mkdir()
    out.write_text("as before")
    take = RoutingRecorder.take
    passes = []

    def interrupted(recorder: RoutingRecorder) -> Any:
        passes.append(1)
        if len(passes) == 3:
            raise KeyboardInterrupt
        return take(recorder)

    monkeypatch.setattr(RoutingRecorder, "take", interrupted)
    sizes = ("--prompt-tokens", "8", "--new-tokens", "6", "--sequences", "2")
    result = invoke(str(TINY), "--text", str(texts[0]), "--out", str(out), *sizes)
    assert result.exit_code != 0
    assert [path.name for path in out.parent.iterdir()] == [out.name]
    assert out.read_text() == "as before"


def test_missing_files_and_folders_are_said_before_the_work(
    texts: list[Path], tmp_path: Path
) -> None:
    out = tmp_path / "none" / "t.trace.safetensors"
    result = invoke("no-model", "--text", str(texts[0]), "--out", str(out))
    assert isinstance(result.exception, CrispError)
    assert "t.trace.safetensors: the folder" in str(result.exception)

    out = tmp_path / "t.trace.safetensors"
    result = invoke("no-model", "--text", str(texts[0]), "nothing.txt", "--out", str(out))
    assert isinstance(result.exception, CrispError)
    assert str(result.exception).startswith("nothing.txt: no such file")


# -- the traces that are shipped -------------------------------------------------------------------


def test_the_shipped_traces() -> None:
    paths = sorted(TRACES.glob("tiny-mixtral-*.trace.safetensors"))
    names = [path.name.split(".")[0] for path in paths]
    assert names == ["tiny-mixtral-code", "tiny-mixtral-docs", "tiny-mixtral-kjv"]
    traces = [RoutingTrace.load(path) for path in paths]
    assert sum(int((trace.phase == 1).sum()) for trace in traces) >= 10_000
    for path, trace in zip(paths, traces, strict=True):
        assert path.stat().st_size < 1_000_000
        assert trace.experts.shape[1:] == (6, 2)
        assert trace.token is None
        assert trace.weights is not None
        assert trace.guess is not None
        assert set(trace.phase.tolist()) == {0, 1}
        kind = path.name.removeprefix("tiny-mixtral-").split(".")[0]
        assert (trace.header.dataset or "").startswith(f"{kind}.heldout.txt sha256:")
        assert not any("/" in str(value) for value in trace.header.to_metadata().values())
        assert f"{trace.digest()}" in (TRACES / "README.md").read_text(encoding="utf-8")
