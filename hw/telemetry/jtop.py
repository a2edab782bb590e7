"""jtop: the power of a Jetson's supply rails, as the service of jetson-stats measures it.

Its client runs in a process of its own; `jtop_child` is its program, and says why.
"""

from __future__ import annotations

import json
import subprocess
import sys
import threading
import time
from collections.abc import Callable
from functools import partial
from importlib.util import find_spec
from pathlib import Path
from typing import Any

from crisp.hw.telemetry.jetson_rails import module_input_rails
from crisp.hw.telemetry.sampler import PowerWindow, SampledMeter, SampleWindow, UnreadableMeter

CHILD = Path(__file__).with_name("jtop_child.py")
INTERVAL = 0.1  # seconds between samples
SERVICE_INTERVAL = 0.5  # seconds between the service's; other clients may have asked for others
TIMEOUT = 10.0  # seconds for the service to answer
SILENCE_NS = 10_000_000_000  # without a line of the child, which writes far more often

_RESTART = "sudo systemctl restart jtop.service; what it says: systemctl status jtop.service"
_INSTALL = (
    "on a Jetson: pip install '.[jetson]' in the checkout, in the version of its service (jtop -v)"
)
_VERSIONS = (
    "install the same version of jetson-stats here and for the service, then "
    "sudo systemctl restart jtop.service"
)
_GROUP = "sudo usermod -aG jtop $USER, then log in again"


class Jtop(SampledMeter):
    """The meter of jetson-stats' service; rails are summed by `crisp.hw.telemetry.jetson_rails`.

    jtop's own total is not used: it may be a sum of all rails, of which some contain others.
    """

    name = "jtop"

    def __init__(
        self,
        interval: float = INTERVAL,
        clock: Callable[[], int] = time.monotonic_ns,
        child: Path = CHILD,
        timeout: float = TIMEOUT,
    ) -> None:
        """interval: seconds; clock: ns; child: the program that asks the service; timeout: seconds
        for that to have an answer.
        """
        super().__init__(interval, clock)
        self._child, self._timeout = child, timeout

    def open(self) -> SampleWindow:
        """Open a window on the rails that make up the whole, of a service that answers."""
        if find_spec("jtop") is None:
            raise UnreadableMeter("jetson-stats is not installed", _INSTALL)
        client = _Client(self._child, self.clock)
        try:
            names, pace = client.first(self._timeout)
            input_rails = module_input_rails(names)
        except UnreadableMeter:
            client.close()
            raise
        return PowerWindow(
            f"{self.name} {' + '.join(input_rails)}",
            f"power by a service that measures every {pace:g} s",
            partial(client.watts, input_rails),
            self,
            lag=round(pace * 1e9),
            close=client.close,
        )


class _Client:
    """The child process, and a thread that reads its lines."""

    def __init__(self, child: Path, clock: Callable[[], int]) -> None:
        self._clock, self._heard = clock, clock()
        self._client: str | None = None  # the client's version; None until the child has sent it
        self._power: dict[str, Any] | None = None
        self._pace = SERVICE_INTERVAL
        self._ended: UnreadableMeter | None = None
        self._news = threading.Condition()
        # -P: or this folder would be searched for jtop first, and this very module be found
        self._process = subprocess.Popen(
            [sys.executable, "-P", str(child), str(SERVICE_INTERVAL)],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=subprocess.DEVNULL,
            text=True,
            encoding="utf-8",
            process_group=0,  # so that Ctrl-C at a terminal does not end it before the window ends
        )
        self._thread = threading.Thread(target=self._listen, name="crisp-jtop-child", daemon=True)
        self._thread.start()

    def first(self, timeout: float) -> tuple[list[str], float]:
        """Return the rails that it reads, and the seconds between two readings.

        Raises `UnreadableMeter` if there is no answer in ``timeout`` seconds.
        """
        with self._news:
            self._news.wait_for(lambda: self._power is not None or self._ended, timeout)
            if self._ended is not None:
                raise self._ended
            if self._client is None:
                raise UnreadableMeter(f"its client did not start within {timeout:g} s")
            if self._power is None:
                raise UnreadableMeter(
                    f"the jtop service accepts a connection, but did not answer within "
                    f"{timeout:g} s",
                    _RESTART,
                )
            return list(_rails(self._power)), self._pace

    def watts(self, rails: tuple[str, ...]) -> float:
        """Return the last sum of some rails in W; `UnreadableMeter` if it is out of date."""
        with self._news:
            if self._ended is not None:
                raise self._ended
            if self._clock() - self._heard > SILENCE_NS:
                raise UnreadableMeter(f"its client said nothing for {SILENCE_NS / 1e9:g} s")
            power = _rails(self._power)
            gone = [rail for rail in rails if rail not in power]
            if gone:
                raise UnreadableMeter(f"{gone[0]} is no longer among the rails")
            return sum(power[rail] for rail in rails) / 1e3

    def close(self) -> None:
        """End the child and the thread."""
        self._process.kill()  # it has nothing to lose, and may hang
        self._process.wait()
        self._thread.join()
        for pipe in (self._process.stdin, self._process.stdout):
            if pipe is not None:
                pipe.close()

    def _listen(self) -> None:
        """Read the child's lines until it ends: the thread's function."""
        for line in self._process.stdout or ():
            said = json.loads(line)
            with self._news:
                self._heard = self._clock()
                if "error" in said:
                    self._ended = _failed(said["kind"], said["error"])
                elif "power" in said:
                    self._power, self._pace = said["power"], said["interval"]
                else:
                    self._client = said["client"]
                self._news.notify_all()
        with self._news:
            self._ended = self._ended or UnreadableMeter("its client ended without a word")
            self._news.notify_all()


def _rails(power: dict[str, Any] | None) -> dict[str, float]:
    """Return the mW of each rail, the one included that jtop lists apart, as its total."""
    report = power or {}  # None for a board without sensors
    rails = {name: rail["power"] for name, rail in report.get("rail", {}).items()}
    total = report.get("tot", {})
    if "name" in total:
        rails[total["name"]] = total["power"]
    return rails


def _failed(kind: str, text: str) -> UnreadableMeter:
    """Return the client's error with its meaning, and the command that it says to run."""
    line, _, command = (part.strip() for part in text.partition("Please run:"))
    line = line.partition("\n")[0]
    low = line.lower()
    if kind == "ImportError" or kind == "ModuleNotFoundError":
        return UnreadableMeter(f"jetson-stats cannot be imported: {line}", _INSTALL)
    if "not active" in low:
        return UnreadableMeter(f"the jtop service is dead: {line}", command or _RESTART)
    if "mismatch" in low or "authentication" in low:
        return UnreadableMeter(
            f"client and service do not fit together: {line}", command or _VERSIONS
        )
    if "access" in low:
        return UnreadableMeter(f"permission denied: {line}", _GROUP)
    if kind == "TimeoutError":
        return UnreadableMeter(f"the jtop service stands still: {line}", _RESTART)
    return UnreadableMeter(f"the jtop service was lost: {line}", _RESTART)
