"""The executor against the simulator, on streams that take random times."""

from __future__ import annotations

import random
import threading
import time
from collections.abc import Callable
from contextlib import closing, nullcontext
from dataclasses import replace
from typing import Any

import numpy as np
import pytest

from crisp.hw.devices.batch import ExpertBatch
from crisp.hw.devices.slots import Slots, slots_needed
from crisp.hw.executor import Executor
from crisp.model.spec import ModelSpec
from crisp.policy import Budget, named
from crisp.profile import Profile
from crisp.run.case import Case, Conditions
from crisp.run.driver import replay_timeline
from crisp.run.sinks import FullTimeline
from crisp.run.timeline import COMPUTE, EVENT, LOAD, Recorder
from crisp.scheduler.scheduler import EventScheduler
from crisp.scheduler.tasks import Task
from crisp.scheduler.workload import Event, union
from crisp.sim.hardware import hardware_profile
from crisp.sim.simulate import simulate
from crisp.trace import Header, RoutingTrace
from crisp.trace.fitting import fit_to_trace
from tests.hw.fakes import FakeDevice
from tests.hw.timelines import computed, of_kind

LAYERS, EXPERTS, K = 3, 8, 2
SPEC = ModelSpec.named("mixtral-8x7b").first_layers(LAYERS)


def trace(tokens: int, seed: int) -> RoutingTrace:
    draw = np.random.default_rng(seed)
    skew = np.linspace(0, 0.8, EXPERTS)

    def routed() -> Any:
        scores = draw.random((tokens, LAYERS, EXPERTS)) + skew
        return scores.argsort(axis=2)[..., :K].astype(np.int16)

    real = routed()
    wrong = draw.random((tokens, LAYERS, 1)) < 0.3
    guess = np.where(wrong, routed(), real)
    guess[:, 0] = -1
    return RoutingTrace(
        experts=real, guess=guess,
        sequence=np.zeros(tokens, np.int32), position=np.arange(tokens, dtype=np.int32),
        phase=np.ones(tokens, np.uint8),
        header=Header(n_experts=EXPERTS, top_k=K, ordered=True, origin="synthetic"),
    )  # fmt: skip


def case(seed: int, tokens: int = 12) -> Case:
    """A random policy without prefetch, budget and granularity."""
    draw = random.Random(seed)
    made = trace(tokens, seed)
    counted = trace(50, seed + 1000)
    name = draw.choice(["fo", "lru", "up", "crisp"])
    unit, scope = draw.choice(["expert", "block"]), draw.choice(["layer", "global"])
    cache = draw.choice([None, "lfu", "static", "saliency"])
    if cache == "saliency":
        unit = "block"
    policy = named(name, unit=unit, scope=scope, cache=cache)
    budget = Budget.parse(draw.choice(["1%", "5%", "10%", "20%", "35%", "50%", "100%"]))
    conditions = Conditions(granularity=draw.choice(["expert", "block"]), batch=draw.choice([1, 3]))
    return Case(
        made, fit_to_trace(SPEC, made), policy, budget, Profile.from_trace(counted), conditions, "x"
    )


def execute(
    one: Case, device_seed: int, asked: Callable[[Event], bool] = lambda event: True
) -> tuple[Any, list[list[int]], list[Any], FakeDevice]:
    """(timeline, residency after each event, outputs, device) of a run on the fake device.

    asked: of which events outputs are.
    """
    scheduler, workload, everything = one.scheduler(None), one.workload(), FullTimeline()
    recorder = Recorder([everything])
    needed = slots_needed(one.spec, one.capacity(), scheduler.ahead is not None)
    slots, states, outputs = Slots(one.spec, needed), [], []
    with closing(FakeDevice(needed, device_seed)) as device:
        executor = Executor(
            one.spec, scheduler, device, slots, recorder,
            watch=lambda scheduler: states.append(list(scheduler.residency.resident)),
        )  # fmt: skip
        executor.preload()
        step = None
        for event in workload.events(one.steps()):
            if event.step is not step:
                executor.end_step(step)
                step = event.step
            assert event.experts is not None
            with executor.at_rest() if workload.looks else nullcontext():
                tasks = union(event.experts, workload.widths(event, executor.residents))
                works = labelled(one, event, tasks)
                routed = workload.routed(event)
                output = executor.event(event.layer, tasks, event.guess, routed, works, 1)
            if not asked(event):
                continue
            outputs.append(output())
            if scheduler.ahead is None:
                assert slots.resident() == states[-1]
                assert slots.free == needed - sum(states[-1])
        executor.end_step(step)
        executor.finish()
    return everything.rows, states, outputs, device


def labelled(one: Case, event: Event, tasks: list[Task]) -> Callable[[], dict[int, ExpertBatch]]:
    """One row for each task; in place of activations the layer, for the device to compare."""
    row, weight = one.spec.moe_layers.index(event.layer), np.ones(1, np.float32)
    first = np.zeros(1, np.int64)
    return lambda: {
        t.expert: ExpertBatch(t.expert, first, np.array([t.width]), weight, row) for t in tasks
    }


def simulated(one: Case) -> tuple[Any, list[list[int]]]:
    everything, states = FullTimeline(), []
    simulate(
        one, hardware_profile("rtx4090-pcie4"), sinks=[everything],
        watch=lambda scheduler: states.append(list(scheduler.residency.resident)),
    )  # fmt: skip
    return everything.rows, states


@pytest.mark.parametrize("seed", range(40))
def test_the_same_decisions_as_in_simulation(seed: int) -> None:
    """Whatever times the streams take: loads and their order, and residency after every event."""
    one = case(seed)
    rows, states, _, _ = execute(one, seed)
    expected_rows, expected_states = simulated(one)
    assert of_kind(rows, LOAD) == of_kind(expected_rows, LOAD)
    assert computed(rows) == computed(expected_rows)
    assert states == expected_states


@pytest.mark.parametrize("granularity", ["expert", "block"])
def test_a_resident_task_is_one_piece(granularity: str) -> None:
    """All experts are there from the start: as many computations as tasks, each of all blocks."""
    one = replace(
        case(3), policy=named("fo", cache="static"), budget=Budget.parse("100%"),
        conditions=Conditions(granularity=granularity),
    )  # fmt: skip
    for rows in (execute(one, 3)[0], simulated(one)[0]):
        pieces = [[*piece[2:]] for piece in of_kind(rows, COMPUTE)]
        assert len(pieces) == len(one.trace.experts) * LAYERS * K
        assert {(first, blocks) for _, first, blocks in pieces} == {(0, SPEC.n_blocks)}


@pytest.mark.parametrize("seed", range(8))
def test_every_event_is_summed_once_whether_anybody_asks_or_not(seed: int) -> None:
    one, draw = case(seed), random.Random(seed)
    asked = [draw.random() < 0.5 for _ in range(len(one.trace.experts) * LAYERS)]
    turns = iter(asked)
    rows, _, outputs, device = execute(one, seed, asked=lambda event: next(turns))
    every = execute(one, seed + 1)
    assert of_kind(rows, LOAD) == of_kind(every[0], LOAD)
    assert device.summed == every[3].summed
    assert len(device.summed) == int(rows[:, EVENT].max()) + 1
    experts = [[expert for expert, _ in output] for output in every[2]]
    assert device.summed == experts
    assert [[expert for expert, _ in output] for output in outputs] == [
        own for own, ask in zip(experts, asked, strict=False) if ask
    ]


@pytest.mark.parametrize("seed", range(24))
def test_a_prefetching_run_can_be_lived_through_again(seed: int) -> None:
    """Its timeline, fed to a fresh scheduler, gives every load, piece and residency once more."""
    draw = random.Random(seed)
    one = case(seed)
    policy = named("mo", unit=draw.choice(["expert", "block"]),
                   prefetch=draw.choice(["guess", "previous"]))  # fmt: skip
    relive(replace(one, policy=policy), seed)


@pytest.mark.parametrize("prefetch", ["saliency(guess)", "saliency(previous)"])
@pytest.mark.parametrize("seed", range(8))
def test_what_saliency_prefetches_can_be_lived_through_again(seed: int, prefetch: str) -> None:
    """With contributions that fall within an expert, and with weights."""
    one, draw = case(seed), np.random.default_rng(seed)
    weights = -np.sort(-draw.random(one.trace.experts.shape), axis=2)
    sizes = -np.sort(-draw.random((LAYERS, EXPERTS, one.spec.n_blocks)), axis=2)
    told = replace(
        one.profile,
        router_weights=draw.random((LAYERS, EXPERTS, 32)).astype(np.float16),
        contributions=sizes.astype(np.float32),
        sensitivities=np.ones(LAYERS, np.float32),
    )
    one = replace(
        one,
        policy=named("saliency", rescale="none", prefetch=prefetch),
        budget=Budget.parse("20%"),
        profile=told,
        trace=replace(one.trace, weights=weights.astype(np.float16)),
    )
    ahead = relive(one, seed).ahead
    assert ahead is not None
    assert ahead.useful_bytes + ahead.late_bytes + ahead.wasted_bytes > 0


def relive(one: Case, seed: int) -> EventScheduler:
    """Run a case, and check that its timeline leads a fresh scheduler to the same decisions."""
    rows, states, _, device = execute(one, seed)
    scheduler, workload = one.scheduler(None), one.workload()

    def residents(layer: int) -> list[int]:
        start = one.spec.moe_layers.index(layer) * EXPERTS
        return scheduler.residency.resident[start : start + EXPERTS]

    def events() -> Any:
        for event in workload.events(one.steps()):
            tasks = workload.tasks(event, residents)
            yield event.layer, tasks, event.guess, workload.routed(event)

    loads, again = [], []
    for load, _ in replay_timeline(
        scheduler,
        events(),
        rows,
        lambda scheduler: again.append(list(scheduler.residency.resident)),
    ):
        if load is not None:
            loads.append((load.row, load.expert, load.first, load.blocks))
    copies = [(c.row, c.expert, c.first, len(c.slots)) for c in device.copies]
    assert len(copies) - len(loads) in (0, 1)  # one that arrived after the end
    assert loads[: len(copies)] == copies[: len(loads)]
    assert again == states
    assert scheduler.blocks_loaded == sum(len(c.slots) for c in device.copies)
    return scheduler


def test_every_task_computes_its_blocks_once_and_in_order() -> None:
    for seed in range(10):
        one = case(seed)
        _, _, outputs, _ = execute(one, seed)
        asked = [
            sorted((t.expert, list(range(t.width))) for t in workload_tasks)
            for workload_tasks in all_tasks(one)
        ]
        assert list(map(sorted, outputs)) == asked  # a device sums them by expert


def all_tasks(one: Case) -> list[Any]:
    workload = one.workload()
    return [workload.tasks(event, lambda _: []) for event in workload.events(one.steps())]


@pytest.mark.parametrize("fails", range(14, 35, 2))
def test_a_prefetch_that_fails_between_two_events_is_told_by_the_next(fails: int) -> None:
    one = replace(case(1), policy=named("mo"), budget=Budget.parse("20%"))
    scheduler, workload = one.scheduler(None), one.workload()
    needed = slots_needed(one.spec, one.capacity(), True)
    told: list[BaseException] = []

    def run(device: FakeDevice) -> None:
        executor = Executor(one.spec, scheduler, device, Slots(one.spec, needed), Recorder([]))
        try:
            for event in workload.events(one.steps()):
                tasks = workload.tasks(event, executor.residents)
                executor.event(
                    event.layer,
                    tasks,
                    event.guess,
                    workload.routed(event),
                    labelled(one, event, tasks),
                    1,
                )
                time.sleep(0.005)  # the link prefetches meanwhile, and fails
        except OSError as error:
            told.append(error)

    with closing(FakeDevice(needed)) as device:
        device.fail_at = fails
        runner = threading.Thread(target=run, args=(device,), daemon=True)
        runner.start()
        runner.join(10)
        assert not runner.is_alive(), "it waits for ever"
    assert [str(error) for error in told] == ["the disk is gone"]


def test_a_failing_copy_ends_the_run_and_nothing_hangs() -> None:
    one = case(1)
    scheduler, workload = one.scheduler(None), one.workload()
    needed = slots_needed(one.spec, one.capacity(), True)
    with closing(FakeDevice(needed)) as device:
        device.fail_at = 2
        executor = Executor(one.spec, scheduler, device, Slots(one.spec, needed), Recorder([]))
        with pytest.raises(OSError, match="the disk is gone"):
            for event in workload.events(one.steps()):
                tasks = workload.tasks(event, executor.residents)
                executor.event(
                    event.layer,
                    tasks,
                    event.guess,
                    workload.routed(event),
                    labelled(one, event, tasks),
                    1,
                )
    assert not [t for t in threading.enumerate() if "_serve" in t.name]
