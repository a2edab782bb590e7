"""Calibration, on a device whose times are known."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from fractions import Fraction
from itertools import cycle, pairwise
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from crisp.errors import CrispError
from crisp.hardware.measured import TimeCurve
from crisp.hardware.profile import HardwareProfile, cost_model
from crisp.hw.calibration.calibrate import calibrate, pool_slots
from crisp.hw.calibration.host_time import measure_host_times
from crisp.hw.calibration.stopwatch import TimedChain
from crisp.hw.calibration.tables import DeviceTimes
from crisp.hw.devices.protocol import Copy, Done
from crisp.model.spec import ModelSpec
from tests.hw.calibration.timed import TimedDevice, opened

SPEC = ModelSpec(
    name="small", n_layers=3, moe_layers=(1, 2), n_experts=4, top_k=2, d_model=512, d_ff=200,
    dtype_bits=16, bits=Fraction(16), matrices=3, biases=False, dense_params=(0,) * 3, block=64,
    config_hash=None,
)  # fmt: skip
STORE: Any = SimpleNamespace(
    spec=SPEC,
    dtype="bf16",
    activation="silu",
    check=lambda spec: None,
    describe=lambda: {"origin": "synthetic"},
)
LAYER = TimeCurve((1,), (Fraction(7_000),))


def measured(seconds: float = 0.2, **times: Any) -> tuple[DeviceTimes, TimedDevice]:
    with opened(TimedDevice(**times)) as device:
        return calibrate(device, STORE, LAYER, lambda rows: None, seconds=seconds), device


def test_the_tables_are_the_times_of_the_device() -> None:
    tables = measured(2)[0].tables
    block = SPEC.block_bytes
    assert tables.load == TimeCurve(
        tuple(block * n for n in (1, 2, 3, 4)), tuple(50_000 + 100_000 * n for n in (1, 2, 3, 4))
    )
    assert tables.compute.blocks == (1, 2, 3, 4)
    assert tables.compute.rows[:3] == (1, 2, 4)
    for blocks, line in zip(tables.compute.blocks, tables.compute.ns, strict=True):
        expected = [10_000 + 20_000 * blocks * rows for rows in tables.compute.rows]
        assert list(line) == expected
    assert (tables.slow_load, tables.slow_compute) == (Fraction(5, 4), Fraction(3, 2))
    assert tables.layer == LAYER
    assert dict(tables.spreads) == {"load": 0, "compute": 0, "busy": 0}


def test_loads_that_take_very_unlike_times_take_their_mean() -> None:
    """As blocks do of which one is read along with another."""
    turns = cycle((40_000, 40_000, 40_000, 500_000))
    tables = measured(2, load_ns=lambda blocks: blocks * next(turns))[0].tables
    assert tables.load.ns[0] == 155_000  # 16 in a row, a quarter of them slow


def test_faster_beside_the_other_stream_counts_as_no_slower() -> None:
    tables = measured(slow=(Fraction(9, 10), Fraction(1)))[0].tables
    assert (tables.slow_load, tables.slow_compute) == (1, 1)


def test_the_profile_can_be_read_and_simulated_with(tmp_path: Path) -> None:
    done, _ = measured()
    file = tmp_path / "here.toml"
    file.write_text(done.toml())
    profile = HardwareProfile.load(file)
    assert profile.tables == done.tables
    assert (profile.kind, profile.model, profile.power) == ("disk", "measured", None)
    costs = cost_model(profile, SPEC)
    assert costs.load(2 * SPEC.block_bytes) == 250_000
    assert costs.compute(0, 4, 200) == 90_000
    assert (costs.layer(1, 1), costs.layer(0, 1)) == (7_000, 0)
    for section in ("load", "compute", "busy"):
        assert "crisp calibrate on " in profile.sources[section]
        assert "; name fake; small in bf16, 197 kB a block; median of " in profile.sources[section]
        assert "means of some in a row, interquartile range 0 % of it; " in profile.sources[section]


def test_long_pieces_and_loads_are_measured_at_fewer_points() -> None:
    """Two thirds of a second: a load of a block may take 20 ms, a piece 22 ms."""
    seconds = 2 / 3
    tables = measured(seconds, load_ns=lambda n: 20_000_000 * n)[0].tables
    assert [size // SPEC.block_bytes for size in tables.load.at] == [1, 2, 4]
    tables = measured(seconds, piece_ns=lambda n, rows: 500_000 * n * rows)[0].tables
    assert tables.compute.rows == (1, 2, 4)  # of 16 rows a whole expert would take 32 ms
    tables = measured(seconds, piece_ns=lambda n, rows: 100_000 * n * rows)[0].tables
    assert tables.compute.rows == (1, 2, 4, 16)  # 6.4 ms, and 25.6 ms of 64 rows


def test_loads_are_of_experts_drawn_from_the_whole_store() -> None:
    _, device = measured()
    assert {copy.row for copy in device.copies} == {0, 1}
    assert {copy.expert for copy in device.copies} == {0, 1, 2, 3}
    assert {copy.first for copy in device.copies if len(copy.slots) > 1} == {0}
    for operations in (device.copies, device.pieces):
        for operation in operations:
            assert len(set(operation.slots)) == len(operation.slots)


def test_single_blocks_are_loaded_as_those_of_a_task_are() -> None:
    """One after the other, each promised by the one before, into another slot."""
    _, device = measured()
    single = [copy for copy in device.copies if len(copy.slots) == 1]
    assert {copy.first for copy in single} == set(range(SPEC.n_blocks))
    assert {copy.first for copy in single if not copy.then} == {SPEC.n_blocks - 1}
    kept = 0
    for copy, following in pairwise(device.copies):
        if copy.then and following.first:
            kept += 1
            promised = copy.row, copy.expert, copy.first + 1, [copy.then[0]]
            assert promised == (following.row, following.expert, following.first, following.slots)
            assert not {*copy.then} & {*copy.slots}
    assert kept > len(single) // 2


def test_the_streams_never_use_the_same_slot() -> None:
    _, device = measured()
    computed = {slot for piece in device.pieces for slot in piece.slots}
    half = pool_slots(STORE) // 2
    assert computed <= set(range(half, 2 * half))
    first = next(i for i, copy in enumerate(device.copies) if copy.slots[0] < half)
    filled = [slot for copy in device.copies[:first] for slot in copy.slots]
    assert sorted(filled) == list(range(half, 2 * half))  # before anything is measured
    assert all(slot < half for copy in device.copies[first:] for slot in copy.slots)


def test_the_pool_holds_an_expert_for_each_stream() -> None:
    assert pool_slots(STORE) == 2 * (128_000_000 // SPEC.block_bytes)
    large: Any = SimpleNamespace(spec=replace(SPEC, d_ff=2**24, block=2**22))
    assert pool_slots(large) == 2 * 4


def test_it_takes_about_as_long_as_it_is_told_and_says_how_far_it_is() -> None:
    told: list[float] = []
    with opened(TimedDevice()) as device:
        calibrate(device, STORE, LAYER, lambda rows: None, seconds=1, progress=told.append)
        assert 1e9 <= device.clock() < 1.5e9
    assert told == sorted(told)
    assert 0 < told[0] < told[-1] <= 1


@pytest.mark.parametrize("seconds", [0.0, -1.0, 1e9, float("nan")])
def test_no_time_is_refused(seconds: float) -> None:
    with (
        opened(TimedDevice()) as device,
        pytest.raises(CrispError, match=r"seconds .*: must be above 0 and at most"),
    ):
        calibrate(device, STORE, LAYER, lambda rows: None, seconds=seconds)


@pytest.mark.parametrize("operation", [1, 800, 1_500])
def test_a_failure_ends_it(operation: int) -> None:
    with opened(TimedDevice(fails=operation)) as device, pytest.raises(OSError, match="broken"):
        calibrate(device, STORE, LAYER, lambda rows: None, seconds=1)


def test_a_chain_takes_as_many_times_as_it_is_told() -> None:
    with opened(TimedDevice()) as device:

        def make() -> Callable[[Done], None]:
            return lambda done: device.copy(Copy(0, 0, 0, [1]), done)

        for handed in (False, True):
            chain = TimedChain(device, make, handed)
            assert chain.measure(3, 16, 0) == [150_000] * 3  # no time for more than it must
            assert chain.measure(3, 5, 10**9) == [150_000] * 5
            assert chain.measure(1, 99, 400_000) == [150_000] * 3  # the third begins at 300,000


def test_a_layers_time_is_what_passes_between_two_events() -> None:
    """Combining two experts takes 1000 ns and 1000 a row here; time stands still beside it."""
    pytest.importorskip("torch")
    options: Any = SimpleNamespace(
        open=lambda store, slots: TimedDevice(), describe=lambda device: device.describe()
    )
    times = measure_host_times(STORE, options)
    assert times.at == (1, 4, 16)
    assert [int(ns) for ns in times.ns] == [2_000, 5_000, 17_000]
