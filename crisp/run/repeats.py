"""Repeats: a run is measured again until its joules are known as well as was asked.

Two runs of one machine draw different joules. Of several the mean is told, and its 95 % interval by
Student's t. As the repeats end when the interval happens to be narrow, it is a little too narrow on
average; LEAST keeps two runs that agree by chance from ending them.
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
MOST = 20  # runs, where nobody says how many
INTERRUPTED = "interrupted"

_GROSS, _NET = "energy_j_per_token", "energy_net_j_per_token"

T = TypeVar("T")


@dataclass(frozen=True)
class Rule:
    """When there are runs enough: ``most``, or fewer if the interval is narrow before."""

    within: float | None = None  # half-width over mean; None: it does not matter
    most: int = 1

    @classmethod
    def parse(cls, within: str | None, most: int | None, prefix: str = "--energy-") -> Rule:
        """From the options ``within`` (such as 5%) and ``repeats``; CrispError names them."""
        if most is not None and most < 1:
            raise CrispError(f"{prefix}repeats {most}: expected 1 or more")
        if within is None:
            return cls(None, most or 1)
        share = parse_fraction(within, f"{prefix}within")
        if not 0 < share < 1:
            raise CrispError(f"{prefix}within {within}: expected a share of the mean, such as 5%")
        return cls(float(share), most or MOST)

    def met(self, found: Interval) -> bool:
        """Whether the interval is as narrow as was asked."""
        share = found.share
        return (
            self.within is not None
            and share is not None
            and found.n >= LEAST
            and share <= self.within
        )

    def why_enough(self, found: Interval) -> str | None:
        """Why no more runs are wanted; None: one more."""
        share = f"within {100 * self.within:g} %" if self.within is not None else None
        if self.met(found):
            return share
        if found.n < self.most:
            return None
        return "as many as were asked for" if share is None else f"not {share} after {found.n} runs"


@dataclass(frozen=True)
class Series(Generic[T]):
    """What was run, the interval of its joules, and why there is no more of it.

    interrupt: what ended it, if that was Ctrl-C or the like: to be raised when all has been told.
    """

    items: Sequence[T]
    found: Interval
    ended: str
    interrupt: KeyboardInterrupt | None = None


class NoMoreError(Exception):
    """A run that does not count and is the last one: its message says why."""


def repeat(first: T, again: Callable[[], T], joules: Callable[[T], float], rule: Rule) -> Series[T]:
    """Run ``again`` until the rule is content. Ctrl-C, too, ends it, and what was run before stays.

    again: raises NoMoreError for a run that does not count. joules: of a run, gross.
    """
    items = [first]
    while True:
        found = interval([joules(item) for item in items])
        ended = rule.why_enough(found)
        if ended is not None:
            return Series(items, found, ended)
        try:
            items.append(again())
        except KeyboardInterrupt as interrupt:
            return Series(items, found, INTERRUPTED, interrupt)
        except NoMoreError as why:
            return Series(items, found, str(why))


def repeat_run(
    first: Run, again: Callable[[], Run], rule: Rule
) -> tuple[Run, KeyboardInterrupt | None]:
    """A run whose joules a token are the mean over repeats of it; what interrupted them, if
    anything did: to be raised when all has been told.

    All else is the first run's. ``provenance`` says how narrow the interval is and what each run
    took. A run without joules, and a rule that wants one run, stay as they are.
    """
    if rule.most == 1 or first.metrics[_GROSS] is None:
        return first, None

    def counted() -> Run:
        run = again()
        if run.metrics[_GROSS] is None:
            raise NoMoreError(f"a repeat had no joules: {run.unavailable[_GROSS]}")
        return run

    series = repeat(first, counted, lambda run: run.metrics[_GROSS] or 0.0, rule)
    return _merged(series, rule), series.interrupt


def _merged(series: Series[Run], rule: Rule) -> Run:
    runs, first = series.items, series.items[0]
    net = [run.metrics[_NET] for run in runs]
    known = [joules for joules in net if joules is not None]
    above = interval(known) if len(known) == len(runs) else None
    metrics, unavailable = dict(first.metrics), dict(first.unavailable)
    metrics[_GROSS], metrics[_NET] = series.found.mean, None if above is None else above.mean
    if above is None:
        unavailable[_NET] = next(run.unavailable[_NET] for run in runs if _NET in run.unavailable)
    repeats = {
        "runs": len(runs),
        "within": rule.within,
        "most": rule.most,
        "reached": rule.met(series.found),
        "ended": series.ended,
        "confidence": CONFIDENCE,
        "half_width_j_per_token": series.found.half_width,
        "half_width_net_j_per_token": None if above is None else above.half_width,
        "each": [_told(run) for run in runs],
    }
    energy = first.provenance["energy"] | {"repeats": repeats}
    return Run(first.settings, metrics, unavailable, first.provenance | {"energy": energy})


def _told(run: Run) -> dict[str, Any]:
    """What one of several runs took."""
    tokens, gross, net = (run.metrics[name] for name in ("tokens", _GROSS, _NET))
    origin = run.provenance["energy"]
    return {
        "joules": (gross or 0) * (tokens or 0),
        "net_joules": None if net is None else net * (tokens or 0),
        "tokens": tokens,
        "total_ns": run.metrics["total_ns"],
        **{key: origin[key] for key in ("window_ns", "uncertainty_j") if key in origin},
    }
