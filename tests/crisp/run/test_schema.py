"""Run files that were edited, or are something else: one line each, that names the file."""

from __future__ import annotations

import copy
import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from hypothesis import HealthCheck, given
from hypothesis import settings as limits
from hypothesis import strategies as st

from crisp.cli.commands.explore.explain import explain_run
from crisp.errors import CrispError
from crisp.run.result import load_runs, to_json
from crisp.run.schema import COUNTS, NAMED_BY_PHASE, NUMBERS
from tests.crisp.cli.conftest import crisp, trace
from tests.crisp.run.runs import whole

__all__ = ["crisp", "trace"]  # fixtures


def changed(*places: str, to: Any) -> str:
    """The text of a run file with the value at a place replaced."""
    content: Any = json.loads(to_json(whole()))
    inner = content
    for key in places[:-1]:
        inner = inner[key]
    inner[places[-1]] = to
    return json.dumps(content)


def test_what_is_asked_for_is_what_a_run_has(
    crisp: Callable[..., Any], trace: Path, tmp_path: Path
) -> None:
    file = tmp_path / "run.json"
    line = ("--policy", "lru", "--budget", "30%", "--json", file)
    assert crisp("simulate", trace, *line).code == 0
    assert {*COUNTS, *NUMBERS, *NAMED_BY_PHASE} <= load_runs(file)[0].metrics.keys()


@pytest.mark.parametrize(
    ("places", "value", "line"),
    [
        (("settings",), None, "settings: found None, expected an object"),
        (("metrics",), [1], "metrics: found [1], expected an object"),
        (("provenance",), "x", "provenance: found 'x', expected an object"),
        (("settings", "policy"), "lru", "settings.policy: found 'lru', expected an object"),
        (("settings", "policy", "name"), 3, "settings.policy.name: found 3, expected a text"),
        (
            ("settings", "policy", "prefetch"),
            [],
            "settings.policy.prefetch: found [], expected a t",
        ),
        (("settings", "budget", "asked"), None, "settings.budget.asked: found None, expected a te"),
        (("settings", "hardware"), "box", "settings.hardware: found 'box', expected an object"),
        (("settings", "device"), {}, "settings.device.name: found None, expected a text"),
        (("settings", "engine"), "slow", "settings.engine: found 'slow', expected simpy or fast"),
        (("settings", "batch"), True, "settings.batch: found True, expected a whole number"),
        (("settings", "model", "bits"), "1/0", "settings.model: bits: found '1/0', expected Fract"),
        (("metrics", "tokens"), 0, "metrics.tokens: found 0, expected at least 1"),
        (("metrics", "hits"), 1.5, "metrics.hits: found 1.5, expected a count"),
        (("metrics", "hits"), 10**400, "metrics.hits: found 1000"),
        (
            ("metrics", "link_busy"),
            "0.5",
            "metrics.link_busy: found '0.5', expected a number or nu",
        ),
        (("metrics", "link_busy"), -(10**400), "metrics.link_busy: found -1000"),
        (("metrics", "stall_ms_per_token"), False, "metrics.stall_ms_per_token: found False, expe"),
        (("version",), 2, "made by another version of crisp"),
    ],
)
def test_what_is_wrong_is_named(
    tmp_path: Path, places: tuple[str, ...], value: Any, line: str
) -> None:
    file = tmp_path / "x.json"
    file.write_text(changed(*places, to=value))
    with pytest.raises(CrispError) as caught:
        load_runs(file)
    assert str(caught.value).startswith(f"{file}: {line}")
    assert len(str(caught.value)) < len(str(file)) + 200


def test_settings_that_were_changed_are_refused(tmp_path: Path) -> None:
    file = tmp_path / "x.json"
    file.write_text(to_json(whole()))
    assert load_runs(file)[0].settings == whole().settings
    file.write_text(changed("settings", "batch", to=2))
    with pytest.raises(CrispError, match=r"x\.json: its settings were changed after it was made"):
        load_runs(file)


def test_of_a_list_the_run_is_named(tmp_path: Path) -> None:
    good, file = json.loads(to_json(whole())), tmp_path / "x.json"
    bad = copy.deepcopy(good)
    del bad["metrics"]["tasks"]
    file.write_text(json.dumps([good, bad]))
    with pytest.raises(CrispError, match=r"x\.json: run 2: metrics\.tasks: found 'nothing', expec"):
        load_runs(file)


@pytest.mark.parametrize(
    "value",
    ["NaN", "-Infinity", "1e999", "9" * 5000, "[" * 10**5, '"\\ud800"', "[" * 30 + "]" * 30],
)
def test_numbers_that_are_none_and_depth_without_end(tmp_path: Path, value: str) -> None:
    file = tmp_path / "x.json"
    file.write_text(changed("settings", "note", to="HERE").replace('"HERE"', value))
    with pytest.raises(
        CrispError, match=r"x\.json: is (not a run file|nested more than)"
    ) as caught:
        load_runs(file)
    assert "\n" not in str(caught.value)


@limits(max_examples=300, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(st.data())
def test_whatever_is_put_anywhere_it_is_refused_or_can_be_shown(
    tmp_path: Path, data: st.DataObject
) -> None:
    places, inner = list[str](), json.loads(to_json(whole()))
    while isinstance(inner, dict) and inner:
        places.append(data.draw(st.sampled_from(sorted(inner))))
        inner = inner[places[-1]]
        if data.draw(st.booleans()):
            break
    odd = st.sampled_from(
        [None, True, -1, 0, 1e308, -1e-308, 10**300, "", "x", [], {}, [{}], "1/0"]
    )
    file = tmp_path / "x.json"
    file.write_text(changed(*places, to=data.draw(odd)))
    try:
        runs = load_runs(file)
    except CrispError:
        return
    assert explain_run(runs[0], "run 1 of 1")
