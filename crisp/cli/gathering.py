"""Runs what the claims of the paper are held against: `crisp.reproduce` says which runs."""

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
from crisp.reproduce.arithmetic import Costs
from crisp.reproduce.evidence import (
    BITS,
    GPU,
    MODEL,
    OTHER,
    Evidence,
    Wanted,
    bounds,
    lengths,
    wanted,
)
from crisp.reproduce.routing import GENERATED, LENGTHS, drawn, prompted
from crisp.run.case import Case, Conditions
from crisp.run.result import Run
from crisp.scheduler.workload import split
from crisp.sim.fast_simulate import replay
from crisp.sim.hardware import profile as hardware_profile
from crisp.sim.simulate import simulate
from crisp.trace import DECODE, RoutingTrace
from crisp.trace.bundled import resolve
from crisp.trace.describe import Description, describe, pair_shares
from crisp.trace.fitting import fit
from crisp.units import exact

Progress = Callable[[int, int], None]
_DRAWN = "drawn from statistics of a real Mixtral-8x7B"
_SKEWED = f"{_DRAWN}, pairs as unequal as in the paper's Figure 3"


def gather(trace: str | None, progress: Progress = lambda done, total: None) -> Evidence:
    """Simulate whatever the claims need, on a trace or on routing drawn for it.

    progress: how many runs of how many are done.

    Raises CrispError for a trace of another shape than Mixtral's, or too short.
    """
    whole = drawn() if trace is None else RoutingTrace.load(resolve(trace))
    _, _, simulated = divided(whole)
    if len(lengths(simulated.rows)) < 2:
        least = 2 * (LENGTHS[1] + GENERATED)
        raise CrispError(f"--trace {trace}: {whole.rows:,} rows, expected {least:,} at least")
    own, bounding = wanted(simulated.rows), bounds()
    every, before = len(own) + 2 * len(bounding), 0
    found = []
    for made, routing, runs in (
        (_made(trace, whole), whole, own),
        (_SKEWED, drawn(skewed=True), bounding),
        (OTHER, RoutingTrace.load(resolve(OTHER)), bounding),
    ):
        found.append(
            _gathered(trace, made, routing, runs, partial(_after, progress, before, every))
        )
        before += len(runs)
    return replace(found[0], skewed=found[1], other=found[2])


def _after(progress: Progress, before: int, every: int, done: int) -> None:
    progress(before + done, every)


def _gathered(
    given: str | None,
    made: str,
    whole: RoutingTrace,
    runs: Sequence[Wanted],
    progress: Callable[[int], None],
) -> Evidence:
    """All runs on one routing; made: where it comes from, in words."""
    spec, profile, simulated = divided(whole)
    found = {}
    for done, run in enumerate(runs):
        progress(done)
        found[run] = _run(run, simulated, spec, profile, hardware_profile(run.machine)).metrics
    progress(len(runs))
    return Evidence(
        given=given,
        made=made,
        ahead="the previous token's experts" if whole.guess is None else "what the router guesses",
        described=_described(whole),
        pairs=_pairs(whole),
        rows=simulated.rows,
        runs=found,
        gpu=_costs(hardware_profile(GPU), spec),
        expert_bytes=spec.expert_bytes,
    )


def divided(trace: RoutingTrace) -> tuple[ModelSpec, Profile, RoutingTrace]:
    """The geometry of the trace's layers, the counts of its first half, and the rest of it."""
    spec = fit(ModelSpec.named(MODEL).with_(bits=exact(BITS, "bits")), trace)
    counted, simulated, _ = split(trace)
    return spec, Profile.from_trace(counted), simulated


def _run(
    run: Wanted,
    trace: RoutingTrace,
    spec: ModelSpec,
    profile: Profile,
    machine: HardwareProfile,
) -> Run:
    conditions = Conditions(phase="all", limit=run.limit)
    if run.prompt is not None:
        trace = prompted(trace, run.prompt)
    else:  # a claim about decoding: every row is one more token
        trace = replace(trace, phase=np.full(trace.rows, DECODE, np.uint8))
    policy = named(
        run.policy,
        width=run.width,
        order=run.order,
        cache=run.cache,
        scope=run.scope,
        unit=run.unit,
        has_guess=trace.guess is not None,
    )
    case = Case(trace, spec, policy, Budget.parse(f"{run.budget}%"), profile, conditions)
    return simulate(case, machine) if machine.kind == "unified" else replay(case, machine)


def _described(trace: RoutingTrace) -> Description:
    counts, tiering = Profile.from_trace(trace), Tiered()
    return describe(trace, counts, tiers(counts, tiering.alpha, tiering.beta), tiering)


def _pairs(trace: RoutingTrace) -> tuple[float, ...]:
    counts = Profile.from_trace(trace)
    known = [pair_shares(counts, layer) for layer in trace.moe_layers]
    mean = np.mean([shares for shares in known if shares is not None], axis=0)
    return tuple(float(share) for share in mean)


def _made(trace: str | None, whole: RoutingTrace) -> str:
    """Where the routing comes from, in words."""
    if trace is None:
        return _DRAWN
    header = whole.header
    return f"{trace}, {header.origin} from {header.model or 'an unnamed model'}"


def _costs(machine: HardwareProfile, spec: ModelSpec) -> Costs:
    """What an expert, loaded in one request, and the rest of a layer take, ms."""
    cost = cost_model(machine, spec)
    return Costs(
        cost.load(spec.expert_bytes) / 1e6,
        cost.compute(0, spec.n_blocks, spec.d_ff) / 1e6,
        cost.layer(spec.moe_layers[0], 1) / 1e6,
    )
