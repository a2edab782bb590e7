"""Planned runs are the runs of their cases, on whatever engine and in whatever process."""

from __future__ import annotations

import pickle
from collections.abc import Callable, Iterator
from dataclasses import replace
from pathlib import Path

import pytest

from crisp.errors import CrispError
from crisp.run.inputs import cached_inputs
from crisp.run.setup import Setup, load_setup
from crisp.sim import experiment
from crisp.sim.experiment import plan_run, run_all, run_case, run_planned
from crisp.sim.hardware import hardware_profile
from crisp.sim.simulate import simulate
from tests.crisp.cli.toy import toy_trace


@pytest.fixture
def setup(tmp_path: Path) -> Iterator[Setup]:
    path = tmp_path / "toy.trace.safetensors"
    toy_trace().save(path)
    yield load_setup(path, hardware=hardware_profile("paper-table1"))
    cached_inputs.cache_clear()


def test_a_plan_is_its_case(setup: Setup) -> None:
    plan = plan_run(setup, "crisp", "50%")
    again = pickle.loads(pickle.dumps(plan))
    assert again == plan
    assert run_planned(again) == simulate(setup.case("crisp", "50%"), "paper-table1")
    with pytest.raises(CrispError, match="budget"):
        plan_run(setup, "crisp", "300%")


def test_runs_come_in_the_order_of_their_plans(
    setup: Setup, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(experiment, "cores", lambda: 1)
    plans = [plan_run(setup, name, "50%") for name in ("lru", "fo", "crisp")]
    finished: list[None] = []
    runs = run_all(plans, lambda: finished.append(None))
    assert [run.settings["policy"]["name"] for run in runs] == ["lru", "fo", "crisp"]
    assert len(finished) == 3


def test_auto_takes_the_fast_engine_where_it_can(setup: Setup) -> None:
    case, shared = setup.case("lru", "50%"), hardware_profile("jetson-agx-orin-32gb")
    assert setup.hardware is not None
    runs = {name: run_case(case, setup.hardware, name) for name in ("simpy", "fast", "auto")}
    assert {name: run.settings["engine"] for name, run in runs.items()} == {
        "simpy": "simpy", "fast": "fast", "auto": "fast",
    }  # fmt: skip
    assert runs["simpy"].metrics == runs["fast"].metrics
    assert run_case(case, shared, "auto").settings["engine"] == "simpy"
    with pytest.raises(CrispError, match="engine fast: does not know unified memory"):
        run_case(case, shared, "fast")


@pytest.mark.parametrize(
    ("use", "message"),
    [
        (lambda s: plan_run(s, "lru", "50%", "bogus"), "unknown engine 'bogus'; known: simpy, "),
        (lambda s: plan_run(s, "lru", "50%", None), "unknown engine 'None'"),
        (
            lambda s: plan_run(replace(s, hardware=None), "lru", "50%"),
            "setup toy.trace.safetensors: has no hardware to simulate; load it with hardware=",
        ),
        (lambda s: plan_run(3, "lru", "50%"), "setup 3: expected a Setup"),
        (lambda s: run_case(s.case("lru", "50%"), s.hardware, "x"), "unknown engine 'x'"),
        (
            lambda s: run_case(s.case("lru", "50%"), s.hardware, "fast", sinks=[print]),
            "engine fast: has no timeline for sinks; engine simpy has one",
        ),
        (lambda s: run_case(s, s.hardware), "case Setup("),
        (lambda s: run_case(s, s.hardware, "fast"), "case Setup("),
        (lambda s: run_case(s.case("lru", "50%"), 3), "hardware profile 3: expected a name or a"),
        (lambda s: run_case(s.case("lru", "50%"), ""), "hardware profile '': expected a name or"),
        (lambda s: run_case(s.case("lru", "50%"), "paper"), "unknown hardware profile 'paper'"),
    ],
)
def test_what_is_no_run_is_refused(
    setup: Setup, use: Callable[[Setup], object], message: str
) -> None:
    with pytest.raises(CrispError) as refused:
        use(setup)
    assert str(refused.value).startswith(message)
