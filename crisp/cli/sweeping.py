"""A sweep from its first word to its files: told, estimated, run, kept."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path

from crisp import TOOL
from crisp.cli import asked as cells
from crisp.cli.asked import job_of
from crisp.cli.cells import AUTO
from crisp.cli.estimate import TRIED, Sample, sample, tell_compiling
from crisp.cli.options.files import Name, check_outputs
from crisp.cli.output.progress import progress, progress_of
from crisp.cli.output.words import counted
from crisp.errors import CrispError
from crisp.sim.sweep import results
from crisp.sim.sweep.journal import Journal, Record
from crisp.sim.sweep.parallel import side_by_side
from crisp.sim.sweep.spec import Sweep

MANY = 5000  # cells that are not run without being asked twice


@dataclass(frozen=True)
class Options:
    """How a sweep is run."""

    out: str
    engine: str
    per_sequence: bool  # keep what each sequence took, and write it
    jobs: int
    backend: str
    scheduler: str | None
    replace: bool  # drop what earlier results hold beside what is asked for
    yes: bool

    @property
    def outputs(self) -> dict[str, Name]:
        """The files to be written, by option."""
        beside = self.per_sequence or Path(self.beside).exists()  # which is renewed with the rows
        return {
            "--out": self.out,
            "--per-sequence": self.beside if beside else None,
            "--out, until it is written,": self.journal,
        }

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
                yield job_of(key, asked, self._options.engine, self._options.per_sequence)
            else:
                self.told += 1

    def waiting(self) -> int:
        """How many are to be run."""
        if not self.before:
            return self._sweep.count
        with progress("cells, whether they are kept", self._sweep.count) as advance:
            keys = set()
            for asked in self._sweep.cells():
                keys.add(cells.key(asked))
                advance(1)
        return sum(not self.done(key) for key in keys)

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
        for text in axis.values[:TRIED]
    ]
    check_outputs(options.outputs, [*inputs, *files], stdout=False)
    if Path(options.out).exists():
        results.check(Path(options.out))  # else it would be said after the work
    if Path(options.beside).exists():
        results.check_sequences(Path(options.beside))
    print(f"{sweep.name}: {counted(sweep.count, 'cell')}", flush=True)
    some = sample(sweep)
    if sweep.count > MANY and not options.yes:
        tell_compiling(options)
        seconds = [taken for _, taken in some.measured(options)]
        told = some.estimate(seconds, sweep, options)
        raise CrispError(f"{sweep.name}: {counted(sweep.count, 'cell')}, {told}; --yes runs them")
    journal = Journal(options.journal, results.fits)
    try:
        _run(sweep, options, journal, some)
    finally:
        journal.close()


def _run(sweep: Sweep, options: Options, journal: Journal, some: Sample) -> None:
    _check_dropped(sweep, options, journal)
    _adopt(options, journal)
    seen = Seen(sweep, options, journal)
    waiting = seen.waiting()
    if seen.before:
        print(f"{sweep.count - waiting:,} kept, {waiting:,} to run", flush=True)
    if waiting:
        tell_compiling(options)
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


def _check_dropped(sweep: Sweep, options: Options, journal: Journal) -> None:
    """Raise CrispError where cells of another sweep would be lost, unless they may be."""
    out, kept = Path(options.out), {str(journal.path): set(journal)}
    if out.exists():
        kept[options.out] = {str(row["cell"]) for row in results.load(out, "cell".__eq__)}
    if options.replace or not any(kept.values()):
        return
    for asked in sweep.cells():
        key = cells.key(asked)
        for own in kept.values():
            own.discard(key)
        if not any(kept.values()):
            return
    if not len(journal):
        journal.remove()
    file, rows = max(kept.items(), key=lambda item: len(item[1]))
    raise CrispError(
        f"{file}: holds {counted(len(rows), 'row')} that this sweep does not ask for; --replace "
        f"drops {'it' if len(rows) == 1 else 'them'}"
    )


def _adopt(options: Options, journal: Journal) -> None:
    """Take over what earlier results hold, so that it need not be run again."""
    out = Path(options.out)
    if not out.exists():
        return
    beside = Path(options.beside)
    kept = results.load_sequences(beside) if beside.exists() else {}
    for number, row in enumerate(results.load(out), 1):
        key = str(row["cell"])
        record = {"cell": key, "row": row, "sequences": kept.get(key)}
        if not results.fits(record):
            raise CrispError(f"{out}: row {number} is not what crisp sweep writes")
        if key not in journal and row.get("provenance.tool") == TOOL:
            journal.add(record)


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
    beside = Path(options.beside)
    if options.per_sequence or any(record["sequences"] for record in seen.records()):
        results.save_sequences(
            beside,
            (
                (record["cell"], record["sequences"])
                for record in seen.records()
                if record["sequences"]
            ),
        )
    else:
        beside.unlink(missing_ok=True)  # what it tells of is no longer there
