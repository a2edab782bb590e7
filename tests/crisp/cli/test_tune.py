"""``crisp tune``: the cheapest policy within a loss, and a command that runs it."""

from __future__ import annotations

import json
import shlex
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from crisp.run import load
from tests.crisp.test_tune import losses, measured

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
                costs[width, cache, unit, order] = load(out)[0].metrics[metric]
    least = min(costs.values(), key=lambda cost: cost or 0)

    done = crisp("tune", trace, "--loss", loss, *ASKED, "--minimise", minimise)
    assert (done.code, done.err) == (0, "")
    command = shlex.split(done.out.splitlines()[-1])
    assert command[:2] == ["crisp", "simulate"]
    assert crisp(*command[1:], "--json", out).code == 0
    assert load(out)[0].metrics[metric] == least
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


@pytest.mark.parametrize(
    ("line", "message"),
    [
        (("--minimise", "bites"), "--minimise: unknown quantity 'bites'; did you mean 'bytes'?"),
        (("--minimise", "energy", "--hardware", "paper-table1"), "--minimise energy: paper-table1"),
        (("--max-loss", "much"), "--max-loss: 'much' is not a number"),
        (("--max-loss=-1%",), "--max-loss -1%: must not be below 0"),
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
