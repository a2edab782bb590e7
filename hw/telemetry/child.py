"""A command run as if it stood alone: streams, signals and exit code are its own."""

from __future__ import annotations

import os
import signal
import subprocess
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

from crisp.errors import CrispError

PASSED_ON = (
    signal.SIGINT, signal.SIGQUIT, signal.SIGTERM, signal.SIGHUP, signal.SIGUSR1, signal.SIGUSR2,
)  # fmt: skip
_ENDING = (signal.SIGINT, signal.SIGQUIT, signal.SIGTERM, signal.SIGHUP)
_PATIENCE = 0.2  # seconds until a signal is looked at that came just before waiting began


@dataclass(frozen=True)
class CompletedCommand:
    """A command that has ended."""

    code: int  # as a shell tells it: 128 and more, where a signal ended it
    ns: int  # from its start to its end
    asked_to_end: bool  # whether this process was sent a signal that ends things


def run(command: Sequence[str]) -> CompletedCommand:
    """Run a command to its end. This process gets no KeyboardInterrupt meanwhile.

    Raises CrispError if it cannot be started.
    """
    with _signals_passed_on() as (attach, received):
        since = time.monotonic_ns()
        try:
            process = subprocess.Popen(command, close_fds=False)  # else cat <(ls) reads nothing
        except OSError as error:
            raise CrispError(f"{command[0]}: {error.strerror or error}") from error
        attach(process)
        code = _wait(process)
        ns = time.monotonic_ns() - since
    return CompletedCommand(
        128 - code if code < 0 else code, ns, any(one in _ENDING for one in received)
    )


def _wait(process: subprocess.Popen[Any]) -> int:
    """The return code. Waiting in a thread leaves this one free to answer signals."""
    over = threading.Event()

    def wait() -> None:
        process.wait()
        over.set()

    threading.Thread(target=wait, name="crisp-child", daemon=True).start()
    while not over.wait(_PATIENCE):
        pass
    return process.wait()


@contextmanager
def _signals_passed_on() -> Iterator[tuple[Callable[[subprocess.Popen[Any]], None], list[int]]]:
    """Signals go to the process that is attached, also those from before.

    Yields what attaches it, and the signals so far.
    """
    received: list[int] = []
    early: list[int] = []
    attached: list[subprocess.Popen[Any]] = []

    def attach(process: subprocess.Popen[Any]) -> None:
        attached.append(process)
        for number in early:
            process.send_signal(number)

    def handle(number: int, frame: object) -> None:
        received.append(number)
        if not attached:
            early.append(number)
        for process in attached:
            if not _told_by_the_terminal(number):
                process.send_signal(number)

    before = {number: signal.getsignal(number) for number in PASSED_ON}
    # what is ignored, as by nohup, is ignored by the command, too
    taken = [number for number, handler in before.items() if handler is not signal.SIG_IGN]
    try:
        for number in taken:
            signal.signal(number, handle)
        yield attach, received
    finally:
        for number in taken:
            signal.signal(number, before[number])


def _told_by_the_terminal(number: int) -> bool:
    """Whether the command has had it: what is typed goes to all that run in the foreground.

    A second one could make it drop what the first made it do.
    """
    if number not in (signal.SIGINT, signal.SIGQUIT):
        return False
    try:
        terminal = os.open("/dev/tty", os.O_RDONLY | os.O_NOCTTY)
    except OSError:  # there is none
        return False
    try:
        return os.tcgetpgrp(terminal) == os.getpgrp()
    finally:
        os.close(terminal)
