"""Journals, results and specs that somebody else has made or damaged."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

import pandas as pd
import pyarrow as pa
import pyarrow.parquet as pq
import pytest

from crisp.errors import CrispError
from crisp.sim.parallel import cores
from crisp.sim.sweep import results
from crisp.sim.sweep.journal import Journal
from crisp.sim.sweep.spec import Sweep, read


def record(cell: str, **more: Any) -> dict[str, Any]:
    row = {"cell": cell, "refused": None, "engine": "fast", **more}
    return {"cell": cell, "row": row, "sequences": None}


# --- the journal's file


@pytest.mark.parametrize("content", [b"trace = 'x'\n", b"\x08\x00\x00\x00{}", b'{"a": 1}\n', b"["])
def test_what_is_no_journal_is_not_cut(tmp_path: Path, content: bytes) -> None:
    path = tmp_path / "j"
    path.write_bytes(content)
    with pytest.raises(CrispError, match=rf"^{path}: is not what an unfinished sweep left$"):
        Journal(path)
    assert path.read_bytes() == content


def test_a_header_that_was_cut_short_is_begun_anew(tmp_path: Path) -> None:
    path = tmp_path / "j"
    Journal(path).close()
    whole = path.read_bytes()
    for n in range(len(whole)):
        path.write_bytes(whole[:n])
        Journal(path).close()
        assert path.read_bytes() == whole


def test_links_and_other_kinds_are_not_opened(tmp_path: Path) -> None:
    precious, path = tmp_path / "precious", tmp_path / "j"
    precious.write_bytes(b"")
    for make in (
        lambda: path.symlink_to(precious),
        lambda: path.symlink_to("/dev/full"),
        lambda: path.symlink_to(tmp_path / "nowhere"),
        lambda: os.mkfifo(path),  # without a writer: opening it would wait
    ):
        make()
        with pytest.raises(CrispError, match=rf"^{path}: is a link, or not an ordinary file$"):
            Journal(path, results.is_record)
        path.unlink()
    assert precious.read_bytes() == b""
    assert list(tmp_path.iterdir()) == [precious]


BAD = {
    "no row": '{"cell": "b"}',
    "null": '{"cell": "b", "row": null}',
    "another's row": json.dumps({**record("a"), "cell": "b"}),
    "nested": "[" * 100_000,
    "half a pair": json.dumps(record("b", asked="\ud800")),
    "a list": json.dumps(record("b", x=[1])),
    "NaN": '{"cell": "b", "row": {"cell": "b", "refused": null, "engine": "fast", "x": NaN}}',
    "no engine": '{"cell": "b", "row": {"cell": "b", "refused": null}}',
    "not refused": '{"cell": "b", "row": {"cell": "b", "engine": "fast"}}',
    "sequences": json.dumps(record("b") | {"sequences": {"sequence": [1]}}),
    "no text": "\x00\udcff",
    "empty": "",
}


@pytest.mark.parametrize("line", BAD.values(), ids=BAD.keys())
def test_a_damaged_line_takes_no_other_with_it(tmp_path: Path, line: str) -> None:
    path = tmp_path / "j"
    journal = Journal(path, results.is_record)
    journal.add(record("a"))
    journal.close()
    last = json.dumps(record("c", n=3)).encode() + b"\n"
    damaged = line.encode(errors="surrogateescape") + b"\n"
    whole = path.read_bytes() + damaged + last
    path.write_bytes(whole + b'{"cell": "d", "row')
    again = Journal(path, results.is_record)
    assert sorted(cell for cell in "abcd" if cell in again) == ["a", "c"]
    assert again.record("c") == record("c", n=3)
    again.add(record("e"))
    again.close()
    assert path.read_bytes().startswith(whole + b'{"cell": "e"')


# --- results


def made(path: Path, **columns: Any) -> Path:
    """A file that says that a sweep wrote it."""
    table = pa.table(columns).replace_schema_metadata({results.MARK: b"{}"})
    pq.write_table(table, path)
    return path


@pytest.mark.parametrize(
    ("columns", "message"),
    [
        ({"refused": ["x"]}, "row 1 has no cell"),
        ({"cell": ["x"]}, "row 1 has no refused"),
        ({"cell": ["x"], "refused": pa.nulls(1)}, "row 1 has no engine"),
        (
            {"cell": ["x", "y"], "refused": ["why", None], "engine": pa.nulls(2)},
            "row 2 has no engine",
        ),
        ({"cell": [1], "refused": ["x"]}, "row 1 has no cell"),
    ],
)
def test_results_without_what_is_needed(
    tmp_path: Path, columns: dict[str, Any], message: str
) -> None:
    path = made(tmp_path / "r.parquet", **columns)
    with pytest.raises(CrispError, match=rf"^{path}: {message}, as crisp sweep writes it$"):
        results.check_results(path)


def test_results_of_refused_cells_alone_have_no_engine(tmp_path: Path) -> None:
    results.check_results(made(tmp_path / "r.parquet", cell=["x"], refused=["why"]))


def test_a_column_twice_is_said(tmp_path: Path) -> None:
    path = tmp_path / "r.parquet"
    table = pa.table([["a"], ["b"]], ["cell", "cell"], metadata={results.MARK: b"{}"})
    pq.write_table(table, path)
    with pytest.raises(CrispError, match=rf"^{path}: has the column 'cell' twice$"):
        list(results.load_rows(path))


def damaged(path: Path) -> None:
    """With a footer that can be read, and rows that cannot."""
    content = bytearray(path.read_bytes())
    content[4:60] = b"\xff" * 56
    path.write_bytes(content)


def test_damaged_rows_are_said_with_the_file(tmp_path: Path) -> None:
    path = made(tmp_path / "r.parquet", cell=["x"], refused=["why"])
    damaged(path)
    with pytest.raises(CrispError, match=rf"^{path}: is damaged: [^\n]+$"):
        results.check_results(path)


def test_other_sequences_are_refused(tmp_path: Path) -> None:
    path = tmp_path / "s.parquet"
    own = {"sequence": [1], "tokens": [2], "bytes": [3], "ns": [4]}
    results.save_sequences(path, [("a", own)])
    results.check_sequences(path)
    damaged(path)
    with pytest.raises(CrispError, match=rf"^{path}: is damaged: [^\n]+$"):
        results.load_sequences(path)
    path.write_text("text")
    for look in (results.check_sequences, results.load_sequences):
        with pytest.raises(CrispError, match=rf"^{path}: is not a parquet file$"):
            look(path)
    pd.DataFrame({"mine": [1]}).to_parquet(path)
    for look in (results.check_sequences, results.load_sequences):
        with pytest.raises(CrispError, match=rf"^{path}: is not what crisp sweep --per-sequence"):
            look(path)
    nulls = [pa.nulls(1, field.type) for field in results.SEQUENCES]
    pq.write_table(pa.table(nulls, schema=results.SEQUENCES), path)
    with pytest.raises(CrispError, match=rf"^{path}: is damaged: a row has no value$"):
        results.load_sequences(path)


# --- what is asked for


def test_what_is_tried_first_is_among_what_was_drawn(tmp_path: Path) -> None:
    sweep = read(
        None,
        {"trace": ["t"], "policy": ["lru"], "budget": [f"{n}%" for n in range(1, 91)]},
    )
    drawn = Sweep(sweep.name, sweep.grids * 2, 7, seed=3)
    asked = [own["budget"] for own in drawn.cells()]
    assert len(asked) == 14
    for n in (1, 4, 50):
        some = [own["budget"] for own in drawn.some(n)]
        assert 0 < len(some) <= n
        assert set(some) <= set(asked)


def test_a_range_of_too_many_values_is_refused(tmp_path: Path) -> None:
    path = tmp_path / "s.toml"
    line = 'trace = "t"\npolicy = "lru"\nbudget = { from = 0.1, to = 0.9, step = STEP }\n'
    path.write_text(line.replace("STEP", "1e-30"))
    with pytest.raises(CrispError, match=rf"^{path}: budget: so small a step makes too many"):
        read(path, {})
    path.write_text(line.replace("STEP", "1e-18"))
    assert read(path, {}).count == 8 * 10**17 + 1


# --- workers

_PARENT = """\
import os, time
from crisp.sim.parallel import side_by_side

def work(n):
    open(f"{os.getpid()}.worker", "w").close()
    time.sleep(60)

if __name__ == "__main__":
    with side_by_side(work, range(4), jobs=2) as found:
        list(found)
"""


@pytest.mark.skipif(sys.platform != "linux" or cores() < 2, reason="needs Linux and two cores")
def test_workers_end_with_a_parent_that_is_killed(tmp_path: Path) -> None:
    (tmp_path / "parent.py").write_text(_PARENT)
    root = str(Path(__file__).resolve().parents[3])
    parent = subprocess.Popen(
        [sys.executable, "parent.py"],
        cwd=tmp_path,
        env={**os.environ, "PYTHONPATH": root},
        stderr=subprocess.DEVNULL,  # joblib tells of what it cleans up
    )
    stop = time.monotonic() + 60
    while len(found := list(tmp_path.glob("*.worker"))) < 2:
        assert time.monotonic() < stop
        assert parent.poll() is None
        time.sleep(0.05)
    parent.send_signal(signal.SIGKILL)
    parent.wait()
    stop = time.monotonic() + 30  # they sleep for longer
    while any(runs(int(path.stem)) for path in found):
        assert time.monotonic() < stop
        time.sleep(0.05)


def runs(process: int) -> bool:
    try:
        stat = Path(f"/proc/{process}/stat").read_text()
    except OSError:
        return False
    return stat.rpartition(")")[2].split()[0] != "Z"
