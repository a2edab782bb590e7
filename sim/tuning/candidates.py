"""Every measured width at a budget: the policies that are tried, and which are worth it."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass

from crisp.errors import CrispError
from crisp.policy import Budget, named
from crisp.policy.widths.names import WIDTHS
from crisp.run.result import Run
from crisp.run.setup import Setup
from crisp.sim.experiment import AUTO, PlannedRun, plan_run, run_planned
from crisp.sim.parallel import cores, side_by_side
from crisp.sim.tuning.losses import Loss, Losses, front, same_budget

METRICS = {
    "bytes": "decode_bytes_per_token",
    "energy": "decode_energy_j_per_token",
    "time": "ms_per_token_mean",
}
# Tried for widths that do not look at what is resident: their loss is the same with all of them.
CACHES = (("lru", "expert"), ("lfu", "expert"), ("lru", "block"), ("suffix-lru", "block"))
ORDERS = ("widest", "johnson")  # johnson where time counts: bytes hardly depend on the order


@dataclass(frozen=True)
class Candidate:
    """A policy that is tried: what its widths lose, and how it is run."""

    loss: Loss
    planned: PlannedRun


@dataclass(frozen=True)
class Candidates:
    """All policies that measured losses allow at a budget."""

    file: str  # where the losses come from
    losses: Losses
    budget: str
    minimise: str  # a key of METRICS
    tried: list[Candidate]
    other_budget: list[Loss]  # that hold at another budget only
    refused: list[str]  # why some cannot be run


@dataclass(frozen=True)
class TunedPolicy:
    """A policy that was run at the budget: what its widths lose, and its run."""

    loss: Loss
    run: Run


@dataclass(frozen=True)
class Tuning:
    """The policies that no other one beats, by rising loss, and what has to be said about it."""

    front: list[TunedPolicy]
    reference: TunedPolicy  # the cheapest of full widths
    tried: int
    notes: list[str]

    def best(self, most: float) -> TunedPolicy:
        """Return the last one on the front that loses no more than ``most``."""
        return [policy for policy in self.front if policy.loss.loss <= most][-1]


def cost_of(run: Run, minimise: str) -> float:
    """Return what a decoded token takes, in the unit of the metric; minimise: a key of METRICS."""
    return run.metrics[METRICS[minimise]] or 0.0


def find_candidates(
    setup: Setup, losses: Losses, file: str, budget: str, minimise: str
) -> Candidates:
    """Return what is tried at a budget; CrispError where nothing can be minimised.

    file: where the losses come from. minimise: a key of METRICS.
    """
    hardware = setup.hardware
    if minimise == "energy" and (hardware is None or hardware.power is None):
        raise CrispError(f"--minimise energy: {setup.machine} has no power figures")
    parsed, orders = Budget.parse(budget), ORDERS if minimise == "time" else ORDERS[:1]
    tried, other_budget, refused = list[Candidate](), list[Loss](), list[str]()
    for loss in {_conditions(loss): loss for loss in losses.rows}.values():
        try:
            resident = _looks_at_residents(setup, loss)
        except CrispError as error:
            refused.append(f"{loss.width}: {error}")
            continue
        if resident and not same_budget(budget, loss.budget):
            other_budget.append(loss)
            continue
        caches = [(loss.cache, loss.unit)] if resident else CACHES
        for cache, unit in caches:
            for order in orders:
                policy = named(
                    loss.policy, width=loss.width, order=order, cache=cache, scope=loss.scope,
                    unit=unit, rescale=loss.rescale, magnitude=loss.magnitude, prefetch="none",
                )  # fmt: skip
                tried.append(Candidate(loss, plan_run(setup, policy, parsed, AUTO)))
    return Candidates(file, losses, budget, minimise, tried, other_budget, refused)


def tune(candidates: Candidates, finished: Callable[[], None] = lambda: None) -> Tuning:
    """Simulate all candidates, on all cores; CrispError where none of full width can be run.

    finished: called whenever one more is.
    """
    tried, minimise = candidates.tried, candidates.minimise
    results: dict[int, Run | str] = {}
    jobs = min(len(tried), cores())
    with side_by_side(_try_numbered, enumerate(tried), jobs=jobs) as done:
        for place, result in done:
            results[place] = result
            finished()
    policies, refused = list[TunedPolicy](), list(candidates.refused)
    for place, candidate in enumerate(tried):
        result = results[place]
        if isinstance(result, Run):
            policies.append(TunedPolicy(candidate.loss, result))
        else:
            refused.append(f"{candidate.loss.width}: {result}")

    def cost(policy: TunedPolicy) -> float:
        return cost_of(policy.run, minimise)

    full = [policy for policy in policies if policy.loss.width == "full"]
    if not full:
        raise CrispError(refused[0])
    notes = _missing_losses(candidates)
    if refused:
        notes.append(f"refused: {len(refused)}, such as {refused[0]}")
    best = front(policies, lambda policy: policy.loss.loss, cost)
    return Tuning(best, min(full, key=cost), len(policies), notes)


def _conditions(loss: Loss) -> tuple[object, ...]:
    """Return what two measurements share that need be tried once."""
    return (
        loss.width, loss.cache, loss.scope, loss.unit, loss.budget, loss.rescale, loss.magnitude,
    )  # fmt: skip


def _looks_at_residents(setup: Setup, loss: Loss) -> bool:
    """Return whether the widths depend on what is resident: then a loss holds for one cache."""
    inputs = setup.inputs
    width = named(loss.policy, width=loss.width, prefetch="none").width
    return width.bind(setup.spec, inputs.profile, inputs.trace.header.ordered).residency


def _try_numbered(item: tuple[int, Candidate]) -> tuple[int, Run | str]:
    """Run a candidate in a worker; return the run, or why there is none."""
    place, candidate = item
    try:
        return place, run_planned(candidate.planned)
    except CrispError as error:
        return place, str(error)


def _missing_losses(candidates: Candidates) -> list[str]:
    """Return what the file of losses lacks, a line each."""
    file, budget, unusable = candidates.file, candidates.budget, candidates.other_budget
    notes = []
    if unusable:
        budgets = ", ".join(sorted({loss.budget or "none" for loss in unusable}))
        names = ", ".join(_distinct([loss.width for loss in unusable]))
        notes.append(
            f"{file}: not usable at {budget}: {names}, which look at what is resident and were "
            f"measured at a budget of {budgets}; crisp eval --budget {budget} measures them"
        )
    measured = {loss.width.partition("(")[0] for loss in candidates.losses.rows}
    missing = [name for name in WIDTHS if name not in measured]
    if missing:
        notes.append(f"{file}: has no {', '.join(missing)}; crisp eval --width measures them")
    return notes


def _distinct(names: Sequence[str]) -> list[str]:
    return list(dict.fromkeys(names))
