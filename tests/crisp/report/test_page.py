"""The page: what is in it, that nothing in it comes from elsewhere or can do anything."""

from __future__ import annotations

import base64
import hashlib
import json
import re
from collections.abc import Sequence
from dataclasses import replace
from html.parser import HTMLParser
from typing import Any

import pytest

from crisp.report.conditions import conditions
from crisp.report.page import render_page
from crisp.report.table import from_runs
from crisp.run.result import Run
from tests.crisp.run.runs import whole

LRU = whole().settings["policy"]
HOSTILE = [
    "</script><script>document.title='taken'</script>",
    "<img src=x onerror=\"document.title='taken'\">",
    "<!--<script>",
    "{{DATA}} {{SCRIPT}}",
    "'\"&amp;&lt;b&gt; \u2028\u0000",
]


class Read(HTMLParser):
    """The elements of a page, and the texts of its script elements."""

    def __init__(self, text: str) -> None:
        super().__init__()
        self.tags: list[str] = []
        self.scripts: list[str] = []
        self.words: list[str] = []
        self.attributes: dict[str, list[str | None]] = {}
        self.feed(text)
        self.close()

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        self.tags.append(tag)
        for name, value in attrs:
            self.attributes.setdefault(name, []).append(value)
        if tag == "script":
            self.scripts.append("")

    def handle_data(self, data: str) -> None:
        if self.tags and self.tags[-1] == "script" and self.cdata_elem:
            self.scripts[-1] += data
        self.words.append(data)


def made(runs: Sequence[Run], names: Sequence[str] = ("runs.json",)) -> str:
    table = from_runs(runs)
    return render_page(table, conditions(table), [], list(names))


def data_of(runs: Sequence[Run]) -> dict[str, Any]:
    found: dict[str, Any] = json.loads(Read(made(runs)).scripts[0])
    return found


def at(share: str, *, engine: str = "simpy", phase: str = "decode", **metrics: float) -> Run:
    settings = {"budget": {"asked": share}, "engine": engine, "phase": phase}
    return whole(settings, **metrics)


def test_the_same_runs_give_the_same_bytes() -> None:
    runs = [whole({"batch": batch}) for batch in (1, 2)]
    assert made(runs) == made(runs)


def test_nothing_comes_from_elsewhere() -> None:
    text = made([whole()])
    assert not set(Read(text).attributes) & {"src", "href", "srcset", "action", "data-src"}
    assert set(re.findall(r"https?://[^\"'\s]*", text)) == {"http://www.w3.org/2000/svg"}
    assert not re.search(r"@import|url\(|fetch\(|XMLHttpRequest|import\s*\(|WebSocket|eval\(", text)


def test_only_the_script_of_the_page_may_run() -> None:
    read = Read(made([whole()]))
    (policy,) = (value for value in read.attributes["content"] if value and "default" in value)
    digest = base64.b64encode(hashlib.sha256(read.scripts[1].encode()).digest()).decode()
    assert policy == (
        f"default-src 'none'; style-src 'unsafe-inline'; script-src 'sha256-{digest}'"
    )


@pytest.mark.parametrize("name", HOSTILE)
def test_a_name_is_text_whatever_it_is(name: str) -> None:
    def runs(name: str) -> list[Run]:
        run = whole({"policy": LRU | {"name": name}, "budget": {"asked": name}, "batch": 1})
        run.settings["trace"]["model"] = run.settings["hardware"]["name"] = name
        run.settings["model"]["name"] = name
        run = replace(run, unavailable={"ttft_ms": name}, provenance={"tool": name})
        return [run, replace(run, settings=run.settings | {"batch": 2, name: name})]

    read, plain = Read(made(runs(name), [name])), Read(made(runs("name"), ["name"]))
    assert read.tags == plain.tags
    assert set(read.attributes) == set(plain.attributes)
    assert read.scripts[1] == plain.scripts[1]
    found = json.loads(read.scripts[0])
    assert found["policy"]["texts"] == found["legend"]["texts"] == [name]
    assert found["budget"]["texts"] == [name]
    assert read.words.count(name) >= 3  # routing of, machine, model


def test_the_figures_are_the_runs_figures_in_their_units() -> None:
    run = at("10%", tokens_per_second=12.3456789, decode_bytes_per_token=5_000_000, hit_rate=0.25)
    columns = {column["key"]: column for column in data_of([run])["metrics"]}
    shown = {key: (column["values"][0], column["unit"]) for key, column in columns.items()}
    assert shown["tokens_per_second"] == (12.3457, "tokens/s")
    assert shown["decode_bytes_per_token"] == (5, "MB/token")
    assert shown["hit_rate"] == (25, "%")


def test_what_is_not_known_says_why() -> None:
    known, unknown = at("10%", decode_energy_j_per_token=2.0), at("20%", decode_bytes_per_token=1e6)
    unknown = replace(unknown, unavailable={"decode_energy_j_per_token": "no meter"})
    found = data_of([known, unknown])
    energy = next(one for one in found["metrics"] if one["key"] == "decode_energy_j_per_token")
    assert energy["values"] == [2, None]
    assert [energy["why"]["codes"][0], energy["why"]["texts"]] == [-1, ["no meter"]]
    assert found["charts"][2]["missing"] == [{"why": "no meter", "runs": 1}]
    absent = {one["head"]: one["why"] for one in data_of([unknown])["absent"]}
    assert absent["energy (J/token)"] == "no meter"


def test_a_bound_in_ms_is_one_in_tokens_a_second() -> None:
    bounds = {"io_bound_ms_per_token": 4.0, "belady_bytes_per_token": 3e6}
    speed, n_bytes, energy = data_of([at("10%", tokens_per_second=200, **bounds)])["charts"]
    assert speed["bounds"] == [{"name": "io", "values": [250]}]
    assert n_bytes["bounds"] == [{"name": "belady", "values": [3]}]
    assert energy["bounds"] == []
    both = data_of([at("10%", phase="all", tokens_per_second=200, **bounds)])["charts"][0]
    none = {"io_bound_ms_per_token": 1e-320, "order_bound_ms_per_token": 0.0}
    assert data_of([at("10%", tokens_per_second=200, **none)])["charts"][0]["bounds"] == []
    assert both["bounds"] == []  # the time is of rows of both phases, the speed of one


def test_prefill_has_a_chart_where_it_was_run() -> None:
    charts = data_of([at("10%", phase="prefill", prefill_tokens_per_second=9)])["charts"]
    assert [chart["title"] for chart in charts] == [
        "Throughput of prefill",
        "Bytes loaded",
        "Energy",
    ]


def test_measured_and_simulated_are_told_apart() -> None:
    found = data_of([at("10%"), at("10%", engine="hw"), at("20%", engine="hw")])
    assert found["measured"] == [0, 1, 1]
    assert found["line"] == [0, 1, 1]


def test_of_many_policies_those_of_one_name_share_a_place_in_the_legend() -> None:
    def runs(n: int) -> list[Run]:
        return [whole({"policy": LRU | {"width": f"uniform(.{place})"}}) for place in range(n)]

    assert len(data_of(runs(12))["legend"]["texts"]) == 12
    many = data_of(runs(13))
    assert many["legend"]["texts"] == ["lru"]
    assert len(many["policy"]["texts"]) == 13
