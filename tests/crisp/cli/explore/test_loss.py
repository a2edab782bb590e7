"""``--loss``: a loss in the place of a threshold."""

from __future__ import annotations

import json
from collections.abc import Callable
from dataclasses import replace
from fractions import Fraction
from pathlib import Path

import numpy as np
import pytest

from crisp.model.spec import ModelSpec
from crisp.profile.loss_curve import LossCurve
from crisp.profile.metadata import Metadata
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
    widths = [run["settings"]["policy"]["width"] for run in json.loads(runs.read_text())]
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
    assert "at most 20%" in refused("--metadata", metadata, "--loss", "40%", "--policy", "saliency")
    assert "crisp prepare" in refused("--loss", "2%", "--policy", "saliency")
