"""What runs share, what differs, and that no line joins runs of different conditions."""

from __future__ import annotations

import itertools
import random
from typing import Any

from crisp.report.conditions import conditions, count_values, policy_labels
from crisp.report.table import from_runs
from crisp.run.result import Run
from tests.crisp.run.runs import whole

LRU = whole().settings["policy"]


def run(policy: dict[str, Any] | None = None, budget: str = "10%", **settings: Any) -> Run:
    own = {"policy": LRU | (policy or {}), "budget": {"asked": budget}}
    return whole(own | settings)


def test_what_all_share_stands_apart_from_what_differs() -> None:
    found = conditions(from_runs([run(batch=1, seed=3), run(batch=2, seed=3)]))
    assert ("model", "moe") in found.common
    assert ("bits a weight", "4.25") in found.common
    assert ("seed", "3") in found.common
    assert [one.label for one in found.differing] == ["batch"]
    assert found.differing[0].values == ["1", "2"]
    assert "batch" not in dict(found.common)


def test_numbers_of_a_machine_go_with_its_name() -> None:
    machines = [
        {"name": name, "kind": "discrete", "numbers": {"bandwidth": {"value": value}}}
        for name, value in (("slow", 1), ("fast", 2))
    ]
    found = conditions(from_runs([run(hardware=machine) for machine in machines]))
    assert [one.label for one in found.differing] == ["machine"]
    assert found.implied == ["hardware.numbers.bandwidth.value"]
    machines[1]["name"] = "slow"  # the same name for another machine
    found = conditions(from_runs([run(hardware=machine) for machine in machines]))
    assert [one.name for one in found.differing] == ["hardware.numbers.bandwidth.value"]


def test_batch_and_machine_that_differ_together_are_both_told() -> None:
    other = {"name": "other", "kind": "discrete"}
    found = conditions(from_runs([run(batch=1), run(batch=2, hardware=other)]))
    assert [one.label for one in found.differing] == ["machine", "batch"]


def test_a_policy_without_a_profile_does_not_differ_by_it() -> None:
    counts = {"sha256": "0", "from": "the first half"}
    found = conditions(from_runs([run(), run({"name": "crisp"}, profile=counts)]))
    assert ("counts from", "the first half") in found.common
    assert not found.differing


def test_no_limit_differs_from_one() -> None:
    found = conditions(from_runs([run(limit=None), run(limit=7)]))
    assert count_values(found.differing[0]) == [("7", 1), ("none", 1)]
    other = {"name": "box", "kind": "discrete", "limit": 1}
    found = conditions(from_runs([run(), run(hardware=other), run(hardware=None)]))
    values = {one.name: count_values(one) for one in found.differing}
    assert values["hardware.limit"] == [("1", 1), ("none", 1)]  # the third has no such machine


def test_policies_of_one_name_are_told_apart_by_what_differs() -> None:
    table = from_runs([run(), run({"width": "single"}), run({"name": "x", "width": "single"})])
    assert policy_labels(table) == ["lru full", "lru single", "x"]
    table = from_runs([run(), run({"scope": "global", "unit": "block"})])
    assert policy_labels(table) == ["lru per layer by expert", "lru per global by block"]


def test_no_line_joins_what_differs_in_more_than_the_budget() -> None:
    machines = [{"name": "box", "kind": "discrete"}, {"name": "box", "kind": "discrete", "x": 1}]
    runs = [
        run(policy, budget, batch=batch, hardware=machine, engine=engine)
        for policy, budget, batch, machine, engine in itertools.product(
            [{}, {"cache": "fifo"}, {"name": "other"}],
            ["10%", "20%"],
            [1, 2],
            machines,
            ["simpy", "hw"],
        )
    ]
    random.Random(0).shuffle(runs)
    lines = conditions(from_runs(runs)).lines
    for (one, place), (other, place2) in itertools.combinations(zip(runs, lines, strict=True), 2):
        same = all(
            one.settings[key] == other.settings[key] for key in one.settings if key != "budget"
        )
        assert (place == place2) == same
    assert len(set(lines)) == len(runs) / 2


def test_budgets_of_different_conditions_are_no_line() -> None:
    assert conditions(from_runs([run(batch=1), run(budget="20%", batch=2)])).lines == [0, 1]
    whole_policy = conditions(from_runs([run(), run({"unit": "block"}, "20%")]))
    assert whole_policy.lines == [0, 1]


def test_both_simulators_are_one_line_and_a_measurement_is_another() -> None:
    engines = [("simpy", "10%"), ("fast", "20%"), ("hw", "10%"), ("hw", "20%")]
    found = conditions(from_runs([run(engine=e, budget=budget) for e, budget in engines]))
    assert found.lines == [0, 0, 1, 1]


def test_a_run_that_repeats_another_has_a_line_of_its_own() -> None:
    runs = [whole({"engine": "hw"}, hit_rate=rate) for rate in (0.1, 0.2, 0.3)]
    assert conditions(from_runs(runs)).lines == [0, 1, 2]


def test_another_file_of_the_same_trace_is_the_same_condition() -> None:
    traces = [{"sha256": "0", "rows": 9, "file": {"name": name}} for name in ("a", "b")]
    runs = [run(trace=trace, budget=b) for trace, b in zip(traces, ("10%", "20%"), strict=True)]
    found = conditions(from_runs(runs))
    assert (found.lines, found.differing) == ([0, 0], [])
