from __future__ import annotations

import json
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from crisp.model.spec import ModelSpec
from crisp.profile import Profile
from crisp.profile.metadata import FILE, Metadata
from crisp.trace import RoutingTrace

pytest.importorskip("torch", reason="needs the extra hf")
pytest.importorskip("transformers", reason="needs the extra hf")

ROOT = Path(__file__).resolve().parents[4]
TINY = ROOT / "traces" / "tiny-mixtral"
TEXTS = [
    ROOT / "tests" / "data" / "texts" / "contract.md",
    ROOT / "tests" / "data" / "texts" / "traces.md",
]
FEW = ("--window", "32", "--tokens", "128", "--block", "16")


def told(done: Any) -> str:
    """What a successful command printed."""
    assert done.code == 0, done.err
    return str(done.out)


def rows(out: str, first: str = "policy  width") -> list[list[str]]:
    """The first table in the output whose heading starts so."""
    lines = out.splitlines()
    start = next(i for i, line in enumerate(lines) if line.startswith(first))
    return [line.split() for line in lines[start + 1 : lines.index("", start)]]


def test_a_table_is_every_policy_at_every_width(crisp: Callable, tmp_path: Path) -> None:
    file = tmp_path / "loss.json"
    out = told(
        crisp(
            "eval", TINY, "--policy", "lru,up", "--width", "uniform(.5),tiered(alpha=.5,beta=.8)",
            "--profile", "tiny-mixtral-docs", "--text", *TEXTS, *FEW, "--json", file,
        )
    )  # fmt: skip
    table = rows(out)
    widths = ["uniform(.5)", "tiered(alpha=.5,beta=.8)"]
    expected = [["full", "full"], *([p, w] for p in ("lru", "up") for w in widths)]
    assert [row[:2] for row in table] == expected
    results = json.loads(file.read_text())["results"]
    assert [one["settings"]["policy"]["name"] for one in results] == [row[0] for row in table]
    for row, one in zip(table, results, strict=True):
        metrics = one["metrics"]
        assert float(row[2]) == pytest.approx(metrics["perplexity"], abs=0.005)
        low, high = metrics["perplexity_interval"]
        assert row[3] == f"{low:.2f}..{high:.2f}"
        loss = 100 * ((metrics["ratio"] or 1) - 1)
        assert row[4] == ("–" if one is results[0] else f"{loss:z.1f}")
        assert float(row[-1]) == pytest.approx(100 * metrics["touched_share"], abs=0.05)
    assert [len(one["by_tier"]) for one in results] == [0, 0, 3, 0, 3]
    tiers = rows(out, "policy  width                     tier")
    assert [row[2] for row in tiers] == ["hot", "warm", "cold"] * 2


def test_the_output_says_which_routing_rule_was_followed(crisp: Callable) -> None:
    out = told(
        crisp(
            "eval", TINY, "--policy", "lru", "--routing", "skip-missing", "--budget", "20%",
            "--text", TEXTS[0], *FEW,
        )
    )  # fmt: skip
    assert "routing of lru: skip-missing(keep=1)" in out
    assert "experts a token, whose weight goes where the model's router would" in " ".join(
        out.split()
    )


def test_the_output_states_its_conditions(crisp: Callable) -> None:
    out = told(
        crisp(
            "eval", TINY, "--policy", "crisp", "--profile", "tiny-mixtral-docs", "--text", *TEXTS,
            *FEW, "--batch", "4", "--seed", "7",
        )
    )  # fmt: skip
    for words in (
        "tiny-mixtral, 6 layers, 8 experts, top-2; float32 (published in bfloat16) on cpu, torch ",
        "contract.md, traces.md: 126 tokens scored",
        "6 windows of 32 tokens, stride 16: each scores its last 16, a text's first all but its",
        "20 blocks of 16 neurons, 12.3 kB each as stored in 16 bits",
        "rows of tiny-mixtral-docs",
        "batch 4, seed 7; ranges: 95 % bootstrap over windows, 1,000 resamples",
        "tiered: tiered(alpha=0.6,beta=0.9,warm=0.5,cold=0)",
        "experts a token, whose weight is dropped",
        "perplexity of several texts: over all their tokens together",
    ):
        assert words in " ".join(out.split()), words
    assert max(map(len, out.splitlines())) <= 100


def test_full_width_loses_nothing(crisp: Callable) -> None:
    out = told(crisp("eval", TINY, "--policy", "fo,mo", "--text", TEXTS[0], *FEW))
    full, *others = rows(out)
    for row in others:
        assert row[2:4] == full[2:4]
        assert row[4:8] == ["0.0", "0.0..0.0", "100.0", "100.0..100.0"]
    assert "mo: prefetch changes no widths" in out
    assert "several texts" not in out


def test_with_a_budget_every_token_is_fed_once(crisp: Callable, tmp_path: Path) -> None:
    file = tmp_path / "loss.json"
    line = ("eval", TINY, "--policy", "fo,lru", "--text", TEXTS[0], *FEW, "--budget", "50%")
    out = told(crisp(*line, "--json", file))
    assert "4 windows of 32 tokens, stride 32: no overlap, so that every token is fed once" in out
    assert "50%: 24 of 48 experts, 50.0 %; one window after the other" in out
    full, fo, lru = (one["metrics"] for one in json.loads(file.read_text())["results"])
    assert full["perplexity"] == fo["perplexity"] == lru["perplexity"]
    # without a cache every expert of every token is loaded: 6 layers, 2 experts of 20 blocks
    assert fo["bytes_loaded_per_token"] == fo["bytes_touched_per_token"] == 6 * 2 * 20 * 12288
    missed = (1 - lru["hit_rate"]) * fo["bytes_loaded_per_token"]
    assert lru["bytes_loaded_per_token"] == pytest.approx(missed)
    assert 0.3 < lru["hit_rate"] < 1
    assert [row[4] for row in rows(out, "policy  width  MB loaded/token")][:2] == ["0.0", "0.0"]


def test_weights_in_groups_are_compared_with_the_model_as_it_is(
    crisp: Callable, tmp_path: Path
) -> None:
    line = ("eval", TINY, "--policy", "fo,up", "--text", TEXTS[0], *FEW, "--block", "48")
    found = {}
    for dtype, size in (("int8", 20480), ("int4", 12288)):
        file = tmp_path / f"{dtype}.json"
        out = told(crisp(*line, "--dtype", dtype, "--json", file))
        assert f"experts in {dtype}" in " ".join(out.split())
        assert f"as stored in {'8.25' if dtype == 'int8' else '4.25'} bits" in out
        assert f"full: the model as it is; experts in {dtype} for all others" in out
        full, fo, up = (one["metrics"] for one in json.loads(file.read_text())["results"])
        # 6 layers, 2 experts of 7 blocks, of which half the neurons take 4; a bf16 block is 36,864
        assert full["bytes_touched_per_token"] == 6 * 2 * 7 * 36864
        assert fo["bytes_touched_per_token"] == 6 * 2 * 7 * size
        assert up["bytes_touched_per_token"] == 6 * 2 * 4 * size
        table = rows(out)
        assert [row[-1] for row in table] == ["100.0", *(
            f"{100 * blocks / 7 * size / 36864:.1f}" for blocks in (7, 4)
        )]  # fmt: skip
        found[dtype] = abs(fo["ratio"] - 1)
    assert 0 < found["int8"] < 0.002 < found["int4"] < 0.1
    plain = told(crisp(*line))
    assert rows(plain)[0][:8] == table[0][:8]
    assert "the model as it is" not in plain


def test_renormalizing_is_said(crisp: Callable) -> None:
    line = ("eval", TINY, "--policy", "lru", "--width", "single", "--text", TEXTS[0], *FEW)
    out = told(crisp(*line, "--renormalize"))
    assert "skips 6.00 of 12 experts a token, whose weight goes to the token's others" in out


def test_json_goes_where_it_is_wanted(crisp: Callable) -> None:
    done = crisp("eval", TINY, "--policy", "up", "--text", TEXTS[0], *FEW, "--json", "-")
    assert len(json.loads(done.out)["results"]) == 2
    assert "policy  width" in done.err


# -- what preparation found out --------------------------------------------------------------------


@pytest.fixture
def prepared(tmp_path: Path) -> Path:
    """The model with metadata that has been written for its weights."""
    from crisp.checkpoint.files import weights_digest

    folder = tmp_path / "model"
    shutil.copytree(TINY, folder)
    trace = RoutingTrace.load(ROOT / "traces" / "tiny-mixtral-docs.trace.safetensors")
    counts = Profile.from_trace(trace)
    spec = ModelSpec.from_config(folder)
    layers, experts = spec.n_layers, spec.n_experts
    Metadata(
        spec=spec,
        weights=weights_digest(folder),
        order="importance",
        expert_counts=counts.expert_counts,
        pair_counts=counts.pair_counts,
        increase=np.full((layers, experts, experts), np.nan, np.float32),
        curves=np.zeros((layers, experts, 32), np.float32),
        contributions=np.zeros((layers, experts, spec.n_blocks), np.float32),
        router_weights=np.zeros((layers, experts, 32), np.float16),
        provenance={},
    ).save(folder / FILE)
    return folder


def test_metadata_beside_the_model_is_used(crisp: Callable, prepared: Path) -> None:
    line = ("--policy", "crisp", "--text", TEXTS[0], *FEW)
    out = told(crisp("eval", prepared, *line))
    assert "crisp.safetensors, neurons ordered by importance" in " ".join(out.split())
    by_trace = told(crisp("eval", TINY, *line, "--profile", "tiny-mixtral-docs"))
    assert rows(out) == rows(by_trace)  # the counts are the same
    named = told(crisp("eval", TINY, *line, "--metadata", prepared / FILE))
    assert rows(out) == rows(named)


def test_metadata_of_other_weights_is_refused(crisp: Callable, prepared: Path) -> None:
    weights = prepared / "model.safetensors"
    data = bytearray(weights.read_bytes())
    data[-1] ^= 1
    weights.write_bytes(data)
    done = crisp("eval", prepared, "--policy", "crisp", "--text", TEXTS[0], *FEW)
    assert done.code == 2
    assert "are not those the metadata belongs to" in done.err
    # other counts may be used all the same
    told(
        crisp(
            "eval", prepared, "--policy", "crisp", "--text", TEXTS[0], *FEW,
            "--profile", "tiny-mixtral-docs",
        )
    )  # fmt: skip


# -- what is refused -------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("options", "line"),
    [
        (("--policy", "crips"), "unknown policy 'crips'; did you mean 'crisp'?"),
        (
            ("--policy", "up,crisp"),
            "--policy crisp: width tiered needs counts of combinations; give --metadata FILE, as "
            "crisp prepare writes it, or --profile TRACE, a trace of this model",
        ),
        (("--policy", "lru", "--cache", "static", "--budget", "50%"), "cache static needs counts"),
        (
            ("--policy", "lru", "--routing", "substitute(.5)"),
            "--routing substitute(ratio=0.5): dep",
        ),
        (("--policy", "mo", "--budget", "10%"), "--policy mo: what its prefetch has brought"),
        (("--policy", "up", "--budget", "200%"), "budget '200%': above 100 %"),
        (("--policy", "up", "--budget", "9GB"), "budget '9GB': more than all routed experts"),
        (("--policy", "up", "--budget", "9%", "--stride", "8"), "--stride 8: with --budget every"),
        (("--policy", "up", "--window", "513"), "--window 513: the model's context is 512"),
        (("--policy", "up", "--tokens", "20"), "--tokens 20: 20 for each of 1 texts"),
        (("--policy", "up", "--block", "999"), "block is 999, expected at most 320"),
        (("--policy", "up", "--dtype", "bf16"), "--dtype bf16: expected int8 or int4"),
        (("--policy", "up", "--batch", "0"), "invalid value for '--batch'"),
        (("--policy", "up", "--width", "uniform(0)"), "nothing would be executed"),
        (("--policy", "up", "--profile", "nothing"), "unknown trace 'nothing'"),
        (("--policy", "up", "--metadata", "no.safetensors"), "no.safetensors: cannot be read"),
        (
            ("--policy", "up", "--metadata", "m", "--profile", "tiny-mixtral-docs"),
            "--profile tiny-mixtral-docs: counts are taken from --metadata m already",
        ),
        (("--policy", "up", "--json", "no/loss.json"), "--json no/loss.json: the folder no does"),
        (("--policy", "up", "--json", "."), "--json .: is a folder"),
        (("--policy", "up", "--tasks", "none.yaml"), "none.yaml: no such file"),
    ],
)
def test_what_makes_no_sense_is_told_in_one_line(
    crisp: Callable, options: tuple[str, ...], line: str
) -> None:
    if "--tasks" in options:
        pytest.importorskip("lm_eval", reason="needs the extra eval")
    done = crisp("eval", TINY, *options, "--text", TEXTS[0])
    assert (done.code, done.out) == (2, "")
    assert line in done.err
    assert done.err.count("\n") == 1


@pytest.mark.parametrize(
    ("content", "line"),
    [
        (b"too short", "text.txt: 4 tokens, shorter than a window of 32"),
        (b"", "text.txt: 0 tokens, shorter than a window of 32"),
        (b"caf\xe9", "text.txt: is not UTF-8 text (byte 3)"),
        (None, "text.txt: no such file; a text was expected"),
    ],
)
def test_texts_that_cannot_be_read(
    crisp: Callable, tmp_path: Path, content: bytes | None, line: str
) -> None:
    path = tmp_path / "text.txt"
    if content is not None:
        path.write_bytes(content)
    done = crisp("eval", TINY, "--policy", "up", "--text", TEXTS[0], path, "--window", "32")
    assert done.code == 2
    assert line in done.err
    assert done.err.count("\n") == 1


def test_models_that_cannot_be_read(crisp: Callable, tmp_path: Path) -> None:
    folder = tmp_path / "model"
    shutil.copytree(TINY, folder)
    for name in ("tokenizer.json", "tokenizer_config.json"):
        (folder / name).unlink()
    done = crisp("eval", folder, "--policy", "up", "--text", TEXTS[0], *FEW)
    assert done.code == 2
    assert "its tokenizer" in done.err
    done = crisp("eval", tmp_path / "none", "--policy", "up", "--text", TEXTS[0], *FEW)
    assert (done.code, "is no folder" in done.err) == (2, True)


def test_a_profile_of_another_model_is_refused(crisp: Callable, trace: Path) -> None:
    line = ("eval", TINY, "--policy", "up", "--text", TEXTS[0], *FEW)
    done = crisp(*line, "--profile", trace)
    assert done.code == 2
    assert "toy.trace.safetensors: 3 layers, but tiny-mixtral has 6" in done.err
