"""A simulated run beside a measured one: what is matched, and the figures, by hand."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from crisp.errors import CrispError
from crisp.run.compare import (
    COUNTS,
    TIMES,
    ComparedMetric,
    compare,
    load_one_run,
    load_run_timeline,
    read_timeline_rows,
)
from crisp.run.result import Run, save_runs
from crisp.run.sinks import parquet
from crisp.run.timeline import COMPUTE, END, LAYER, LOAD, PREFETCH, Recorder, Rows
from tests.crisp.run.runs import whole

SETTINGS: dict[str, Any] = {
    "engine": "simpy",
    "trace": {"sha256": "aa", "rows": 7},
    "hardware": {"name": "rtx"},
    "policy": {"name": "lru", "order": "fifo"},
    "granularity": "expert",
}


def run(**metrics: float | None) -> Run:
    return Run(SETTINGS, dict.fromkeys((*COUNTS, *TIMES), 1) | metrics, {}, {})


def table(*rows: tuple[int, int, int, int, int, int]) -> Rows:
    """(event, kind, expert, start, end, resident): blocks [0, 2) of layer 3, in step 0."""
    return np.array([
        (0, event, 3, kind, expert, 0, 2, start, end, -1, resident)
        for event, kind, expert, start, end, resident in rows
    ])  # fmt: skip


SIMULATED = table(
    (0, LAYER, -1, 0, 10, 0),
    (0, LOAD, 5, 10, 50, 2),
    (0, COMPUTE, 5, 50, 90, 2),
    (-1, LAYER, -1, 90, 95, 2),  # a layer that is not MoE
    (1, LAYER, -1, 95, 100, 2),
    (1, LOAD, 6, 100, 140, 4),
    (1, COMPUTE, 5, 100, 145, 4),
    (1, COMPUTE, 6, 145, 190, 4),
)
# the same decisions, the second event's computations the other way round; 100 and 80 ns
MEASURED = table(
    (0, LAYER, -1, 0, 12, 0),
    (0, LOAD, 5, 12, 60, 2),
    (0, COMPUTE, 5, 60, 100, 2),
    (1, LAYER, -1, 100, 101, 2),
    (1, LOAD, 6, 101, 130, 4),
    (1, COMPUTE, 6, 130, 150, 4),
    (1, COMPUTE, 5, 150, 180, 4),
)


@pytest.mark.parametrize(
    ("simulated", "measured", "error"),
    [(11, 10, 0.1), (9, 10, -0.1), (0, 0, 0.0), (1, 0, None), (None, 3, None), (3, None, None)],
)
def test_an_error_is_relative_to_what_was_measured(
    simulated: float | None, measured: float | None, error: float | None
) -> None:
    found = ComparedMetric("x", simulated, measured).error
    assert found == (None if error is None else pytest.approx(error))


def test_metrics_stand_side_by_side() -> None:
    done = compare(
        run(hits=3, ms_per_token_mean=11.0), run(hits=3, ms_per_token_mean=10.0), None, None
    )
    assert done.timelines is None
    assert done.error("hits") == 0
    assert done.error("ms_per_token_mean") == pytest.approx(0.1)
    assert [pair.metric for pair in done.pairs] == [*COUNTS, *TIMES]


def test_events_are_compared_one_by_one() -> None:
    own = compare(run(), run(), SIMULATED, MEASURED).timelines
    assert own is not None
    assert own.identical
    assert own.events == 2
    # 90 ns for 100, and 100 for 80: -10 % and +25 %; percentiles between two points are linear
    assert own.errors == pytest.approx((-0.1 + 0.05 * 0.35, 0.075, 0.25 - 0.05 * 0.35))


def changed(place: int, column: int, value: int) -> Rows:
    rows = MEASURED.copy()
    rows[place, column] = value
    return rows


@pytest.mark.parametrize(
    ("measured", "loads", "computed", "residents"),
    [
        (
            changed(1, 4, 7),
            "load 0: simulated L3 E5 [0,2) (event 0), measured L3 E7 [0,2) (event 0)",
            None,
            None,
        ),
        (
            changed(5, 6, 1),
            None,
            "task 2: simulated L3 E6 [0,2) (event 1), measured L3 E6 [0,1) (event 1)",
            None,
        ),
        (
            changed(6, 10, 3),
            None,
            None,
            "blocks after event 1: simulated 4 (event 1), measured 3 (event 1)",
        ),
        (
            np.delete(MEASURED, 4, axis=0),
            "load 1: simulated L3 E6 [0,2) (event 1), measured none",
            None,
            None,
        ),
        (
            np.insert(MEASURED, 5, table((-1, PREFETCH, 1, 130, 131, 4)), axis=0),
            "load 2: simulated none, measured L3 E1 [0,2) (a prefetch)",
            None,
            None,
        ),
    ],
)
def test_the_first_difference_is_named(
    measured: Rows, loads: str | None, computed: str | None, residents: str | None
) -> None:
    own = compare(run(), run(), SIMULATED, measured).timelines
    assert own is not None
    assert (own.loads, own.computed, own.residents) == (loads, computed, residents)
    assert not own.identical


def test_a_run_that_stopped_early_is_compared_as_far_as_it_goes() -> None:
    own = compare(run(), run(), SIMULATED, MEASURED[:3]).timelines
    assert own is not None
    assert (own.events, own.errors[1]) == (1, pytest.approx(-0.1))
    assert own.residents == "blocks after event 1: simulated 4 (event 1), measured none"


def test_a_task_may_be_cut_into_other_pieces() -> None:
    """Expert 6, two blocks: the first from 130 to 140, the second from 140 to 150."""
    pieces = np.insert(MEASURED, 6, MEASURED[5], axis=0)
    pieces[5:7, 6], pieces[6, 5], pieces[5, 8], pieces[6, 7] = 1, 1, 140, 140
    own = compare(run(), run(), SIMULATED, pieces).timelines
    assert own is not None
    assert own.identical


def test_an_event_without_tasks_ends_with_its_layer() -> None:
    rows = table((0, LAYER, -1, 0, 10, 0), (1, LAYER, -1, 10, 30, 0), (1, COMPUTE, 5, 30, 40, 0))
    own = compare(run(), run(), rows, rows).timelines
    assert own is not None
    assert (own.events, own.errors) == (2, (0, 0, 0))


def test_where_it_ran_may_differ() -> None:
    other = {"engine": "hw", "hardware": None, "device": {"name": "cpu"}, "store": {"seed": 1}}
    made = compare(run(), replace(run(), settings=SETTINGS | other), None, None)
    assert {pair.error for pair in made.pairs} <= {0.0, None}
    one, two = (
        {
            "trace": SETTINGS["trace"] | {"file": file},
            "profile": {"sha256": "cc", "from": source},
        }
        for file, source in ((None, "the model"), ({"name": "x"}, "the trace"))
    )
    runs = [replace(run(), settings=SETTINGS | settings) for settings in (one, two)]
    assert compare(*runs, None, None).pairs == compare(run(), run(), None, None).pairs


@pytest.mark.parametrize(
    ("settings", "line"),
    [
        ({"granularity": "block"}, "granularity is 'expert' and 'block'"),
        ({"trace": {"sha256": "bb", "rows": 8}}, "trace.sha256 is 'aa' and 'bb'"),
        ({"policy": {"name": "lru"}}, "policy.order is 'fifo' and None"),
        ({"seed": 3}, "seed is None and 3"),
    ],
)
def test_other_cases_are_refused_by_the_first_setting(settings: dict[str, Any], line: str) -> None:
    with pytest.raises(CrispError) as caught:
        compare(run(), replace(run(), settings=SETTINGS | settings), None, None)
    assert str(caught.value) == f"the runs are not of the same case: {line}"


def test_rows_are_read_as_they_were_written(tmp_path: Path) -> None:
    file = tmp_path / "t.parquet"
    with parquet(file) as sink:
        sink.write(SIMULATED[:3])
        sink.write(SIMULATED[3:])
    assert read_timeline_rows(file).tolist() == SIMULATED.tolist()


def test_what_is_no_timeline_is_refused(tmp_path: Path) -> None:
    import pyarrow
    import pyarrow.parquet

    with pytest.raises(CrispError, match=r"none\.parquet: cannot be read: No such file"):
        read_timeline_rows(tmp_path / "none.parquet")
    file = tmp_path / "x.parquet"
    file.write_text("not parquet")
    with pytest.raises(CrispError, match=r"x\.parquet: is not a parquet file"):
        read_timeline_rows(file)
    pyarrow.parquet.write_table(pyarrow.table({"a": [1]}), file)
    with pytest.raises(CrispError, match=r"x\.parquet: is not a timeline"):
        read_timeline_rows(file)
    with parquet(file) as sink:
        sink.write(SIMULATED[:2])
    good = pyarrow.parquet.read_table(file)
    kinds = good.schema.field("kind").type
    for name, values, kind in [
        ("layer", [1, None], pyarrow.int64()),
        ("layer", [1.0, 2.0], pyarrow.float64()),
        ("layer", ["1", "2"], pyarrow.string()),
        ("layer", [[1], [2]], pyarrow.list_(pyarrow.int64())),
        ("layer", [None, None], pyarrow.null()),
        ("kind", ["load", None], kinds),
        ("kind", ["load", "lunch"], kinds),
        ("kind", [0, 1], pyarrow.int64()),
    ]:
        column = pyarrow.array(values, pyarrow.string() if kind == kinds else kind)
        if kind == kinds:
            column = column.dictionary_encode().cast(kinds)
        place = good.schema.names.index(name)
        pyarrow.parquet.write_table(good.set_column(place, name, column), file)
        with pytest.raises(CrispError, match=rf"x\.parquet: is not a timeline: {name}") as caught:
            read_timeline_rows(file)
        assert "\n" not in str(caught.value)


def test_a_file_holds_one_run(tmp_path: Path) -> None:
    file = tmp_path / "x.json"
    save_runs(whole(), file)
    assert load_one_run(file, measured=False) == whole()
    save_runs([whole(), whole()], file)
    with pytest.raises(CrispError, match=r"x\.json: holds 2 runs, expected one"):
        load_one_run(file, measured=False)


def test_a_run_of_the_other_kind_is_refused(tmp_path: Path) -> None:
    file = tmp_path / "x.json"
    save_runs(whole(), file)
    with pytest.raises(CrispError, match=r"x\.json: is a simulated run, expected a measured one$"):
        load_one_run(file, measured=True)
    save_runs(whole({"engine": "hw"}), file)
    assert load_one_run(file, measured=True).settings["engine"] == "hw"
    with pytest.raises(CrispError, match=r"x\.json: is a measured run, expected a simulated one$"):
        load_one_run(file, measured=False)


@pytest.mark.parametrize("other", ["fp16", None])
def test_blocks_that_were_calibrated_are_the_stores(other: str | None) -> None:
    tables = {"geometry": {"dtype": "bf16", "activation": "silu"}}
    calibrated = replace(run(), settings=SETTINGS | {"hardware": {"tables": tables}})
    store = {"dtype": other, "activation": "silu"}
    measured = replace(run(), settings=SETTINGS | {"engine": "hw", "store": store})
    if other is None:
        compare(calibrated, measured, None, None)
        return
    with pytest.raises(CrispError, match="dtype of calibrated blocks is 'bf16', of the store's"):
        compare(calibrated, measured, None, None)


def test_a_timeline_belongs_to_one_run(tmp_path: Path) -> None:
    file, where = tmp_path / "t.parquet", tmp_path / "x.json"
    recorder = Recorder([])
    for row in SIMULATED.tolist():
        recorder.add(row)
    recorder.flush(190, None, always=True)
    own = Run({}, {}, {}, {"timeline_sha256": recorder.sums.digest()})

    def written(*parts: Rows) -> Path:
        with parquet(file) as sink:
            for part in parts:
                sink.write(part)
        return file

    assert load_run_timeline(own, where, written(SIMULATED)).tolist() == SIMULATED.tolist()
    assert len(load_run_timeline(own, where, written(SIMULATED[:2], SIMULATED[2:]))) == len(
        SIMULATED
    )
    later = SIMULATED.copy()
    later[-1, END] += 1
    for other in (MEASURED, SIMULATED[:-1], later, SIMULATED[:0]):
        with pytest.raises(CrispError, match=r"t\.parquet: is of another run than .*x\.json, or "):
            load_run_timeline(own, where, written(other))
