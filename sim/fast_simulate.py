"""fast_simulate(): the same run as `crisp.sim.simulate`, to the nanosecond and the byte, compiled.

It keeps no timeline, and refuses what it cannot do exactly.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import partial

from crisp.errors import wrong_type
from crisp.hardware.energy import modelled_energy
from crisp.hardware.profile import HardwareProfile, cost_model
from crisp.run.case import Case
from crisp.run.finish import finish
from crisp.run.result import Run
from crisp.sim.contention import sharing
from crisp.sim.fast.rules import refused
from crisp.sim.hardware import hardware_profile


def fast_simulate(
    case: Case,
    hardware: HardwareProfile | str,
    *,
    progress: Callable[[int], None] | None = None,
) -> Run:
    """Run a case on a simulated machine whose link and compute share nothing.

    hardware: a profile, or how `hardware_profile` finds one. progress: called with the number of
    rows of each step that is laid out.

    Raises CrispError for conditions that do not go together and for what only `simulate` can do,
    InvariantError for a fault of ours.
    """
    from crisp.sim.fast.execution import execute  # imports numba, for which others need not wait

    if not isinstance(case, Case):
        raise wrong_type(case, "case", "a Case, as Setup.case returns")
    machine = hardware_profile(hardware)
    cost = cost_model(machine, case.spec)
    if machine.kind == "unified":
        raise refused(f"unified memory, which {machine.name} has")
    if machine.page_cache is not None:
        raise refused("a page cache")
    if sharing(cost, (0, 1)) is not None:
        raise refused(f"streams that slow each other down, as on {machine.name}")
    if case.policy.routing.active:
        raise refused(f"routing {case.policy.routing_name}")
    case.asks_magnitudes()  # says what the trace lacks
    start = case.start()
    widths = case.policy.width.bind(case.spec, case.profile, case.trace.header.ordered)
    if case.policy.oracle and widths.residency:
        case.future()  # says why there is none
    found = execute(
        case.spec,
        case.policy,
        start,
        by_block=case.conditions.by_block,
        cost=cost,
        trace=case.trace,
        widths=widths,
        steps=case.steps(progress),
        following=case.following(),
    )
    return finish(
        case.settings("fast", machine.to_dict()),
        case.spec,
        cost=cost,
        scheduler=found.decided,
        sums=found.sums,
        log=found.log,
        total_ns=found.total_ns,
        skipped=found.skipped,
        belady=found.belady,
        sequence=case.trace.sequence,
        initial=start.resident,
        energy=partial(modelled_energy, machine),
    )
