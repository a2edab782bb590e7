"""INA3221 sensors on a folder that looks like the kernel's."""

from __future__ import annotations

import os
from pathlib import Path

import pytest

import crisp.hw.telemetry
from crisp.hw.telemetry.ina3221 import Ina3221
from tests.hw.telemetry.clocks import Clock

Rails = dict[str, tuple[int, int]]  # mV, mA

NANO: Rails = {"VDD_IN": (5000, 2000), "VDD_CPU_GPU_CV": (5000, 900), "VDD_SOC": (5000, 500)}
AGX: tuple[Rails, Rails] = (
    {"VDD_GPU_SOC": (19_000, 1000), "VDD_CPU_CV": (19_000, 300), "VIN_SYS_5V0": (5000, 600)},
    {"NC": (0, 0), "VDDQ_VDD2_1V8AO": (5000, 200)},
)


def sensor(root: Path, number: int, rails: Rails, name: str = "ina3221") -> Path:
    """As the driver shows it: a rail to a channel, and a sum of shunt voltages."""
    folder = root / f"hwmon{number}"
    folder.mkdir(parents=True)
    (folder / "name").write_text(f"{name}\n")
    for channel, (rail, values) in enumerate(rails.items(), 1):
        (folder / f"in{channel}_label").write_text(f"{rail}\n")
        put(folder, channel, *values)
    (folder / "in7_label").write_text("sum of shunt voltages\n")
    return folder


def put(folder: Path, channel: int, millivolt: int, milliampere: int) -> None:
    (folder / f"in{channel}_input").write_text(f"{millivolt}\n")
    (folder / f"curr{channel}_input").write_text(f"{milliampere}\n")


@pytest.fixture
def clock() -> Clock:
    return Clock()


@pytest.fixture
def own(tmp_path: Path, clock: Clock) -> Ina3221:
    """One that samples only when it is told to."""
    return Ina3221(tmp_path, interval=1000, clock=clock)


def test_the_modules_input_holds_all_else(tmp_path: Path, own: Ina3221, clock: Clock) -> None:
    """Orin Nano and NX: 10 W, then 20 W, of which the other rails are parts."""
    sensor(tmp_path, 0, {"anything": (12_000, 9000)}, name="ina238")
    folder = sensor(tmp_path, 1, NANO)
    assert (own.probe().source, own.probe().reason) == ("INA3221 VDD_IN", None)
    own.start()
    clock.passes(2)
    put(folder, 1, 5000, 4000)
    own.sample()
    clock.passes(1)
    reading = own.stop()
    assert reading.joules == 2 * 15 + 20
    assert (reading.source, reading.reason) == ("INA3221 VDD_IN", None)
    assert reading.samples == 3
    assert reading.uncertainty_j == 2 * 10 / 2
    assert reading.method == ("voltage times current, sampled every 1000 s, at most 2 s apart")


def test_without_one_the_rails_that_are_parts_of_no_other(
    tmp_path: Path, own: Ina3221, clock: Clock
) -> None:
    """AGX Orin: 19 + 5.7 + 3 W; its memory's watt is in the 3 W of the 5 V rail already."""
    for number, rails in enumerate(AGX):
        sensor(tmp_path, number, rails)
    own.start()
    clock.passes(10)
    reading = own.stop()
    assert reading.joules == pytest.approx(277)
    assert reading.source == "INA3221 VDD_GPU_SOC + VDD_CPU_CV + VIN_SYS_5V0"


def test_a_board_that_is_not_known_is_not_guessed_at(tmp_path: Path, own: Ina3221) -> None:
    sensor(tmp_path, 0, {"VDD_GPU": (19_000, 1000), "VIN_SYS_5V0": (5000, 600), "NC": (0, 0)})
    probe = own.probe()
    assert probe.reason == (
        "which rails make up the whole is not known for this board's: VDD_GPU, VIN_SYS_5V0"
    )
    assert probe.remedy is not None
    assert "VDD_GPU_SOC + VDD_CPU_CV + VIN_SYS_5V0" in probe.remedy


@pytest.mark.parametrize("how", ["gone", "unreadable"])
def test_a_rail_without_a_label_could_be_anything(tmp_path: Path, own: Ina3221, how: str) -> None:
    folder = sensor(tmp_path, 0, NANO)
    if how == "gone":
        (folder / "in1_label").unlink()
    else:
        (folder / "in1_label").write_bytes(b"\xff\xfe")
    reason = own.probe().reason
    assert reason is not None
    assert reason.endswith("this board's: VDD_CPU_GPU_CV, VDD_SOC")


def test_no_sensor_is_no_joules_and_not_none_of_them(
    tmp_path: Path, own: Ina3221, clock: Clock
) -> None:
    for root in (tmp_path / "no", tmp_path):
        probe = Ina3221(root).probe()
        assert probe.reason == f"{root}: has no INA3221 sensor with a named rail"
        assert probe.remedy is not None
        sensor(tmp_path, len(list(tmp_path.iterdir())), NANO, name="nvme")
    own.start()
    clock.passes(1)
    reading = own.stop()
    assert (reading.joules, reading.reason) == (None, probe.reason)


def test_no_current_is_no_joules_and_not_none_of_them(
    tmp_path: Path, own: Ina3221, clock: Clock
) -> None:
    """A shunt that is not there; a part's 0 A beside others that flow is a part that is off."""
    sensor(tmp_path, 0, {"VDD_IN": (5000, 0)})
    own.start()
    clock.passes(5)
    reading = own.stop()
    assert reading.joules is None
    assert reading.reason == "its power was never above 0 W, so it measures nothing here"
    other = tmp_path / "other"
    sensor(other, 0, AGX[0] | {"VDD_CPU_CV": (19_000, 0)})
    off = Ina3221(other, interval=1000, clock=clock)
    off.start()
    clock.passes(5)
    assert off.stop().joules == 110


def test_permission_denied_has_a_remedy(
    tmp_path: Path, own: Ina3221, monkeypatch: pytest.MonkeyPatch
) -> None:
    current = sensor(tmp_path, 0, NANO) / "curr1_input"
    if os.geteuid() == 0:  # root may read everything
        real = Path.read_text

        def read_text(path: Path, *arguments: str) -> str:
            if path == current:
                raise PermissionError(13, "Permission denied", str(path))
            return real(path, *arguments)

        monkeypatch.setattr(Path, "read_text", read_text)
    else:
        current.chmod(0)
    probe = own.probe()
    assert probe.reason == f"{current}: permission denied"
    assert probe.remedy is not None
    assert f"sudo chmod a+r {current}" in probe.remedy


@pytest.mark.parametrize("how", ["gone", "no number", "unpowered"])
def test_a_sensor_that_goes_away_during_a_run_ends_in_a_reason(
    tmp_path: Path, own: Ina3221, clock: Clock, how: str
) -> None:
    folder = sensor(tmp_path, 0, NANO)
    own.start()
    clock.passes(1)
    voltage = folder / "in1_input"
    voltage.unlink()
    told = f"{voltage}: No such file or directory"
    if how == "no number":
        voltage.write_text("\n")
        told = f"{voltage}: is no number"
    elif how == "unpowered":  # a file that is there, and an error when it is read
        voltage.mkdir()
        told = f"{voltage}: Is a directory"
    own.sample()
    clock.passes(1)
    reading = own.stop()
    assert reading.joules is None
    assert reading.reason is not None
    assert reading.reason.startswith(f"was lost during the run: {told}")


def test_on_a_jetson_they_are_asked_before_the_service(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    class Service:
        name = "jtop"
        reason: str | None = None

        def probe(self) -> Service:
            return self

    monkeypatch.setattr(crisp.hw.telemetry, "Ina3221", lambda: Ina3221(tmp_path))
    monkeypatch.setattr(crisp.hw.telemetry, "Jtop", Service)
    assert crisp.hw.telemetry.meter_for("unified").name == "jtop"
    Service.reason = "dead"
    assert (
        crisp.hw.telemetry.meter_for("unified").name == "INA3221"
    )  # whose reason says what is missing
    Service.reason = None
    sensor(tmp_path, 0, NANO)
    assert crisp.hw.telemetry.meter_for("unified").name == "INA3221"
    assert crisp.hw.telemetry.meter_for("cpu").name == "RAPL"
