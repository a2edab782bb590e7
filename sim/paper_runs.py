"""The runs that the claims of the paper are held against; `crisp.reproduce` says which."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import replace
from functools import partial

import numpy as np

from crisp.errors import CrispError
from crisp.hardware.profile import HardwareProfile, cost_model
from crisp.model.spec import ModelSpec
from crisp.policy import Budget, named
from crisp.policy.widths.base import Tiered
from crisp.profile import Profile, tiers
from crisp.progress import Progress
from crisp.reproduce.arithmetic import PaperCosts
from crisp.reproduce.evidence import (
    BITS,
    GPU,
    MODEL,
    OTHER,
    Evidence,
    RequiredRun,
    bound_runs,
    prompt_lengths,
    required_runs,
)
from crisp.reproduce.routing import GENERATED, LENGTHS, draw_trace, with_prompt
from crisp.run.case import Conditions
from crisp.run.inputs import LoadedInputs
from crisp.run.result import Run
from crisp.sim.experiment import AUTO, run_case
from crisp.sim.hardware import hardware_profile
from crisp.trace import DECODE, RoutingTrace
from crisp.trace.bundled import resolve_trace
from crisp.trace.describe import Description, describe, pair_shares
from crisp.trace.fitting import fit_to_trace
from crisp.units import parse_fraction

_DRAWN = "drawn from statistics of a real Mixtral-8x7B"
_SKEWED = f"{_DRAWN}, pairs as unequal as in the paper's Figure 3"


def gather(trace: str | None, progress: Progress = lambda done, total: None) -> Evidence:
    """Simulate whatever the claims need, on a trace or on routing drawn for it.

    progress: called with how many runs of how many are done.

    Raises CrispError for a trace of another shape than Mixtral's, or too short.
    """
    whole = draw_trace() if trace is None else RoutingTrace.load(resolve_trace(trace))
    _, inputs = inputs_of(whole)
    rows = inputs.trace.rows
    if len(prompt_lengths(rows)) < 2:
        least = 2 * (LENGTHS[1] + GENERATED)
        raise CrispError(f"--trace {trace}: {whole.rows:,} rows, expected {least:,} at least")
    main_runs, bounding_runs = required_runs(rows), bound_runs()
    total, before = len(main_runs) + 2 * len(bounding_runs), 0
    evidence = []
    for source, routing, runs in (
        (_describe_routing(trace, whole), whole, main_runs),
        (_SKEWED, draw_trace(skewed=True), bounding_runs),
        (OTHER, RoutingTrace.load(resolve_trace(OTHER)), bounding_runs),
    ):
        advance = partial(_report_progress, progress, before, total)
        evidence.append(_gather_on(trace, source, routing, runs, advance))
        before += len(runs)
    return replace(evidence[0], skewed=evidence[1], other=evidence[2])


def _report_progress(progress: Progress, before: int, total: int, done: int) -> None:
    progress(before + done, total)


def _gather_on(
    given: str | None,
    source: str,
    whole: RoutingTrace,
    runs: Sequence[RequiredRun],
    progress: Callable[[int], None],
) -> Evidence:
    """Make all runs on one routing; source: where it comes from, in words."""
    spec, inputs = inputs_of(whole)
    metrics = {}
    for done, run in enumerate(runs):
        progress(done)
        metrics[run] = run_wanted(run, inputs, spec, hardware_profile(run.machine)).metrics
    progress(len(runs))
    mo_prefetches = (
        "the previous token's experts" if whole.guess is None else "what the router guesses"
    )
    return Evidence(
        trace_name=given,
        routing_source=source,
        mo_prefetches=mo_prefetches,
        described=_described(whole),
        pairs=_pairs(whole),
        rows=inputs.trace.rows,
        runs=metrics,
        gpu=_costs(hardware_profile(GPU), spec),
        expert_bytes=spec.expert_bytes,
    )


def inputs_of(trace: RoutingTrace) -> tuple[ModelSpec, LoadedInputs]:
    """Return the geometry of the trace's layers, and its first half counted, the rest to be run."""
    spec = fit_to_trace(ModelSpec.named(MODEL).with_(bits=parse_fraction(BITS, "bits")), trace)
    return spec, LoadedInputs.from_trace(trace)


def run_wanted(
    wanted_run: RequiredRun, inputs: LoadedInputs, spec: ModelSpec, machine: HardwareProfile
) -> Run:
    """Make one run that the claims ask for."""
    trace = inputs.trace
    if wanted_run.prompt is not None:
        trace = with_prompt(trace, wanted_run.prompt)
    else:  # a claim about decoding: every row is one more token
        trace = replace(trace, phase=np.full(trace.rows, DECODE, np.uint8))
    policy = named(
        wanted_run.policy,
        width=wanted_run.width,
        order=wanted_run.order,
        cache=wanted_run.cache,
        scope=wanted_run.scope,
        unit=wanted_run.unit,
        has_guess=trace.guess is not None,
    )
    conditions = Conditions(phase="all", limit=wanted_run.limit)
    budget = Budget.parse(f"{wanted_run.budget}%")
    case = replace(inputs, trace=trace).case(spec, policy, budget, conditions)
    return run_case(case, machine, AUTO)


def _described(trace: RoutingTrace) -> Description:
    counts, tiering = Profile.from_trace(trace), Tiered()
    return describe(trace, counts, tiers(counts, tiering.alpha, tiering.beta), tiering)


def _pairs(trace: RoutingTrace) -> tuple[float, ...]:
    counts = Profile.from_trace(trace)
    of_layers = [pair_shares(counts, layer) for layer in trace.moe_layers]
    mean = np.mean([shares for shares in of_layers if shares is not None], axis=0)
    return tuple(float(share) for share in mean)


def _describe_routing(trace: str | None, whole: RoutingTrace) -> str:
    """Say where the routing comes from."""
    if trace is None:
        return _DRAWN
    header = whole.header
    return f"{trace}, {header.origin} from {header.model or 'an unnamed model'}"


def _costs(machine: HardwareProfile, spec: ModelSpec) -> PaperCosts:
    """Return the times of an expert, loaded in one request, and of the rest of a layer, in ms."""
    cost = cost_model(machine, spec)
    return PaperCosts(
        cost.load(spec.expert_bytes) / 1e6,
        cost.compute(0, spec.n_blocks, spec.d_ff) / 1e6,
        cost.layer(spec.moe_layers[0], 1) / 1e6,
    )
