from __future__ import annotations

import json
import os
from collections.abc import Callable
from dataclasses import replace
from fractions import Fraction
from pathlib import Path
from typing import Any

import pyarrow.parquet as pq
import pytest

from crisp.cli.options.lists import split_list
from crisp.cli.output.columns import format_numbers
from crisp.errors import CrispError
from crisp.hardware.measured import BlockGeometry, MeasuredTables, TimeCurve, TimeGrid
from crisp.hardware.tables import SECTIONS, to_toml
from crisp.model.spec import ModelSpec
from crisp.policy.cache import CACHES
from crisp.run.result import load_runs
from crisp.sim.hardware import hardware_profile
from crisp.trace import RoutingTrace
from tests.crisp.cli.toy import CONFIG, toy_trace


def told(done: object) -> str:
    """What a successful command printed."""
    assert done.code == 0, done.err
    return done.out


def cells(out: str) -> list[list[str]]:
    """The table in the output: a list for each line of it."""
    lines = out.splitlines()
    start = next(i for i, line in enumerate(lines) if line.startswith("policy  "))
    return [line.split() for line in lines[start + 1 : lines.index("", start)]]


def test_a_table_goes_policy_by_policy_with_budgets_as_given(
    crisp: Callable, trace: Path, tmp_path: Path
) -> None:
    file = tmp_path / "runs.json"
    out = told(
        crisp("simulate", trace, "--policy", "lru,fo", "--budget", "50%,10%", "--json", file)
    )
    expected = [["lru", "50%"], ["lru", "10%"], ["fo", "50%"], ["fo", "10%"]]
    rows = cells(out)
    assert [row[:2] for row in rows] == expected
    runs = load_runs(file)
    assert [[r.settings["policy"]["name"], r.settings["budget"]["asked"]] for r in runs] == expected
    for row, run in zip(rows, runs, strict=True):
        for cell, metric in ((2, "tokens_per_second"), (7, "bytes_per_token")):
            value = run.metrics[metric] * (1 if cell == 2 else 1e-6)
            assert float(row[cell].replace(",", "")) == pytest.approx(value, rel=1e-2)
        assert float(row[5]) == pytest.approx(100 * run.metrics["hit_rate"], abs=0.05)


def test_the_output_states_its_conditions(crisp: Callable, trace: Path) -> None:
    out = told(
        crisp(
            "simulate", trace, "--model", "mixtral-8x7b", "--bits", "4.25", "--policy", "lru,crisp",
            "--budget", "30%", "--limit", "10", "--batch", "2",
        )
    )  # fmt: skip
    for words in (
        "10 decode rows (the first of 16), captured from toy",
        "the first 2 of the trace's 4 sequences; run: the rest",
        "mixtral-8x7b, 3 of 32 layers; experts in 4.25 bits, 93.6 MB each",
        "the routing is toy's, the sizes are mixtral-8x7b's",
        "rtx4090-pcie4",
        "phase decode, batch 2, granularity expert",
        "times are of these 3 layers, not of the whole model",
        "quality is not simulated: crisp leaves out parts of experts",
        "width tiered(alpha=0.6,beta=0.9,warm=0.5,cold=0), widest, cache lru per layer",
        "J/token: modelled",
    ):
        assert words in out
    assert max(map(len, out.splitlines())) <= 100


@pytest.mark.parametrize(
    ("options", "line"),
    [  # of 3 layers with 8 experts of 8 blocks
        ((), "budget 10%: 2 of 24 experts, 8.3 %; 1 of 3 layers holds none\nbudget 30%: 7 of 24"),
        (("--scope", "global"), "budget 10%: 2 of 24 experts, 8.3 %\nbudget 30%: 7 of 24"),
        (("--unit", "block"), " of 192 blocks, 9.9 %\nbudget 30%: 57 of 192 blocks, 29.7 %\n"),
        (("--phase", "all"), "MB, stall and J are of decoded tokens; hit, part and hid of all\n"),
    ],
)
def test_budgets_are_said_in_whole_units(
    crisp: Callable, trace: Path, options: tuple[str, ...], line: str
) -> None:
    line_up = ("--policy", "fo,lru", "--budget", "10%,30%", "--block", "32")
    assert line in told(crisp("simulate", trace, *line_up, *options))


@pytest.mark.parametrize("cache", [*CACHES, "random(5)"])
def test_every_cache_can_be_asked_for(crisp: Callable, trace: Path, cache: str) -> None:
    unit = "block" if cache.startswith(("suffix", "saliency")) else "expert"
    done = crisp(
        "simulate", trace, "--limit", 3, "--policy", "lru", "--cache", cache, "--unit", unit,
        "--budget", "50%",
    )  # fmt: skip
    assert (done.code, done.err) == (0, "")
    told = "no cache" if cache == "none" else f"cache {'random(0)' if cache == 'random' else cache}"
    assert told in done.out


def test_an_oracle_is_labelled(crisp: Callable, trace: Path) -> None:
    asked = ("--policy", "lru", "--budget", "30%", "--block", "32")
    bound = told(crisp("simulate", trace, *asked, "--cache", "belady"))
    assert "cache belady per layer by expert; cache belady is an oracle" in " ".join(bound.split())
    ahead = told(crisp("simulate", trace, *asked, "--prefetch", "perfect"))
    assert "prefetches what comes next; prefetch perfect is an oracle" in " ".join(ahead.split())
    assert "oracle" not in told(crisp("simulate", trace, *asked))


def test_pictures_and_timelines_say_the_conditions(
    crisp: Callable, trace: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    drawn: list[tuple[Any, ...]] = []
    monkeypatch.setattr(
        "crisp.cli.output.run_files.draw_gantt", lambda *arguments: drawn.append(arguments)
    )
    for granularity in ("expert", "block"):
        told(
            crisp(
                "simulate", trace, "--policy", "lru", "--budget", "30%", "--bits", "4.25",
                "--block", "16", "--granularity", granularity, "--batch", "2",
                "--plot", tmp_path / "g.png", "--perfetto", tmp_path / f"{granularity}.json",
            )
        )  # fmt: skip
    title = "lru at 30% on rtx4090-pcie4; 3 layers of toy in 4.25 bits, batch 2, granularity "
    assert [arguments[3] for arguments in drawn] == [f"{title}expert", f"{title}block"]
    events = json.loads((tmp_path / "block.json").read_text())["traceEvents"]
    assert events[0]["args"]["name"] == f"{title}block"
    # three events of at most 4 experts are drawn whole; in blocks of 16 neurons they are too many
    whole, first = (next(iter(arguments[1])) for arguments in drawn)
    assert whole.startswith("step ")
    assert "first events" not in whole
    assert first == f"{whole}, its first events"


def test_mo_says_what_it_prefetches(crisp: Callable, trace: Path, tmp_path: Path) -> None:
    line = ("--policy", "mo", "--budget", "30%")
    assert "prefetches what the trace guessed" in told(crisp("simulate", trace, *line))
    toy_trace(guess=False).save(tmp_path / "plain.trace.safetensors")
    out = told(crisp("simulate", tmp_path / "plain.trace.safetensors", *line))
    assert "prefetches what the previous token used" in out


def test_what_cannot_be_had_is_a_dash_with_its_reason(crisp: Callable, trace: Path) -> None:
    out = told(
        crisp("simulate", trace, "--policy", "fo", "--budget", "1", "--hardware", "paper-table1")
    )
    assert cells(out)[0][-1] == "–"
    assert f"J/token –: {hardware_profile('paper-table1').no_power}" in out
    assert "modelled" not in out


@pytest.mark.parametrize(
    ("budget", "options", "warned"),
    [
        ("16%", (), True),  # 3 experts of 24; (3 - 1) x 2 = 4 never hit
        ("17%", (), True),  # 4 experts
        ("25%", (), False),
        ("16%", ("--batch", "2"), False),
        ("16%", ("--scope", "layer"), False),
        ("16%", ("--width", "uniform(.5)"), False),
        ("16%", ("--cache", "lfu"), False),
    ],
)
def test_a_global_lru_that_cannot_hit_is_warned_of(
    crisp: Callable, trace: Path, budget: str, options: tuple[str, ...], warned: bool
) -> None:
    line = ("--policy", "lru", "--budget", budget, "--scope", "global")
    out = told(crisp("simulate", trace, *line, *options))
    assert ("warning: a global LRU of at most (layers - 1) x k experts never hits" in out) == warned
    if warned:
        assert float(cells(out)[0][5]) == 0.0


@pytest.mark.parametrize(
    ("phase", "heads"),
    [
        ("decode", "tokens/s  p50 ms  p95 ms  hit %"),
        ("prefill", "tokens/s  ttft ms  hit %"),
        ("all", "tokens/s  p50 ms  p95 ms  ttft ms  hit %"),
    ],
)
def test_phases_have_their_columns(crisp: Callable, trace: Path, phase: str, heads: str) -> None:
    out = told(crisp("simulate", trace, "--policy", "lru", "--budget", "50%", "--phase", phase))
    line = next(line for line in out.splitlines() if line.startswith("policy  "))
    assert line.startswith(f"policy  budget  {heads}")
    assert "–" not in "".join(cells(out)[0])


def test_a_profile_of_its_own_leaves_the_whole_trace(
    crisp: Callable, trace: Path, tmp_path: Path
) -> None:
    file = tmp_path / "run.json"
    line = ("--policy", "crisp", "--budget", "30%", "--json", file)
    out = told(crisp("simulate", trace, "--profile", trace, *line))
    assert "all 40 rows of toy.trace.safetensors; simulated: all rows" in out
    assert load_runs(file)[0].metrics["tokens"] == 32


def test_one_run_is_an_object_and_the_same_twice(
    crisp: Callable, trace: Path, tmp_path: Path
) -> None:
    texts = []
    for name in ("a.json", "b.json"):
        told(
            crisp(
                "simulate", trace, "--policy", "crisp", "--budget", "30%", "--json",
                tmp_path / name,
            )
        )  # fmt: skip
        texts.append((tmp_path / name).read_bytes())
    assert texts[0] == texts[1]
    assert json.loads(texts[0])["settings"]["budget"]["asked"] == "30%"


def test_data_on_standard_output_is_data_alone(crisp: Callable, trace: Path) -> None:
    done = crisp("simulate", trace, "--policy", "lru", "--budget", "30%", "--json", "-")
    assert json.loads(told(done))["metrics"]["tokens"] == 16
    assert "tokens/s" in done.err
    done = crisp("simulate", trace, "--policy", "lru", "--budget", "30%", "--perfetto", "-")
    assert json.loads(told(done))["traceEvents"]


def test_all_files_of_one_run_agree(crisp: Callable, trace: Path, tmp_path: Path) -> None:
    line = ("--policy", "mo", "--budget", "30%", "--json", tmp_path / "run.json")
    files = ("--timeline", tmp_path / "t.parquet", "--perfetto", tmp_path / "p.json")
    told(crisp("simulate", trace, *line, *files, "--plot", tmp_path / "g.png"))
    run = load_runs(tmp_path / "run.json")[0]
    rows = pq.read_table(tmp_path / "t.parquet").to_pandas()
    own = rows[rows["kind"] != "prefetch"]
    assert own["end_ns"].max() == run.metrics["total_ns"]
    loads = rows[rows["kind"].isin(["load", "prefetch"])]
    in_flight = run.metrics["blocks_loaded"] - loads["blocks"].sum()
    assert in_flight in (0, 1), "all but a prefetch that the run did not wait for"
    events = json.loads((tmp_path / "p.json").read_text())["traceEvents"]
    assert sum(event["ph"] == "B" for event in events) == len(rows)
    assert (tmp_path / "g.png").read_bytes()[:4] == b"\x89PNG"


@pytest.mark.seconds
def test_all_cores_give_what_one_gives(
    crisp: Callable, trace: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def written(name: str, cores: set[int]) -> bytes:
        monkeypatch.setattr(os, "sched_getaffinity", lambda process: cores)
        line = ("--policy", "lru,crisp", "--budget", "10%,30%", "--json", tmp_path / name)
        told(crisp("simulate", trace, *line))
        return (tmp_path / name).read_bytes()

    assert written("one.json", {0}) == written("two.json", {0, 1})


MACHINE = """
kind = "discrete"
model = "table"
no_power = "a test"
[table]
expert_load_ms = {{ value = {load}, source = "a test" }}
expert_compute_ms = {{ value = 1, source = "a test" }}
"""


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ("--budget 0", "budget '0': must be above 0"),
        ("--budget 101%", "budget '101%': above 100 %"),
        ("--budget ten", "budget 'ten': 'ten' is not a size"),
        ("--budget 10%,,20%", "--budget '10%,,20%': an item of the list is empty"),
        ("--budget 1TB", "budget '1TB': more than all routed experts"),
        ("--policy crips", "unknown policy 'crips'; did you mean 'crisp'?"),
        ("--policy lru,crips", "unknown policy 'crips'; did you mean 'crisp'?"),
        ("--policy lru(", "--policy 'lru(': the parentheses do not match"),
        ("--model mixtral-8x7", "unknown model 'mixtral-8x7'; did you mean "),
        ("--model olmoe-1b-7b", "model olmoe-1b-7b: 64 experts, but the trace has 8"),
        ("--hardware rtx4090", "unknown hardware profile 'rtx4090'; did you mean 'rtx4090-pcie4'"),
        ("--order widst", "unknown order 'widst'; did you mean 'widest'?"),
        ("--cache lru2", "unknown cache 'lru2'; did you mean 'lru'?"),
        (
            "--cache lru,lfu",
            "--cache 'lru,lfu': expected one; a list of them goes to crisp sweep --c",
        ),
        ("--width tierd", "unknown width 'tierd'; did you mean 'tiered'?"),
        ("--width tiered(alpah=.5)", "unknown parameter of width tiered 'alpah'; did you mean "),
        ("--prefetch gues", "unknown prefetch 'gues'; did you mean 'guess'?"),
        ("--scope globl", "unknown scope 'globl'; did you mean 'global'?"),
        ("--unit blok", "unknown unit 'blok'; did you mean 'block'?"),
        ("--granularity exprt", "unknown granularity 'exprt'; did you mean 'expert'?"),
        ("--phase decod", "unknown phase 'decod'; did you mean 'decode'?"),
        ("--limit 0", "limit 0: must be at least 1"),
        ("--batch 0", "batch 0: must be at least 1"),
        ("--chunk 0", "--chunk 0: expected a number of rows, at least 1, or whole"),
        ("--chunk all", "--chunk all: expected a number of rows, at least 1, or whole"),
        ("--seed -1", "seed -1: must not be negative"),
        ("--top-k 0", "model toy: top_k is 0, expected at least 1"),
        ("--top-k 9", "model toy: top_k is 9, expected at most 8 experts"),
        ("--top-k 3", "model toy: top-3, but the trace was recorded with top-2"),
        ("--bits 0", "model toy: bits is 0, expected more than 0"),
        ("--bits many", "--bits: 'many' is not a number"),
        ("--block 0", "model toy: block is 0, expected at least 1"),
        ("--json nowhere/run.json", "--json nowhere/run.json: the folder nowhere does not exist"),
        ("--json .", "--json .: is a folder"),
        ("--plot p.gif", "p.gif: expected a name that ends in .png"),
        ("--plot p.png --policy fo,lru", "--plot: needs one policy and one budget, found 2 runs"),
        ("--timeline t --budget .1,.2", "--timeline: needs one policy and one budget, found 2 run"),
        ("--json x --perfetto x", "--perfetto: --json goes to x already"),
        ("--profile no/where", "no/where: no such file"),
        ("--policy fo --prefetch previous", "policy fo: order sequential lets nothing overlap"),
        ("--cache belady --prefetch previous", "policy lru: cache belady bounds what is loaded on"),
        ("--cache suffix-lru", "cache suffix-lru: needs unit block, found expert"),
        ("--magnitude predict", "unknown magnitude 'predict'; did you mean 'predicted'?"),
        ("--magnitude predicted", "policy lru: magnitude predicted: the trace has no magnitudes;"),
        ("--routing cash-prior", "unknown routing 'cash-prior'; did you mean 'cache-prior'?"),
        ("--routing skip-missing", "routing skip-missing(keep=1): asks for the router's scores of"),
    ],
)
def test_a_mistake_is_one_line_and_leaves_no_file(
    crisp: Callable,
    trace: Path,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    options: str,
    message: str,
) -> None:
    monkeypatch.chdir(tmp_path)
    given = options.split()
    for option, value in (("--policy", "lru"), ("--budget", "10%"), ("--json", "run.json")):
        if option not in given:
            given += [option, value]
    done = crisp("simulate", trace, *given)
    assert (done.code, done.out) == (2, "")
    assert done.err.startswith(f"error: {message}")
    assert done.err.count("\n") == 1
    assert [path.name for path in tmp_path.iterdir()] == ["traces"]


def test_a_trace_that_is_missing_or_cut_off(crisp: Callable, trace: Path, tmp_path: Path) -> None:
    cut = tmp_path / "cut.trace.safetensors"
    cut.write_bytes(trace.read_bytes()[:-10])
    for name in (cut, tmp_path / "none.trace.safetensors"):
        done = crisp("simulate", name, "--policy", "lru", "--budget", "10%")
        assert (done.code, done.out) == (2, "")
        assert done.err.startswith(f"error: {name}: ")
        assert done.err.count("\n") == 1


def test_a_trace_that_does_not_say_its_size_needs_a_model(crisp: Callable, tmp_path: Path) -> None:
    path = tmp_path / "bare.trace.safetensors"
    toy = toy_trace()
    header = replace(toy.header, spec=None, config_hash=None)
    RoutingTrace(**toy.tensors(), header=header).save(path)
    line = ("simulate", path, "--policy", "lru", "--budget", "10%")
    done = crisp(*line)
    assert done.code == 2
    assert done.err == f"error: {path}: does not say how large its model is; give --model\n"
    assert "the sizes are mixtral-8x7b's" in told(crisp(*line, "--model", "mixtral-8x7b"))


def test_a_profile_of_another_geometry_is_refused(
    crisp: Callable, trace: Path, tmp_path: Path
) -> None:
    toy = toy_trace()
    tensors = {
        name: array[:, :2] if array.ndim > 1 else array for name, array in toy.tensors().items()
    }
    other = tmp_path / "two-layers.trace.safetensors"
    RoutingTrace(**tensors, header=replace(toy.header, spec=None)).save(other)
    line = ("--policy", "lru", "--budget", "10%", "--profile", other)
    done = crisp("simulate", trace, *line)
    assert done.code == 2
    assert done.err == f"error: --profile {other}: 2 layers, but the simulated trace has 3\n"


@pytest.mark.parametrize(
    ("text", "message"),
    [
        (MACHINE.format(load=1), "table.layer_ms: is missing"),
        (MACHINE.format(load=-1), "table.expert_load_ms: found -1, expected more than 0"),
    ],
)
def test_a_machine_with_a_missing_or_negative_number(
    crisp: Callable, trace: Path, tmp_path: Path, text: str, message: str
) -> None:
    machine = tmp_path / "mine.toml"
    machine.write_text(text)
    done = crisp("simulate", trace, "--policy", "lru", "--budget", "10%", "--hardware", machine)
    assert (done.code, done.err) == (2, f"error: {machine}: {message}\n")


@pytest.mark.parametrize(
    ("text", "items"),
    [
        ("fo", ["fo"]),
        ("fo, lru ,crisp", ["fo", "lru", "crisp"]),
        ("tiered(alpha=.6,beta=.9),full", ["tiered(alpha=.6,beta=.9)", "full"]),
    ],
)
def test_lists(text: str, items: list[str]) -> None:
    assert split_list(text, "--x") == items


@pytest.mark.parametrize("text", ["", "a,", ",a", "a,,b", "a(b", "a)b(", "(a))"])
def test_broken_lists(text: str) -> None:
    with pytest.raises(CrispError, match=r"^--x "):
        split_list(text, "--x")


@pytest.mark.parametrize(
    ("values", "shown"),
    [
        ([2.1701, 14.4], ["2.17", "14.40"]),
        ([0.0, 158.7, 1234.5], ["0", "159", "1,234"]),
        ([0.00123, None], ["0.0012", "–"]),
        ([None, 0.0], ["–", "0.0"]),
    ],
)
def test_numbers_of_a_column_have_the_same_decimals(
    values: list[float | None], shown: list[str]
) -> None:
    assert format_numbers(values) == shown


def test_a_profile_of_another_kind_of_store_is_refused(
    crisp: Callable, trace: Path, tmp_path: Path
) -> None:
    """Sizes are the same, and times are not: fp16 for bf16."""
    spec = ModelSpec.from_config(CONFIG, "toy")
    store, machine = tmp_path / "store", tmp_path / "here.toml"
    store.mkdir()
    one = TimeCurve((1,), (Fraction(9),))
    own = replace(BlockGeometry.of(spec), dtype="bf16")
    grid = TimeGrid((1,), (1,), ((Fraction(5),),))
    tables = MeasuredTables(own, one, grid, one, slow_load=Fraction(1), slow_compute=Fraction(1))
    machine.write_text(to_toml("disk", None, "no", tables, dict.fromkeys(SECTIONS, "here")))
    line = ("simulate", trace, "--policy", "fo", "--budget", "30%", "--hardware", machine)
    for dtype, code in (("bf16", 0), ("fp16", 2)):
        (store / "store.json").write_text(json.dumps({"spec": spec.to_dict(), "dtype": dtype}))
        done = crisp(*line, "--model", store)
        assert done.code == code, done.err
    assert done.err == (
        "error: hardware profile here: was calibrated with dtype bf16, but the store has fp16; "
        "calibrate with that store\n"
    )


def test_a_page_cache_spares_the_disk_what_was_read_before(
    crisp: Callable, trace: Path, tmp_path: Path
) -> None:
    """A load takes 9 ns, or 1 ns where an earlier one has brought the same expert."""
    spec, machine = ModelSpec.from_config(CONFIG, "toy"), tmp_path / "here.toml"
    load, pages = TimeCurve((1,), (Fraction(9),)), TimeCurve((1,), (Fraction(1),))
    grid = TimeGrid((1,), (1,), ((Fraction(5),),))
    tables = MeasuredTables(
        BlockGeometry.of(spec), load, grid, load, Fraction(1), Fraction(1), page_cache=pages
    )
    machine.write_text(to_toml("disk", None, "no", tables, dict.fromkeys(SECTIONS, "here")))
    line = ("simulate", trace, "--policy", "fo", "--budget", "30%", "--hardware", machine)
    plain, cached, rows = tmp_path / "a.json", tmp_path / "b.json", tmp_path / "b.parquet"
    told(crisp(*line, "--json", plain))
    more = ("--page-cache", "1GB")
    out = told(crisp(*line, *more, "--json", cached, "--timeline", rows))
    assert "hardware  here, page cache of 1 GB\n" in out
    loads = [row for row in pq.read_table(rows).to_pylist() if row["kind"] == "load"]
    found = len(loads) - len({(row["layer"], row["expert"]) for row in loads})
    assert found > 0
    one, other = (load_runs(path)[0] for path in (plain, cached))
    assert one.metrics["total_ns"] - other.metrics["total_ns"] == 8 * found
    assert other.settings["hardware"]["page_cache"] == 10**9
    assert other.metrics["bytes_loaded"] == one.metrics["bytes_loaded"]
    done = crisp(*line, *more, "--engine", "fast")
    assert done.err == "error: engine fast: does not know a page cache; use --engine simpy\n"
    machine.write_text(machine.read_text().partition("\n[page_cache]")[0])
    assert "has no section page_cache, the rate of reads" in crisp(*line, *more).err
