"""Repeats: a run is measured again, so often or until its joules are known as well as was asked.

Two runs of one machine take different times and draw different joules. Of several, each metric's
mean is given and its 95 % interval by Student's t. Where the repeats end when the interval happens
to be narrow, it is a little too narrow on average; LEAST keeps two runs that agree by chance from
ending them.
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

_GROSS = "energy_j"

T = TypeVar("T")


@dataclass(frozen=True)
class StoppingRule:
    """When to stop: after ``most`` runs, or fewer if the interval is narrow enough before."""

    within: float | None = None  # half-width over mean; None: it does not matter
    most: int = 1
    metered: bool = True  # repeated for its joules: a run without any is not

    @classmethod
    def parse(
        cls,
        within: str | None,
        most: int | None,
        prefix: str = "--energy-",
        runs: int | None = None,
    ) -> StoppingRule:
        """Read the options ``within`` (such as 5%) and ``repeats``; CrispError names them.

        runs: so many, whether they have joules or not; the option --repeats.
        """
        if runs is not None:
            if runs < 1:
                raise CrispError(f"--repeats {runs}: expected 1 or more")
            if within is not None or most is not None:
                raise CrispError(
                    f"--repeats {runs}: not together with {prefix}within or {prefix}repeats, which "
                    "say how often by themselves"
                )
            return cls(None, runs, metered=False)
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
    """Repeat a run; return it with the means of the repeats' metrics, and what interrupted them.

    An interrupt is to be raised when all has been reported.

    ``provenance`` has the intervals and every run's value; settings and timeline are the first
    run's. A run without joules that was to be repeated for them, and a rule that wants one run,
    stay as they are.
    """
    if rule.most == 1 or (rule.metered and first.metrics[_GROSS] is None):
        return first, None
    watched = _GROSS if rule.metered else "total_ns"

    def repeat_once() -> Run:
        run = again()
        if run.metrics[watched] is None:
            raise NoMoreRunsError(f"a repeat had no joules: {run.unavailable[watched]}")
        return run

    series = repeat(first, repeat_once, lambda run: run.metrics[watched] or 0.0, rule)
    return _merged(series, rule), series.interrupt


def half_width(run: Run, metric: str) -> float | None:
    """Return the half-width of a metric's 95 % interval; None: it is not known.

    It is 0 for a metric that came out alike in all of several runs.
    """
    repeats = run.provenance.get("repeats") or {}
    if (repeats.get("runs") or 1) < 2 or run.metrics.get(metric) is None:
        return None
    half: float | None = repeats["half_width"].get(metric, 0.0)
    return half


def _merged(series: RepeatedRuns[Run], rule: StoppingRule) -> Run:
    runs, first = series.items, series.items[0]
    metrics, unavailable = dict(first.metrics), dict(first.unavailable)
    half_widths, each = dict[str, float | None](), dict[str, list[float | None]]()
    for name in metrics:
        values = [run.metrics[name] for run in runs]
        known = [value for value in values if value is not None]
        if len(set(values)) == 1:
            continue
        each[name] = values
        if len(known) < len(runs):
            metrics[name] = half_widths[name] = None
            unavailable[name] = next(
                run.unavailable[name] for run in runs if run.metrics[name] is None
            )
            continue
        estimate = interval(known)
        whole = all(isinstance(value, int) for value in known)
        metrics[name] = round(estimate.mean) if whole else estimate.mean
        half_widths[name] = estimate.half_width
    repeats = {
        "runs": len(runs),
        "within": rule.within,
        "most": rule.most,
        "reached": rule.met(series.interval),
        "ended": series.ended,
        "confidence": CONFIDENCE,
        "half_width": half_widths,
        "each": each,
        "windows": [_window(run) for run in runs],
    }
    return Run(first.settings, metrics, unavailable, first.provenance | {"repeats": repeats})


def _window(run: Run) -> dict[str, Any]:
    """Return how well the joules of one of several runs are known by themselves."""
    origin = run.provenance.get("energy") or {}
    known = {key: origin[key] for key in ("window_ns", "uncertainty_j") if key in origin}
    return {"joules": run.metrics[_GROSS], **known}
