"""Streams that slow each other down while both are busy, by a rule.

On a unified memory they share one bandwidth and slow down only when it is exceeded; on a calibrated
machine each is slowed by a factor that was measured.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from math import ceil
from typing import Any

import simpy

from crisp.hardware.measured import MeasuredCost
from crisp.hardware.page_cache import PageCacheCost
from crisp.hardware.profile import CostModel

_ROUNDING = 1e-6  # ns: what floating point may add to a whole number of ns


class Activity:
    """An operation that occupies a stream and moves bytes."""

    __slots__ = ("demand", "done", "finish", "rate", "remaining", "stream")

    def __init__(self, stream: int, alone_ns: int, traffic: int, done: simpy.Event) -> None:
        self.stream = stream
        self.remaining = float(alone_ns)  # ns of undisturbed work
        self.demand = traffic / alone_ns if alone_ns else 0.0  # bytes per ns, when undisturbed
        self.rate = 1.0  # of progress
        self.finish = -1
        self.done = done


SlowdownRule = Callable[[Sequence[Activity]], list[float]]
"""The rate of progress of each of two activities or more that run at the same time."""


def sharing(cost: CostModel, streams: Sequence[int]) -> SlowdownRule | None:
    """Return how link and compute slow each other down under a cost model; None: they do not.

    streams: the numbers of link and compute.
    """
    if isinstance(cost, PageCacheCost):
        cost = cost.disk
    if isinstance(cost, MeasuredCost):
        slow = [float(cost.tables.slow_load), float(cost.tables.slow_compute)]
        return constant(dict(zip(streams, slow, strict=True))) if max(slow) > 1 else None
    return None if cost.memory_bandwidth is None else fair(cost.memory_bandwidth / 1e9)


def fair(bytes_per_ns: float) -> SlowdownRule:
    """Return the rule of max-min fair shares of a bandwidth, by what each activity demands."""
    return lambda active: fair_rates([activity.demand for activity in active], bytes_per_ns)


def constant(slow: Mapping[int, float]) -> SlowdownRule:
    """slow[stream]: how many times as long its activities take beside another."""
    return lambda active: [1 / slow[activity.stream] for activity in active]


class Shared:
    """Streams whose activities run at rate 1 alone, and together as a rule says."""

    def __init__(self, env: simpy.Environment, rule: SlowdownRule, until: list[int]) -> None:
        """until[stream]: kept at the time at which the stream's activity will end."""
        self._env: Any = env  # SimPy types times as floats too; here they are whole
        self._rule, self._until = rule, until
        self._active: list[Activity] = []
        self._since = 0

    def occupy(self, stream: int, alone_ns: int, traffic: int, done: simpy.Event) -> None:
        """Begin an activity that alone takes ``alone_ns`` and moves ``traffic`` bytes.

        ``done`` is triggered when it ends.
        """
        self._advance()
        self._active.append(Activity(stream, alone_ns, traffic, done))
        self._plan()

    def _advance(self) -> None:
        elapsed = self._env.now - self._since
        for activity in self._active:
            activity.remaining -= elapsed * activity.rate
        self._since = self._env.now

    def _plan(self) -> None:
        rates = [1.0]  # what runs alone takes what it takes alone, whatever was rounded
        if len(self._active) != 1:
            rates = self._rule(self._active)
        for activity, rate in zip(self._active, rates, strict=True):
            activity.rate = rate
            left = ceil(max(0.0, activity.remaining) / rate - _ROUNDING)
            finish = self._env.now + left
            if finish != activity.finish:
                activity.finish = self._until[activity.stream] = finish
                timeout = self._env.timeout(left, activity)
                assert timeout.callbacks is not None
                timeout.callbacks.append(self._ended)

    def _ended(self, timeout: simpy.Event) -> None:
        activity = timeout.value
        assert isinstance(activity, Activity)
        if activity.finish == self._env.now and activity in self._active:  # else: was replanned
            self._advance()
            self._active.remove(activity)
            self._plan()
            activity.done.succeed()


def fair_rates(demands: list[float], bandwidth: float) -> list[float]:
    """Return each demand's rate of progress, at most 1: max-min fair shares of a bandwidth.

    >>> fair_rates([60.0, 30.0], 100.0)
    [1.0, 1.0]
    >>> fair_rates([90.0, 30.0], 100.0), fair_rates([80.0, 80.0], 100.0)
    ([0.7777777777777778, 1.0], [0.625, 0.625])
    """
    rates = [1.0] * len(demands)
    left, free = bandwidth, sorted(range(len(demands)), key=demands.__getitem__)
    while free:
        smallest, share = free.pop(0), left / (len(free) + 1)
        if demands[smallest] > share:
            rates[smallest] = share / demands[smallest]
        left -= min(share, demands[smallest])
    return rates
