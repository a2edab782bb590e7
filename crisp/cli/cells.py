"""Runs of a table, side by side: what a cell needs, and how many of them are executed."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from functools import lru_cache
from pathlib import Path

from crisp.cli.output.run_files import title
from crisp.errors import CrispError
from crisp.hardware.profile import HardwareProfile, Power
from crisp.model.spec import ModelSpec
from crisp.policy import Budget, Policy
from crisp.profile import Profile
from crisp.profile.metadata import Metadata
from crisp.run.case import Case, Conditions
from crisp.run.result import Run
from crisp.run.timeline import Sink
from crisp.scheduler.workload import split
from crisp.sim.simulate import simulate
from crisp.sim.sweep.parallel import cores, side_by_side
from crisp.trace import RoutingTrace

ENGINES = ("simpy", "fast")
AUTO = "auto"  # fast where it can do the case exactly, else simpy
_OPENED = 4  # sources that stay open


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


@lru_cache(maxsize=_OPENED)
def opened(source: Source) -> Routing:
    """What `open_source` says, remembered: files are taken not to change meanwhile."""
    return open_source(source)


def run_cell(
    cell: Cell,
    routing: Routing,
    sinks: Sequence[Sink] = (),
    progress: Callable[[int], None] | None = None,
) -> Run:
    """Simulate one cell here. The engine ``fast`` has nothing for sinks."""
    assert cell.hardware is not None
    case = cell.case(routing)
    if cell.engine == AUTO:
        try:
            return run_cell(replace(cell, engine="fast"), routing, sinks, progress)
        except CrispError:  # what it cannot do; what nobody can is said by the other one
            return run_cell(replace(cell, engine="simpy"), routing, sinks, progress)
    if cell.engine == "fast":
        from crisp.sim.fast_simulate import replay  # imports numba, for which others need not wait

        assert not sinks
        return replay(case, cell.hardware, progress=progress)
    return simulate(case, cell.hardware, sinks=sinks, progress=progress)


def run_cells(cells: Sequence[Cell], done: Callable[[], None]) -> list[Run]:
    """The runs of all cells, in their order, on all cores that this process may use.

    done: called whenever one more is finished.
    """
    runs: list[Run | None] = [None] * len(cells)
    jobs = min(len(cells), cores())
    with side_by_side(_numbered, enumerate(cells), jobs=jobs) as finished:
        for place, run in finished:
            runs[place] = run
            done()
    return [run for run in runs if run is not None]


def _numbered(item: tuple[int, Cell]) -> tuple[int, Run]:
    """A cell's run in a worker, which opens each source once."""
    place, cell = item
    return place, run_cell(cell, opened(cell.source))
