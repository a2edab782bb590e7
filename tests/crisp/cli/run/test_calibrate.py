"""crisp calibrate, on a device whose times are known."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import pytest

from crisp.hardware.profile import HardwareProfile
from crisp.hw.devices.options import DeviceOptions
from crisp.hw.store.reader import Store
from tests.hw.calibration.test_calibrate import STORE
from tests.hw.calibration.timed import TimedDevice

pytest.importorskip("torch")


@pytest.fixture
def opened(monkeypatch: pytest.MonkeyPatch) -> list[DeviceOptions]:
    """What a device was opened with, each time."""
    seen: list[DeviceOptions] = []

    def open_(options: DeviceOptions, store: Store, slots: int) -> TimedDevice:
        seen.append(options)
        return TimedDevice()

    monkeypatch.setattr(DeviceOptions, "open", open_)
    monkeypatch.setattr(Store, "open", lambda path: STORE)
    return seen


def test_a_profile_is_written(crisp: Callable, opened: list[DeviceOptions], tmp_path: Path) -> None:
    file = tmp_path / "here.toml"
    done = crisp(
        "calibrate", "--store", tmp_path, "--out", file, "--seconds", "0.2",
        "--link-limit", "200MB/s", "--threads", "2",
    )  # fmt: skip
    assert done.code == 0, done.err
    assert set(opened) == {DeviceOptions("cpu", threads=2, link_limit=200_000_000)}
    profile = HardwareProfile.load(file)
    assert profile.tables is not None
    assert [int(ns) for ns in profile.tables.load.ns] == [150_000, 250_000, 350_000, 450_000]
    assert int(profile.tables.layer(1)) == 2_000
    assert done.out == (
        f"{file}: an expert of small loads in 0.45 ms (1.75 GB/s) and computes in 0.09 ms; "
        "beside the other stream they take 1.25 and 1.5 times as long\n"
        "half of the means lie within: load 0 %, compute 0 %, busy 0 % of their median\n"
    )


def test_reads_through_the_page_cache_are_timed_with_it_full_and_empty(
    crisp: Callable, opened: list[DeviceOptions], tmp_path: Path
) -> None:
    file = tmp_path / "here.toml"
    done = crisp(
        "calibrate", "--store", tmp_path, "--out", file, "--seconds", "0.2", "--read", "buffered"
    )
    assert done.code == 0, done.err
    buffered, uncached = DeviceOptions(read="buffered"), DeviceOptions(read="uncached")
    assert opened[-2:] == [buffered, uncached]
    assert uncached not in opened[:-1]
    tables = HardwareProfile.load(file).tables
    assert tables is not None
    assert tables.page_cache is not None
    assert [int(ns) for ns in tables.page_cache.ns] == [150_000, 250_000, 450_000]
    assert ", page_cache 0 % of their median" in done.out
    run = crisp("calibrate", "--store", tmp_path, "--out", tmp_path / "x.toml", "--read", "bufered")
    assert run.err.startswith("error: unknown way of reading 'bufered'; did you mean 'buffered'?")


def test_mistakes_are_told_before_anything_is_measured(
    crisp: Callable, opened: list[DeviceOptions], tmp_path: Path
) -> None:
    for options, line in [
        (("--seconds", "0"), "error: seconds 0: must be above 0"),
        (("--device", "cdu"), "error: unknown device 'cdu'"),
        (("--threads", "0"), "error: threads 0: must be at least 1"),
        (("--threads", 2**31), "error: threads 2147483648: must be at least 1 and at most 1024"),
        (("--link-limit", "0.5B/s"), "error: --link-limit: '0.5B/s' is less than 1 byte a second"),
        (("--link-limit", "1kB/s"), "error: link limit 1000: it would take 136,249 seconds"),
        (("--link-limit", "fast"), "error: --link-limit: 'fast' is not a size"),
        (("--out", tmp_path / "no" / "x.toml"), "error: --out"),
    ]:
        done = crisp("calibrate", "--store", tmp_path, "--out", tmp_path / "x.toml", *options)
        assert (done.code, done.out) == (2, "")
        assert done.err.startswith(line)
    assert opened == []


def test_a_link_too_slow_for_the_time_is_told(
    crisp: Callable, opened: list[DeviceOptions], tmp_path: Path
) -> None:
    """Half a pool of 128 MB and 6 x (1 + 2 + 4) blocks of 196,608 bytes: 136 MB."""
    line = ("calibrate", "--store", tmp_path, "--seconds", "0.2")
    assert crisp(*line, "--out", tmp_path / "x.toml", "--link-limit", "1GB/s").err == ""
    done = crisp(*line, "--out", tmp_path / "y.toml", "--link-limit", "200MB/s")
    assert (done.code, done.err) == (
        0,
        "--link-limit 200MB/s: to load everything once takes 1 seconds, more than --seconds 0.2\n",
    )
