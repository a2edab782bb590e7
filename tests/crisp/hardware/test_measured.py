"""Measured profiles: what is refused, and what their costs answer, worked out by hand."""

from __future__ import annotations

import json
from dataclasses import replace
from fractions import Fraction
from itertools import pairwise
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from crisp.errors import CrispError
from crisp.hardware.measured import (
    BlockGeometry,
    MeasuredCost,
    MeasuredTables,
    TimeCurve,
    TimeGrid,
    check_store,
)
from crisp.hardware.profile import HardwareProfile, cost_model
from crisp.hardware.tables import to_toml
from crisp.model.spec import ModelSpec

# 4 blocks of 64 neurons, the last with 8: a block is 64 * 3 * 512 * 2 bytes
SPEC = ModelSpec(
    name="small", n_layers=1, moe_layers=(0,), n_experts=4, top_k=2, d_model=512, d_ff=200,
    dtype_bits=16, bits=Fraction(16), matrices=3, biases=False, dense_params=(0,), block=64,
    config_hash=None,
)  # fmt: skip
BLOCK = 196_608
TEXT = """
kind = "disk"
model = "measured"
no_power = "not measured"

[geometry]
d_model = 512
block = 64
matrices = 3
bits = 16
block_bytes = 196608
source = "a store"

[load]
bytes = [196608, 393216, 786432]
ns = [300, 500, 1100]
spread = 0.02
source = "read here"

[compute]
blocks = [1, 2, 4]
rows = [1, 4]
ns = [
  [100, 130],
  [180, 210],
  [340, 430],
]
source = "computed here"

[layer]
rows = [1, 3]
ns = [0, 20]
source = "the executor's own"

[busy]
load = 1.25
compute = 2
source = "both at once"
"""


def load(folder: Path, text: str = TEXT) -> HardwareProfile:
    file = folder / "mine.toml"
    file.write_text(text)
    return HardwareProfile.load(file)


def cost(folder: Path) -> MeasuredCost:
    costs = cost_model(load(folder), SPEC)
    assert isinstance(costs, MeasuredCost)
    return costs


def test_a_load_lies_on_the_lines_between_measured_sizes(tmp_path: Path) -> None:
    costs = cost(tmp_path)
    assert [costs.load(n * BLOCK) for n in (1, 2, 3, 4)] == [300, 500, 800, 1100]
    assert costs.load(6 * BLOCK) == 1700  # on along the last piece
    # a line through the first two meets 0 bytes at 100 ns: that is the latency
    assert (costs.load(0), costs.load(BLOCK // 2)) == (100, 200)
    assert costs.io_bound(BLOCK) == 275.0  # at the speed of the largest


def test_latency_is_not_negative_and_of_one_size_unknown() -> None:
    steep = TimeCurve((10, 20), (Fraction(10), Fraction(40)))
    assert (steep(0), steep(5), steep(10)) == (0, 5, 10)
    assert TimeCurve((10,), (Fraction(30),))(5) == 15


def test_a_falling_table_never_falls_further() -> None:
    falling = TimeCurve((1, 2), (Fraction(9), Fraction(3)))
    assert [falling(x) for x in (1, 2, 3, 100)] == [9, 3, 3, 3]


def test_a_piece_is_bilinear_in_blocks_and_mean_rows(tmp_path: Path) -> None:
    costs = cost(tmp_path)
    assert costs.compute(0, 1, 64) == costs.compute(2, 3, 64) == 100
    assert costs.compute(0, 1, 2 * 64) == 110  # a third of the way from 1 row to 4
    assert costs.compute(0, 3, 192) == 260
    assert costs.compute(0, 3, 4 * 192) == 320
    # one row of both blocks and one of the first: 192 neurons of 128, one and a half rows
    assert costs.compute(0, 2, 192) == 185
    assert costs.compute(3, 4, 8) == 100  # the short block is one row of 8 neurons
    assert costs.compute(0, 1, 32) == 100  # half a row is computed like a whole one
    assert costs.compute(0, 4, 200 * 7) == 520  # 30 a row beyond 4 rows


def test_a_layer_goes_by_rows(tmp_path: Path) -> None:
    costs = cost(tmp_path)
    assert [costs.layer(0, rows) for rows in (1, 2, 3, 4)] == [0, 10, 20, 30]


def test_nothing_is_shared_by_bytes(tmp_path: Path) -> None:
    costs = cost(tmp_path)
    assert costs.memory_bandwidth is None
    assert (costs.load_traffic(9), costs.compute_traffic(0, 2), costs.layer_traffic(0)) == (0, 0, 0)


@given(
    st.lists(st.tuples(st.integers(1, 10**6), st.integers(1, 10**9)), min_size=1, max_size=6),
    st.integers(0, 2 * 10**6),
)
def test_times_are_within_half_a_nanosecond_of_the_lines(
    points: list[tuple[int, int]], x: int
) -> None:
    by_size = dict(points)
    at = tuple(sorted(by_size))
    ns = tuple(Fraction(by_size[size]) for size in at)
    grid = TimeGrid((1,), (1,), ((Fraction(1),),))
    one = TimeCurve((1,), (Fraction(0),))
    tables = MeasuredTables(
        BlockGeometry.of(SPEC),
        TimeCurve(at, ns),
        grid,
        one,
        slow_load=Fraction(1),
        slow_compute=Fraction(1),
    )
    time = MeasuredCost(SPEC, tables).load(x)
    if x in by_size:
        assert time == by_size[x]
    for left, right in pairwise(at):
        if left <= x <= right:
            share = Fraction(x - left, right - left)
            exact = by_size[left] * (1 - share) + by_size[right] * share
            assert Fraction(-1, 2) <= exact - time < Fraction(1, 2)


@pytest.mark.parametrize(
    ("spec", "line"),
    [
        (replace(SPEC, d_model=1024), "d_model 512, but small has 1024"),
        (SPEC.with_(block=32), "block 64, but small has 32"),
        (SPEC.with_(bits=Fraction(17, 4)), "bits 16, but small has 17/4"),
        (replace(SPEC, matrices=2), "matrices 3, but small has 2"),
        (replace(SPEC, biases=True), "block_bytes 196608, but small has 200704"),
    ],
)
def test_other_blocks_need_another_calibration(tmp_path: Path, spec: ModelSpec, line: str) -> None:
    with pytest.raises(CrispError) as caught:
        cost_model(load(tmp_path), spec)
    assert str(caught.value).startswith(f"hardware profile mine: was calibrated with {line};")
    assert "calibrate with a store of small in blocks of" in str(caught.value)


def test_stores_of_another_kind_need_another_calibration(tmp_path: Path) -> None:
    kind = 'block_bytes = 196608\ndtype = "bf16"\nactivation = "silu"'
    profile = load(tmp_path, TEXT.replace("block_bytes = 196608", kind))
    assert profile.tables is not None
    store = {"dtype": "bf16", "activation": "silu"}
    check_store(profile.tables, store, "mine")
    for key, other in (("dtype", "fp16"), ("activation", "gelu")):
        with pytest.raises(CrispError, match=f"mine: was calibrated with {key} .*{other};"):
            check_store(profile.tables, store | {key: other}, "mine")
    cost_model(profile, SPEC)  # of a model nobody knows
    unknown = load(tmp_path).tables
    assert unknown is not None
    check_store(unknown, store, "mine")
    printed = profile.to_dict()["tables"]["geometry"]
    assert (printed["dtype"], printed["activation"]) == ("bf16", "silu")
    assert "dtype" not in load(tmp_path).to_dict()["tables"]["geometry"]
    with pytest.raises(CrispError, match=r"mine\.toml: geometry\.dtype: found 16, expected a word"):
        load(tmp_path, TEXT.replace("block_bytes = 196608", "block_bytes = 196608\ndtype = 16"))


def test_a_profile_keeps_tables_and_sources(tmp_path: Path) -> None:
    profile = load(tmp_path)
    assert profile.tables is not None
    assert (profile.tables.slow_load, profile.tables.slow_compute) == (Fraction(5, 4), 2)
    assert profile.tables.spreads == (("load", 0.02),)
    printed = profile.to_dict()
    assert json.loads(json.dumps(printed)) == printed
    assert printed["tables"]["load"] == {
        "bytes": [196608, 393216, 786432],
        "ns": [300, 500, 1100],
        "spread": 0.02,
        "source": "read here",
    }


def test_what_is_written_reads_back_the_same(tmp_path: Path) -> None:
    profile = load(tmp_path)
    assert profile.tables is not None
    sources = dict(profile.sources) | {"load": 'a "disk"\n\\ and more'}
    text = to_toml("disk", None, "not measured", profile.tables, sources)
    again = load(tmp_path, text)
    assert again == replace(profile, sources=sources)


def test_power_may_be_given_beside_measured_times(tmp_path: Path) -> None:
    watts = ("idle_w = 1", "link_w = 2", "compute_w = 3", "both_w = 4")
    power = [line.replace("= ", "= { value = ") + ", source = 'a meter' }" for line in watts]
    text = TEXT.replace('no_power = "not measured"\n', "") + "\n".join(["[power]", *power])
    profile = load(tmp_path, text)
    assert profile.power is not None
    assert profile.power.both == 4.0


def change(old: str, new: str) -> str:
    assert TEXT.count(old) == 1
    return TEXT.replace(old, new)


@pytest.mark.parametrize(
    ("text", "message"),
    [
        (change("[busy]", "[bussy]"), "unknown section 'bussy'; did you mean 'busy'"),
        (TEXT[: TEXT.index("[busy]")], "busy: the section is missing"),
        (change("load = 1.25", "loads = 1.25"), "unknown key 'busy.loads'; did you mean"),
        (change("load = 1.25", ""), "busy.load: is missing"),
        (change("load = 1.25", "load = 0.9"), "busy.load: found 0.9, expected 1 or more"),
        (change("load = 1.25", "load = nan"), "busy.load: found NaN, expected a finite number"),
        (change("load = 1.25", "load = 1e999999999"), "expected a finite number"),
        (change("load = 1.25", "load = '1'"), "busy.load: found '1', expected a number"),
        (change("393216, 786432", "393216, 393216"), "expected strictly rising numbers"),
        (change("393216, 786432", "0.5"), "load.bytes: found 0.5, expected a whole number"),
        (change("[196608, 393216, 786432]", "[]"), "load.bytes: found [], expected a list"),
        (change("ns = [300, 500, 1100]", "ns = [300, 500]"), "load.ns: holds 2 times in a list"),
        (change("ns = [300, 500, 1100]", "ns = [300, 0, 1]"), "found 0, expected more than 0"),
        (change("ns = [300, 500, 1100]", "ns = [300, true, 1]"), "load.ns: found True"),
        (change("spread = 0.02", "spread = -1"), "load.spread: found -1, expected 0 or more"),
        (change("  [180, 210],\n", ""), "compute.ns: holds 2 lists, expected 3, one for each of"),
        (change("[180, 210]", "[180]"), "compute.ns: holds 1 times in a list, expected 2"),
        (change("[180, 210]", "180"), "compute.ns: found 180, expected a list"),
        (change("blocks = [1, 2, 4]", "blocks = [2, 3, 4]"), "begins with 2, expected 1"),
        (change("rows = [1, 4]", "rows = [2, 4]"), "compute.rows: begins with 2, expected 1"),
        (change("ns = [0, 20]", "ns = [0, -1]"), "layer.ns: found -1, expected 0 or more"),
        (change('"read here"', '" "'), "load.source: found ' ', expected where the numbers"),
        (change("d_model = 512", "d_model = 0"), "geometry.d_model: found 0, expected more"),
        (change("bits = 16", "bits = 0"), "geometry.bits: found 0, expected more than 0"),
        (change('"disk"', '"unified"\nloads_from = "mapped"'), "loads_from: 'mapped' loads"),
        (TEXT + "[table]\n", "unknown section 'table'"),
        (change('no_power = "not measured"', ""), "power: neither the section nor"),
    ],
)
def test_a_bad_profile_is_refused_in_one_line(tmp_path: Path, text: str, message: str) -> None:
    with pytest.raises(CrispError) as caught:
        load(tmp_path, text)
    assert str(caught.value).startswith(f"{tmp_path / 'mine.toml'}: ")
    assert message in str(caught.value)
    assert "\n" not in str(caught.value)
