"""Run a command as if it stood alone: with its own streams, signals and exit code."""

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
_CHECK_SECONDS = 0.2  # until a signal is handled that came just before waiting began


@dataclass(frozen=True)
class CompletedCommand:
    """A command that has ended."""

    code: int  # as a shell tells it: 128 and more, where a signal ended it
    ns: int  # from its start to its end
    asked_to_end: bool  # whether this process was sent a signal that ends things


def run_command(command: Sequence[str]) -> CompletedCommand:
    """Run a command to its end; meanwhile this process gets no KeyboardInterrupt.

    Raises CrispError if the command cannot be started.
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
    """Wait for a process and return its code; in a thread, so that this one can handle signals."""
    over = threading.Event()

    def wait() -> None:
        process.wait()
        over.set()

    threading.Thread(target=wait, name="crisp-child", daemon=True).start()
    while not over.wait(_CHECK_SECONDS):
        pass
    return process.wait()


@contextmanager
def _signals_passed_on() -> Iterator[tuple[Callable[[subprocess.Popen[Any]], None], list[int]]]:
    """Pass signals on to a process, also those that came before it was attached.

    Yields the function that attaches it, and the list of signals so far.
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
            if not _sent_by_terminal(number):
                process.send_signal(number)

    before = {number: signal.getsignal(number) for number in PASSED_ON}
    # a signal that is ignored, as by nohup, is ignored by the command, too
    taken = [number for number, handler in before.items() if handler is not signal.SIG_IGN]
    try:
        for number in taken:
            signal.signal(number, handle)
        yield attach, received
    finally:
        for number in taken:
            signal.signal(number, before[number])


def _sent_by_terminal(number: int) -> bool:
    """Return whether the command has had a signal already: a terminal sends what is typed to all
    processes in the foreground.

    A second one could make the command abandon its reaction to the first.
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
