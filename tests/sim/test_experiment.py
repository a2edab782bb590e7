"""Planned runs are the runs of their cases, on whatever engine and in whatever process."""

from __future__ import annotations

import pickle
from collections.abc import Iterator
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
