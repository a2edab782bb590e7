"""A sweep from its settings to its files: checked, estimated, run, kept."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

from crisp.errors import CrispError
from crisp.sim.experiment import AUTO
from crisp.sim.parallel import side_by_side
from crisp.sim.sweep import cell as cells
from crisp.sim.sweep import results
from crisp.sim.sweep.estimate import TRIED, Sample, announce_compiling, sample
from crisp.sim.sweep.journal import Journal, Record
from crisp.sim.sweep.options import SilentReporter, SweepOptions, SweepReporter
from crisp.sim.sweep.spec import Sweep
from crisp.units import format_count
from crisp.version import TOOL

MANY = 5000  # cells that are not run without being asked twice


class SweepProgress:
    """The cells of a sweep in their order, each once, and which of them are done."""

    def __init__(self, sweep: Sweep, options: SweepOptions, journal: Journal) -> None:
        self._sweep, self._options, self.journal = sweep, options, journal
        self._order: dict[str, None] = {}  # keys that have been seen
        self._added: dict[str, None] = {}  # those that were run now, some before they were seen
        self.settled = 0  # cells that need not be run: done before, or the same as an earlier one
        self.before = len(journal)  # cells that were there when it began

    def jobs(self) -> Iterator[cells.CellJob]:
        """Yield those that are to be run."""
        for settings in self._sweep.cells():
            key = cells.cell_key(settings)
            new = key not in self._order
            self._order[key] = None
            if new and not self.done(key):
                options = self._options
                yield cells.job_of(key, settings, options.engine, options.per_sequence)
            else:
                self.settled += 1

    def waiting(self, reporter: SweepReporter) -> int:
        """Return how many are to be run."""
        if not self.before:
            return self._sweep.count
        with reporter.steps("cells, whether they are kept", self._sweep.count) as advance:
            keys = set()
            for settings in self._sweep.cells():
                keys.add(cells.cell_key(settings))
                advance(1)
        return sum(not self.done(key) for key in keys)

    def add(self, record: Record) -> None:
        """Keep the record of one that has been run."""
        self.journal.add(record)
        self._added[record["cell"]] = None

    def done(self, key: str) -> bool:
        """Return whether a record is here and has what is wanted; a refused cell is tried anew."""
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
        """Yield what is done, in the order of the sweep as far as it has been seen."""
        keys = self._order | self._added
        return (self.journal.record(key) for key in keys if key in self.journal)

    def see_all(self) -> None:
        """See the order of all cells, if some may have been done before."""
        if self.before:
            for _ in self.jobs():
                pass


def check_sweep(sweep: Sweep) -> list[tuple[str, str | None]]:
    """Raise CrispError for a value that cannot be read; return the files that cells read.

    Each is (where it is asked for, its path); of long lists of values the first few are looked at.
    """
    cells.forget_files()
    cells.check_values(sweep)
    cells.check_losses(sweep)
    return [
        (axis.where, cells.files_of({axis.key: text}).get(axis.key))
        for grid in sweep.grids
        for axis in grid.axes
        for text in axis.values[:TRIED]
    ]


def run_sweep(sweep: Sweep, options: SweepOptions, reporter: SweepReporter | None = None) -> None:
    """Run a sweep that `check_sweep` has passed, and write its files.

    Raises CrispError for what is wrong with the sweep, and for what goes wrong while it runs; what
    is finished by then is kept.
    """
    reporter = reporter or SilentReporter()
    if Path(options.out).exists():
        results.check_results(Path(options.out))  # else it would be said after the work
    if Path(options.beside).exists():
        results.check_sequences(Path(options.beside))
    for line in (f"{sweep.name}: {format_count(sweep.count, 'cell')}", *cells.check_losses(sweep)):
        reporter.say(line)
    some = sample(sweep)
    if sweep.count > MANY and not options.yes:
        announce_compiling(options, reporter)
        seconds = [taken for _, taken in some.measured(options, reporter)]
        estimate = some.estimate(seconds, sweep, options)
        raise CrispError(
            f"{sweep.name}: {format_count(sweep.count, 'cell')}, {estimate}; --yes runs them"
        )
    journal = Journal(options.journal, results.is_record)
    try:
        _run(sweep, options, journal, some, reporter)
    finally:
        journal.close()


def _run(
    sweep: Sweep, options: SweepOptions, journal: Journal, some: Sample, reporter: SweepReporter
) -> None:
    _check_dropped(sweep, options, journal)
    _adopt(options, journal)
    progress = SweepProgress(sweep, options, journal)
    waiting = progress.waiting(reporter)
    if progress.before:
        reporter.say(f"{sweep.count - waiting:,} kept, {waiting:,} to run")
    if waiting:
        announce_compiling(options, reporter)
    try:
        if not progress.before and sweep.count > 4 * options.jobs:
            seconds = []
            for record, taken in some.measured(options, reporter):
                progress.add(record)
                seconds.append(taken)
            reporter.say(some.estimate(seconds, sweep, options))
        with (
            reporter.share("cells") as update,
            side_by_side(
                cells.run_cell,
                progress.jobs(),
                jobs=min(options.jobs, sweep.count),
                backend=options.backend,
                scheduler=options.scheduler,
            ) as finished,
        ):
            for number, record in enumerate(finished, 1):
                progress.add(record)
                update(progress.settled + number, sweep.count)
    except BaseException as error:
        _keep(progress, options, error, sweep)
        raise
    reasons = (record["row"]["refused"] for record in progress.records())
    first = next(reasons)
    if first and all(reasons):
        journal.remove()
        raise CrispError(f"{sweep.name}: every cell is refused: {first}")
    _save(progress, options, complete=True)
    journal.remove()


def _check_dropped(sweep: Sweep, options: SweepOptions, journal: Journal) -> None:
    """Raise CrispError where cells of another sweep would be lost, unless they may be."""
    out, rows_of_file = Path(options.out), {str(journal.path): set(journal)}
    if out.exists():
        rows_of_file[options.out] = {
            str(row["cell"]) for row in results.load_rows(out, "cell".__eq__)
        }
    if options.replace or not any(rows_of_file.values()):
        return
    for settings in sweep.cells():
        key = cells.cell_key(settings)
        for keys in rows_of_file.values():
            keys.discard(key)
        if not any(rows_of_file.values()):
            return
    if not len(journal):
        journal.remove()
    file, rows = max(rows_of_file.items(), key=lambda item: len(item[1]))
    raise CrispError(
        f"{file}: holds {format_count(len(rows), 'row')} that this sweep does not ask for; "
        f"--replace drops {'it' if len(rows) == 1 else 'them'}"
    )


def _adopt(options: SweepOptions, journal: Journal) -> None:
    """Take over what earlier results hold, so that it need not be run again."""
    out = Path(options.out)
    if not out.exists():
        return
    beside = Path(options.beside)
    sequences = results.load_sequences(beside) if beside.exists() else {}
    for number, row in enumerate(results.load_rows(out), 1):
        key = str(row["cell"])
        record = {"cell": key, "row": row, "sequences": sequences.get(key)}
        if not results.is_record(record):
            raise CrispError(f"{out}: row {number} is not what crisp sweep writes")
        if key not in journal and row.get("provenance.tool") == TOOL:
            journal.add(record)


def _keep(
    progress: SweepProgress, options: SweepOptions, error: BaseException, sweep: Sweep
) -> None:
    """Write what is finished, and add to the error that it is there."""
    try:
        progress.see_all()
        done = sum(1 for _ in progress.records())
        if not done:
            progress.journal.remove()
            return
        _save(progress, options, complete=False)
    except CrispError as other:
        error.add_note(f"{other}; {options.journal} has what is finished")
        return
    error.add_note(
        f"{done:,} of {format_count(sweep.count, 'cell')} are in {options.out}; the same command "
        "goes on"
    )


def _save(progress: SweepProgress, options: SweepOptions, complete: bool) -> None:
    about = {"tool": TOOL, "complete": complete}
    results.save_rows(
        Path(options.out), lambda: (record["row"] for record in progress.records()), about
    )
    beside = Path(options.beside)
    if options.per_sequence or any(record["sequences"] for record in progress.records()):
        results.save_sequences(
            beside,
            (
                (record["cell"], record["sequences"])
                for record in progress.records()
                if record["sequences"]
            ),
        )
    else:
        beside.unlink(missing_ok=True)  # what it tells of is no longer there
