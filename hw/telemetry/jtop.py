"""jtop: what the service of jetson-stats measures of a Jetson's supply rails.

Its client runs in a process of its own, which `jtop_child` is; see there why.
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

from crisp.hw.telemetry.rails import inputs
from crisp.hw.telemetry.sampler import PowerWindow, Sampled, SampleWindow, Unreadable

CHILD = Path(__file__).with_name("jtop_child.py")
INTERVAL = 0.1  # seconds between samples
SERVICE_INTERVAL = 0.5  # seconds between the service's; what others asked of it may differ
TIMEOUT = 10.0  # seconds for the service to answer
SILENCE_NS = 10_000_000_000  # the child says something far more often

_RESTART = "sudo systemctl restart jtop.service; what it says: systemctl status jtop.service"
_INSTALL = (
    "on a Jetson: pip install '.[jetson]' in the checkout, in the version of its service (jtop -v)"
)
_VERSIONS = (
    "install the same version of jetson-stats here and for the service, then "
    "sudo systemctl restart jtop.service"
)
_GROUP = "sudo usermod -aG jtop $USER, then log in again"


class Jtop(Sampled):
    """See `crisp.hardware.energy.Meter`. Rails are summed as in `crisp.hw.telemetry.rails`,
    whatever jtop's own total is: it may be a sum of all rails, of which some contain others.
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
        """The rails that make up the whole, of a service that answers."""
        if find_spec("jtop") is None:
            raise Unreadable("jetson-stats is not installed", _INSTALL)
        client = _Client(self._child, self.clock)
        try:
            names, pace = client.first(self._timeout)
            chosen = inputs(names)
        except Unreadable:
            client.close()
            raise
        return PowerWindow(
            f"{self.name} {' + '.join(chosen)}",
            f"power by a service that measures every {pace:g} s",
            partial(client.watts, chosen),
            self,
            lag=round(pace * 1e9),
            close=client.close,
        )


class _Client:
    """The child, and a thread that listens to it."""

    def __init__(self, child: Path, clock: Callable[[], int]) -> None:
        self._clock, self._heard = clock, clock()
        self._client: str | None = None  # its version; None while it has not said even that
        self._power: dict[str, Any] | None = None
        self._pace = SERVICE_INTERVAL
        self._ended: Unreadable | None = None
        self._news = threading.Condition()
        # -P: or this folder would be searched for its jtop, and this very module be found
        self._process = subprocess.Popen(
            [sys.executable, "-P", str(child), str(SERVICE_INTERVAL)],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=subprocess.DEVNULL,
            text=True,
            encoding="utf-8",
            process_group=0,  # Ctrl-C at a terminal is not for it: what it reads then still counts
        )
        self._thread = threading.Thread(target=self._listen, name="crisp-jtop-child", daemon=True)
        self._thread.start()

    def first(self, timeout: float) -> tuple[list[str], float]:
        """The rails it reads, and every how many seconds; `Unreadable` if it does not say so in
        ``timeout`` seconds.
        """
        with self._news:
            self._news.wait_for(lambda: self._power is not None or self._ended, timeout)
            if self._ended is not None:
                raise self._ended
            if self._client is None:
                raise Unreadable(f"its client did not start within {timeout:g} s")
            if self._power is None:
                raise Unreadable(
                    f"the jtop service accepts a connection, but did not answer within "
                    f"{timeout:g} s",
                    _RESTART,
                )
            return list(_rails(self._power)), self._pace

    def watts(self, rails: tuple[str, ...]) -> float:
        """Their sum as last heard; `Unreadable` if that is nothing to go by any more."""
        with self._news:
            if self._ended is not None:
                raise self._ended
            if self._clock() - self._heard > SILENCE_NS:
                raise Unreadable(f"its client said nothing for {SILENCE_NS / 1e9:g} s")
            power = _rails(self._power)
            gone = [rail for rail in rails if rail not in power]
            if gone:
                raise Unreadable(f"{gone[0]} is no longer among the rails")
            return sum(power[rail] for rail in rails) / 1e3

    def close(self) -> None:
        """End the child and the thread."""
        self._process.kill()  # it holds nothing, and may hang
        self._process.wait()
        self._thread.join()
        for pipe in (self._process.stdin, self._process.stdout):
            if pipe is not None:
                pipe.close()

    def _listen(self) -> None:
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
            self._ended = self._ended or Unreadable("its client ended without a word")
            self._news.notify_all()


def _rails(power: dict[str, Any] | None) -> dict[str, float]:
    """mW of each rail; the one that jtop takes for the total it lists apart, with its name."""
    told = power or {}  # of a board without sensors
    rails = {name: rail["power"] for name, rail in told.get("rail", {}).items()}
    total = told.get("tot", {})
    if "name" in total:
        rails[total["name"]] = total["power"]
    return rails


def _failed(kind: str, text: str) -> Unreadable:
    """What the client's error means, in its own words, and what it says to run."""
    line, _, command = (part.strip() for part in text.partition("Please run:"))
    line = line.partition("\n")[0]
    low = line.lower()
    if kind == "ImportError" or kind == "ModuleNotFoundError":
        return Unreadable(f"jetson-stats cannot be imported: {line}", _INSTALL)
    if "not active" in low:
        return Unreadable(f"the jtop service is dead: {line}", command or _RESTART)
    if "mismatch" in low or "authentication" in low:
        return Unreadable(f"client and service do not fit together: {line}", command or _VERSIONS)
    if "access" in low:
        return Unreadable(f"permission denied: {line}", _GROUP)
    if kind == "TimeoutError":
        return Unreadable(f"the jtop service stands still: {line}", _RESTART)
    return Unreadable(f"the jtop service was lost: {line}", _RESTART)
