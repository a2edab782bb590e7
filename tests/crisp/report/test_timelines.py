"""One token's time out of a timeline, against the file read by other means."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import pandas as pd
import pytest

from crisp.errors import CrispError
from crisp.model.spec import ModelSpec
from crisp.policy import Budget, named
from crisp.profile import Profile
from crisp.report import timelines
from crisp.report.timelines import Timeline, bars, read_timeline, steps_shown
from crisp.run.case import Case
from crisp.run.result import Run
from crisp.run.sinks import parquet
from crisp.sim.hardware import hardware_profile
from crisp.sim.simulate import simulate
from tests.crisp.cli.toy import CONFIG, toy_trace

KINDS = ["layer", "compute", "load", "prefetch"]


@pytest.fixture(scope="module")
def ran(tmp_path_factory: pytest.TempPathFactory) -> tuple[Run, Path]:
    """A run that prefetches, and its timeline."""
    path = tmp_path_factory.mktemp("run") / "timeline.parquet"
    trace = toy_trace()
    spec = ModelSpec.from_config(CONFIG, "toy")
    case = Case(trace, spec, named("mo"), Budget.parse("80%"), Profile.from_trace(trace))
    with parquet(path) as sink:
        return simulate(case, hardware_profile("rtx4090-pcie4"), sinks=[sink]), path


def test_the_steps_are_the_median_and_a_slow_one(ran: tuple[Run, Path]) -> None:
    run, path = ran
    shown = steps_shown([read_timeline(path, [run])])
    rows = pd.read_parquet(path)
    rows = rows[rows["kind"].isin(["layer", "compute"])]
    took = rows.groupby("step")["end_ns"].max() - rows.groupby("step")["start_ns"].min()
    expected = [took.quantile(share, "lower") for share in (0.5, 0.95)]
    assert [step["lanes"][0]["ns"] for step in shown] == expected
    numbers = [step["lanes"][0]["step"] for step in shown]
    assert [took[number] for number in numbers] == expected
    assert shown[0]["label"] == f"step {numbers[0]}, typical: the median of {len(took)}"


def test_a_single_step_is_shown_once(ran: tuple[Run, Path]) -> None:
    timeline = read_timeline(ran[1], [ran[0]])
    one = replace(timeline, begins=timeline.begins[:1], ends=timeline.ends[:1])
    assert [step["label"] for step in steps_shown([one])] == ["step 0, typical: the median of 1"]


def test_bars_are_the_rows_of_the_step(ran: tuple[Run, Path]) -> None:
    run, path = ran
    rows = pd.read_parquet(path)
    found = bars(read_timeline(path, [run]), 8)
    own = rows[(rows["step"] == 8) & (rows["kind"] != "prefetch")]
    begin, end = own["start_ns"].min(), own["end_ns"].max()
    assert found["ns"] == end - begin
    during = rows[(rows["start_ns"] < end) & (rows["end_ns"] > begin)]
    expected = sorted(
        [
            *(KINDS.index(row.kind), row.event, row.layer, row.expert, row.first, row.blocks),
            *(max(row.start_ns, begin) - begin, min(row.end_ns, end) - begin),
        ]
        for row in during.itertuples()
    )
    assert "prefetch" in set(during["kind"])
    assert sorted(bar[:4] + bar[6:] for bar in found["bars"]) == expected
    assert found["blocks"] == 8


def test_tasks_are_numbered_as_they_are_computed(ran: tuple[Run, Path]) -> None:
    run, path = ran
    computed: dict[int, list[int]] = {}
    found = bars(read_timeline(path, [run]), 8)["bars"]
    for kind, event, _, expert, *_ in found:
        if KINDS[kind] == "compute":
            computed.setdefault(event, []).append(expert)
    for kind, event, _, expert, task, tasks, *_ in found:
        if KINDS[kind] in ("load", "compute"):
            assert (task, tasks) == (computed[event].index(expert) + 1, len(computed[event]))
        else:
            assert (task, tasks) == (0, 0)


def test_a_shorter_run_shows_its_last_step(ran: tuple[Run, Path]) -> None:
    timeline = read_timeline(ran[1], [ran[0]])
    assert bars(timeline, 10**6)["step"] == len(timeline.ends) - 1


def test_of_too_many_bars_the_first_are_kept(
    ran: tuple[Run, Path], monkeypatch: pytest.MonkeyPatch
) -> None:
    timeline = read_timeline(ran[1], [ran[0]])
    whole = bars(timeline, 3)
    monkeypatch.setattr(timelines, "MOST_BARS", 4)
    part = bars(timeline, 3)
    assert part["bars"] == whole["bars"][:4]
    assert part["left_out"] == len(whole["bars"]) - 4


def test_a_timeline_belongs_to_the_run_that_its_digest_says(ran: tuple[Run, Path]) -> None:
    run, path = ran
    other = replace(run, provenance=run.provenance | {"timeline_sha256": "0" * 64})
    found = read_timeline(path, [other, run])
    assert isinstance(found, Timeline)
    assert found.run is run
    with pytest.raises(CrispError, match=r"is of none of the runs, or was changed$"):
        read_timeline(path, [other])
