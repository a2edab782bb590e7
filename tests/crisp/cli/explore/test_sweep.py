"""``crisp sweep``: the same figures as single runs, and nothing lost on the way."""

from __future__ import annotations

import os
import signal
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pandas as pd
import pytest

from crisp.run.result import load_runs
from crisp.sim.sweep import cell, estimate, runner
from tests.crisp.cli.test_interrupt import DEADLINE, started, wait_for, workers
from tests.crisp.cli.toy import toy_trace

LINE = ("--policy", "lru,crisp,mo", "--budget", "30%,50%", "--hardware", "paper-table1")
SPEC = """\
trace = "TRACE"
hardware = "paper-table1"
budget = ["30%", "50%"]
[[grid]]
policy = "lru"
[[grid]]
policy = "crisp"
width = "tiered(alpha={a},beta={b})"
a = [0.3, 0.8]
b = [0.5, 0.9]
"""


@pytest.fixture
def spec(tmp_path: Path, trace: Path) -> Path:
    path = tmp_path / "s.toml"
    path.write_text(SPEC.replace("TRACE", str(trace)))
    return path


def test_rows_are_the_runs_of_simulate(
    crisp: Callable[..., Any], trace: Path, tmp_path: Path
) -> None:
    out, runs = tmp_path / "r.parquet", tmp_path / "r.json"
    done = crisp("sweep", "--trace", trace, *LINE, "--out", out)
    assert (done.code, done.err) == (0, "")
    assert done.out.startswith("sweep: 6 cells\n")
    assert "6 rows in" in done.out
    assert crisp("simulate", trace, *LINE, "--json", runs).code == 0
    rows = pd.read_parquet(out).to_dict("records")
    for row, run in zip(rows, load_runs(runs), strict=True):
        assert row["engine"] == "fast"
        assert {part: row[f"policy.{part}"] for part in run.settings["policy"]} == (
            run.settings["policy"]
        )
        for name, value in run.metrics.items():
            assert row[name] == value or (value is None and pd.isna(row[name])), name
    assert len({row["cell"] for row in rows}) == 6
    assert sorted(path.name for path in tmp_path.iterdir()) == ["r.json", "r.parquet", "traces"]


def test_each_row_says_which_engine_ran(
    crisp: Callable[..., Any], trace: Path, tmp_path: Path
) -> None:
    out = tmp_path / "r.parquet"
    line = ("--trace", trace, "--policy", "lru", "--budget", "30%", "--out", out)
    both = "rtx4090-pcie4,jetson-agx-orin-32gb"  # the latter only SimPy can do
    assert crisp("sweep", *line, "--hardware", both).code == 0
    assert list(pd.read_parquet(out)["engine"]) == ["fast", "simpy"]
    assert crisp("sweep", *line, "--hardware", both, "--engine", "simpy").code == 0
    assert list(pd.read_parquet(out)["engine"]) == ["simpy", "simpy"]
    done = crisp("sweep", *line, "--hardware", both, "--engine", "fast")
    assert (done.code, done.err) == (0, "")
    rows = pd.read_parquet(out)
    assert pd.isna(rows["refused"][0])
    assert rows["refused"][1].startswith("engine fast: does not know unified memory")
    assert pd.isna(rows["tokens_per_second"][1])
    assert "refused: 1 cell, such as: engine fast: does not know unified memory" in done.out


def test_what_does_not_go_together_is_a_row_with_the_reason(
    crisp: Callable[..., Any], spec: Path, tmp_path: Path
) -> None:
    out = tmp_path / "r.parquet"
    done = crisp("sweep", spec, "--out", out)
    assert done.code == 0
    rows = pd.read_parquet(out)
    assert len(rows) == 10
    refused = rows[rows["refused"].notna()]
    assert list(refused["asked.a"]) == [0.8, 0.8]
    assert list(refused["asked.b"]) == [0.5, 0.5]
    assert set(refused["refused"]) == {"width tiered: alpha must not be above beta"}
    assert refused["bytes_per_token"].isna().all()


class Stopped:
    """Runs cells until there have been enough, then is interrupted."""

    def __init__(self, after: int) -> None:
        self.left, self.run, self.done = after, cell.run_cell, 0

    def __call__(self, job: cell.CellJob) -> Any:
        if not self.left:
            raise KeyboardInterrupt
        self.left -= 1
        self.done += 1
        return self.run(job)


def test_an_interrupted_sweep_goes_on_where_it_was(
    crisp: Callable[..., Any], spec: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    whole, out = tmp_path / "whole.parquet", tmp_path / "r.parquet"
    line = ("sweep", spec, "--against", "lru", "--out")
    first = crisp(*line, whole)
    assert first.code == 0

    with monkeypatch.context() as patched:
        patched.setattr(cell, "run_cell", Stopped(3))
        done = crisp(*line, out)
    assert done.code == 130
    told = f"interrupted; 3 of 10 cells are in {out}; the same command goes on\n"
    assert done.err == told
    part, table = pd.read_parquet(out), pd.read_parquet(whole)
    assert len(part) == 3
    assert set(part["cell"]) < set(table["cell"])
    assert Path(f"{out}.unfinished").exists()

    counting = Stopped(100)
    monkeypatch.setattr(cell, "run_cell", counting)
    again = crisp(*line, out)
    assert (again.code, counting.done) == (0, 7)
    cells, duration, rest = first.out.split("\n", 2)
    assert duration.startswith("about ")
    kept = "3 kept, 7 to run"
    assert again.out == f"{cells}\n{kept}\n{rest}".replace(str(whole), str(out))
    assert out.read_bytes() == whole.read_bytes()
    beside = tmp_path / "r.sequences.parquet"
    assert beside.read_bytes() == (tmp_path / "whole.sequences.parquet").read_bytes()
    assert not Path(f"{out}.unfinished").exists()


def test_what_earlier_results_hold_is_not_run_again(
    crisp: Callable[..., Any], trace: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    out = tmp_path / "r.parquet"
    line = ("sweep", "--trace", trace, "--policy", "lru,fo", "--out", out, "--budget")
    assert crisp(*line, "30%").code == 0
    counting = Stopped(100)
    monkeypatch.setattr(cell, "run_cell", counting)
    assert crisp(*line, "30%,50%").code == 0
    assert counting.done == 2
    assert list(pd.read_parquet(out)["asked.budget"]) == ["30%", "50%"] * 2
    done = crisp(*line, "30%,50%", "--per-sequence")
    assert done.out.splitlines()[1] == "0 kept, 4 to run"
    assert counting.done == 6  # of earlier ones nobody knows what each sequence took


def test_rows_that_are_not_asked_for_go_only_when_that_is_said(
    crisp: Callable[..., Any], trace: Path, tmp_path: Path
) -> None:
    out, beside = tmp_path / "r.parquet", tmp_path / "r.sequences.parquet"
    line = ("sweep", "--trace", trace, "--out", out, "--budget")
    assert crisp(*line, "30%,50%", "--policy", "lru", "--per-sequence").code == 0
    before = out.read_bytes(), beside.read_bytes()
    done = crisp(*line, "50%", "--policy", "lru,fo")
    told = f"error: {out}: holds 1 row that this sweep does not ask for; --replace drops it\n"
    assert (done.code, done.err) == (2, told)
    assert (out.read_bytes(), beside.read_bytes()) == before
    assert not Path(f"{out}.unfinished").exists()

    assert crisp(*line, "50%", "--policy", "lru,fo", "--replace").code == 0
    rows = pd.read_parquet(out)
    assert list(rows["asked.policy"]) == ["lru", "fo"]
    assert set(pd.read_parquet(beside)["cell"]) == {rows["cell"][0]}  # fo's nobody asked for
    assert crisp(*line, "50%", "--policy", "fo", "--replace").code == 0
    assert not beside.exists()


def test_an_unfinished_sweep_is_not_lost_to_another_one(
    crisp: Callable[..., Any], spec: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    out = tmp_path / "r.parquet"
    with monkeypatch.context() as patched:
        patched.setattr(cell, "run_cell", Stopped(3))
        assert crisp("sweep", spec, "--out", out).code == 130
    out.unlink()  # as a kill that leaves no time to write
    done = crisp("sweep", spec, "--hardware", "rtx4090-pcie4", "--out", out)
    assert done.code == 2
    assert done.err.startswith(f"error: {out}.unfinished: holds 3 rows that this sweep does not")
    assert crisp("sweep", spec, "--out", out).out.splitlines()[1] == "3 kept, 7 to run"


def test_what_all_rows_share_stands_above_them(
    crisp: Callable[..., Any], trace: Path, tmp_path: Path
) -> None:
    line = ("--trace", trace, "--policy", "lru", "--budget", "30%", "--model", "mixtral-8x7b")
    both = "rtx4090-pcie4,paper-table1"
    done = crisp("sweep", *line, "--hardware", both, "--out", tmp_path / "r.parquet")
    assert done.out.split("\n\n")[1].splitlines() == [
        f"trace     {trace}, 16 rows, routing of toy",
        "model     mixtral-8x7b, experts in 16 bits",
        "run       phase decode, batch 1, granularity expert",
        "          3 of 32 layers of mixtral-8x7b: tokens/s are of these layers",
        "          the routing is toy's, the sizes are mixtral-8x7b's",
    ]


def test_compiling_is_announced_once(
    crisp: Callable[..., Any], trace: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    line = ("sweep", "--trace", trace, "--policy", "lru", "--budget", "30%", "--out")
    told = "compiling, once: the first cells take a minute"
    monkeypatch.setattr(estimate, "compiled_before", lambda: False)
    assert crisp(*line, tmp_path / "r.parquet").out.splitlines()[1] == told
    assert told not in crisp(*line, tmp_path / "r.parquet").out  # nothing is to be run
    assert told not in crisp(*line, tmp_path / "s.parquet", "--engine", "simpy").out


def test_a_full_disk_keeps_what_is_finished(
    crisp: Callable[..., Any], spec: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    from crisp.errors import CrispError
    from crisp.sim.sweep.journal import Journal

    out, add = tmp_path / "r.parquet", Journal.add

    def full(self: Journal, record: dict[str, Any]) -> None:
        if len(self) == 4:
            raise CrispError(f"{self.path}: cannot be written: No space left on device")
        add(self, record)

    with monkeypatch.context() as patched:
        patched.setattr(Journal, "add", full)
        done = crisp("sweep", spec, "--out", out)
    assert done.code == 2
    assert done.err == (
        f"error: {out}.unfinished: cannot be written: No space left on device; 4 of 10 cells are "
        f"in {out}; the same command goes on\n"
    )
    assert len(pd.read_parquet(out)) == 4
    assert crisp("sweep", spec, "--out", out).code == 0
    assert len(pd.read_parquet(out)) == 10


def test_pairs_are_told_with_their_intervals(
    crisp: Callable[..., Any], spec: Path, trace: Path, tmp_path: Path
) -> None:
    out, json_file = tmp_path / "r.parquet", tmp_path / "r.json"
    done = crisp("sweep", spec, "--out", out, "--against", "lru")
    assert done.code == 0
    line = ("--hardware", "paper-table1", "--budget", "50%", "--json", json_file)
    width = "tiered(alpha=0.3,beta=0.9)"
    assert crisp("simulate", trace, "--policy", "crisp", "--width", width, *line).code == 0
    (own,) = load_runs(json_file)
    assert crisp("simulate", trace, "--policy", "lru", *line).code == 0
    (base,) = load_runs(json_file)
    ratios = [
        (own.metrics[name] or 0) / (base.metrics[name] or 1)
        for name in ("bytes_per_token", "ms_per_token_mean")
    ]
    (found,) = [
        row.split()
        for row in done.out.split("refused")[1].splitlines()
        if row.startswith("50%") and width in row
    ]
    assert [found[2], found[6]] == [f"{ratio:.3f}" for ratio in ratios]
    low, high = float(found[3].lstrip("(")), float(found[5].rstrip(")"))
    assert low <= ratios[0] <= high
    assert "times those of lru at the same other settings" in done.out
    kept = pd.read_parquet(tmp_path / "r.sequences.parquet")
    rows = pd.read_parquet(out).set_index("cell")
    sums = kept.groupby("cell").sum()
    assert (sums["bytes"] == rows.loc[sums.index, "bytes_loaded"]).all()
    assert (sums["ns"] == rows.loc[sums.index, "total_ns"]).all()


@pytest.mark.seconds
def test_workers_of_a_dask_cluster_find_the_same(
    crisp: Callable[..., Any], trace: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    distributed = pytest.importorskip("distributed")
    line = ("sweep", "--policy", "lru,crisp", "--budget", "30%,50%", "--per-sequence")
    here, there = tmp_path / "here.parquet", tmp_path / "there.parquet"
    monkeypatch.chdir(trace.parent)  # workers stand elsewhere
    assert crisp(*line, "--trace", trace.name, "--out", here).code == 0
    with distributed.LocalCluster(
        n_workers=2, threads_per_worker=1, dashboard_address=None, host="127.0.0.1"
    ) as cluster:
        cluster_line = ("--backend", "dask", "--scheduler", cluster.scheduler_address)
        done = crisp(*line, "--trace", trace.name, *cluster_line, "--out", there)
    assert done.code == 0, done.err
    assert there.read_bytes() == here.read_bytes()


def test_many_cells_are_counted_at_once_and_need_a_yes(
    crisp: Callable[..., Any], spec: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    many = tmp_path / "many.toml"
    many.write_text(spec.read_text() + "seed = { from = 1, to = 300_000, step = 1 }\n")
    done = crisp("sweep", many, "--out", tmp_path / "r.parquet")
    assert (done.code, done.out) == (2, f"{many}: 2,400,002 cells\n")
    assert done.err.startswith(f"error: {many}: 2,400,002 cells, about ")
    assert done.err.endswith(" on 1 core (measured on 3); --yes runs them\n")
    assert not list(tmp_path.glob("r.*"))
    monkeypatch.setattr(runner, "MANY", 9)
    assert crisp("sweep", spec, "--out", tmp_path / "r.parquet").code == 2
    done = crisp("sweep", spec, "--out", tmp_path / "r.parquet", "--yes")
    assert done.code == 0
    assert done.out.splitlines()[1].startswith("about 1 second on 1 core (measured on 3)")


@pytest.mark.parametrize(
    ("change", "message"),
    [
        (("lru", "lur"), "s.toml: grid 1: policy: unknown policy 'lur'; did you mean 'lru'?"),
        (("tiered(", "teared("), "s.toml: grid 2: width: unknown width 'teared'; did you mean"),
        (("alpha={a}", "alpa={a}"), "grid 2: width: unknown parameter of width tiered 'alpa'; did"),
        (
            ("paper-table1", "paper-table"),
            "s.toml: hardware: unknown hardware profile 'paper-table",
        ),
        (('"30%"', '"130%"'), "s.toml: budget: budget '130%': above 100 %"),
        (("toy.trace", "boy.trace"), "boy.trace.safetensors: no such file"),
        (("budget", "limit = 0\nbudget"), "s.toml: limit: found 0, expected a whole number, at le"),
        (("budget", "batch = 'x'\nbudget"), "s.toml: batch: found x, expected a whole number"),
        (("budget", "bits = 0\nbudget"), "s.toml: bits: found 0, expected bits above 0"),
        (
            ("budget", "phase = 'de'\nbudget"),
            "s.toml: phase: unknown phase 'de'; did you mean 'dec",
        ),
        (("budget", "model = 'mix'\nbudget"), "s.toml: model: "),
        (("budget", "layers = 9\nbudget"), "s.toml: layers 9: "),
        (("budget", "metadata = 'x'\nbudget"), "s.toml: metadata: x: cannot be read"),
        (
            ("budget", "prefetch = 'guess'\nbudget"),
            "s.toml: prefetch guess: the trace has no guess",
        ),
        (
            ("budget", "routing = 'rooter'\nbudget"),
            "s.toml: routing: unknown routing 'rooter'; did",
        ),
    ],
)
def test_a_bad_file_is_one_line(
    crisp: Callable[..., Any],
    spec: Path,
    trace: Path,
    tmp_path: Path,
    change: tuple[str, str],
    message: str,
) -> None:
    toy_trace(guess=False).save(trace)
    spec.write_text(
        spec.read_text().replace(*change, 1).replace('policy = "lru"', 'policy = "lru"')
    )
    done = crisp("sweep", spec, "--out", tmp_path / "r.parquet")
    assert done.code == 2
    assert done.err.startswith("error: ")
    assert message in done.err
    assert done.err.count("\n") == 1
    assert not list(tmp_path.glob("r.*"))


def test_a_sweep_of_which_nothing_can_be_run_fails(
    crisp: Callable[..., Any], spec: Path, tmp_path: Path
) -> None:
    line = ("--hardware", "jetson-agx-orin-32gb", "--engine", "fast")
    done = crisp("sweep", spec, *line, "--out", tmp_path / "r.parquet")
    assert done.code == 2
    assert f"error: {spec}: every cell is refused: engine fast: does not know unified" in done.err
    assert not list(tmp_path.glob("r.*"))


@pytest.mark.parametrize(
    ("line", "message"),
    [
        (
            ("--engine", "fats"),
            "unknown engine 'fats'; did you mean 'fast'? known: auto, simpy, fast",
        ),
        (
            ("--backend", "dusk"),
            "unknown backend 'dusk'; did you mean 'dask'? known: loky, dask, ray",
        ),
        (("--backend", "dask"), "--backend dask: needs --scheduler ADDRESS"),
        (("--scheduler", "x:1"), "--backend loky: --scheduler is for dask and ray"),
        (("--against", "lur"), "--against: unknown policy 'lur'; did you mean 'lru'?"),
        (("--against", "fo"), "--against fo: "),
        (
            ("--against", "lru", "--batch", "4"),
            "--against: sequences run side by side; --batch must",
        ),
        (("--per-sequence", "--batch", "1,2"), "--per-sequence: sequences run side by side"),
        (("--order", "wide"), "--order: unknown order 'wide'; did you mean 'widest'?"),
        (("--out", "s.toml"), "--out s.toml: would replace SPEC"),
        (("--out", "traces/toy.trace.safetensors"), ": would replace "),
        (("--out", "-"), "--out -: a file name was expected"),
        (("--out", "notes.txt"), "notes.txt: is not a parquet file"),
    ],
)
def test_a_bad_flag_is_one_line(
    crisp: Callable[..., Any],
    spec: Path,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    line: tuple[str, ...],
    message: str,
) -> None:
    monkeypatch.chdir(tmp_path)
    Path("notes.txt").write_text("mine")
    done = crisp("sweep", "s.toml", *(() if "--out" in line else ("--out", "r.parquet")), *line)
    assert done.code == 2
    assert message in done.err
    assert done.err.count("\n") == 1
    assert sorted(path.name for path in tmp_path.iterdir()) == ["notes.txt", "s.toml", "traces"]


@pytest.mark.seconds
@pytest.mark.parametrize("how", ["interrupted", "a worker killed"])
def test_whatever_ends_it_what_was_finished_stays(tmp_path: Path, how: str) -> None:
    """As a terminal interrupts it, as the kernel ends what takes too much memory."""
    if len(os.sched_getaffinity(0)) < 2:
        pytest.skip("needs two cores: on one there are no workers")
    trace, journal = tmp_path / "long.trace.safetensors", tmp_path / "r.parquet.unfinished"
    toy_trace(rows=2000).save(trace)
    line = ["sweep", "--trace", str(trace), "--engine", "simpy", "--out", "r.parquet"]
    line += ["--policy", "lru", "--budget", "10%,30%,50%", "--seed", ",".join(map(str, range(60)))]
    process = started(line, tmp_path)
    try:
        wait_for(lambda: journal.exists() and journal.read_bytes().count(b"\n") > 5)
        wait_for(lambda: bool(workers(process.pid)))
        assert process.poll() is None, process.communicate()
        if how == "interrupted":
            os.killpg(process.pid, signal.SIGINT)
        else:
            os.kill(workers(process.pid)[0], signal.SIGKILL)
        _, err = process.communicate(timeout=DEADLINE)
    finally:
        if process.poll() is None:
            os.killpg(process.pid, signal.SIGKILL)
    kept = journal.read_bytes().count(b"\n") - 1
    assert 5 <= kept < 180
    code, told = {
        "interrupted": (130, "interrupted"),
        "a worker killed": (2, "error: a worker process was killed; was there memory enough?"),
    }[how]
    told += f"; {kept} of 180 cells are in r.parquet; the same command goes on\n"
    assert (process.returncode, err) == (code, told)
    assert len(pd.read_parquet(tmp_path / "r.parquet")) == kept
