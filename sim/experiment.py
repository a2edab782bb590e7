"""Planned runs: simulations of one setup or of many, side by side on this machine's cores."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass

from crisp.errors import CrispError, unknown_name, wrong_type
from crisp.hardware.profile import HardwareProfile
from crisp.model.spec import ModelSpec
from crisp.policy import Budget, Policy
from crisp.run.case import Case, Conditions
from crisp.run.inputs import LoadedInputs, TraceSource, cached_inputs
from crisp.run.result import Run
from crisp.run.setup import Setup
from crisp.run.timeline import Sink
from crisp.sim.fast_simulate import fast_simulate
from crisp.sim.parallel import cores, side_by_side
from crisp.sim.simulate import simulate

ENGINES = ("simpy", "fast")
AUTO = "auto"  # fast where it can do the case exactly, else simpy


@dataclass(frozen=True)
class PlannedRun:
    """One simulation, small enough to be sent to another process, which loads its inputs itself."""

    source: TraceSource
    spec: ModelSpec  # cut to the trace's layers
    hardware: HardwareProfile
    policy: Policy
    budget: Budget
    conditions: Conditions
    engine: str = ENGINES[0]

    def case(self, inputs: LoadedInputs) -> Case:
        """Return the case; inputs: what the source holds."""
        return inputs.case(self.spec, self.policy, self.budget, self.conditions)


def plan_run(
    setup: Setup, policy: Policy | str, budget: Budget | str, engine: str = ENGINES[0]
) -> PlannedRun:
    """Plan one run of a setup with an engine: simpy, fast or auto.

    Raises CrispError for a budget that does not fit the model, and for a setup without hardware.
    """
    _check_engine(engine)
    if not isinstance(setup, Setup):
        raise wrong_type(setup, "setup", "a Setup, as crisp.run.setup.load_setup returns")
    if setup.hardware is None:
        raise CrispError(
            f"setup {setup.name}: has no hardware to simulate; load it with "
            "hardware=crisp.sim.hardware_profile(name)"
        )
    case = setup.case(policy, budget)
    return PlannedRun(
        setup.source, case.spec, setup.hardware, case.policy, case.budget, case.conditions, engine
    )


def run_case(
    case: Case,
    hardware: HardwareProfile | str,
    engine: str = ENGINES[0],
    *,
    sinks: Sequence[Sink] = (),
    progress: Callable[[int], None] | None = None,
) -> Run:
    """Simulate a case with an engine: simpy, fast or auto; only simpy has a timeline for sinks.

    hardware: a profile, or how `hardware_profile` finds one. progress: called with the number of
    rows of each step that begins.

    Raises CrispError for what does not go together, and for what the engine cannot do exactly.
    """
    _check_engine(engine)
    if sinks and engine != ENGINES[0]:
        raise CrispError(f"engine {engine}: has no timeline for sinks; engine {ENGINES[0]} has one")
    if engine == ENGINES[0]:
        return simulate(case, hardware, sinks=sinks, progress=progress)
    try:
        return fast_simulate(case, hardware, progress=progress)
    except CrispError:
        if engine != AUTO:
            raise
    # what the fast one cannot do; what nobody can is said by this one
    return simulate(case, hardware, progress=progress)


def run_planned(planned: PlannedRun) -> Run:
    """Run one here; this process loads each source once."""
    case = planned.case(cached_inputs(planned.source))
    return run_case(case, planned.hardware, planned.engine)


def run_all(
    planned: Sequence[PlannedRun], finished: Callable[[], None] = lambda: None
) -> list[Run]:
    """Return the runs in the order of their plans, made on all cores that this process may use.

    finished: called whenever one more run is.
    """
    runs: list[Run | None] = [None] * len(planned)
    jobs = min(len(planned), cores())
    with side_by_side(_run_numbered, enumerate(planned), jobs=jobs) as results:
        for place, run in results:
            runs[place] = run
            finished()
    return [run for run in runs if run is not None]


def _check_engine(engine: str) -> None:
    if engine not in (*ENGINES, AUTO):
        raise unknown_name(engine, (*ENGINES, AUTO), "engine")


def _run_numbered(item: tuple[int, PlannedRun]) -> tuple[int, Run]:
    place, planned = item
    return place, run_planned(planned)
