"""The conditions that all numbers of a table share, in lines above it."""

from __future__ import annotations

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
        "model": f"{spec.name}, {layers}; experts in {float(spec.bits):g} bits, "
        f"{format_bytes(spec.expert_bytes)} each, {format_bytes(spec.routed_bytes)} in all",
        "hardware": setup.machine,
        "run": f"phase {conditions.phase}, batch {conditions.batch}, "
        f"granularity {conditions.granularity}",
    }
    if other_geometry(spec, trace):
        lines["model"] += f"\n{'':10}the routing is {header.model}'s, the sizes are {spec.name}'s"
    return [f"{key:<10}{text}" for key, text in lines.items()]


def describe_run(case: Case, machine: str) -> str:
    """Return the conditions of one run in a line; machine: what it runs on, in a few words."""
    spec, conditions = case.spec, case.conditions
    return (
        f"{case.policy.name} at {case.budget.text} on {machine}; "
        f"{format_count(spec.n_layers, 'layer')} of {spec.name} in {float(spec.bits):g} bits, "
        f"batch {conditions.batch}, granularity {conditions.granularity}"
    )
