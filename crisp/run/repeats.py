"""Repeats: a run is measured again until its joules are known as well as was asked.

Two runs of one machine draw different joules. Of several, the mean is given and its 95 % interval
by Student's t. As the repeats end when the interval happens to be narrow, it is a little too narrow
on average; LEAST keeps two runs that agree by chance from ending them.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any, Generic, TypeVar

from crisp.errors import CrispError
from crisp.run.result import Run
from crisp.statistics import CONFIDENCE, Interval, interval
from crisp.units import parse_fraction

LEAST = 3  # runs, before an interval may be narrow enough
MOST = 20  # runs, by default
INTERRUPTED = "interrupted"

_GROSS, _NET = "energy_j_per_token", "energy_net_j_per_token"

T = TypeVar("T")


@dataclass(frozen=True)
class StoppingRule:
    """When to stop: after ``most`` runs, or fewer if the interval is narrow enough before."""

    within: float | None = None  # half-width over mean; None: it does not matter
    most: int = 1

    @classmethod
    def parse(cls, within: str | None, most: int | None, prefix: str = "--energy-") -> StoppingRule:
        """Read the options ``within`` (such as 5%) and ``repeats``; CrispError names them."""
        if most is not None and most < 1:
            raise CrispError(f"{prefix}repeats {most}: expected 1 or more")
        if within is None:
            return cls(None, most or 1)
        share = parse_fraction(within, f"{prefix}within")
        if not 0 < share < 1:
            raise CrispError(f"{prefix}within {within}: expected a share of the mean, such as 5%")
        return cls(float(share), most or MOST)

    def met(self, estimate: Interval) -> bool:
        """Return whether the interval is as narrow as was asked."""
        share = estimate.share
        return (
            self.within is not None
            and share is not None
            and estimate.n >= LEAST
            and share <= self.within
        )

    def why_enough(self, estimate: Interval) -> str | None:
        """Return why no more runs are wanted; None: one more is."""
        share = f"within {100 * self.within:g} %" if self.within is not None else None
        if self.met(estimate):
            return share
        if estimate.n < self.most:
            return None
        return (
            "as many as were asked for" if share is None else f"not {share} after {estimate.n} runs"
        )


@dataclass(frozen=True)
class RepeatedRuns(Generic[T]):
    """Runs of the same, the interval of their joules, and why there are no more.

    interrupt: what ended them, if that was Ctrl-C or the like: to be raised when all is reported.
    """

    items: Sequence[T]
    interval: Interval
    ended: str
    interrupt: KeyboardInterrupt | None = None


class NoMoreRunsError(Exception):
    """Raised by a run that does not count and is the last one; the message says why."""


def repeat(
    first: T, again: Callable[[], T], joules: Callable[[T], float], rule: StoppingRule
) -> RepeatedRuns[T]:
    """Run ``again`` until the rule is met, or Ctrl-C; what was run before stays.

    again: raises NoMoreRunsError for a run that does not count. joules: of a run, gross.
    """
    items = [first]
    while True:
        estimate = interval([joules(item) for item in items])
        ended = rule.why_enough(estimate)
        if ended is not None:
            return RepeatedRuns(items, estimate, ended)
        try:
            items.append(again())
        except KeyboardInterrupt as interrupt:
            return RepeatedRuns(items, estimate, INTERRUPTED, interrupt)
        except NoMoreRunsError as why:
            return RepeatedRuns(items, estimate, str(why))


def repeat_run(
    first: Run, again: Callable[[], Run], rule: StoppingRule
) -> tuple[Run, KeyboardInterrupt | None]:
    """Repeat a run; return it with the mean joules of the repeats, and what interrupted them.

    An interrupt is to be raised when all has been reported.

    All else is the first run's. ``provenance`` says how narrow the interval is and what each run
    took. A run without joules, and a rule that wants one run, stay as they are.
    """
    if rule.most == 1 or first.metrics[_GROSS] is None:
        return first, None

    def repeat_once() -> Run:
        run = again()
        if run.metrics[_GROSS] is None:
            raise NoMoreRunsError(f"a repeat had no joules: {run.unavailable[_GROSS]}")
        return run

    series = repeat(first, repeat_once, lambda run: run.metrics[_GROSS] or 0.0, rule)
    return _merged(series, rule), series.interrupt


def _merged(series: RepeatedRuns[Run], rule: StoppingRule) -> Run:
    runs, first = series.items, series.items[0]
    net = [run.metrics[_NET] for run in runs]
    net_joules = [joules for joules in net if joules is not None]
    net_interval = interval(net_joules) if len(net_joules) == len(runs) else None
    metrics, unavailable = dict(first.metrics), dict(first.unavailable)
    metrics[_GROSS], metrics[_NET] = (
        series.interval.mean,
        None if net_interval is None else net_interval.mean,
    )
    if net_interval is None:
        unavailable[_NET] = next(run.unavailable[_NET] for run in runs if _NET in run.unavailable)
    repeats = {
        "runs": len(runs),
        "within": rule.within,
        "most": rule.most,
        "reached": rule.met(series.interval),
        "ended": series.ended,
        "confidence": CONFIDENCE,
        "half_width_j_per_token": series.interval.half_width,
        "half_width_net_j_per_token": None if net_interval is None else net_interval.half_width,
        "each": [_describe_repeat(run) for run in runs],
    }
    energy = first.provenance["energy"] | {"repeats": repeats}
    return Run(first.settings, metrics, unavailable, first.provenance | {"energy": energy})


def _describe_repeat(run: Run) -> dict[str, Any]:
    """Return what one of several runs took, safe for JSON."""
    tokens, gross, net = (run.metrics[name] for name in ("tokens", _GROSS, _NET))
    origin = run.provenance["energy"]
    return {
        "joules": (gross or 0) * (tokens or 0),
        "net_joules": None if net is None else net * (tokens or 0),
        "tokens": tokens,
        "total_ns": run.metrics["total_ns"],
        **{key: origin[key] for key in ("window_ns", "uncertainty_j") if key in origin},
    }
