"""RAPL on a folder that looks like the kernel's."""

from __future__ import annotations

import os
import threading
from pathlib import Path

import pytest

from crisp.hw.telemetry.rapl import Rapl

SPAN = 262_143_328_850  # µJ, as of many processors


class Clock:
    """Two looks a sample, 1 ms apart unless told; between samples tests let seconds pass."""

    def __init__(self, step: int = 1_000_000) -> None:
        self.now, self.step = 0, step

    def __call__(self) -> int:
        self.now += self.step
        return self.now


def zone(root: Path, folder: str, name: str, microjoules: int, span: int = SPAN) -> Path:
    own = root / folder
    own.mkdir(parents=True)
    (own / "name").write_text(f"{name}\n")
    (own / "max_energy_range_uj").write_text(f"{span}\n")
    put(own, microjoules)
    return own


def put(own: Path, microjoules: int) -> None:
    """Never half of it, for a thread may be reading."""
    (own / "new").write_text(f"{microjoules}\n")
    (own / "new").replace(own / "energy_uj")


@pytest.fixture
def server(tmp_path: Path) -> dict[str, Path]:
    """Two packages with memory of their own, their parts, the platform, and the doubles."""
    (tmp_path / "intel-rapl").mkdir()  # the driver
    names = {
        "intel-rapl:0": "package-0", "intel-rapl:0:0": "core", "intel-rapl:0:1": "dram",
        "intel-rapl:1": "package-1", "intel-rapl:1:0": "uncore", "intel-rapl:1:1": "dram",
        "intel-rapl:2": "psys", "intel-rapl-mmio:0": "package-0",
    }  # fmt: skip
    return {folder: zone(tmp_path, folder, name, 500) for folder, name in names.items()}


def meter(root: Path, clock: Clock | None = None) -> Rapl:
    """One that samples only when it is told to."""
    return Rapl(root, interval=1000, clock=clock or Clock())


def test_packages_and_their_memory_are_summed_and_nothing_twice(
    tmp_path: Path, server: dict[str, Path]
) -> None:
    clock = Clock()
    own = meter(tmp_path, clock)
    names = "RAPL package-0 + package-0 dram + package-1 + package-1 dram"
    assert (own.probe().source, own.probe().reason) == (names, None)
    own.start()
    clock.now += 200 * 10**9
    for power, folder in enumerate(server.values()):
        put(folder, 500 + 1_000_000 * 10**power)
    reading = own.stop()
    assert reading.joules == 1 + 100 + 1_000 + 100_000
    assert (reading.source, reading.reason) == (names, None)


def test_a_counter_that_begins_anew_goes_on(tmp_path: Path) -> None:
    package = zone(tmp_path, "intel-rapl:0", "package-0", SPAN - 2_000_000)
    clock = Clock()
    own = meter(tmp_path, clock)
    own.start()
    clock.now += 1_000_000_000
    put(package, 3_000_000)  # 2 J to the end, 3 from the start
    own.sample()
    clock.now += 3_000_000_000
    put(package, 7_000_000)
    reading = own.stop()
    assert reading.joules == 9.0
    assert reading.samples == 3
    assert reading.window_ns == 4_004_000_000  # each sample takes 2 ms of this clock
    # 9 J in 4.004 s, and 2 x (1 ms between updates + 1 ms to read)
    assert reading.uncertainty_j == pytest.approx(9 / 4.004 * 0.004)
    assert reading.method == "energy counters, read every 1000 s, at most 3 s apart"


def test_a_counter_that_nobody_read_for_too_long_is_not_believed(tmp_path: Path) -> None:
    """262 kJ last 262 s at the 1 kW that no package draws."""
    package = zone(tmp_path, "intel-rapl:0", "package-0", 0)
    clock = Clock()
    for seconds, believed in ((262, True), (263, False)):
        own = meter(tmp_path, clock)
        own.start()
        put(package, 1_000_000 * seconds)
        clock.now += seconds * 10**9
        reading = own.stop()
        assert (reading.joules is not None) is believed
    assert reading.reason is not None
    assert reading.reason.startswith("package-0: was not read for 263 s")


def test_a_counter_that_was_set_back_is_not_one_that_began_anew(tmp_path: Path) -> None:
    """As after a suspension: 5 J, then 1 J, is no way round 262 kJ in a second."""
    package = zone(tmp_path, "intel-rapl:0", "package-0", 5_000_000)
    clock = Clock()
    own = meter(tmp_path, clock)
    own.start()
    clock.now += 998_000_000  # and a sample's 2 ms
    put(package, 1_000_000)
    reading = own.stop()
    assert reading.joules is None
    assert reading.reason is not None
    assert reading.reason.startswith("package-0: rose by 2.62e+05 J in 1 s, more than")


def test_a_package_that_never_moves_has_no_joules_and_not_none_of_them(
    tmp_path: Path, server: dict[str, Path]
) -> None:
    """Memory that never does is not named among what was read."""
    own = meter(tmp_path)
    own.start()
    put(server["intel-rapl:0"], 1_000_500)
    reading = own.stop()
    assert (reading.joules, reading.uncertainty_j) == (None, None)
    assert reading.reason == "package-1: its counter did not move, so it counts nothing here"
    own.start()
    for folder, joules in (("intel-rapl:0", 2), ("intel-rapl:1", 3), ("intel-rapl:1:1", 1)):
        own_zone = server[folder]
        put(own_zone, int((own_zone / "energy_uj").read_text()) + joules * 1_000_000)
    reading = own.stop()
    assert reading.joules == 6
    assert reading.source == "RAPL package-0 + package-1 + package-1 dram"


def test_windows_do_not_add_up(tmp_path: Path) -> None:
    package = zone(tmp_path, "intel-rapl:0", "package-0", 0)
    own = meter(tmp_path)
    for joules in (1, 2):
        own.start()
        put(package, int((package / "energy_uj").read_text()) + joules * 1_000_000)
        assert own.stop().joules == joules


def test_no_counters_is_no_joules_and_not_none_of_them(tmp_path: Path) -> None:
    zone(tmp_path / "other", "intel-rapl:0", "psys", 0)
    for root in (tmp_path, tmp_path / "no", tmp_path / "other"):
        own = meter(root)
        probe = own.probe()
        assert probe.reason == f"{root}: has no RAPL counters of a package"
        assert probe.remedy is not None
        own.start()
        reading = own.stop()
        assert (reading.joules, reading.samples, reading.window_ns) == (None, 0, 0)
        assert reading.reason == probe.reason


def test_permission_denied_has_a_remedy(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    package = zone(tmp_path, "intel-rapl:0", "package-0", 0)
    counter = package / "energy_uj"
    if os.geteuid() == 0:  # root may read everything
        real = Path.read_text

        def read_text(path: Path, *arguments: str) -> str:
            if path == counter:
                raise PermissionError(13, "Permission denied", str(path))
            return real(path, *arguments)

        monkeypatch.setattr(Path, "read_text", read_text)
    else:
        counter.chmod(0)
    own = meter(tmp_path)
    probe = own.probe()
    assert probe.reason == f"{counter}: permission denied"
    assert probe.remedy is not None
    assert "sudo chmod a+r" in probe.remedy
    own.start()
    assert own.stop().reason == probe.reason


@pytest.mark.parametrize("how", ["gone", "no number"])
def test_a_counter_lost_during_a_run_ends_in_a_reason(tmp_path: Path, how: str) -> None:
    package = zone(tmp_path, "intel-rapl:0", "package-0", 0)
    own = meter(tmp_path)
    own.start()
    counter = package / "energy_uj"
    if how == "gone":
        counter.unlink()
        told = f"{counter}: No such file or directory"
    else:
        counter.write_text("")
        told = "a counter is no number"
    own.sample()
    put(package, 10)  # coming back mends nothing: what was drawn meanwhile is unknown
    reading = own.stop()
    assert reading.joules is None
    assert reading.reason is not None
    assert reading.reason.startswith(f"a counter was lost during the run: {told}")


def test_a_thread_sees_a_counter_go_all_round_and_ends(tmp_path: Path) -> None:
    """10 J to go round; 10 ms between samples, in which no more than 10 J are believed."""
    package = zone(tmp_path, "intel-rapl:0", "package-0", 9_000_000, span=10_000_000)
    ticks, clock = threading.Semaphore(0), Clock(step=5_000_000)

    def counting() -> int:
        ticks.release()
        return clock()

    own = Rapl(tmp_path, interval=0.001, clock=counting)
    own.start()
    for rounds in range(3):
        for value in (4_000_000, 9_000_000):
            put(package, value)
            while ticks.acquire(blocking=False):
                pass
            for _ in range(4):  # two looks at the clock a sample: a whole one at least
                assert ticks.acquire(timeout=20), rounds
    reading = own.stop()
    assert reading.joules == 30
    assert reading.samples >= 7
    assert "crisp-rapl" not in {thread.name for thread in threading.enumerate()}
