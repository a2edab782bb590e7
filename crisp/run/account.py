"""Where the time of a run went, and what it could not be less than."""

from __future__ import annotations

from typing import NamedTuple

from crisp.run.result import Run

NEAR = 0.9  # of the time: a bound that explains this much of it is the one to mind


class TimeBounds(NamedTuple):
    """Lower bounds of the time of one token, in ms."""

    io: float  # bytes over bandwidth
    order: float  # the best order of each event's tasks, at the same residency
    belady: float  # the fewest bytes of any cache for the same tasks, over bandwidth
    compute: float  # all that is computed, undisturbed: nothing had to be loaded
    memory: float | None  # all bytes moved over the bandwidth of a memory that both streams share


class TimeAccount(NamedTuple):
    """The time of one token of either phase, in ms, and its parts."""

    total: float
    waits: float  # compute idle: blocks of the event's tasks are not there
    experts: float
    layers: float  # router, attention and what else is not a routed expert
    bounds: TimeBounds | None  # None: not known, for the run was measured

    def share(self, part: float) -> float:
        """Return a part in per cent of the total."""
        return 100 * part / self.total if self.total else 0.0

    def gain(self, bound: float) -> str:
        """Return what reaching a bound would save at most, in per cent."""
        return f"{max(0.0, 100 - self.share(bound)):.0f} %"

    @property
    def near(self) -> str:
        """Which bound is near: compute, bytes, memory or order; else none, or not known."""
        if self.bounds is None:
            return "not known"
        bounds = (
            ("compute", self.bounds.compute),
            ("bytes", self.bounds.io),
            ("memory", self.bounds.memory or 0.0),
            ("order", self.bounds.order),
        )
        return next((name for name, ms in bounds if ms >= NEAR * self.total), "none")


def time_account(run: Run) -> TimeAccount:
    """Return the account of a run; waits, experts and layers add up to the total."""

    def value(name: str) -> float:
        return float(run.metrics[name] or 0)

    io, order, belady, compute, memory = (
        run.metrics[f"{name}_bound_ms_per_token"] for name in TimeBounds._fields
    )
    bounds = None
    if io is not None and order is not None and belady is not None and compute is not None:
        bounds = TimeBounds(io, order, belady, compute, memory)
    total, waits, experts, layers = (
        value(f"{name}_ns") / value("tokens") / 1e6
        for name in ("total", "stall", "compute", "layer")
    )
    return TimeAccount(total, waits, experts, layers, bounds)
