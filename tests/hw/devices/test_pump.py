"""A stream whose operations are run by whoever waits."""

from __future__ import annotations

import threading
import time

from crisp.hw.devices.pump import Pump

SOON = 10  # seconds; a test that waits as long has failed


def test_operations_run_in_the_thread_that_waits_and_in_order() -> None:
    pump, over, ran = Pump(time.monotonic_ns), threading.Event(), list[tuple[str, int]]()

    def operation(name: str) -> None:
        ran.append((name, threading.get_ident()))

    def second(_: int, failure: BaseException | None) -> None:
        assert failure is None
        pump.submit(lambda: operation("b"), lambda end, failure: over.set())

    pump.submit(lambda: operation("a"), second)
    assert ran == []  # nobody waits
    assert pump.wait(over, SOON)
    here = threading.get_ident()
    assert ran == [("a", here), ("b", here)]


def test_a_failure_is_given_to_the_callback() -> None:
    pump, over, failures = Pump(time.monotonic_ns), threading.Event(), list[BaseException | None]()

    def done(_: int, failure: BaseException | None) -> None:
        failures.append(failure)
        over.set()

    broken = ValueError("broken")

    def operation() -> None:
        raise broken

    pump.submit(operation, done)
    assert pump.wait(over, SOON)
    assert failures == [broken]


def test_who_waits_is_woken_and_is_told_when_nothing_came() -> None:
    pump, condition = Pump(time.monotonic_ns), threading.Event()
    assert not pump.wait(condition, 0.01)

    def elsewhere() -> None:
        condition.set()
        pump.wake()

    threading.Timer(0.05, elsewhere).start()
    assert pump.wait(condition, SOON)


def test_an_answer_comes_behind_what_was_submitted_before() -> None:
    pump, ran = Pump(time.monotonic_ns), list[str]()
    pump.submit(lambda: ran.append("first"), lambda end, failure: None)
    answer = pump.begin(lambda: [*ran, "last"])
    pump.wake()
    assert answer() == ["first", "last"]
