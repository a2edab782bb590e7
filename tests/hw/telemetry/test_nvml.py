"""NVML through the real binding, on a library that a test tells what to answer."""

from __future__ import annotations

import ctypes
import os
import shutil
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path
from types import ModuleType

import pytest

import crisp.hw.telemetry
from crisp.hw.telemetry.nvml import Nvml, uuids
from crisp.hw.telemetry.sampler import UnreadableMeter
from tests.hw.telemetry.clocks import Clock

pynvml = pytest.importorskip("pynvml", reason="needs nvidia-ml-py")

UUIDS = tuple(f"GPU-00000000-0000-0000-0000-{number:012}" for number in range(4))
GPU = f"NVML Stub 0 ({UUIDS[0]})"
COUNTER, FIELD, AVERAGE = (
    f"nvmlDeviceGet{name}" for name in ("TotalEnergyConsumption", "FieldValues", "PowerUsage")
)
NOT_SUPPORTED, NO_PERMISSION, LOST = 3, 4, 15


@pytest.fixture(scope="session")
def built(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The stub, named as the driver's library is."""
    compiler = shutil.which("cc")
    if compiler is None:
        pytest.skip("needs a C compiler, cc")
    library = tmp_path_factory.mktemp("nvml") / "libnvidia-ml.so.1"
    source = Path(__file__).with_name("nvml_stub.c")
    subprocess.run(
        [compiler, "-shared", "-fPIC", "-Wall", "-Werror", "-o", library, source], check=True
    )
    return library


class Machine:
    """GPUs that draw what a test says while time passes as it says."""

    def __init__(self, library: ctypes.CDLL) -> None:
        self.library, self.clock = library, Clock()

    def meter(self, uuid: str | None = None) -> Nvml:
        return Nvml(uuid, interval=1000, clock=self.clock)

    def fail(self, *names: str, code: int) -> None:
        for name in names:
            self.library.stub_fail(name.encode(), code)

    def power(self, watts: float, gpu: int = 0) -> None:
        self.library.stub_power(gpu, round(watts * 1000))

    def counter(self, millijoule: int, bits: int = 64) -> None:
        self.library.stub_counter(0, ctypes.c_ulonglong(millijoule), bits)

    def passes(self, seconds: float) -> None:
        self.clock.passes(seconds)
        self.library.stub_pass(round(seconds * 1000))


@pytest.fixture
def machine(built: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Machine]:
    """One GPU, of 20 W. The binding has the stub in place of what it would load."""
    library = ctypes.CDLL(str(built))
    library.stub_reset(1)
    monkeypatch.setattr(pynvml, "nvmlLib", library)
    monkeypatch.setattr(pynvml, "_nvmlGetFunctionPointer_cache", {})
    yield Machine(library)
    assert library.stub_begun() == 0, "NVML was not ended as often as it was begun"


def test_joules_of_the_counter(machine: Machine) -> None:
    own = machine.meter()
    assert (own.probe().source, own.probe().reason) == (GPU, None)
    own.start()
    machine.passes(0.5)
    own.sample()
    machine.power(60)
    machine.passes(1)
    reading = own.stop()
    assert reading.joules == 20 * 0.5 + 60
    assert (reading.source, reading.reason) == (GPU, None)
    assert reading.method == "energy counter, read every 1000 s, at most 1 s apart"
    assert (reading.samples, reading.window_ns) == (3, 1_500_000_000)
    assert reading.uncertainty_j == pytest.approx(70 / 1.5 * 0.2)  # 100 ms at either end


def test_without_a_counter_the_power_now(machine: Machine) -> None:
    machine.fail(COUNTER, code=NOT_SUPPORTED)
    own = machine.meter()
    own.start()
    machine.passes(2)
    machine.power(40)
    own.sample()
    machine.passes(1)
    reading = own.stop()
    assert reading.joules == 2 * 30 + 40
    assert reading.source == GPU
    assert reading.method.startswith("instant power (field 186), sampled every 1000 s, at most 2 s")
    assert reading.uncertainty_j == 2 * 20 / 2 + 0.1 * 20


@pytest.mark.parametrize("how", [FIELD, "field"])
def test_without_that_the_average_power(machine: Machine, how: str) -> None:
    """Whether NVML refuses the whole call or the one field."""
    machine.fail(COUNTER, how, code=NOT_SUPPORTED)
    own = machine.meter()
    own.start()
    machine.passes(2)
    reading = own.stop()
    assert reading.joules == 40
    assert reading.method.startswith("average power (mean of about a second), sampled")
    own.start()
    machine.passes(1)
    reading = own.stop()
    assert reading.joules is None
    assert reading.reason == "a window of 1 s is too short: a value is up to 1 s old"


def test_nothing_supported_is_no_joules_and_not_none_of_them(machine: Machine) -> None:
    """As on a Jetson."""
    machine.fail(COUNTER, FIELD, AVERAGE, code=NOT_SUPPORTED)
    probe = machine.meter().probe()
    assert probe.reason == (
        f"{GPU}: energy counter: Not Supported; instant power: Not Supported; "
        "average power: Not Supported"
    )
    assert probe.remedy is not None
    assert "INA3221" in probe.remedy
    own = machine.meter()
    own.start()
    machine.passes(5)
    reading = own.stop()
    assert (reading.joules, reading.reason, reading.samples) == (None, probe.reason, 0)


def test_a_counter_one_may_not_read_is_no_reason_not_to_read_power(machine: Machine) -> None:
    machine.fail(COUNTER, code=NO_PERMISSION)
    own = machine.meter()
    own.start()
    machine.passes(5)
    assert own.stop().joules == 100


@pytest.mark.parametrize(
    ("function", "code", "told", "remedy"),
    [
        ("nvmlInitWithFlags", NO_PERMISSION, "NVML: Insufficient Permissions", "run as root"),
        ("nvmlInitWithFlags", 9, "NVML: Driver Not Loaded", "modprobe nvidia"),
        ("nvmlInitWithFlags", 18, "NVML: RM has detected an NVML/RM version mismatch.", "restart"),
        ("nvmlDeviceGetName", LOST, "NVML: GPU is lost", "dmesg | grep Xid"),
        (COUNTER, LOST, "NVML: GPU is lost", "dmesg | grep Xid"),
    ],
)
def test_what_stands_in_the_way_has_a_remedy(
    machine: Machine, function: str, code: int, told: str, remedy: str
) -> None:
    machine.fail(function, code=code)
    own = machine.meter()
    probe = own.probe()
    assert probe.reason == told
    assert probe.remedy is not None
    assert remedy in probe.remedy
    own.start()
    machine.passes(1)
    assert (own.stop().joules, own.stop().reason) == (None, told)


@pytest.mark.parametrize("counted", [True, False])
@pytest.mark.parametrize(
    ("code", "told"),
    [(LOST, "GPU is lost"), (NO_PERMISSION, "Insufficient Permissions")],
)
def test_a_gpu_lost_during_a_run_ends_in_a_reason(
    machine: Machine, counted: bool, code: int, told: str
) -> None:
    if not counted:
        machine.fail(COUNTER, code=NOT_SUPPORTED)
    own = machine.meter()
    own.start()
    machine.passes(2)
    machine.fail(COUNTER if counted else FIELD, code=code)
    own.sample()
    machine.fail(COUNTER, FIELD, code=0)  # coming back mends nothing
    machine.passes(2)
    reading = own.stop()
    assert reading.joules is None
    assert reading.reason is not None
    assert reading.reason.endswith(f"was lost during the run: NVML: {told}")


def test_a_counter_of_32_bits_that_begins_anew_goes_on(machine: Machine) -> None:
    machine.counter(2**32 - 5000, bits=32)
    own = machine.meter()
    own.start()
    for _ in range(3):
        machine.passes(1)
        own.sample()
    machine.passes(1)
    assert own.stop().joules == 80


@pytest.mark.parametrize("before", [7_000_000, 2**32 + 7_000_000])
def test_a_counter_that_was_set_back_is_not_one_that_began_anew(
    machine: Machine, before: int
) -> None:
    """As when the driver is loaded anew; the second would seem to have come round from 2^32 mJ."""
    machine.counter(before)
    own = machine.meter()
    own.start()
    machine.counter(7_000_500)
    if before == 7_000_000:
        machine.counter(0)
    machine.passes(1)
    reading = own.stop()
    assert reading.joules is None
    assert reading.reason is not None
    assert reading.reason.endswith("in 1 s, more than 3000 W: its counter was set back")


def test_a_counter_that_nobody_read_for_too_long_is_not_believed(machine: Machine) -> None:
    """4.29 MJ last 1431 s at 3 kW."""
    for seconds, believed in ((1431, True), (1432, False)):
        own = machine.meter()
        own.start()
        machine.passes(seconds)
        reading = own.stop()
        assert (reading.joules is not None) is believed
    assert reading.reason is not None
    assert "was not read for 1.43e+03 s" in reading.reason


def test_a_counter_that_stands_still_counts_nothing(machine: Machine) -> None:
    machine.power(0)
    own = machine.meter()
    own.start()
    machine.passes(5)
    reading = own.stop()
    assert reading.joules is None
    assert reading.reason == f"{GPU}: its counter did not move, so it counts nothing here"
    machine.power(20)
    own.start()
    machine.passes(0.1)
    assert own.stop().reason == "a window of 0.1 s is too short: counters move every 0.1 s"


def test_each_gpu_has_a_meter_by_its_uuid(machine: Machine) -> None:
    machine.library.stub_reset(3)
    assert uuids() == UUIDS[:3]
    machine.power(70, gpu=2)
    named = [meter for meter in crisp.hw.telemetry.meters() if isinstance(meter, Nvml)]
    assert [meter.name for meter in named] == [f"NVML {uuid}" for uuid in UUIDS[:3]]
    for number, joules in ((1, 100), (2, 350)):
        own = machine.meter(UUIDS[number])
        own.start()
        machine.passes(5)
        reading = own.stop()
        assert (reading.joules, reading.source) == (
            joules,
            f"NVML Stub {number} ({UUIDS[number]})",
        )
    unknown = machine.meter(UUIDS[3]).probe()
    assert unknown.reason == "NVML: Not Found"
    assert unknown.remedy is not None
    assert "nvidia-smi -L" in unknown.remedy


def test_of_several_gpus_one_has_to_be_named(machine: Machine) -> None:
    for number in (2, 0):
        machine.library.stub_reset(number)
        probe = machine.meter().probe()
        assert probe.reason is not None
        assert probe.reason.startswith(f"this machine has {number} NVIDIA GPUs")


def test_of_several_gpus_the_one_that_torch_uses(
    machine: Machine, monkeypatch: pytest.MonkeyPatch
) -> None:
    import crisp.extras

    class Cuda:
        @staticmethod
        def is_available() -> bool:
            return True

        @staticmethod
        def current_device() -> int:
            return 0

        @staticmethod
        def get_device_properties(device: int) -> object:
            # CUDA's first, NVML's second; torch leaves out what NVML begins it with
            return type("Properties", (), {"uuid": UUIDS[1].removeprefix("GPU-")})

    machine.library.stub_reset(2)
    monkeypatch.setattr(
        crisp.extras, "import_extra", lambda name: type("Torch", (), {"cuda": Cuda})
    )
    assert crisp.hw.telemetry.meter_for("cuda").probe().source == f"NVML Stub 1 ({UUIDS[1]})"
    machine.library.stub_reset(1)
    assert crisp.hw.telemetry.meter_for("cuda").probe().source == GPU


def test_the_library_is_found_where_the_driver_would_have_it(built: Path) -> None:
    """In a process that loads it by its name, as users' do; energy counts from the first look."""
    code = (
        "import crisp.hw.telemetry.nvml as own, ctypes\n"
        "ctypes.CDLL('libnvidia-ml.so.1').stub_reset(1)\n"
        "print(own.Nvml().probe().source)"
    )
    done = subprocess.run(
        [sys.executable, "-c", code],
        env={**os.environ, "LD_LIBRARY_PATH": str(built.parent)},
        cwd=Path(__file__).parents[3],
        capture_output=True,
        text=True,
        check=True,
    )
    assert done.stdout.strip() == GPU


def test_no_driver_is_a_reason_with_a_remedy(monkeypatch: pytest.MonkeyPatch) -> None:
    def absent(name: str) -> ctypes.CDLL:
        raise OSError(f"{name}: cannot open shared object file")

    monkeypatch.setattr(pynvml, "nvmlLib", None)
    monkeypatch.setattr(pynvml, "CDLL", absent)
    probe = Nvml().probe()
    assert probe.reason == "NVML: NVML Shared Library Not Found"
    assert probe.remedy is not None
    assert "install NVIDIA's driver" in probe.remedy
    assert [meter.name for meter in crisp.hw.telemetry.meters()] == [
        "RAPL",
        "NVML",
        "INA3221",
        "jtop",
    ]
    assert crisp.hw.telemetry.meter_for("cuda").probe().reason == probe.reason


def test_no_binding_is_a_reason_with_a_remedy(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "pynvml", None)
    probe = Nvml().probe()
    assert probe.reason is not None
    assert probe.reason.startswith("nvidia-ml-py cannot be imported")
    assert probe.remedy is not None
    assert "pip install nvidia-ml-py" in probe.remedy


def test_an_old_binding_is_a_reason_with_a_remedy(monkeypatch: pytest.MonkeyPatch) -> None:
    """As nvidia-ml-py3 7.352.0, of 2018, which knows neither energy counters nor fields."""
    old = ModuleType("pynvml")
    old.__file__ = "/old/pynvml.py"
    old.nvmlInit = lambda: None  # type: ignore[attr-defined]
    monkeypatch.setitem(sys.modules, "pynvml", old)
    probe = Nvml().probe()
    assert probe.reason == (
        "/old/pynvml.py: an old binding, without nvmlDeviceGetTotalEnergyConsumption"
    )
    assert probe.remedy == "pip uninstall nvidia-ml-py3 pynvml, then pip install nvidia-ml-py"


@pytest.fixture
def real_gpu() -> str:
    """The UUID of the first that NVML tells of."""
    try:
        return uuids()[0]
    except (UnreadableMeter, IndexError) as error:
        pytest.skip(f"needs an NVIDIA GPU: {error}")


@pytest.mark.gpu
@pytest.mark.parametrize("refused", [(), (COUNTER,), (COUNTER, FIELD)])
def test_a_real_gpu_draws_power(
    real_gpu: str, refused: tuple[str, ...], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Whichever way it is read: more than nothing, and less than no GPU draws."""

    def refuse(*arguments: object) -> None:
        raise pynvml.NVMLError(NOT_SUPPORTED)

    for function in refused:
        monkeypatch.setattr(pynvml, function, refuse)
    own = Nvml(real_gpu)
    if own.probe().reason is not None:
        pytest.skip(str(own.probe().reason))
    own.start()
    time.sleep(2.5)
    reading = own.stop()
    assert reading.reason is None
    assert reading.joules is not None
    assert 1 < reading.joules / reading.window_ns * 1e9 < 3000
    assert reading.samples > 5
    assert real_gpu in reading.source
    names = ("energy counter", "instant power", "average power")
    assert reading.method.startswith(names[len(refused) :])
    assert 0 <= (reading.uncertainty_j or 0) < reading.joules
