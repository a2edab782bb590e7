"""`crisp prepare` and `crisp refresh` at the terminal."""

from __future__ import annotations

import json
from collections.abc import Callable
from fractions import Fraction
from pathlib import Path

import numpy as np
import pytest

pytest.importorskip("torch")
pytest.importorskip("transformers")

from crisp.profile.metadata import FILE, Metadata
from crisp.trace import RoutingTrace
from tests.crisp.cli.conftest import Done

ROOT = Path(__file__).parents[4]
MODEL = ROOT / "traces" / "tiny-mixtral"
TEXT = ROOT / "tests" / "data" / "texts" / "contract.md"
OPTIONS = ("--text", TEXT, "--window", 128, "--tokens", 1024, "--block", 16, "--roles", "local")

Crisp = Callable[..., Done]


def test_a_model_is_prepared_simulated_and_refreshed(crisp: Crisp, tmp_path: Path) -> None:
    out = tmp_path / "model"
    done = crisp("prepare", MODEL, *OPTIONS, "--order", "random(3)", "--out", out)
    assert (done.code, done.err) == (0, "")
    lines = done.out.splitlines()
    assert lines[:3] == [
        f"{out}: tiny-mixtral, prepared",
        "text      1,024 tokens of 1 text, 128 at a time",
        "neurons   by random(3); blocks of 16, 20 blocks an expert",
    ]
    assert [line.split()[0] for line in lines[3:]] == ["pairs", "unreached", "times"]
    before = Metadata.load(out / FILE)

    asked = ("simulate", "tiny-mixtral-code", "--policy", "crisp", "--budget", "20%")
    done = crisp(*asked, "--limit", 50, "--metadata", out / FILE)
    assert (done.code, done.err) == (0, "")
    assert "crisp.safetensors, prepared from tiny-mixtral; simulated: all rows" in done.out
    assert "experts in 16 bits, 246 kB each" in done.out  # 20 blocks of 16, not 7 of 48
    assert "50 decode rows (the first of 3,816)" in done.out  # nothing is set aside to be counted

    other = tmp_path / "new.safetensors"
    text = ROOT / "tests" / "data" / "texts" / "traces.md"
    done = crisp(
        "refresh", out, "--text", text, "--roles", "local", "--window", 128, "--out", other
    )
    assert (done.code, done.err) == (0, "")
    assert done.out.startswith(f"{other}: of tiny-mixtral, refreshed\n")
    after = Metadata.load(other)
    assert not np.array_equal(after.pair_counts, before.pair_counts)
    assert (after.weights, after.order, after.spec) == (before.weights, before.order, before.spec)
    assert Metadata.load(out / FILE).provenance == before.provenance  # left alone

    for wrong in (out / "model.safetensors", out / FILE, text):
        done = crisp("refresh", out, "--text", text, "--roles", "local", "--out", wrong)
        assert (done.code, done.out) == (2, "")
        assert str(wrong) in done.err
    done = crisp("refresh", MODEL, "--text", text)
    assert "is not prepared: it holds no crisp.safetensors" in done.err

    done = crisp("prepare", out, *OPTIONS, "--out", tmp_path / "again")
    assert (done.code, done.out) == (2, "")
    assert "is prepared already" in done.err


def test_magnitudes_go_from_preparation_to_a_simulated_trace(crisp: Crisp, tmp_path: Path) -> None:
    out, trace = tmp_path / "model", tmp_path / "m.trace.safetensors"
    done = crisp("prepare", MODEL, *OPTIONS, "--magnitudes", "--out", out)
    assert (done.code, done.err) == (0, "")
    assert (out / "crisp.magnitudes.safetensors").stat().st_size < 6 * 8 * 129 * 2 + 300
    short = ("--text", TEXT, "--sequences", 2, "--prompt-tokens", 40, "--new-tokens", 4)
    done = crisp("trace", "capture", out, *short, "--out", trace, "--magnitudes")
    assert (done.code, done.err) == (0, "")
    kept = RoutingTrace.load(trace)
    assert kept.magnitudes is not None and kept.magnitudes.std() > 0.01
    loaded = []
    for magnitude in ("none", "predicted"):
        done = crisp(
            "simulate", trace, "--policy", "saliency", "--magnitude", magnitude, "--budget", "20%",
            "--phase", "all", "--metadata", out / FILE, "--json", tmp_path / "run.json",
        )  # fmt: skip
        assert (done.code, done.err) == (0, "")
        loaded.append(json.loads((tmp_path / "run.json").read_text())["metrics"]["bytes_loaded"])
    assert loaded[0] != loaded[1]
    done = crisp(
        "simulate", trace, "--policy", "saliency", "--magnitude", "predicted", "--budget", "20%",
        "--loss", "2%", "--metadata", out / FILE,
    )  # fmt: skip
    assert "--loss: was measured for policy saliency as it is, without another --m" in done.err
    done = crisp("trace", "capture", MODEL, *short, "--out", tmp_path / "no", "--magnitudes")
    assert (done.code, done.out) == (2, "")
    assert "is not prepared: it holds no crisp.safetensors" in done.err


@pytest.mark.parametrize(
    ("changed", "words"),
    [
        (("--order", "importence"), "did you mean 'importance'"),
        (("--roles", "exakt"), "did you mean 'exact'"),
        (("--roles", "grouped(share=2)"), "share 2: 0.001 to 1 was expected"),
        (("--roles", "exact", "--layerwise"), "--layerwise goes with --roles local"),
        (("--width-losses", "100"), "--width-losses 100: at least a window of 128 tokens"),
        (("--width-losses", "512", "--layerwise"), "--width-losses: needs the whole model"),
        (("--loss-curve", "10%", "--layerwise"), "--loss-curve: needs the whole model"),
        (("--roles", "grouped(share=1e-9)"), "share 1e-09: 0.001 to 1 was expected"),
        (("--roles", "grouped(passes=1e20)"), "passes 1e+20: a whole number up to"),
        (("--roles", ""), "expected a name"),
        (("--window", "0"), "--window 0: expected 2 or more"),
        (("--window", "1"), "--window 1: expected 2 or more"),
        (("--window", "4096"), "the model's context is 512"),
        (("--tokens", "5"), "at least a window"),
        (("--block", "0"), "block is 0"),
        (("--text", "missing.txt"), "missing.txt: no such file"),
        (("--out", "missing/out"), "does not exist"),
    ],
)
def test_what_is_wrong_is_said_in_one_line(
    crisp: Crisp, tmp_path: Path, changed: tuple[str, ...], words: str
) -> None:
    done = crisp("prepare", MODEL, *OPTIONS, "--out", tmp_path / "out", *changed)
    assert (done.code, done.out) == (2, "")
    assert words in done.err
    assert done.err.count("\n") == 1
    assert not (tmp_path / "out").exists()


def test_metadata_of_another_model_is_refused(crisp: Crisp, tmp_path: Path) -> None:
    from crisp.model.spec import ModelSpec
    from tests.crisp.profile.test_metadata import made

    made(ModelSpec.named("mixtral-8x7b")).save(tmp_path / "m")
    asked = ("simulate", "tiny-mixtral-code", "--policy", "crisp", "--budget", "20%")
    done = crisp(*asked, "--metadata", tmp_path / "m")
    assert done.code == 2
    assert "32 layers of 8 experts, but the trace has 6 of 8" in done.err
    done = crisp(*asked, "--metadata", tmp_path / "m", "--profile", "tiny-mixtral-docs")
    assert "give one" in done.err


CURVE = ("--text", TEXT, "--window", 128, "--tokens", 512, "--block", 16, "--loss-curve", "20%")


@pytest.mark.seconds
def test_a_loss_curve_is_measured_last_and_after_a_kill(
    crisp: Crisp, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def killed(*_: object) -> None:
        raise KeyboardInterrupt

    out = tmp_path / "model"
    with monkeypatch.context() as patch:
        patch.setattr("crisp.quality.loss_curve.measure_loss_curve", killed)
        assert crisp("prepare", MODEL, *CURVE, "--out", out).code == 130
    assert [path.name for path in tmp_path.iterdir()] == ["model.partial"]
    written = (tmp_path / "model.partial" / "model" / "model.safetensors").stat().st_mtime_ns

    done = crisp("prepare", MODEL, *CURVE, "--out", out)
    assert (done.code, done.err) == (0, "")
    assert "losses    of policy saliency at 20 % and 13 thresholds, on 508 tokens" in done.out
    assert ", loss curve " in done.out.splitlines()[-1]
    assert [path.name for path in tmp_path.iterdir()] == ["model"]
    assert (out / "model.safetensors").stat().st_mtime_ns == written  # not once more

    metadata = Metadata.load(out / FILE)
    curve = metadata.loss_curve
    assert curve is not None
    assert (curve.tokens, list(map(float, curve.budgets))) == (508, [0.2])  # 4 windows of 127
    # The more blocks are worth loading, the less is lost.
    losses = [curve.losses[0, curve.shares.index(Fraction(share))] for share in (".15", ".5", ".9")]
    assert losses[0] > losses[1] > losses[2]

    done = crisp("prepare", MODEL, *CURVE, "--out", out)
    assert (done.code, done.out) == (2, "")
    assert "crisp refresh measures what it lacks, such as --loss-curve" in done.err
    assert Metadata.load(out / FILE).provenance == metadata.provenance


@pytest.mark.parametrize(
    ("changed", "words"),
    [
        (("--tokens", 128), "--loss-curve: one window of 128 tokens says nothing about other text"),
        (("--layerwise",), "--loss-curve: needs the whole model in memory"),
        (("--loss-curve", "4GB"), "--loss-curve 4GB: expected shares of all experts"),
        (("--loss-curve", "200%"), "--loss-curve 200%: expected shares of all experts"),
        (("--loss-curve", "10%,"), "expected"),
    ],
)
def test_what_no_loss_curve_can_be_measured_on_is_said_before_the_work(
    crisp: Crisp, tmp_path: Path, changed: tuple[object, ...], words: str
) -> None:
    done = crisp("prepare", MODEL, *CURVE, "--out", tmp_path / "out", *changed)
    assert (done.code, done.out) == (2, "")
    assert words in done.err
    assert done.err.count("\n") == 1
    assert not any(tmp_path.rglob("*.safetensors"))
