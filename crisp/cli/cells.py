"""Runs of a table, side by side: what a cell needs, and how many of them are executed."""

from __future__ import annotations

import os
import signal
import threading
import warnings
from collections.abc import Callable, Generator, Iterator, Sequence
from concurrent.futures.process import BrokenProcessPool
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from functools import lru_cache
from multiprocessing import resource_tracker
from pathlib import Path

from crisp.case import Case, Conditions
from crisp.cli.outputs import title
from crisp.errors import CrispError
from crisp.hardware import HardwareProfile, Power
from crisp.metadata import Metadata
from crisp.model import ModelSpec
from crisp.policy import Budget, Policy
from crisp.profile import Profile
from crisp.run import Run
from crisp.timeline import Sink
from crisp.trace import RoutingTrace
from crisp.workload import split
from sim.simulate import simulate

ENGINES = ("simpy", "fast")


@dataclass(frozen=True)
class Source:
    """Where the routing comes from: files, so that every process can map them itself."""

    trace: Path
    profile: Path | None = None  # a trace to count combinations in
    metadata: Path | None = None  # of a prepared model, which holds the counts
    layers: int | None = None  # of the trace that are run; None: all


@dataclass(frozen=True, eq=False)
class Routing:
    """What a source holds, divided."""

    counted: RoutingTrace | None  # what the profile was counted from; None: metadata holds it
    simulated: RoutingTrace
    profile: Profile
    how: str  # it was divided, in words
    file: dict[str, str]  # name and digest of the whole trace
    prepared: ModelSpec | None = None  # the geometry in the metadata


@dataclass(frozen=True)
class Cell:
    """One run of a table."""

    source: Source
    spec: ModelSpec  # cut to the trace's layers
    machine: str  # in a few words
    hardware: HardwareProfile | None  # None: it is measured
    policy: Policy
    budget: Budget
    conditions: Conditions
    engine: str = ENGINES[0]  # what simulates it

    @property
    def title(self) -> str:
        """The conditions in a line."""
        return title(self.policy, self.budget, self.machine, self.spec, self.conditions)

    @property
    def power(self) -> Power | None:
        """Of the machine, if it is known."""
        return None if self.hardware is None else self.hardware.power

    def case(self, routing: Routing) -> Case:
        """What is run, whoever runs it; routing: what the source holds."""
        return Case(
            routing.simulated,
            self.spec,
            self.policy,
            self.budget,
            routing.profile,
            self.conditions,
            routing.how,
            routing.file,
            counted=routing.counted,
        )


def open_source(source: Source) -> Routing:
    """Map the trace (and count its profile), or CrispError.

    Without a profile of its own, the first half of the trace is counted and the rest simulated.
    """
    whole = RoutingTrace.load(source.trace)
    file = {"name": source.trace.name, "sha256": whole.digest()}
    layers = whole.layers if source.layers is None else source.layers
    if not 1 <= layers <= whole.layers:
        raise CrispError(f"--layers {layers}: {source.trace} has {whole.layers}")
    if source.metadata is not None:
        found = Metadata.load(source.metadata)
        how = f"profile: {source.metadata.name}, prepared from {found.spec.name}; simulated: all"
        counts = _fitting(found, whole, source.metadata).first_layers(layers)
        rest = whole.first_layers(layers)
        return Routing(None, rest, counts, how + " rows", file, found.spec)
    if source.profile is None:
        counted, simulated, how = split(whole.first_layers(layers))
    else:
        counted, simulated = RoutingTrace.load(source.profile), whole.first_layers(layers)
        counted = counted.first_layers(min(layers, counted.layers))
        how = f"profile: all {counted.rows:,} rows of {source.profile.name}; simulated: all rows"
    return Routing(counted, simulated, Profile.from_trace(counted), how, file)


def _fitting(found: Metadata, trace: RoutingTrace, path: Path) -> Profile:
    """The metadata's profile; CrispError unless it is of the traced model."""
    own, traced = found.spec, trace.header
    sizes = (own.n_layers, own.n_experts), (trace.layers, traced.n_experts)
    if sizes[0] != sizes[1]:
        raise CrispError(
            f"--metadata {path}: {sizes[0][0]} layers of {sizes[0][1]} experts, but the trace has "
            f"{sizes[1][0]} of {sizes[1][1]}"
        )
    if None not in (own.config_hash, traced.config_hash) and own.config_hash != traced.config_hash:
        raise CrispError(
            f"--metadata {path}: belongs to {own.name}; the trace was recorded from another model, "
            f"{traced.model}"
        )
    return found.profile()


def run_cell(
    cell: Cell,
    routing: Routing,
    sinks: Sequence[Sink] = (),
    progress: Callable[[int], None] | None = None,
) -> Run:
    """Simulate one cell here. The engine ``fast`` has nothing for sinks."""
    assert cell.hardware is not None
    case = cell.case(routing)
    if cell.engine == "fast":
        from sim.replay import replay  # imports numba, for which others need not wait

        assert not sinks
        return replay(case, cell.hardware, progress=progress)
    return simulate(case, cell.hardware, sinks=sinks, progress=progress)


def run_cells(cells: Sequence[Cell], done: Callable[[], None]) -> list[Run]:
    """The runs of all cells, in their order, on all cores that this process may use.

    done: called whenever one more is finished.
    """
    runs: list[Run | None] = [None] * len(cells)
    with ExitStack() as stack:
        try:
            for place, run in _finished(cells, stack):
                runs[place] = run
                done()
        except BrokenProcessPool as error:
            raise CrispError("a worker process was killed; was there memory enough?") from error
        except BaseException:
            # what has failed is raised here; joblib's threads may trip over tasks that are gone
            threading.excepthook = lambda failure: None
            raise
    return [run for run in runs if run is not None]


def _finished(cells: Sequence[Cell], stack: ExitStack) -> Iterator[tuple[int, Run]]:
    """Places and runs as they finish; leaving the stack stops those that have not."""
    import joblib

    numbered = list(enumerate(cells))
    workers = min(len(cells), len(os.sched_getaffinity(0)))
    if workers < 2:
        return map(_numbered, numbered)
    parallel = joblib.Parallel(
        workers, "loky", return_as="generator_unordered", pre_dispatch="all", batch_size=1
    )
    with _interrupts_held():
        finished: Generator[tuple[int, Run]] = parallel(map(joblib.delayed(_numbered), numbered))
        stack.callback(_stop, finished)
    return finished


def _numbered(item: tuple[int, Cell]) -> tuple[int, Run]:
    """A cell's run in a worker, which opens each source once."""
    place, cell = item
    return place, run_cell(cell, _opened(cell.source))


@lru_cache(maxsize=1)
def _opened(source: Source) -> Routing:
    return open_source(source)


def _stop(finished: Generator[tuple[int, Run]]) -> None:
    """End the workers; nothing happens if all are done."""
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # joblib's advice on work that was in vain
        finished.close()


@contextmanager
def _interrupts_held() -> Iterator[None]:
    """Answer Ctrl-C when the block ends; processes that start in it never get any.

    So a terminal's Ctrl-C reaches this process alone, which stops its workers itself.
    """
    caught: list[int] = []
    resource_tracker.ensure_running()  # joblib starts it, and starting it lets signals through
    handler = signal.signal(signal.SIGINT, lambda number, frame: caught.append(number))
    mask = signal.pthread_sigmask(signal.SIG_BLOCK, {signal.SIGINT})
    try:
        yield
    finally:
        signal.pthread_sigmask(signal.SIG_SETMASK, mask)
        signal.signal(signal.SIGINT, handler)
    if caught and callable(handler):
        handler(signal.SIGINT, None)
