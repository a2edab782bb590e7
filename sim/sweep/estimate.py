"""How long a sweep will take, measured on a few of its cells."""

from __future__ import annotations

import time
from collections.abc import Iterator
from dataclasses import dataclass
from fractions import Fraction

from crisp.errors import CrispError
from crisp.sim.experiment import ENGINES
from crisp.sim.parallel import BACKENDS
from crisp.sim.sweep import cell as cells
from crisp.sim.sweep.compiling import compiled_before
from crisp.sim.sweep.journal import Record
from crisp.sim.sweep.options import SweepOptions, SweepReporter
from crisp.sim.sweep.spec import CellSettings, Sweep
from crisp.units import format_count

TRIED = 50  # cells, one of which must be possible
_MEASURED = 3  # cells, for the estimate
_PATIENCE = 20.0  # seconds for trying cells before all are run


def announce_compiling(options: SweepOptions, reporter: SweepReporter) -> None:
    """Say so where the first cells have to wait for the fast engine's compilation."""
    if options.engine != ENGINES[0] and not compiled_before():
        reporter.say("compiling, once: the first cells take a minute")


@dataclass(frozen=True)
class Sample:
    """Some cells, of which at least one can be run."""

    possible: list[CellSettings]
    share: Fraction  # of all that were looked at

    def measured(
        self, options: SweepOptions, reporter: SweepReporter
    ) -> Iterator[tuple[Record, float]]:
        """Yield the records of a few, run here one after the other, and each one's seconds.

        Two at least: the first one has to open and compile what others find.
        """
        began = time.monotonic()
        with reporter.steps("cells, to see how long they take", _MEASURED) as advance:
            n = min(_MEASURED, len(self.possible))
            for number in range(n):
                settings = self.possible[number * len(self.possible) // n]
                start = time.monotonic()
                if number < 2 or start - began < _PATIENCE:
                    key = cells.cell_key(settings)
                    job = cells.job_of(key, settings, options.engine, options.per_sequence)
                    record = cells.run_cell(job)
                    yield record, time.monotonic() - start
                advance(1)

    def estimate(self, seconds: list[float], sweep: Sweep, options: SweepOptions) -> str:
        """Return in words how long all take; seconds: of those that were measured."""
        each = seconds[1:] or seconds
        cores = options.jobs if options.backend == BACKENDS[0] else 1
        whole = float(sum(each) / len(each) * sweep.count * self.share / cores)
        duration = format_duration(whole)
        return f"about {duration} on {format_count(cores, 'core')} (measured on {len(seconds)})"


def sample(sweep: Sweep) -> Sample:
    """Return some cells of a sweep; CrispError if none of those that are looked at can be run."""
    possible: list[CellSettings] = []
    errors: list[CrispError] = []
    began = time.monotonic()
    for settings in sweep.some(TRIED):
        try:
            cells.plan_cell(settings)
            possible.append(settings)
        except CrispError as error:
            errors.append(error)
        if possible and time.monotonic() - began > _PATIENCE:  # large traces take time to open
            break
    if not possible:
        raise CrispError(f"{sweep.name}: {str(errors[0]).removeprefix('--')}")
    return Sample(possible, Fraction(len(possible), len(possible) + len(errors)))


def format_duration(seconds: float) -> str:
    """Return a time in words, in the largest unit of which there are two.

    >>> format_duration(0.2), format_duration(90), format_duration(7300)
    ('1 second', '90 seconds', '2 hours')
    """
    for size, unit in ((86400, "day"), (3600, "hour"), (60, "minute")):
        if seconds >= 2 * size:
            return format_count(round(seconds / size), unit)
    return format_count(max(1, round(seconds)), "second")
