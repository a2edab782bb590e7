"""The conditions that all numbers of a table share, and what is promised, in lines above it."""

from __future__ import annotations

from collections.abc import Iterable
from fractions import Fraction

from crisp.errors import CrispError
from crisp.model.spec import ModelSpec
from crisp.policy import Budget, Policy
from crisp.policy.promise import check_promising, within_loss
from crisp.profile.loss_curve import POLICY, Promise
from crisp.run.case import Case
from crisp.run.setup import Setup, other_geometry
from crisp.scheduler.workload import chosen_rows
from crisp.units import format_bytes, format_count


def describe_setup(setup: Setup) -> list[str]:
    """Return the conditions of a setup, a line each: they belong to every number below them."""
    trace, conditions, spec = setup.inputs.trace, setup.conditions, setup.spec
    header = trace.header
    of_phase = len(chosen_rows(trace, conditions.phase, None))
    rows, phase = setup.rows(), "" if conditions.phase == "all" else f"{conditions.phase} "
    limited = f" (the first of {of_phase:,})" if rows < of_phase else ""
    origin = "drawn from statistics of" if header.origin == "synthetic" else f"{header.origin} from"
    layers = format_count(spec.n_layers, "layer")
    if spec.n_layers < setup.whole.n_layers:
        layers = f"{spec.n_layers} of {setup.whole.n_layers} layers"
    lines = {
        "trace": f"{setup.name}: {rows:,} {phase}rows{limited}, {origin} "
        f"{header.model or 'an unnamed model'}",
        "profile": (setup.inputs.split or "").removeprefix("profile: "),
        "model": f"{spec.name}, {layers}; experts in {describe_bits(spec)}, "
        f"{describe_size(spec)}, {format_bytes(spec.routed_bytes)} in all",
        "hardware": setup.machine,
        "run": f"phase {conditions.phase}, batch {conditions.batch}, "
        f"granularity {conditions.granularity}",
    }
    if other_geometry(spec, trace):
        lines["model"] += f"\n{'':10}the routing is {header.model}'s, the sizes are {spec.name}'s"
    for note in setup.notes:
        lines["model"] += f"\n{'':10}{note}"
    return [f"{key:<10}{text}" for key, text in lines.items()]


def describe_bits(spec: ModelSpec) -> str:
    """Return the stored bits of a routed weight in words.

    >>> describe_bits(ModelSpec.named("gpt-oss-20b"))
    '4.25 bits'
    """
    if spec.layer_bits is None:
        return f"{float(spec.bits):g} bits"
    low, high = min(spec.layer_bits), max(spec.layer_bits)
    return f"{float(spec.bits):.3g} bits ({float(low):.3g} to {float(high):.3g} by layer)"


def describe_size(spec: ModelSpec) -> str:
    """Return the bytes of one routed expert in words."""
    least, most = (spec.n_blocks * size(spec.row_block_bytes) for size in (min, max))
    if least == most:
        return f"{format_bytes(most)} each"
    return f"{format_bytes(least)} to {format_bytes(most)} each"


def describe_run(case: Case, machine: str) -> str:
    """Return the conditions of one run in a line; machine: what it runs on, in a few words."""
    spec, conditions = case.spec, case.conditions
    return (
        f"{case.policy.name} at {case.budget.text} on {machine}; "
        f"{format_count(spec.n_layers, 'layer')} of {spec.name} in {describe_bits(spec)}, "
        f"batch {conditions.batch}, granularity {conditions.granularity}"
    )


def check_asked(loss: Fraction | None, policies: Iterable[Policy]) -> None:
    """Raise CrispError for a loss that none of the policies, or one with other parts, can keep."""
    named = [policy for policy in policies if policy.name == POLICY]
    if loss is not None and not named:
        raise CrispError(f"--loss: is for policy {POLICY}, which --policy does not name")
    for policy in named if loss is not None else ():
        check_promising(policy)


def describe_promises(
    setup: Setup, policies: Iterable[Policy], budgets: Iterable[Budget]
) -> list[str]:
    """Return a line for each budget in which a loss is promised; none where none was asked for."""
    if setup.loss is None or POLICY not in {policy.name for policy in policies}:
        return []
    policy = setup.policy(POLICY)
    alone = "" if setup.conditions.batch == 1 else "; measured for one sequence alone"
    return [
        describe_promise(
            setup.loss,
            budget,
            within_loss(policy, setup.loss, setup.spec, budget, setup.inputs.loss_curve)[1],
        )
        + alone
        for budget in budgets
    ]


def describe_promise(loss: Fraction, budget: Budget, promise: Promise) -> str:
    """Return what is promised in one budget."""
    return (
        f"{'loss':<10}at most {100 * float(loss):g} % at {budget.text}: "
        f"{POLICY}({float(promise.share):g}), which at {100 * float(promise.budget):g} % lost "
        f"{100 * promise.loss:.1f} % on the curve's text, by its interval "
        f"{100 * promise.high:.1f} % at most"
    )
