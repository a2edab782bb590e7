"""``sweep``, ``tune`` and ``report`` with files that somebody else has made or damaged."""

from __future__ import annotations

import json
import os
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pandas as pd
import pyarrow as pa
import pyarrow.parquet as pq
import pytest

from crisp.cli.output.words import printable
from crisp.errors import CrispError
from crisp.sim.sweep import results
from crisp.sim.tuning.losses import read_losses
from tests.crisp.cli.toy import toy_trace
from tests.sim.tuning.test_losses import losses, measured

LINE = ("--policy", "lru", "--budget", "30%", "--hardware", "paper-table1")


def one_line(done: Any, *parts: str) -> None:
    assert done.code == 2
    assert done.err.count("\n") == 1, done.err
    for part in parts:
        assert part in done.err


# --- crisp sweep


def test_no_input_is_where_finished_cells_go(
    crisp: Callable[..., Any], trace: Path, tmp_path: Path
) -> None:
    spec, out = tmp_path / "q.parquet.unfinished", tmp_path / "q.parquet"
    text = f'trace = "{trace}"\npolicy = "lru"\nbudget = "30%"\n'
    spec.write_text(text)
    one_line(crisp("sweep", spec, "--out", out), f"{spec}: would replace SPEC {spec}")
    assert spec.read_text() == text
    toy_trace().save(spec)
    before = spec.read_bytes()
    done = crisp("sweep", "--trace", spec, *LINE, "--out", out)
    one_line(done, f"{spec}: would replace --trace {spec}")
    assert spec.read_bytes() == before
    assert not out.exists()


def test_a_link_in_the_way_is_not_followed(
    crisp: Callable[..., Any], trace: Path, tmp_path: Path
) -> None:
    precious, out = tmp_path / "precious", tmp_path / "q.parquet"
    precious.write_text("mine")
    journal = Path(f"{out}.unfinished")
    for make in (lambda: journal.symlink_to(precious), lambda: os.mkfifo(journal)):
        make()
        done = crisp("sweep", "--trace", trace, *LINE, "--out", out)
        one_line(done, str(journal), "not an ordinary file")
        journal.unlink()
    assert precious.read_text() == "mine"
    journal.write_text("mine too")
    one_line(crisp("sweep", "--trace", trace, *LINE, "--out", out), "unfinished sweep left")
    assert journal.read_text() == "mine too"


def test_a_random_search_twice_is_the_same_file(
    crisp: Callable[..., Any], trace: Path, tmp_path: Path
) -> None:
    spec, out = tmp_path / "s.toml", tmp_path / "r.parquet"
    budgets = ", ".join(f'"{n}%"' for n in range(10, 90, 2))
    spec.write_text(
        f'trace = "{trace}"\npolicy = "lru"\nbudget = [{budgets}]\nhardware = "paper-table1"\n'
        "[search]\nrandom = 7\n"
    )
    assert crisp("sweep", spec, "--out", out).code == 0
    first = out.read_bytes()
    asked = list(pd.read_parquet(out)["asked.budget"])
    assert len(asked) == 7
    assert asked == sorted(asked)
    assert crisp("sweep", spec, "--out", out).code == 0
    assert out.read_bytes() == first


def test_damaged_lines_are_run_anew(crisp: Callable[..., Any], trace: Path, tmp_path: Path) -> None:
    out = tmp_path / "r.parquet"
    line = ("sweep", "--trace", trace, *LINE, "--out", out)
    assert crisp(*line).code == 0
    (row,) = results.load_rows(out)
    before, cell = out.read_bytes(), row["cell"]
    out.unlink()
    for damaged in ({"cell": cell}, {"cell": cell, "row": None}, {"cell": cell, "row": {"x": "y"}}):
        header = json.dumps({"tool": row["provenance.tool"]})
        Path(f"{out}.unfinished").write_text(f"{header}\n{json.dumps(damaged)}\n")
        assert crisp(*line).code == 0
        assert out.read_bytes() == before
        out.unlink()


def test_sequences_that_are_not_ours_are_kept(
    crisp: Callable[..., Any], trace: Path, tmp_path: Path
) -> None:
    out, beside = tmp_path / "r.parquet", tmp_path / "r.sequences.parquet"
    line = ("sweep", "--trace", trace, *LINE, "--out", out)
    for content in (b"damaged", b"PAR1"):
        beside.write_bytes(content)
        one_line(crisp(*line, "--per-sequence"), f"{beside}: is not a parquet file")
        assert beside.read_bytes() == content
    pd.DataFrame({"mine": [1]}).to_parquet(beside)
    content = beside.read_bytes()
    for more in ((), ("--per-sequence",)):
        one_line(crisp(*line, *more), f"{beside}: is not what crisp sweep --per-sequence writes")
    assert beside.read_bytes() == content
    assert not out.exists()


def test_results_that_lack_a_column_are_kept(
    crisp: Callable[..., Any], trace: Path, tmp_path: Path
) -> None:
    out = tmp_path / "r.parquet"
    line = ("sweep", "--trace", trace, *LINE, "--out", out)
    assert crisp(*line).code == 0
    whole = pq.read_table(out)
    for name in ("cell", "refused", "engine"):
        pq.write_table(whole.drop_columns([name]), out)
        before = out.read_bytes()
        one_line(crisp(*line), f"{out}: row 1 has no {name}")
        assert out.read_bytes() == before
    place = whole.schema.names.index("hit_rate")
    for value in (float("nan"), "high", True, [0.5]):
        pq.write_table(whole.set_column(place, "hit_rate", pa.array([value])), out)
        one_line(crisp(*line), f"{out}: row 1 is not what crisp sweep writes")
    for name in ("hit_rate", "tokens_per_second", "policy.name"):
        pq.write_table(whole.drop_columns([name]), out)
        assert crisp(*line).code == 0


@pytest.mark.parametrize("value", ["1" * 5000, "1" * 19, "٣" * 5000])
def test_a_long_number_is_refused(
    crisp: Callable[..., Any], trace: Path, tmp_path: Path, value: str
) -> None:
    done = crisp(
        "sweep", "--trace", trace, *LINE, "--batch", value, "--out", tmp_path / "r.parquet"
    )
    one_line(done, "--batch: found ", "expected a whole number")
    assert len(done.err) < 150


# --- crisp tune


@pytest.mark.parametrize(
    "ratio", ["NaN", "-1", "0", "Infinity", "true", '"1.2"', "[1.2]", "1" + "0" * 400]
)
def test_a_ratio_is_a_number_above_nothing(tmp_path: Path, ratio: str) -> None:
    path = tmp_path / "loss.json"
    path.write_text(json.dumps(losses(measured("single", 1.25))).replace("1.25,", f"{ratio},"))
    with pytest.raises(CrispError, match=rf"^{path}: row 2: ratio: found .{{1,40}}, expected a fi"):
        read_losses(path)


@pytest.mark.parametrize(
    "interval", ["[NaN, 2]", "[1, Infinity]", "[-1, 1]", "[true, 2]", '["1", "2"]', "[2, 1]"]
)
def test_an_interval_is_two_numbers_in_order(tmp_path: Path, interval: str) -> None:
    path = tmp_path / "loss.json"
    row = measured("single", 1.25)
    row["metrics"]["ratio_interval"] = "HERE"
    path.write_text(json.dumps(losses(row)).replace('"HERE"', interval))
    with pytest.raises(CrispError, match=rf"^{path}: row 2: ratio_interval: found .*, expected"):
        read_losses(path)


def broken(part: str, value: Any) -> dict[str, Any]:
    row = measured("single", 1.25, "10%")
    row["settings"]["policy"][part] = value
    return row


@pytest.mark.parametrize(
    ("part", "told"),
    [
        ("name", "unknown policy"),
        ("width", "unknown width"),
        ("cache", "unknown cache"),
        ("scope", "unknown scope"),
        ("unit", "unknown unit"),
    ],
)
def test_what_is_unknown_is_said_with_file_and_row(tmp_path: Path, part: str, told: str) -> None:
    path = tmp_path / "loss.json"
    path.write_text(json.dumps(losses(broken(part, "sideways"))))
    with pytest.raises(CrispError, match=rf"^{path}: row 2: {told} 'sideways'"):
        read_losses(path)


def test_the_full_model_and_the_blocks_are_needed(
    crisp: Callable[..., Any], trace: Path, tmp_path: Path
) -> None:
    path = tmp_path / "loss.json"
    line = ("tune", trace, "--loss", path, "--budget", "30%", "--max-loss", "5%")
    content = losses(measured("single", 1.25))
    path.write_text(json.dumps(content | {"results": content["results"][1:]}))
    one_line(crisp(*line), f"{path}: lacks the row of the full model")
    for blocks in ("Infinity", "0", "8.5", "true", '"8"'):
        text = json.dumps(content).replace('"expert_blocks": 8', f'"expert_blocks": {blocks}')
        path.write_text(text)
        one_line(crisp(*line), f"{path}: expert_blocks: found {blocks}, expected a whole number")
    content["results"][-1]["settings"]["model"] = "\x1b[2Jtoy"
    path.write_text(json.dumps(content))
    done = crisp(*line)
    assert done.code == 0
    assert "\x1b" not in done.out
    content["results"][-1]["settings"]["model"] = "\ud800"
    path.write_text(json.dumps(content))
    one_line(crisp(*line), f"{path}: is not what crisp eval --json writes")


# --- crisp report


@pytest.fixture
def swept(crisp: Callable[..., Any], trace: Path, tmp_path: Path) -> Path:
    """Results of four cells, of which two are refused."""
    out = tmp_path / "r.parquet"
    machines = "jetson-agx-orin-32gb,rtx4090-pcie4"  # the former the fast engine cannot do
    line = ("--policy", "lru", "--budget", "30%,50%", "--hardware", machines, "--engine", "fast")
    assert crisp("sweep", "--trace", trace, *line, "--out", out).code == 0
    return out


def test_refused_cells_are_counted_not_shown(
    crisp: Callable[..., Any], swept: Path, tmp_path: Path
) -> None:
    done = crisp("report", swept)
    assert (done.code, done.err) == (0, "")
    assert done.out.splitlines()[1] == "2 runs, simulated: 1 policy at 2 budgets"
    assert "not shown: 2 cells that the sweep refused" in done.out.splitlines()
    page = tmp_path / "page.html"
    assert crisp("report", swept, "--html", page).code == 0
    assert "not shown: 2 cells that the sweep refused" in page.read_text()
    rows = pq.read_table(swept)
    pq.write_table(rows.filter(rows["refused"].is_valid()), swept)
    one_line(crisp("report", swept), f"{swept}: holds no run, every cell is refused")


def test_rows_keep_their_numbers(crisp: Callable[..., Any], swept: Path) -> None:
    rows = pq.read_table(swept)
    refused = rows["refused"].is_valid().to_pylist()
    last = max(place for place, own in enumerate(refused) if not own)
    phases = rows["phase"].to_pylist()
    phases[last] = None
    place = rows.schema.names.index("phase")
    pq.write_table(rows.set_column(place, "phase", pa.array(phases, pa.string())), swept)
    one_line(crisp("report", swept), f"{swept}: row {last + 1} has no phase")
    assert any(refused[:last])


def test_a_terminal_is_not_told_what_to_do(crisp: Callable[..., Any], swept: Path) -> None:
    rows = pq.read_table(swept)
    place = rows.schema.names.index("policy.name")
    name = "\x1b]0;owned\x07\x1b[2Jlru\n\x9b31m\u202e"
    pq.write_table(rows.set_column(place, "policy.name", pa.array([name] * len(rows))), swept)
    done = crisp("report", swept)
    assert done.code == 0
    assert "�]0;owned��[2Jlru��31m�" in done.out
    assert all(line.isprintable() for line in done.out.split("\n"))


def test_letters_of_all_kinds_can_be_printed() -> None:
    for text in ("lru – 3 µs", "模型", "a\u00a0b", "🙂"):
        assert printable(text) == text


def test_a_column_twice_and_damage_are_one_line(
    crisp: Callable[..., Any], swept: Path, tmp_path: Path
) -> None:
    rows, other = pq.read_table(swept), tmp_path / "other.parquet"
    pq.write_table(rows.append_column("engine", rows["engine"]), other)
    one_line(
        crisp("report", other), f"{other}: is not what a sweep wrote: it has the column 'engine'"
    )
    content = bytearray(swept.read_bytes())
    content[4:60] = b"\xff" * 56
    other.write_bytes(content)
    one_line(crisp("report", other), f"{other}: cannot be read: ")
