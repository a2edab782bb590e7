"""``crisp tune``: the cheapest policy within a loss, and a command that runs it."""

from __future__ import annotations

import json
import shlex
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from crisp.model.spec import ModelSpec
from crisp.profile import Profile
from crisp.run.result import load_runs
from crisp.scheduler.workload import split
from crisp.trace import RoutingTrace
from tests.crisp.cli.toy import CONFIG
from tests.crisp.profile.test_metadata import made
from tests.sim.tuning.test_losses import losses, measured

WIDTHS = {"uniform(share=0.5)": 1.3, "uniform(share=0.75)": 1.08, "single": 1.03, "full": 1.0}
ASKED = ("--budget", "30%", "--max-loss", "5%", "--hardware", "rtx4090-pcie4")


@pytest.fixture
def loss(tmp_path: Path) -> Path:
    path = tmp_path / "loss.json"
    path.write_text(json.dumps(losses(*(measured(*item) for item in WIDTHS.items()))))
    return path


@pytest.mark.parametrize(
    ("minimise", "metric", "orders"),
    [
        ("bytes", "bytes_per_token", ("widest",)),
        ("energy", "energy_j_per_token", ("widest",)),
        ("time", "ms_per_token_mean", ("widest", "johnson")),
    ],
)
def test_the_best_is_that_of_all_that_are_tried(
    crisp: Callable[..., Any],
    trace: Path,
    loss: Path,
    tmp_path: Path,
    minimise: str,
    metric: str,
    orders: tuple[str, ...],
) -> None:
    """Each simulated by itself."""
    out, costs = tmp_path / "r.json", {}
    for width in ("full", "single"):  # the others lose more
        for cache, unit in (
            ("lru", "expert"), ("lfu", "expert"), ("lru", "block"), ("suffix-lru", "block"),
        ):  # fmt: skip
            for order in orders:
                line = ("--policy", "crisp", "--width", width, "--cache", cache, "--unit", unit)
                line += ("--order", order, "--budget", "30%", "--json", out)
                assert crisp("simulate", trace, *line).code == 0
                costs[width, cache, unit, order] = load_runs(out)[0].metrics[metric]
    least = min(costs.values(), key=lambda cost: cost or 0)

    done = crisp("tune", trace, "--loss", loss, *ASKED, "--minimise", minimise)
    assert (done.code, done.err) == (0, "")
    command = shlex.split(done.out.splitlines()[-1])
    assert command[:2] == ["crisp", "simulate"]
    assert crisp(*command[1:], "--json", out).code == 0
    assert load_runs(out)[0].metrics[metric] == least
    (row,) = [line for line in done.out.splitlines() if line.startswith("*  ")]
    assert row.split()[2] == "single"
    assert f"of {16 * len(orders)} policies tried" in done.out


def test_what_is_worse_is_not_shown(crisp: Callable[..., Any], trace: Path, loss: Path) -> None:
    done = crisp("tune", trace, "--loss", loss, *ASKED)
    table = done.out.split("\n\n")[1].splitlines()
    shown = [row.split()[2 if row.startswith("*") else 1] for row in table[1:]]
    costs = [float(row.split()[-4]) for row in table[1:]]
    assert shown[0] == "full"
    assert costs == sorted(costs, reverse=True)
    assert "of full %" in table[0]
    assert "loss.json: has no tiered, skip, skip-contribution," in " ".join(done.out.split())


def test_a_loss_of_nothing_is_met_by_full_widths(
    crisp: Callable[..., Any], trace: Path, loss: Path
) -> None:
    done = crisp("tune", trace, "--loss", loss, *ASKED[:2], "--max-loss", "0")
    assert done.code == 0
    assert "--width full" in done.out.splitlines()[-1]


def test_what_was_measured_at_another_budget_is_said(
    crisp: Callable[..., Any], trace: Path, tmp_path: Path
) -> None:
    """`resident` looks at what is resident, so its loss holds for one budget and cache."""
    path = tmp_path / "loss.json"
    at = [("resident(floor=0.25)", 1.01, "20%"), ("resident(floor=0.5)", 1.02, "0.3")]
    path.write_text(json.dumps(losses(*(measured(*item) for item in at))))
    done = crisp("tune", trace, "--loss", path, *ASKED)
    assert done.code == 0
    told = " ".join(done.out.split())
    assert (
        "not usable at 30%: resident(floor=0.25), which look at what is resident and were measured "
        "at a budget of 20%; crisp eval --budget 30% measures them" in told
    )
    assert "of 5 policies tried" in told  # full widths with four caches, the other with its own
    assert "--width 'resident(floor=0.5)'" in done.out.splitlines()[-1]


def told(done: Any) -> list[str]:
    """The lines about the losses, above the table."""
    lines = done.out.split("\n\n")[0].partition("losses ")[2].splitlines()
    return " ".join(line.strip() for line in lines).split("loss.json: ")[1:]


def test_losses_of_other_conditions_are_named_above_the_table(
    crisp: Callable[..., Any], trace: Path, tmp_path: Path
) -> None:
    path = tmp_path / "loss.json"
    tiered = "tiered(alpha=0.4,beta=0.7,warm=0.5,cold=0)"
    own = Profile.from_trace(split(RoutingTrace.load(trace))[0]).digest()
    same = {"run": "float32 (published in bfloat16) on cpu", "profile": {"sha256": own}}
    by_name = "models are compared by name: the losses hold no hash of the traced weights"

    def head(**changed: Any) -> str:
        content = losses(measured(tiered, 1.01))
        for result in content["results"]:
            result["settings"] |= same | changed
        path.write_text(json.dumps(content))
        done = crisp("tune", trace, "--loss", path, *ASKED)
        assert done.code == 0
        assert tiered in done.out.splitlines()[-1]  # used all the same
        (line,) = told(done)
        return line

    first = "measured on toy, experts in bfloat16, 8 blocks each"
    assert head() == f"{first} {by_name}"
    assert head(profile={"sha256": "ab" * 32}) == (
        f"{first} {by_name} differs: measured with the counts abababababab, simulated with "
        f"{own[:12]} (the first 2 of the trace's 4 sequences; run: the rest): they decide {tiered}"
    )
    assert head(run="bfloat16 on cuda, torch 2, experts in int4") == (
        f"{first.replace('bfloat16', 'int4')} {by_name} "
        "differs: measured with experts in int4, simulated in 16 bits"
    )
    assert head(model="boy") == (
        f"{first.replace('toy', 'boy')} differs: measured on boy, the routing is toy's"
    )
    assert head(expert_blocks=4) == (
        f"{first.replace('8 b', '4 b')} {by_name} differs: measured with 4 blocks an expert, "
        "simulated with 8: widths are rounded up to whole ones"
    )
    assert head(run=None, profile=None) == (
        f"{first.replace('bfloat16', 'an untold type')} {by_name} the losses do not say in which "
        "type experts were the losses do not say which counts they were measured with: they "
        f"decide {tiered}"
    )


def test_of_a_prepared_model_the_weights_are_compared(
    crisp: Callable[..., Any], trace: Path, tmp_path: Path
) -> None:
    path, metadata = tmp_path / "loss.json", tmp_path / "crisp.safetensors"
    found = made(ModelSpec.from_config(CONFIG, "toy"))
    found.save(metadata)
    counts = found.profile().digest()

    def head(**profile: str) -> str:
        content = losses(measured("tiered(alpha=0.4,beta=0.7,warm=0.5,cold=0)", 1.01))
        for result in content["results"]:
            result["settings"] |= {
                "model": "prepared", "run": "bfloat16 on cuda", "expert_blocks": 4,
                "profile": {"sha256": counts} | profile,
            }  # fmt: skip
        path.write_text(json.dumps(content))
        done = crisp("tune", trace, "--loss", path, *ASKED, "--metadata", metadata, "--block", "64")
        assert done.code == 0, done.err
        (line,) = told(done)
        return line.removeprefix("measured on prepared, experts in bfloat16, 4 blocks each").strip()

    assert head(weights=found.weights) == ""
    assert head(weights="cd" * 32) == (
        "differs: measured on weights cdcdcdcdcdcd, the metadata is of abababababab"
    )
    assert head() == (
        "measured on prepared, the routing is toy's: the losses hold no hash that tells whether it "
        "is the prepared one"
    )
    assert head(weights=found.weights, sha256="00" * 32).startswith(
        f"differs: measured with the counts 000000000000, simulated with {counts[:12]} "
    )


def test_what_the_trace_cannot_do_is_said(
    crisp: Callable[..., Any], trace: Path, tmp_path: Path
) -> None:
    path = tmp_path / "loss.json"
    path.write_text(json.dumps(losses(measured("skip(share=0.5)", 1.02))))
    done = crisp("tune", trace, "--loss", path, *ASKED)
    assert done.code == 0
    assert "refused: 4, such as skip(share=0.5): width skip: asks for the router's" in " ".join(
        done.out.split()
    )


@pytest.mark.parametrize("loss", ["many", "1%,2%", "-1%"])
def test_a_loss_that_is_neither_share_nor_file_is_said(
    crisp: Callable[..., Any], trace: Path, loss: str
) -> None:
    done = crisp("tune", trace, f"--loss={loss}", "--budget", "30%")
    assert (done.code, done.out) == (2, "")
    assert done.err == (
        f"error: --loss {loss}: is no file; without --max-loss a share such as 2% will do\n"
    )


@pytest.mark.parametrize(
    ("line", "message"),
    [
        (("--minimise", "bites"), "--minimise: unknown quantity 'bites'; did you mean 'bytes'?"),
        (("--minimise", "energy", "--hardware", "paper-table1"), "--minimise energy: paper-table1"),
        (("--max-loss", "much"), "--max-loss: 'much' is not a number"),
        (("--max-loss=-1%",), "--max-loss -1%: must not be below 0"),
        (("--max-loss", "10"), "--max-loss 10: above 100 %; ten per cent is 10% or .1"),
        (("--loss", "nowhere.json"), "nowhere.json: cannot be read"),
        (("--loss", "."), "--loss .: is a folder"),
        (("--budget", "200%"), "budget '200%': above 100 %"),
    ],
)
def test_a_mistake_is_one_line(
    crisp: Callable[..., Any], trace: Path, loss: Path, line: tuple[str, ...], message: str
) -> None:
    given = {"--loss": loss, "--budget": "30%", "--max-loss": "5%"}
    asked = {item.partition("=")[0] for item in line}
    rest = [item for flag, value in given.items() if flag not in asked for item in (flag, value)]
    done = crisp("tune", trace, *line, *rest)
    assert done.code == 2
    assert message in done.err
    assert done.err.count("\n") == 1
