"""The rule and the settings that take least within a loss that metadata promises to keep."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from functools import partial

from crisp.errors import CrispError
from crisp.policy import Budget
from crisp.profile.loss_curve import POLICY
from crisp.run.case import GRANULARITIES
from crisp.run.result import Run
from crisp.run.setup import Setup
from crisp.sim.experiment import AUTO, PlannedRun, plan_run, run_planned
from crisp.sim.parallel import cores, side_by_side
from crisp.sim.tuning.candidates import cost_of

# What loses nothing, and what keeps the loss; each by its own unit.
_POLICIES = (("lru", "expert"), ("lru", "block"), (POLICY, "block"))
_ORDERS = ("widest", "johnson")


@dataclass(frozen=True)
class TunedBudget:
    """What takes least in one budget, and what the best that loses nothing takes there."""

    budget: Budget
    best: Run
    full: Run
    tried: int


def tune_promised(
    setup: Setup,
    budgets: Sequence[Budget],
    minimise: str,
    finished: Callable[[], None] = lambda: None,
) -> list[TunedBudget]:
    """Simulate all rules and settings in every budget, on all cores; return what takes least.

    setup: with the loss; minimise: a key of METRICS; finished: called whenever one more is.

    Raises CrispError where nothing can be minimised, and for a loss that cannot be promised.
    """
    if minimise == "energy" and (setup.hardware is None or setup.hardware.power is None):
        raise CrispError(f"--minimise energy: {setup.machine} has no power figures")
    planned = plan_promised(setup, budgets)
    runs: dict[int, Run] = {}
    with side_by_side(_numbered, enumerate(planned), jobs=min(len(planned), cores())) as done:
        for place, run in done:
            runs[place] = run
            finished()

    cost, result = partial(cost_of, minimise=minimise), []
    for budget in budgets:
        own = [runs[place] for place, plan in enumerate(planned) if plan.budget == budget]
        full = [run for run in own if run.settings["policy"]["name"] != POLICY]
        result.append(TunedBudget(budget, min(own, key=cost), min(full, key=cost), len(own)))
    return result


def plan_promised(setup: Setup, budgets: Sequence[Budget]) -> list[PlannedRun]:
    """Return all that is tried."""
    planned = []
    for granularity in GRANULARITIES:
        conditions = replace(setup.conditions, granularity=granularity)
        own = replace(setup, conditions=conditions)
        for name, unit in _POLICIES:
            for order in _ORDERS:
                policy = own.policy(name, unit=unit, order=order)
                planned += [plan_run(own, policy, budget, AUTO) for budget in budgets]
    return planned


def _numbered(item: tuple[int, PlannedRun]) -> tuple[int, Run]:
    place, planned = item
    return place, run_planned(planned)
