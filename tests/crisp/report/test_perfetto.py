from __future__ import annotations

import json
import random
from io import StringIO
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from crisp.hardware.profile import Power
from crisp.report.perfetto import COMPUTE_TRACK, LINK_TRACK, format_time, perfetto, side_by_side
from crisp.run.timeline import COMPUTE, END, KIND, LAYER, LOAD, PREFETCH, START, Rows

POWER = Power(idle=1.0, link=20.0, compute=300.0, both=4000.5)


def row(kind: int, start: int, end: int, *, expert: int = 5, resident: int = 0) -> list[int]:
    """step 7, event 3, layer 2, blocks [1, 4)."""
    return [7, 3, 2, kind, expert, 1, 3, start, end, end - start, resident]


def written(blocks: list[list[list[int]]], power: Power | None = POWER) -> list[dict[str, Any]]:
    out = StringIO()
    with perfetto(out, 'a "title"', 4096, power) as sink:
        for block in blocks:
            sink.write(np.array(block, np.int64).reshape(-1, 11))
    events: list[dict[str, Any]] = json.loads(out.getvalue())["traceEvents"]
    return events


def in_ns(event: dict[str, Any]) -> int:
    """As Perfetto reads a time: µs in floating point, times 1000, cut off."""
    return int(event["ts"] * 1000.0)


def values(events: list[dict[str, Any]], counter: str) -> list[tuple[int, float]]:
    return [
        (in_ns(event), event["args"]["value"])
        for event in events
        if event["ph"] == "C" and event["name"] == counter
    ]


def test_streams_are_tracks_and_intervals_are_named() -> None:
    events = written([[row(LOAD, 0, 40), row(LAYER, 10, 50), row(COMPUTE, 50, 1234567)]])
    tracks = {e["tid"]: e["args"]["name"] for e in events if e.get("name") == "thread_name"}
    assert tracks == {LINK_TRACK: "link", COMPUTE_TRACK: "compute"}
    begins = [(e["tid"], in_ns(e), e["name"]) for e in events if e["ph"] == "B"]
    assert begins == [
        (LINK_TRACK, 0, "load L2 E5 [1,4)"),
        (COMPUTE_TRACK, 10, "layer L2"),
        (COMPUTE_TRACK, 50, "compute L2 E5 [1,4)"),
    ]
    assert [in_ns(e) for e in events if e["ph"] == "E"] == [40, 50, 1234567]
    assert next(e for e in events if e.get("name") == "process_name")["args"]["name"] == 'a "title"'


def test_a_prefetch_is_on_the_link() -> None:
    (begin,) = [e for e in written([[row(PREFETCH, 3, 9)]]) if e["ph"] == "B"]
    assert (begin["tid"], begin["name"]) == (LINK_TRACK, "prefetch L2 E5 [1,4)")
    assert begin["args"] == {"step": 7, "event": 3}


def test_resident_bytes_are_counted_when_they_change() -> None:
    rows = [row(LOAD, 0, 9, resident=2), row(LOAD, 9, 20, resident=2), row(LOAD, 20, 21)]
    assert values(written([rows]), "resident bytes") == [(9, 8192), (21, 0)]


def test_power_follows_the_streams() -> None:
    # link 10-30 and 30-35, compute 20-40 and 60-70
    rows = [row(LOAD, 10, 30), row(LOAD, 30, 35), row(COMPUTE, 20, 40), row(LAYER, 60, 70)]
    steps = [(10, 20.0), (20, 4000.5), (35, 300.0), (40, 1.0), (60, 300.0), (70, 1.0)]
    assert values(written([rows]), "power (W)") == steps


def test_without_figures_there_is_no_power() -> None:
    assert values(written([[row(LOAD, 0, 9)]], power=None), "power (W)") == []


@pytest.mark.parametrize("seed", range(20))
def test_power_does_not_depend_on_how_the_rows_come(seed: int) -> None:
    """Also when a prefetch began before the block of rows that it ended after."""
    draw = random.Random(seed)
    rows = []
    for kinds in ((LOAD, PREFETCH), (LAYER, COMPUTE)):
        now = 0
        for _ in range(60):
            start = now + draw.choice([0, 0, 3, 11])
            now = start + draw.choice([1, 5, 20])
            rows.append(row(draw.choice(kinds), start, now))
    rows.sort(key=lambda one: one[END])
    size = draw.choice([30, 50])  # in each the link ends something
    blocks = [rows[start : start + size] for start in range(0, len(rows), size)]

    table: Rows = np.array(rows)
    link = (table[:, KIND] == LOAD) | (table[:, KIND] == PREFETCH)
    expected, shown = [], None
    for time in sorted({*table[:, START].tolist(), *table[:, END].tolist()}):
        covers = (table[:, START] <= time) & (time < table[:, END])
        state = (bool((covers & link).any()), bool((covers & ~link).any()))
        watts = {(0, 0): 1.0, (1, 0): 20.0, (0, 1): 300.0, (1, 1): 4000.5}[state]
        if watts != shown:
            expected.append((time, watts))
            shown = watts
    assert values(written(blocks), "power (W)") == expected


def test_times_survive_perfettos_arithmetic() -> None:
    draw = random.Random(0)
    for ns in [0, 1, 999, 1000, *(draw.randrange(10**13) for _ in range(10_000))]:
        assert int(float(format_time(ns)) * 1000.0) == ns


def test_a_failure_leaves_no_file(tmp_path: Path) -> None:
    with pytest.raises(KeyboardInterrupt), perfetto(tmp_path / "t.json", "t", 1, None) as sink:
        sink.write(np.array([row(LOAD, 0, 9)]))
        raise KeyboardInterrupt
    assert list(tmp_path.iterdir()) == []


def test_a_file_is_complete_when_the_block_ends(tmp_path: Path) -> None:
    with perfetto(tmp_path / "t.json", "t", 1, POWER) as sink:
        sink.write(np.array([row(LOAD, 0, 9)]))
        assert not (tmp_path / "t.json").exists()
    assert json.loads((tmp_path / "t.json").read_text())["displayTimeUnit"] == "ns"


def test_timelines_side_by_side_are_processes() -> None:
    out = StringIO()
    with side_by_side(out, ["one", "other"], 4096) as sinks:
        for sink, start in zip(sinks, (3, 5), strict=True):
            sink.write(np.array([row(LOAD, start, start + 4, resident=2)]))
    events = json.loads(out.getvalue())["traceEvents"]
    names = {e["pid"]: e["args"]["name"] for e in events if e.get("name") == "process_name"}
    assert names == {1: "one", 2: "other"}
    assert [(e["pid"], in_ns(e)) for e in events if e["ph"] == "B"] == [(1, 3), (2, 5)]
    assert [(e["pid"], in_ns(e)) for e in events if e["ph"] == "E"] == [(1, 7), (2, 9)]
    resident = [(e["pid"], e["args"]["value"]) for e in events if e["ph"] == "C"]
    assert resident == [(1, 8192), (2, 8192)]
