"""The fast engine equals the SimPy model in all that it counts, or refuses."""

from __future__ import annotations

from dataclasses import fields, replace
from fractions import Fraction
from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings

from crisp.errors import CrispError
from crisp.model.spec import ModelSpec
from crisp.policy import Budget, Cache, Order, Prefetch, named
from crisp.policy.widths.contribution import PrefixExtension
from crisp.policy.widths.skipping import ResidentFloor
from crisp.profile import Profile
from crisp.run.case import Case, Conditions
from crisp.run.timeline import Recorder, RunTotals, StepLog, StepTimes
from crisp.scheduler.workload import Workload, chosen_rows, plan, split
from crisp.sim import fast_replay
from crisp.sim.bounds import Belady
from crisp.sim.fast import streams, unions
from crisp.sim.fast.batches import CostTable
from crisp.sim.fast.execution import execute
from crisp.sim.fast_simulate import fast_simulate
from crisp.sim.hardware import hardware_profile
from crisp.sim.simulate import simulate
from crisp.sim.streams import SimulatedStreams
from crisp.trace import PREFILL, RoutingTrace
from crisp.trace.bundled import bundled_traces
from crisp.trace.fitting import fit_to_trace
from tests.oracles.straight import KEYS
from tests.sim.drawn import SALIENT, toys
from tests.sim.toys import Costs, GivenWidths, Toy

TOTALS = [field.name for field in fields(RunTotals)]
COUNTS = ("done", "event", "tasks", "hits", "partial_hits", "blocks_loaded", "bytes_loaded")


class GivenBlocks(PrefixExtension):
    """Blocks worth loading, as bits, that stand in the trace's weights."""

    def wanted(self, layer: int, experts: Any, weights: Any) -> Any:
        return weights.astype(np.uint64)


def told(scheduler: Any, sums: RunTotals, log: StepLog, **more: Any) -> dict[str, Any]:
    """All that a run is made of but its settings."""
    ahead = scheduler.ahead
    steps = log.steps(np.arange(1000, dtype=np.int32))
    return {
        **{name: getattr(scheduler, name) for name in COUNTS},
        "ahead": ahead and (ahead.useful_bytes, ahead.late_bytes, ahead.wasted_bytes),
        **{name: getattr(sums, name) for name in TOTALS},
        "steps": [column.tolist() for column in log.columns()],
        "prompts": sums.prompt_times(log.columns()[2] == PREFILL),
        "by step": [getattr(steps, field.name).tolist() for field in fields(StepTimes)],
        **more,
    }


def by_simpy(toy: Toy) -> dict[str, Any]:
    trace, scheduler, log = toy.trace(), toy.scheduler(), StepLog()
    workload = Workload(trace, widths(toy), guess="guess" in toy.prefetch)
    belady = Belady(toy.spec(), toy.start(), compiled=False)
    recorder = Recorder([belady])
    total = SimulatedStreams(toy.spec(), scheduler, toy.costs, workload, recorder, log).run(
        steps(toy)
    )
    return told(
        scheduler, recorder.sums, log, total=total, skipped=workload.skipped,
        resident=scheduler.residency.resident, belady=belady.fewest,
    )  # fmt: skip


def fast(toy: Toy) -> dict[str, Any]:
    found = execute(
        toy.spec(), toy.policy(), toy.start(),
        by_block=toy.granularity == "block", cost=toy.costs, trace=toy.trace(),
        widths=widths(toy), steps=steps(toy),
    )  # fmt: skip
    return told(
        found.decided, found.sums, found.log, total=found.total_ns, skipped=found.skipped,
        resident=found.resident, belady=found.belady,
    )  # fmt: skip


def widths(toy: Toy) -> Any:
    """The toy's widths as they are, or as bits of the blocks that are worth loading."""
    return GivenWidths(tabled=True) if toy.tabled else GivenBlocks()


def steps(toy: Toy) -> Any:
    trace = toy.trace()
    return plan(trace, chosen_rows(trace, "all", None), toy.batch, toy.chunk)


@pytest.mark.seconds
@settings(max_examples=300)
@given(toys())
def test_random_runs_agree(toy: Toy) -> None:
    """In every policy that is no oracle, and with a perfect prefetcher; not tabled: widths depend
    on what is resident.
    """
    if toy.prefetch == "perfect":
        toy = replace(toy, tabled=True)  # else the future is not known
    expected = by_simpy(toy)
    assert fast(toy) == expected
    assert expected["belady"].blocks <= expected["blocks_loaded"]
    assert expected["belady"].n_bytes <= expected["bytes_loaded"]


@pytest.mark.seconds
@settings(max_examples=300)
@given(toys(["saliency"]))
def test_random_runs_agree_where_saliency_decides(toy: Toy) -> None:
    if toy.prefetch == "perfect":
        toy = replace(toy, tabled=True)
    assert fast(toy) == by_simpy(toy)


@pytest.mark.seconds
@settings(max_examples=300)
@given(toys(prefetches=SALIENT))
def test_random_runs_agree_where_saliency_prefetches(toy: Toy) -> None:
    assert fast(toy) == by_simpy(toy)


@pytest.mark.parametrize("cache", ["saliency", *KEYS])
def test_longer_runs_agree(cache: str) -> None:
    """Long enough that caches differ; three tokens a step, so that tasks have several rows."""
    rng = np.random.default_rng(7)
    experts = (rng.random((90, 2, 6)) + np.linspace(0, 1, 6)).argsort(axis=2)[:, :, :2]
    for tabled, most, share in ((True, 4, 2), (False, 8, 10)):
        toy = Toy(
            experts, rng.integers(0, most, experts.shape), 6, 3, cache=cache, unit="block",
            sequence=np.arange(90) // 30, batch=3, tabled=tabled, share=Fraction(1, share),
            costs=Costs(row_block=1), weights=rng.integers(0, 4, experts.shape) / 4,
        )  # fmt: skip
        assert fast(toy) == by_simpy(toy)


@pytest.mark.parametrize("prefetch", SALIENT)
def test_rows_that_predict_an_expert_at_several_ranks_agree(prefetch: str) -> None:
    """Few experts, four tokens a step: the largest weight decides what is worth loading."""
    rng = np.random.default_rng(11)
    experts, guess = rng.random((2, 80, 2, 4)).argsort(axis=3)[..., :3]
    toy = Toy(
        experts, rng.integers(0, 3, experts.shape), 4, 3, guess=guess, prefetch=prefetch,
        cache="saliency", unit="block", sequence=np.arange(80) // 20, batch=4,
        costs=Costs(router=9), weights=rng.integers(0, 4, experts.shape) / 4, share=Fraction(1, 4),
    )  # fmt: skip
    expected = by_simpy(toy)
    assert fast(toy) == expected
    assert sum(expected["ahead"]) > 0
    assert toy.simulated()["activities"] == toy.oracle()["activities"]


@pytest.mark.parametrize(
    "own",
    [
        {"prefetch": "previous"},
        {"prefetch": "perfect"},
        {"prefetch": "previous", "tabled": False, "batch": 2},
        {"cache": "random", "order": "random"},
        {"cache": "least-stale", "scope": "global"},
        {"cache": "saliency", "unit": "block", "prefetch": "previous"},
        {"cache": "saliency", "unit": "block", "prefetch": "saliency(perfect)", "tabled": False},
        {"cache": "saliency", "unit": "block", "prefetch": "saliency(previous)", "batch": 2},
    ],
)
def test_batches_go_on_where_the_last_one_ended(
    monkeypatch: pytest.MonkeyPatch, own: dict[str, Any]
) -> None:
    """Residency, predictions and the load in flight outlive a batch of steps."""
    rng = np.random.default_rng(3)
    experts = rng.random((40, 2, 6)).argsort(axis=2)[:, :, :2]
    toy = Toy(
        experts, rng.integers(0, 4, experts.shape), 6, 3, granularity="block",
        sequence=np.arange(40) // 20, costs=Costs(load_block=9, router=5), **own,
    )  # fmt: skip
    whole = by_simpy(toy)
    for rows in (1, 7):
        monkeypatch.setattr("crisp.sim.fast.batches._ROWS", rows)
        assert fast(toy) == whole


CELLS: list[tuple[str, str, dict[str, Any]]] = [
    ("fo", "10%", {}),
    ("lru", "30%", {}),
    ("up", "10%", {}),
    ("crisp", "50%", {}),
    ("crisp", "30%", {"phase": "prefill", "chunk": 96}),
    ("lru", "30%", {"cache": "lfu", "batch": 3}),
    ("lru", "20%", {"cache": "static", "scope": "global", "unit": "block"}),
    ("crisp", "10%", {"unit": "block", "order": "random(7)"}),
    ("crisp", "30%", {"granularity": "block", "phase": "all", "batch": 2}),
    ("crisp", "30%", {"unit": "block", "granularity": "block", "order": "johnson"}),
    ("crisp", "50%", {"cache": "lfu", "scope": "global", "unit": "block"}),
    ("mo", "30%", {}),
    ("mo", "20%", {"width": "tiered", "order": "johnson", "unit": "block", "phase": "all"}),
    ("mo", "30%", {"scope": "global", "granularity": "block", "prefetch": "previous"}),
    ("em", "30%", {"granularity": "block"}),
    ("lru", "20%", {"prefetch": "perfect", "batch": 2}),
    ("drop", "20%", {"cache": "slru", "order": "resident-first"}),
    ("crisp", "30%", {"width": "resident(.5)", "cache": "suffix-lfu", "unit": "block", "batch": 3}),
    ("crisp", "30%", {"width": "skip(.5)", "cache": "tier-aware", "order": "narrowest"}),
    ("lru", "20%", {"width": "resident", "cache": "random(5)", "phase": "all", "chunk": 64}),
    ("lru", "20%", {"cache": "saliency", "unit": "block", "granularity": "block"}),
    ("mo", "30%", {"width": "resident", "cache": "saliency", "unit": "block", "batch": 3}),
]


def case(trace: RoutingTrace, spec: ModelSpec, policy: str, budget: str, **changes: Any) -> Case:
    names = ("granularity", "batch", "phase", "chunk", "limit")
    conditions = {name: changes.pop(name) for name in names if name in changes}
    first, rest, how = split(trace)
    return Case(
        rest, fit_to_trace(spec, trace),
        named(policy, has_guess=trace.guess is not None, **changes),
        Budget.parse(budget), Profile.from_trace(first), Conditions(**conditions), how,
        counted=first,
    )  # fmt: skip


def check(given: Case, machine: str) -> None:
    runs = [run(given, hardware_profile(machine)) for run in (simulate, fast_simulate)]
    for name in (field.name for field in fields(StepTimes)):
        own, other = (getattr(run.steps, name) for run in runs)
        assert own.dtype == other.dtype
        assert own.tolist() == other.tolist()
    expected, found = (run.to_dict() for run in runs)
    assert found["settings"].pop("engine") == "fast"
    assert expected["settings"].pop("engine") == "simpy"
    assert found["provenance"].pop("timeline_sha256") is None
    for run in (expected, found):
        run["provenance"].pop("inputs_sha256")
    expected["provenance"].pop("timeline_sha256")
    assert found == expected


@pytest.mark.parametrize(("policy", "budget", "changes"), CELLS)
@pytest.mark.parametrize("name", ["tiny-mixtral-code", "tiny-deepseek-docs"])
def test_bundled_traces_agree(name: str, policy: str, budget: str, changes: dict[str, Any]) -> None:
    trace = RoutingTrace.load(bundled_traces()[name])
    assert trace.header.spec is not None
    # blocks that do not divide an expert: the last one is shorter
    own = ModelSpec.from_dict(trace.header.spec, name).with_(block=48)
    check(case(trace, own, policy, budget, **({"limit": 400} | changes)), "rtx4090-pcie4")


@pytest.mark.parametrize(
    ("budget", "changes"),
    [
        ("10%", {}),
        ("30%", {"width": "saliency(.2)", "granularity": "block", "batch": 3}),
        ("20%", {"width": "contribution-resident(.6)", "scope": "global", "order": "johnson"}),
        ("20%", {"width": "tiered", "prefetch": "guess", "granularity": "block"}),
        ("20%", {"prefetch": "saliency(guess)"}),
        ("40%", {"prefetch": "saliency(perfect)", "granularity": "block"}),
        ("20%", {"prefetch": "saliency(previous)", "batch": 3, "cache": "lru"}),
        ("30%", {"prefetch": "saliency(frequent)", "width": "contribution-resident(.6)"}),
        ("5%", {"phase": "prefill", "chunk": 48}),
    ],
)
@pytest.mark.parametrize("name", ["tiny-mixtral-docs", "tiny-deepseek-code"])
def test_saliency_on_bundled_traces_agrees(name: str, budget: str, changes: dict[str, Any]) -> None:
    """Contributions fall within an expert and differ between experts; layers differ, too."""
    trace = RoutingTrace.load(bundled_traces()[name])
    assert trace.header.spec is not None
    spec = ModelSpec.from_dict(trace.header.spec, name)
    given = case(trace, spec, "saliency", budget, limit=300, rescale="none", **changes)
    rng = np.random.default_rng(5)
    sizes = rng.random((spec.n_layers, spec.n_experts, spec.n_blocks)).astype(np.float32)
    profile = replace(
        given.profile,
        contributions=-np.sort(-sizes, axis=2) + 0.1 * rng.random(sizes.shape, np.float32),
        sensitivities=rng.random(spec.n_layers).astype(np.float32),
    )
    check(replace(given, profile=profile), "rtx4090-pcie4")


def test_magnitudes_decide_alike_and_as_larger_weights_would() -> None:
    """Widths are those of weight x magnitude, computed here; retention goes by weights alone."""
    trace = RoutingTrace.load(bundled_traces()["tiny-mixtral-docs"])
    assert trace.header.spec is not None and trace.weights is not None
    spec = ModelSpec.from_dict(trace.header.spec, "tiny-mixtral")
    rng = np.random.default_rng(6)
    magnitudes = rng.uniform(0.4, 2, trace.experts.shape).astype(np.float16)
    with_them = replace(trace, magnitudes=magnitudes)
    sizes = -np.sort(-rng.random((spec.n_layers, spec.n_experts, spec.n_blocks)), axis=2)
    more = {"contributions": sizes.astype(np.float32),
            "sensitivities": rng.random(spec.n_layers).astype(np.float32)}  # fmt: skip

    def given(of: RoutingTrace, magnitude: str, **parts: Any) -> Case:
        one = case(of, spec, "saliency", "20%", limit=300, rescale="none", magnitude=magnitude,
                   width="saliency(.4)", **parts)  # fmt: skip
        first = case(trace, spec, "lru", "20%").profile
        return replace(one, profile=replace(first, **more))

    check(given(with_them, "predicted"), "rtx4090-pcie4")
    check(given(with_them, "predicted", granularity="block", batch=3), "rtx4090-pcie4")
    # Without a cache that goes by weights a trace of the products gives the same run.
    powers = np.ldexp(np.float16(1), rng.integers(-1, 2, trace.experts.shape))
    exact = replace(trace, magnitudes=powers)
    products = replace(trace, weights=powers * trace.weights)
    loads = [
        simulate(given(of, magnitude, cache="lru"), "rtx4090-pcie4").metrics["blocks_loaded"]
        for of, magnitude in ((products, "none"), (exact, "predicted"), (trace, "none"))
    ]
    assert loads[0] == loads[1] != loads[2]
    for run in (simulate, fast_simulate):
        with pytest.raises(CrispError, match="crisp trace capture --magnitudes records them"):
            run(given(trace, "predicted"), hardware_profile("rtx4090-pcie4"))


def test_paper_profile_at_the_size_of_mixtral() -> None:
    """A layer of 0.6 ms, an expert of 5.6 and 1.3 ms: a third of a ms and more is rounded."""
    trace = RoutingTrace.load(bundled_traces()["tiny-mixtral-docs"])
    spec = ModelSpec.named("mixtral-8x7b").with_(bits=Fraction("4.25"))
    check(case(trace, spec, "crisp", "20%", granularity="block", limit=300), "paper-table1")


@pytest.mark.parametrize("scope", ["layer", "global"])
@pytest.mark.parametrize("machine", ["rtx4090-pcie4", "paper-table1"])
def test_layers_in_bits_of_their_own(scope: str, machine: str) -> None:
    """Every metric in bytes and time; the budget in bytes is never exceeded."""
    trace = RoutingTrace.load(bundled_traces()["tiny-mixtral-docs"])
    spec = fit_to_trace(ModelSpec.named("mixtral-8x7b"), trace)
    bits = [Fraction(bits) for bits in ("16", "4.25", "4.25", "8.5", "4.25", "16")]
    spec = spec.with_layer_bits(bits)
    given = case(trace, spec, "crisp", "1.9GB", granularity="block", limit=150)
    given = replace(given, policy=replace(given.policy, cache=Cache("lru", scope, "block")))
    check(given, machine)
    assert given.settings("x", None)["budget"]["bytes"] <= 1_900_000_000


def test_refuses_what_it_cannot_do_exactly() -> None:
    trace = RoutingTrace.load(bundled_traces()["tiny-mixtral-docs"])
    spec = ModelSpec.named("mixtral-8x7b")
    given = case(trace, spec, "crisp", "20%", limit=5)
    for policy, machine, what in (
        (given.policy, "jetson-agx-orin-32gb", "unified memory, which jetson-agx-orin-32gb has"),
        (replace(given.policy, cache=Cache("belady")), "paper-table1", "cache belady"),
        (replace(given.policy, order=Order("random", 1 << 62)), "paper-table1", "order random wit"),
    ):
        with pytest.raises(CrispError, match=f"^engine fast: does not know {what}"):
            fast_simulate(replace(given, policy=policy), hardware_profile(machine))
    unknown = replace(given.policy, width=ResidentFloor(), prefetch=Prefetch("perfect"))
    for run in (fast_simulate, simulate):
        with pytest.raises(CrispError, match="prefetch perfect is an oracle, but its widths depe"):
            run(replace(given, policy=unknown), hardware_profile("paper-table1"))


@pytest.mark.parametrize(
    ("costs", "what"),
    [
        (Costs(request=0, load_block=0), "a load that takes 0 ns"),
        (Costs(launch=0, compute_block=0), "a computation that takes 0 ns"),
        (Costs(router=1 << 62), "times that 64 bits cannot count"),
        (Costs(router=1 << 60), "times that 64 bits cannot count"),
    ],
)
def test_refuses_times_that_it_cannot_order_or_count(costs: Costs, what: str) -> None:
    toy = Toy([[[0]], [[1]], [[0]], [[1]]], np.full((4, 1, 1), 2), 2, 2, costs=costs)
    with pytest.raises(CrispError, match=f"^engine fast: does not know {what}; use --engine simpy"):
        fast(toy)


def test_refuses_widths_that_ask_what_is_resident() -> None:
    toy = Toy([[[0]]], [[[1]]], 2, 2)
    with pytest.raises(CrispError, match="these widths, which depend on what is resident"):
        execute(
            toy.spec(), toy.policy(), toy.start(), by_block=False, cost=toy.costs,
            trace=toy.trace(), widths=GivenWidths(tabled=False), steps=steps(toy),
        )  # fmt: skip


def test_costs_of_pieces_by_counting_and_by_sorting() -> None:
    """3 + blocks x 2 ns."""
    spec = Toy([[[0]]], [[[1]]], 1, 4).spec()
    costs = CostTable(spec, Costs(launch=3, compute_block=2))
    assert costs.grains.tolist() == [0, 1, 2, 3, 4]
    for rows in (1, 1000):  # rows that share the blocks cost nothing here
        widths = np.array([4, 0, 2, 4])
        assert costs.pieces(0, widths, rows * widths).tolist() == [11, 0, 7, 11]
        two = costs.pieces(np.arange(2), np.arange(1, 3), np.array([[rows, 0], [rows, rows]]))
        assert two.tolist() == [[5, 0], [5, 5]]


def test_what_was_compiled_is_of_these_sources() -> None:
    """Numba looks at one file alone: the others are in a digest that the compiled one encloses."""
    for made, sources in (
        (streams.run_batch, streams.SOURCES),
        (unions.union_on, unions.SOURCES),
        (fast_replay.follow, fast_replay.SOURCES),
    ):
        assert [cell.cell_contents for cell in made.py_func.__closure__] == [sources]
