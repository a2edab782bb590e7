"""A sweep from its first word to its files: told, estimated, run, kept."""

from __future__ import annotations

import time
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from fractions import Fraction
from pathlib import Path

from crisp import TOOL
from crisp.cli import asked as cells
from crisp.cli.cells import AUTO
from crisp.cli.progress import progress, progress_of
from crisp.cli.targets import Name, check_outputs
from crisp.cli.words import counted
from crisp.errors import CrispError
from sim.sweep import results
from sim.sweep.journal import Journal, Record
from sim.sweep.parallel import BACKENDS, side_by_side
from sim.sweep.spec import Asked, Sweep

MANY = 5000  # cells that are not run without being asked twice
_MEASURED = 3  # cells, for the estimate
_PATIENCE = 20.0  # seconds for trying cells before all are run
_TRIED = 50  # cells, one of which must be possible


@dataclass(frozen=True)
class Options:
    """How a sweep is run."""

    out: str
    engine: str
    per_sequence: bool  # keep what each sequence took, and write it
    jobs: int
    backend: str
    scheduler: str | None
    yes: bool

    @property
    def outputs(self) -> dict[str, Name]:
        """The files to be written, by option."""
        return {"--out": self.out, "--per-sequence": self.beside if self.per_sequence else None}

    @property
    def beside(self) -> str:
        """Where it goes what each sequence took."""
        return str(Path(self.out).with_suffix(".sequences.parquet"))

    @property
    def journal(self) -> Path:
        """Where finished cells are kept until the results are written."""
        return Path(f"{self.out}.unfinished")


class Seen:
    """The cells of a sweep in their order, each once, and which of them are done."""

    def __init__(self, sweep: Sweep, options: Options, journal: Journal) -> None:
        self._sweep, self._options, self.journal = sweep, options, journal
        self._order: dict[str, None] = {}  # keys that have been seen
        self._added: dict[str, None] = {}  # those that were run now, some before they were seen
        self.told = 0  # cells that need not be run: done before, or the same as an earlier one
        self.before = len(journal)  # cells that were there when it began

    def jobs(self) -> Iterator[cells.Job]:
        """Those that are to be run."""
        for asked in self._sweep.cells():
            key = cells.key(asked)
            new = key not in self._order
            self._order[key] = None
            if new and not self.done(key):
                yield job_of(key, asked, self._options)
            else:
                self.told += 1

    def add(self, record: Record) -> None:
        """One more is done."""
        self.journal.add(record)
        self._added[record["cell"]] = None

    def done(self, key: str) -> bool:
        """Whether its record is here and has what is wanted. What was refused is tried anew."""
        if key not in self.journal:
            return False
        record, engine = self.journal.record(key), self._options.engine
        row = record["row"]
        return (
            row["refused"] is None
            and engine in (AUTO, row["engine"])
            and not (self._options.per_sequence and record["sequences"] is None)
        )

    def records(self) -> Iterator[Record]:
        """What is done, as far as is known, in order."""
        known = self._order | self._added
        return (self.journal.record(key) for key in known if key in self.journal)

    def look_on(self) -> None:
        """See further cells while some may have been there before."""
        if self.before:
            for _ in self.jobs():
                pass


def job_of(key: str, asked: Asked, options: Options) -> cells.Job:
    """A cell that is to be run."""
    return cells.Job(key, asked, cells.files_of(asked), options.engine, options.per_sequence)


def run_sweep(sweep: Sweep, options: Options, inputs: Sequence[tuple[str, Name]]) -> None:
    """Run it and write its files.

    inputs: files that are read, beside those that cells ask for. Raises CrispError for what is
    wrong with the sweep, and for what goes wrong while it runs; what is finished by then is kept.
    """
    cells.forget()
    cells.check(sweep)
    files = [
        (axis.where, cells.files_of({axis.key: text}).get(axis.key))
        for grid in sweep.grids
        for axis in grid.axes
        for text in axis.values[:_TRIED]
    ]
    check_outputs(options.outputs, [*inputs, *files], stdout=False)
    if Path(options.out).exists():
        next(results.load(Path(options.out)), None)  # else it would be said after the work
    print(f"{sweep.name}: {counted(sweep.count, 'cell')}", flush=True)
    some = sample(sweep)
    if sweep.count > MANY and not options.yes:
        seconds = [taken for _, taken in some.measured(options)]
        told = some.estimate(seconds, sweep, options)
        raise CrispError(f"{sweep.name}: {counted(sweep.count, 'cell')}, {told}; --yes runs them")
    journal = Journal(options.journal)
    try:
        _run(sweep, options, journal, some)
    finally:
        journal.close()


def _run(sweep: Sweep, options: Options, journal: Journal, some: Sample) -> None:
    _adopt(options, journal)
    seen = Seen(sweep, options, journal)
    try:
        if not seen.before and sweep.count > 4 * options.jobs:
            seconds = []
            for record, taken in some.measured(options):
                seen.add(record)
                seconds.append(taken)
            print(some.estimate(seconds, sweep, options), flush=True)
        with (
            progress_of("cells") as update,
            side_by_side(
                cells.run,
                seen.jobs(),
                jobs=min(options.jobs, sweep.count),
                backend=options.backend,
                scheduler=options.scheduler,
            ) as finished,
        ):
            for number, record in enumerate(finished, 1):
                seen.add(record)
                update(seen.told + number, sweep.count)
    except BaseException as error:
        _keep(seen, options, error, sweep)
        raise
    reasons = (record["row"]["refused"] for record in seen.records())
    first = next(reasons)
    if first and all(reasons):
        journal.remove()
        raise CrispError(f"{sweep.name}: every cell is refused: {first}")
    _save(seen, options, complete=True)
    journal.remove()


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
                    record = cells.run(job_of(cells.key(asked), asked, options))
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
    for asked in sweep.some(_TRIED):
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


def _adopt(options: Options, journal: Journal) -> None:
    """Take over what earlier results hold, so that it need not be run again."""
    out = Path(options.out)
    if not out.exists():
        return
    beside = Path(options.beside)
    kept = results.load_sequences(beside) if options.per_sequence and beside.exists() else {}
    for row in results.load(out):
        key = str(row["cell"])
        if key not in journal and row.get("provenance.tool") == TOOL:
            journal.add({"cell": key, "row": row, "sequences": kept.get(key)})


def _keep(seen: Seen, options: Options, error: BaseException, sweep: Sweep) -> None:
    """Write what is finished, and add to the error that it is there."""
    try:
        seen.look_on()
        done = sum(1 for _ in seen.records())
        if not done:
            seen.journal.remove()
            return
        _save(seen, options, complete=False)
    except CrispError as other:
        error.add_note(f"{other}; {options.journal} has what is finished")
        return
    error.add_note(
        f"{done:,} of {counted(sweep.count, 'cell')} are in {options.out}; the same command goes on"
    )


def _save(seen: Seen, options: Options, complete: bool) -> None:
    about = {"tool": TOOL, "complete": complete}
    results.save(Path(options.out), lambda: (record["row"] for record in seen.records()), about)
    if options.per_sequence:
        results.save_sequences(
            Path(options.beside),
            (
                (record["cell"], record["sequences"])
                for record in seen.records()
                if record["sequences"]
            ),
        )
