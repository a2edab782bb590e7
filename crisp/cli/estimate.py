"""How long a sweep will take, measured on a few of its cells."""

from __future__ import annotations

import time
from collections.abc import Iterator
from dataclasses import dataclass
from fractions import Fraction
from typing import TYPE_CHECKING

from crisp.cli import asked as cells
from crisp.cli.cells import ENGINES
from crisp.cli.output.progress import progress
from crisp.cli.output.words import counted
from crisp.errors import CrispError
from crisp.sim.sweep.compiling import compiled_before
from crisp.sim.sweep.journal import Record
from crisp.sim.sweep.parallel import BACKENDS
from crisp.sim.sweep.spec import Asked, Sweep

if TYPE_CHECKING:
    from crisp.cli.sweeping import Options

TRIED = 50  # cells, one of which must be possible
_MEASURED = 3  # cells, for the estimate
_PATIENCE = 20.0  # seconds for trying cells before all are run


def tell_compiling(options: Options) -> None:
    """Say so where the first cells have to wait for it."""
    if options.engine != ENGINES[0] and not compiled_before():
        print("compiling, once: the first cells take a minute", flush=True)


@dataclass(frozen=True)
class Sample:
    """Some cells, of which at least one can be run."""

    possible: list[Asked]
    share: Fraction  # of all that were looked at

    def measured(self, options: Options) -> Iterator[tuple[Record, float]]:
        """Records of a few, run here one after the other, and the seconds that each took.

        Two at least: the first one has to open and compile what others find.
        """
        began = time.monotonic()
        with progress("cells, to see how long they take", _MEASURED) as advance:
            n = min(_MEASURED, len(self.possible))
            for number in range(n):
                asked = self.possible[number * len(self.possible) // n]
                start = time.monotonic()
                if number < 2 or start - began < _PATIENCE:
                    job = cells.job_of(
                        cells.key(asked), asked, options.engine, options.per_sequence
                    )
                    record = cells.run(job)
                    yield record, time.monotonic() - start
                advance(1)

    def estimate(self, seconds: list[float], sweep: Sweep, options: Options) -> str:
        """How long all take, in words."""
        each = seconds[1:] or seconds
        cores = options.jobs if options.backend == BACKENDS[0] else 1
        whole = float(sum(each) / len(each) * sweep.count * self.share / cores)
        return f"about {_duration(whole)} on {counted(cores, 'core')} (measured on {len(seconds)})"


def sample(sweep: Sweep) -> Sample:
    """Some of its cells; CrispError if none of those that are looked at can be run."""
    possible: list[Asked] = []
    errors: list[CrispError] = []
    began = time.monotonic()
    for asked in sweep.some(TRIED):
        try:
            cells.cell_of(asked)
            possible.append(asked)
        except CrispError as error:
            errors.append(error)
        if possible and time.monotonic() - began > _PATIENCE:  # large traces take time to open
            break
    if not possible:
        raise CrispError(f"{sweep.name}: {str(errors[0]).removeprefix('--')}")
    return Sample(possible, Fraction(len(possible), len(possible) + len(errors)))


def _duration(seconds: float) -> str:
    """In words, in the largest unit of which there are two.

    >>> _duration(0.2), _duration(90), _duration(7300)
    ('1 second', '90 seconds', '2 hours')
    """
    for size, unit in ((86400, "day"), (3600, "hour"), (60, "minute")):
        if seconds >= 2 * size:
            return counted(round(seconds / size), unit)
    return counted(max(1, round(seconds)), "second")
