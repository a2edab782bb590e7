"""Prefetchers that need more than the run: what usually follows, and what will come."""

from __future__ import annotations

import dataclasses
from typing import Any

import numpy as np
import pytest

from crisp.errors import CrispError
from crisp.model.spec import ModelSpec
from crisp.policy import Budget, named
from crisp.profile import Profile
from crisp.run.case import Case, Conditions
from crisp.run.result import Run
from crisp.scheduler.workload import split
from crisp.sim.hardware import hardware_profile
from crisp.sim.simulate import simulate
from crisp.trace import RoutingTrace
from crisp.trace.bundled import bundled_traces
from crisp.trace.fitting import fit_to_trace
from tests.oracles import offline
from tests.oracles.caches import usual_next


@pytest.fixture(scope="module")
def parts() -> tuple[RoutingTrace, RoutingTrace]:
    first, rest, _ = split(RoutingTrace.load(bundled_traces()["tiny-mixtral-code"]))
    return first, rest


def case(first: RoutingTrace, rest: RoutingTrace, prefetch: str, **more: Any) -> Case:
    spec = fit_to_trace(ModelSpec.named("mixtral-8x7b"), rest)
    policy, limited = named("lru", prefetch=prefetch), Conditions(limit=40)
    counts = Profile.from_trace(first)
    return Case(rest, spec, policy, Budget.parse("50%"), counts, limited, counted=first, **more)


def asked_for(run: Run) -> float:
    """Bytes that were fetched ahead and then asked for, in time or not."""
    return (run.metrics["prefetch_useful_bytes"] or 0) + (run.metrics["prefetch_late_bytes"] or 0)


def timeline(run: Run) -> Any:
    return run.metrics, run.provenance["timeline_sha256"]


def test_frequent_is_a_guess_by_counting(parts: tuple[RoutingTrace, RoutingTrace]) -> None:
    first, rest = parts
    experts, own = np.asarray(first.experts, np.int64), np.asarray(rest.experts, np.int64)
    guess = np.full(rest.experts.shape, -1, np.int16)
    for layer in range(first.layers - 1):
        anchor = [offline.anchor_rank(row, None) for row in experts[:, layer].tolist()]
        usual = usual_next(experts, layer, layer + 1, anchor)
        for row, pair in enumerate(own[:, layer].tolist()):
            guessed = usual.get((min(pair), max(pair)), [])
            guess[row, layer + 1, : len(guessed)] = guessed
    assert first.header.ordered
    told = dataclasses.replace(rest, guess=guess)
    machine = hardware_profile("rtx4090-pcie4")
    frequent = simulate(case(first, rest, "frequent"), machine)
    assert timeline(frequent) == timeline(simulate(case(first, told, "guess"), machine))
    assert asked_for(frequent) > 0
    assert frequent.settings["profile"]["trace"] == first.digest()


def test_perfect_wastes_nothing(parts: tuple[RoutingTrace, RoutingTrace]) -> None:
    machine = hardware_profile("rtx4090-pcie4")
    run = simulate(case(*parts, "perfect"), machine)
    none = simulate(case(*parts, "none"), machine)
    assert run.metrics["prefetch_wasted_bytes"] == 0
    assert asked_for(run) > 0
    assert run.metrics["total_ns"] < none.metrics["total_ns"]
    assert run.settings["policy"]["oracle"] == "prefetch perfect"
    assert "oracle" not in none.settings["policy"]


def salient(first: RoutingTrace, rest: RoutingTrace, prefetch: str) -> Case:
    """With contributions that fall within an expert."""
    made = case(first, rest, "none")
    sizes = np.random.default_rng(5).random((rest.layers, 8, 8)).astype(np.float32)
    told = dataclasses.replace(
        made.profile,
        contributions=-np.sort(-sizes, axis=2),
        sensitivities=np.ones(rest.layers, np.float32),
    )
    policy = named("saliency", prefetch=prefetch, rescale="none")
    return dataclasses.replace(made, policy=policy, profile=told)


def test_saliency_fetches_only_what_is_worth_loading(
    parts: tuple[RoutingTrace, RoutingTrace],
) -> None:
    """What will be routed to is known, and not what is resident then; so nothing is in vain."""
    machine = hardware_profile("paper-table1")
    found = {
        name: simulate(salient(*parts, name), machine)
        for name in ("none", "guess", "saliency(guess)", "saliency(perfect)")
    }
    perfect = found["saliency(perfect)"]
    assert perfect.metrics["prefetch_wasted_bytes"] == 0
    assert asked_for(perfect) > 0
    assert perfect.metrics["total_ns"] < found["none"].metrics["total_ns"]
    assert perfect.settings["policy"]["oracle"] == "prefetch saliency(perfect)"
    wasted = [found[name].metrics["prefetch_wasted_bytes"] for name in ("saliency(guess)", "guess")]
    assert 0 < wasted[0] < wasted[1]


def test_saliency_with_a_routing_rule_cannot_know_the_future(
    parts: tuple[RoutingTrace, RoutingTrace],
) -> None:
    made = salient(*parts, "saliency(perfect)")
    rule = named("lru", routing="skip-missing").routing
    made = dataclasses.replace(made, policy=dataclasses.replace(made.policy, routing=rule))
    own = made.trace
    assert own.weights is not None
    scores = np.full((own.rows, own.layers, 8), -9, np.float16)
    np.put_along_axis(scores, own.experts.astype(np.int64), np.log(own.weights), axis=2)
    made = dataclasses.replace(made, trace=dataclasses.replace(own, scores=scores))
    with pytest.raises(CrispError, match="is an oracle, but its routing depends on what is reside"):
        simulate(made, hardware_profile("paper-table1"))


def test_frequent_needs_a_trace(parts: tuple[RoutingTrace, RoutingTrace]) -> None:
    unknown = dataclasses.replace(case(*parts, "frequent"), counted=None)
    with pytest.raises(CrispError, match="prefetch frequent: asks which experts follow which"):
        simulate(unknown, hardware_profile("rtx4090-pcie4"))
