"""``--loss``: a loss in the place of a threshold."""

from __future__ import annotations

import shlex
from collections.abc import Callable
from dataclasses import replace
from fractions import Fraction
from itertools import product
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from crisp.model.spec import ModelSpec
from crisp.profile.loss_curve import LossCurve
from crisp.profile.metadata import Metadata
from crisp.run.result import load_runs
from crisp.trace import RoutingTrace
from crisp.trace.bundled import resolve_trace
from tests.crisp.profile.test_metadata import made, with_saliency

TRACE = "tiny-mixtral-code"  # it has the router's weights


@pytest.fixture
def metadata(tmp_path: Path) -> Path:
    """Half of the blocks lose 3 % at 10 % of the experts, and half of that at 30 %."""
    recorded = RoutingTrace.load(resolve_trace(TRACE)).header.spec
    assert recorded is not None
    spec = ModelSpec.from_dict(recorded, TRACE).with_(block=16)
    curve = LossCurve(
        1000,
        (Fraction(1, 10), Fraction(3, 10)),
        (Fraction(1, 2),),
        np.array([[0.02], [0.01]]),
        np.array([[0.03], [0.015]]),
    )
    file = tmp_path / "crisp.safetensors"
    replace(with_saliency(made(spec)), loss_curve=curve).save(file)
    assert Metadata.load(file).loss_curve is not None
    return file


def test_simulate_takes_the_threshold_of_each_budget(
    crisp: Callable, metadata: Path, tmp_path: Path
) -> None:
    runs = tmp_path / "runs.json"
    done = crisp(
        "simulate", TRACE, "--metadata", metadata, "--policy", "lru,saliency", "--loss", "2%",
        "--budget", "10%,30%", "--limit", 3, "--json", runs,
    )  # fmt: skip
    assert (done.code, done.err) == (0, "")
    lines = [line for line in done.out.splitlines() if line.startswith("loss ")]
    ends = " lost 1.0 % on the curve's text, by its interval 1.5 % at most"
    assert lines == [
        "loss      at most 2 % at 10%: saliency(0.75), which at 10 %" + ends,
        "loss      at most 2 % at 30%: saliency(0.5), which at 30 %" + ends,
    ]
    widths = [run.settings["policy"]["width"] for run in load_runs(runs)]
    assert widths == ["full", "full", "saliency(share=0.75)", "saliency(share=0.5)"]


def test_what_cannot_be_asked_is_refused(crisp: Callable, metadata: Path) -> None:
    def refused(*options: object) -> str:
        done = crisp("simulate", TRACE, "--budget", "10%", "--limit", 3, *options)
        assert (done.code, done.out) == (2, "")
        assert done.err.count("\n") == 1
        return str(done.err)

    asked = ("--metadata", metadata, "--loss", "2%")
    assert "which --policy does not name" in refused(*asked, "--policy", "lru")
    assert "without another --width" in refused(*asked, "--policy", "saliency", "--width", "full")
    assert "without another --scope" in refused(*asked, "--policy", "saliency", "--scope", "global")
    assert "at most 20%" in refused("--metadata", metadata, "--loss", "40%", "--policy", "saliency")
    assert "crisp prepare" in refused("--loss", "2%", "--policy", "saliency")


def test_a_sweep_says_whose_loss_it_is(crisp: Callable, metadata: Path, tmp_path: Path) -> None:
    def swept(policies: str) -> Any:
        return crisp(
            "sweep", "--trace", TRACE, "--metadata", metadata, "--limit", 3, "--budget", "10%",
            "--loss", "2%", "--policy", policies, "--out", tmp_path / "found.parquet",
        )  # fmt: skip

    done = swept("lru,crisp")
    assert (done.code, done.out) == (2, "")
    assert done.err == "error: --loss: is for policy saliency, which --policy does not name\n"
    done = swept("lru,saliency")
    assert done.code == 0
    assert "--loss: for policy saliency alone, not for lru\n" in done.out + done.err


def test_tune_says_what_takes_least_and_the_command_takes_that(
    crisp: Callable, metadata: Path, tmp_path: Path
) -> None:
    options = ("--metadata", metadata, "--limit", 20, "--loss", "2%", "--minimise", "time")
    done = crisp("tune", TRACE, "--budget", "10%,30%", *options)
    assert (done.code, done.err) == (0, "")
    table = [line.split() for line in done.out.splitlines() if line.startswith((" ", "*"))]
    best = next(row for row in table if row[0] == "*" and row[1].endswith("%"))
    assert best[1:3] == ["30%", "saliency"]
    command = shlex.split(done.out.splitlines()[-1])
    assert command[:2] == ["crisp", "simulate"]
    run = crisp(*command[1:], "--json", tmp_path / "run.json")
    assert (run.code, run.err) == (0, "")
    (found,) = load_runs(tmp_path / "run.json")
    took = found.metrics["ms_per_token_mean"]
    assert took == pytest.approx(float(best[-2]), rel=0.01)  # three digits are printed
    # It is what trying everything by hand finds.
    times = []
    for order, granularity, policy in product(
        ("widest", "johnson"),
        ("expert", "block"),
        ("lru --unit expert", "lru --unit block", "saliency --loss 2%"),
    ):
        name = tmp_path / "one.json"
        one = crisp(
            "simulate", TRACE, "--metadata", metadata, "--limit", 20, "--budget", "10%,30%",
            "--order", order, "--granularity", granularity, "--policy", *policy.split(),
            "--json", name,
        )  # fmt: skip
        assert (one.code, one.err) == (0, "")
        times += [run.metrics["ms_per_token_mean"] for run in load_runs(name)]
    assert min(times) == took
