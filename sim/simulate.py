"""simulate(): one run of a trace under a policy on a simulated machine."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import replace
from functools import partial

from crisp.errors import wrong_type
from crisp.hardware.energy import modelled_energy
from crisp.hardware.profile import HardwareProfile, cost_model
from crisp.policy import Cache
from crisp.run.case import Case
from crisp.run.finish import finish
from crisp.run.result import Run
from crisp.run.timeline import Recorder, Sink, StepLog
from crisp.scheduler.scheduler import EventScheduler
from crisp.sim.bounds import FEW, Belady
from crisp.sim.hardware import hardware_profile
from crisp.sim.streams import SimulatedStreams


def simulate(
    case: Case,
    hardware: HardwareProfile | str,
    *,
    sinks: Sequence[Sink] = (),
    progress: Callable[[int], None] | None = None,
    watch: Callable[[EventScheduler], None] | None = None,
) -> Run:
    """Run a case on a simulated machine.

    hardware: a profile, or how `hardware_profile` finds one. sinks: where the timeline goes.
    progress: called with the number of rows of each step that begins. watch: shown the scheduler
    whenever an event is over.

    Raises CrispError for conditions that do not go together, InvariantError for a fault of ours.
    """
    if not isinstance(case, Case):
        raise wrong_type(case, "case", "a Case, as Setup.case returns")
    machine = hardware_profile(hardware)
    cost = cost_model(machine, case.spec)
    if machine.loads_from == "mapped":  # nothing to load: experts are where they are computed
        mapped = replace(case.policy, cache=Cache("static", "global"))
        case = replace(case, policy=mapped, everything=True)
    workload, scheduler, start = case.workload(), case.scheduler(cost), case.start()
    uses = len(case.rows()) * len(case.spec.moe_layers) * case.trace.k
    belady = Belady(case.spec, start, compiled=uses > FEW)
    recorder, log = Recorder([*sinks, belady]), StepLog()
    streams = SimulatedStreams(case.spec, scheduler, cost, workload, recorder, log, watch)
    total_ns = streams.run(case.steps(progress))
    return finish(
        case.settings("simpy", machine.to_dict()),
        case.spec,
        cost=cost,
        scheduler=scheduler,
        sums=recorder.sums,
        log=log,
        total_ns=total_ns,
        skipped=workload.skipped,
        belady=belady.fewest,
        sequence=case.trace.sequence,
        initial=start.resident,
        energy=partial(modelled_energy, machine),
    )
