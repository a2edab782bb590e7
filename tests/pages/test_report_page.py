"""The page of crisp report in a browser, and the commands of docs/report.md."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from crisp.model.spec import ModelSpec
from crisp.policy import Budget, named
from crisp.profile import Profile
from crisp.report.conditions import conditions
from crisp.report.page import render_page
from crisp.report.table import RunTable, from_runs
from crisp.report.timelines import Timeline, read_timeline
from crisp.run.case import Case
from crisp.run.result import Run
from crisp.run.sinks import parquet
from crisp.sim.hardware import hardware_profile
from crisp.sim.simulate import simulate
from tests.browser import chromium, seen
from tests.consoles import check_console
from tests.crisp.cli.toy import CONFIG, toy_trace
from tests.crisp.run.runs import whole

ROOT = Path(__file__).parents[2]
HOSTILE = "<img src=x onerror=\"document.title='taken'\"></script><script>document.title='taken'"
LOOK = Path(__file__).with_suffix(".js")


def at(policy: str, budget: str, speed: float, engine: str = "simpy", **settings: Any) -> Run:
    own = {"policy": whole().settings["policy"] | {"name": policy}, "budget": {"asked": budget}}
    metrics: dict[str, float] = {"tokens_per_second": speed, "decode_bytes_per_token": 1e9 / speed}
    if engine == "simpy":
        metrics |= {"decode_energy_j_per_token": 9 / speed, "io_bound_ms_per_token": 900 / speed}
    return whole(own | {"engine": engine} | settings, **metrics)


def timed(folder: Path) -> Timeline:
    """The timeline of a short run."""
    trace, file = toy_trace(), folder / "timeline.parquet"
    spec = ModelSpec.from_config(CONFIG, "toy")
    case = Case(trace, spec, named("lru"), Budget.parse("30%"), Profile.from_trace(trace))
    with parquet(file) as sink:
        run = simulate(case, hardware_profile("rtx4090-pcie4"), sinks=[sink])
    return read_timeline(file, [run])


def test_a_click_on_a_policy_shows_it_alone_and_the_rest_works(
    tmp_path: Path,
) -> None:
    chromium()
    runs = [
        at("lru", "10%", 20), at("lru", "20%", 30.5), at("lru", "30%", 41),
        at(HOSTILE, "10%", 25), at(HOSTILE, "20%", 35),
        at("lru", "10%", 19, "hw"), at("lru", "20%", 28, "hw"),
        at("up", "10%", 7),
    ]  # fmt: skip
    table = from_runs(runs)
    text = render_page(table, conditions(table), [timed(tmp_path)], ["runs.json"])
    found = seen(text, LOOK.read_text(encoding="utf-8"), tmp_path)

    assert (found["title"], found["images"]) == (f"lru, {HOSTILE} and up: moe on box", 0)
    assert found["legend"] == ["lru", HOSTILE, "up"]
    # speed, bytes: lru simulated, the hostile one, lru measured; joules of simulated runs only
    three, two = ["lru", HOSTILE, "lru"], ["lru", HOSTILE]
    assert found["lines"] == [three, three, two]
    assert found["marks"] == [[6, 2], [6, 2], [6, 0]]
    alone = found["alone"]
    assert alone["lines"] == [["lru", "lru"], ["lru", "lru"], ["lru"]]
    assert alone["marks"] == [[3, 2], [3, 2], [3, 0]]
    assert (alone["pressed"], alone["rows"]) == ("true", ["lru"] * 5)
    assert (alone["bounds"], alone["named"]) == (1, ["io"])
    assert found["again"] == found["lines"]

    assert found["pointed"].splitlines()[0] == "lru at 10%, simulated"
    assert found["tip"].splitlines()[0] == "lru at 20%, simulated"
    assert "30.50 tokens/s" in found["tip"]
    assert found["hidden"] is True
    rising = ["7.00", "19.00", "20.00", "25.00", "28.00", "30.50", "35.00", "41.00"]
    assert (found["rising"], found["falling"]) == (rising, rising[::-1])
    assert found["sorted"] == "ascending"
    assert set(found["why"]) == {"not in the file"}

    assert found["bars"][0] == sum(found["bars"][1:]) + 3  # and a router in each layer
    assert found["bar"].splitlines()[0] in ("load", "compute an expert")
    assert "task\t1 of 2 of the event" in found["bar"]
    assert 3 <= found["near"][0] < found["far"] == found["bars"][0]
    assert found["near"][1] == "layer 0"
    assert found["fetched"] == 0


def test_ten_thousand_runs_open(tmp_path: Path) -> None:
    chromium()
    n = 10_000
    one = from_runs([at("lru", "10%", 20.0)])
    budgets = [f"{10 * (row % 5 + 1)}%" for row in range(n)]
    table = RunTable(
        n,
        {name: values * n for name, values in one.settings.items()}
        | {"budget.asked": budgets, "seed": [str(row // 50) for row in range(n)]}
        | {"policy.width": [f"uniform(.{row // 5 % 10})" for row in range(n)]},
        {name: values * n for name, values in one.metrics.items()}
        | {
            "tokens_per_second": [1.0 + row for row in range(n)],
            "decode_energy_j_per_token": [None] * n,
        },
        {"decode_energy_j_per_token": ["no meter"] * n},
    )
    look = """
    const lines = document.querySelectorAll("#figures figure:first-child path.line").length;
    const rows = document.querySelectorAll("#table tbody tr").length;
    const next = [...document.querySelectorAll("#pager button")].pop();
    next.focus();
    next.click();
    const text = (id) => document.getElementById(id).innerText;
    const empty = document.querySelector("#figures p.empty").innerText;
    const focus = document.activeElement.textContent;
    return [lines, rows, text("pager"), focus, text("charts-told"), empty];
    """
    text = render_page(table, conditions(table), [], [])
    lines, rows, pager, focus, told, empty = seen(text, look, tmp_path)
    assert (lines, rows) == (150, 25)
    assert pager.endswith("26–50 of 10,000 runs")
    assert focus == "next"
    assert empty == "Nothing to draw: no meter (10,000 runs)"
    assert "Throughput: 150 of 2,000 lines are drawn" in told


@pytest.mark.seconds
def test_the_commands_of_the_guide(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.chdir(tmp_path)
    text = (ROOT / "docs" / "report.md").read_text(encoding="utf-8")
    assert len(check_console(text, capsys)) == 5
    assert (tmp_path / "report.html").stat().st_size > 10_000
