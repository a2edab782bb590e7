"""jtop's real client, in its process, on a service of the test's."""

from __future__ import annotations

import json
import subprocess
import sys
import threading
from collections.abc import Callable, Iterator
from importlib.util import find_spec
from pathlib import Path
from tempfile import TemporaryDirectory

import pytest

import crisp.hw.telemetry.jtop
from crisp.hw.telemetry.jtop import CHILD, Jtop
from tests.hw.telemetry.clocks import Clock

NANO = {"VDD_IN": 10_000, "VDD_CPU_GPU_CV": 4500, "VDD_SOC": 2500}  # mW
AGX = {"VDD_GPU_SOC": 19_000, "VDD_CPU_CV": 5700, "VIN_SYS_5V0": 3000, "VDDQ_VDD2_1V8AO": 1000}

needs_client = pytest.mark.skipif(find_spec("jtop") is None, reason="needs jetson-stats (AGPL)")


def published(rails: dict[str, int] | None) -> dict[str, object]:
    """As the service does: a rail that it takes for the total apart, by name; else all added up.
    Of no sensors, nothing.
    """
    if rails is None:
        return {}
    values = {
        name: {"volt": 5000, "curr": power // 5, "power": power, "avg": power, "online": True}
        for name, power in rails.items()
    }
    if "VDD_IN" in values:
        return {"tot": values.pop("VDD_IN") | {"name": "VDD_IN"}, "rail": values}
    return {"tot": {"power": sum(rails.values()), "avg": 0}, "rail": values}


class Service:
    """A test's jtop.service."""

    def __init__(self, path: Path, version: str, rails: dict[str, int] | None) -> None:
        self.process = subprocess.Popen(
            [sys.executable, "-P", Path(__file__).with_name("jtop_service.py"), path, version],
            stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True,
        )  # fmt: skip
        self.power(rails)
        assert self.process.stdout is not None
        assert self.process.stdout.readline() == "ready\n"

    def order(self, what: str) -> None:
        assert self.process.stdin is not None
        self.process.stdin.write(f"{what}\n")
        self.process.stdin.flush()

    def power(self, rails: dict[str, int] | None) -> None:
        self.order("power" + json.dumps(published(rails)))

    def kill(self) -> None:
        self.process.kill()
        self.process.communicate()


Starts = Callable[..., Service]


@pytest.fixture
def socket() -> Iterator[Path]:
    """Of a short name: more than 107 bytes are none of a socket's."""
    with TemporaryDirectory() as folder:
        yield Path(folder) / "jtop.sock"


@pytest.fixture
def service(socket: Path) -> Iterator[Starts]:
    running = []

    def start(version: str = "same", rails: dict[str, int] | None = NANO) -> Service:
        running.append(Service(socket, version, rails))
        return running[-1]

    yield start
    for each in running:
        each.kill()


@pytest.fixture
def clock() -> Clock:
    return Clock()


@pytest.fixture
def own(tmp_path: Path, socket: Path, clock: Clock) -> Jtop:
    """Whose client looks for the service at ``socket``; it samples only when it is told to."""
    child = tmp_path / "child.py"
    child.write_text(
        "import runpy, sys, jtop.service\n"
        f"jtop.service.JTOP_PIPE = {str(socket)!r}\n"
        f"runpy.run_path({str(CHILD)!r}, run_name='__main__')\n"
    )
    return Jtop(interval=1000, clock=clock, child=child, timeout=60)


def until(done: Callable[[], bool]) -> None:
    """Wait for what the child will say, a minute at most."""
    waits = threading.Event()
    for _ in range(6000):
        if done():
            return
        waits.wait(0.01)
    raise AssertionError("never")


@needs_client
def test_joules_of_the_total(own: Jtop, service: Starts, clock: Clock) -> None:
    """10 W, then 20 W from some moment on that the clock does not see."""
    running = service()
    assert (own.probe().source, own.probe().reason) == ("jtop VDD_IN", None)
    own.start()
    clock.passes(2)
    own.sample()
    running.power(NANO | {"VDD_IN": 20_000})
    until(lambda: own._window._watts() == 20)
    clock.passes(1)
    reading = own.stop()
    assert reading.joules == 2 * 10 + 15
    assert (reading.source, reading.reason) == ("jtop VDD_IN", None)
    assert reading.samples == 3
    assert reading.uncertainty_j == 10 / 2 + 0.5 * 10
    assert reading.method == (
        "power by a service that measures every 0.5 s, sampled every 1000 s, at most 2 s apart"
    )


@needs_client
def test_rails_that_are_parts_of_others_are_not_added_up(
    own: Jtop, service: Starts, clock: Clock
) -> None:
    """AGX Orin: jtop's own total of 28.7 W counts the memory's watt twice."""
    service(rails=AGX)
    own.start()
    clock.passes(10)
    reading = own.stop()
    assert reading.joules == pytest.approx(277)
    assert reading.source == "jtop VDD_GPU_SOC + VDD_CPU_CV + VIN_SYS_5V0"


@needs_client
def test_a_board_that_is_not_known_is_not_guessed_at(own: Jtop, service: Starts) -> None:
    service(rails={"VDD_GPU": 9000})
    reason = own.probe().reason
    assert reason == "which rails make up the whole is not known for this board's: VDD_GPU"


@needs_client
def test_no_power_is_no_joules_and_not_none_of_them(
    own: Jtop, service: Starts, clock: Clock
) -> None:
    service(rails={"VDD_IN": 0})
    own.start()
    clock.passes(10)
    assert own.stop().joules is None


@needs_client
@pytest.mark.parametrize("outlived", [False, True])
def test_a_dead_service(own: Jtop, service: Starts, clock: Clock, outlived: bool) -> None:
    """None was ever started; or its socket outlived it."""
    if outlived:
        service().kill()
    probe = own.probe()
    assert probe.reason == "the jtop service is dead: The jtop.service is not active."
    assert probe.remedy is not None
    assert "sudo jtop --install-service" in probe.remedy  # as this client says
    own.start()
    clock.passes(1)
    reading = own.stop()
    assert (reading.joules, reading.reason) == (None, probe.reason)


@needs_client
def test_a_service_without_sensors(own: Jtop, service: Starts) -> None:
    """As on a board of which it finds none: it publishes power, and there is nothing in it."""
    service(rails=None)
    reason = own.probe().reason
    assert reason == "which rails make up the whole is not known for this board's: none with a name"


@needs_client
def test_a_mute_service(own: Jtop, service: Starts) -> None:
    """Its client would wait for ever."""
    service("mute")
    own._timeout = 3
    probe = own.probe()
    assert probe.reason == ("the jtop service accepts a connection, but did not answer within 3 s")
    assert probe.remedy is not None
    assert "restart" in probe.remedy


@needs_client
def test_a_service_of_another_version(own: Jtop, service: Starts) -> None:
    service("3.1.4")
    probe = own.probe()
    assert probe.reason is not None
    assert probe.reason.startswith(
        "client and service do not fit together: Mismatch version jtop service: [3.1.4] and client"
    )
    assert probe.remedy is not None
    assert "sudo jtop --install-service" in probe.remedy  # as this client says


@needs_client
@pytest.mark.parametrize(
    ("how", "told"), [("stops", "stands still: no new values for"), ("is killed", "was lost: ")]
)
def test_a_service_that_fails_during_a_run_ends_in_a_reason(
    own: Jtop, service: Starts, clock: Clock, how: str, told: str
) -> None:
    """Its client hands out the last values for ever when it merely stops."""
    running = service()
    own.start()
    clock.passes(1)
    own.sample()
    if how == "stops":
        running.order("stop")
    else:
        running.kill()
    client = own._window._watts.func.__self__
    until(lambda: client._ended is not None)
    clock.passes(1)
    reading = own.stop()
    assert reading.joules is None
    assert reading.reason is not None
    assert reading.reason.startswith("was lost during the run: the jtop service")
    assert told in reading.reason, reading.reason


@needs_client
def test_the_client_ends_with_its_window(own: Jtop, service: Starts) -> None:
    service()
    own.start()
    process = own._window._watts.func.__self__._process
    assert process.poll() is None
    own.stop()
    assert process.poll() is not None
    assert "crisp-jtop-child" not in {thread.name for thread in threading.enumerate()}


@needs_client
def test_its_process_alone_has_imported_it(own: Jtop, service: Starts) -> None:
    """It sets multiprocessing to fork, and its licence is the AGPL."""
    service()
    assert own.probe().reason is None
    assert "jtop" not in sys.modules


@needs_client
def test_the_module_of_the_same_name_here_is_not_taken_for_it() -> None:
    """Whatever this machine has: the child has imported the client and asked for the service."""
    assert (Jtop(timeout=60).probe().reason or "the jtop service").startswith("the jtop service")


# Without the client: what its process says, said by another.


def says(tmp_path: Path, clock: Clock, monkeypatch: pytest.MonkeyPatch, *lines: object) -> Jtop:
    """One whose client is a program that says these lines, and stays."""
    child = tmp_path / "child.py"
    text = "".join(json.dumps(line) + "\n" for line in lines)
    child.write_text(
        f"import sys\nsys.stdout.write({text!r})\nsys.stdout.flush()\nsys.stdin.read()"
    )
    monkeypatch.setattr(crisp.hw.telemetry.jtop, "find_spec", lambda name: name)
    return Jtop(interval=1000, clock=clock, child=child, timeout=60)


def test_a_client_that_says_nothing_is_not_believed_for_ever(
    tmp_path: Path, clock: Clock, monkeypatch: pytest.MonkeyPatch
) -> None:
    own = says(
        tmp_path, clock, monkeypatch,
        {"client": "1"}, {"power": published(NANO), "interval": 0.5},
    )  # fmt: skip
    own.start()
    clock.passes(10)
    own.sample()
    clock.passes(0.1)
    reading = own.stop()
    assert reading.joules is None
    assert reading.reason == "was lost during the run: its client said nothing for 10 s"


def test_a_rail_that_goes_away_during_a_run_ends_in_a_reason(
    tmp_path: Path, clock: Clock, monkeypatch: pytest.MonkeyPatch
) -> None:
    own = says(
        tmp_path, clock, monkeypatch,
        {"client": "1"}, {"power": published(NANO), "interval": 0.5},
    )  # fmt: skip
    own.start()
    client = own._window._watts.func.__self__
    client._power = published({"VDD_SOC": 1})
    clock.passes(1)
    assert own.stop().reason == "was lost during the run: VDD_IN is no longer among the rails"


def test_a_client_that_ends_is_a_reason(
    tmp_path: Path, clock: Clock, monkeypatch: pytest.MonkeyPatch
) -> None:
    own = says(tmp_path, clock, monkeypatch)
    own._child.write_text("raise SystemExit(1)")
    assert own.probe().reason == "its client ended without a word"


@pytest.mark.parametrize(
    ("kind", "text", "told", "remedy"),
    [
        ("JtopException", "I can't access jtop.service.\nLog out.", "permission denied", "usermod"),
        ("JtopException", "Authentication with it failed", "do not fit", "same version"),
        ("ModuleNotFoundError", "No module named 'smbus2'", "cannot be imported", "jetson"),
        ("EOFError", "EOFError", "was lost: EOFError", "restart"),
    ],
)
def test_what_the_client_fails_with_is_told_apart(
    tmp_path: Path, clock: Clock, monkeypatch: pytest.MonkeyPatch,
    kind: str, text: str, told: str, remedy: str,
) -> None:  # fmt: skip
    own = says(tmp_path, clock, monkeypatch, {"client": "1"}, {"error": text, "kind": kind})
    probe = own.probe()
    assert probe.reason is not None
    assert told in probe.reason
    assert probe.remedy is not None
    assert remedy in probe.remedy


def test_no_client_is_a_reason_with_a_remedy(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(crisp.hw.telemetry.jtop, "find_spec", lambda name: None)
    probe = Jtop().probe()
    assert probe.reason == "jetson-stats is not installed"
    assert probe.remedy is not None
    assert "'.[jetson]'" in probe.remedy
