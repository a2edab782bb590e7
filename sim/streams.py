"""The SimPy model: one long-lived process per stream, driving the EventScheduler.

At one instant all completions come first, then an event starts, then link and compute choose: what
becomes ready at the same time is collected before anything is chosen.
"""

from __future__ import annotations

from collections.abc import Callable, Generator, Iterable, Sequence
from itertools import combinations
from typing import Any

import numpy as np
import simpy
from simpy.events import Event as SimEvent

from crisp.hardware.cost import costs_by_row
from crisp.hardware.page_cache import PageCacheCost
from crisp.hardware.profile import CostModel
from crisp.model.spec import ModelSpec
from crisp.run.timeline import COMPUTE, LAYER, LOAD, PREFETCH, Recorder, StepLog
from crisp.scheduler.scheduler import EventScheduler
from crisp.scheduler.tasks import Load, Task
from crisp.scheduler.workload import Step, Workload
from crisp.sim.bounds import least_times
from crisp.sim.contention import Shared, sharing

_LINK, _COMPUTE = 0, 1
_STARTS, _CHOICES = 2, 3  # SimPy priorities: both after all that ends at the same time (0 and 1)


class Instant(SimEvent):
    """An event that fires now, after everything of a stronger priority that happens now."""

    def __init__(self, env: Any, priority: int) -> None:
        super().__init__(env)
        self._ok, self._value = True, None
        env.schedule(self, priority)


class SimulatedStreams:
    """Link and compute, from the first event of a workload to the end of its last."""

    def __init__(
        self,
        spec: ModelSpec,
        scheduler: EventScheduler,
        cost: CostModel,
        workload: Workload,
        recorder: Recorder,
        log: StepLog,
        watch: Callable[[EventScheduler], None] | None = None,
    ) -> None:
        """watch: shown the scheduler whenever an event is over."""
        self._scheduler, self._workload = scheduler, workload
        self._recorder, self._log, self._watch = recorder, log, watch
        self._cost, self._layers, self._experts = cost, spec.moe_layers, spec.n_experts
        self._load_costs = [  # [MoE layers][blocks]
            [
                (cost.load(blocks * size), cost.load_traffic(blocks * size))
                for blocks in range(spec.n_blocks + 1)
            ]
            for size in spec.row_block_bytes
        ]
        self._pages = pages = cost if isinstance(cost, PageCacheCost) else None
        self._least_loads = [  # [MoE layers][blocks] ns
            [ns if pages is None else pages.least(row, n) for n, (ns, _) in enumerate(costs)]
            for row, costs in enumerate(self._load_costs)
        ]
        self._compute_costs = dict(zip(spec.moe_layers, costs_by_row(cost, spec), strict=True))
        self._upto = [spec.neurons(0, blocks) for blocks in range(spec.n_blocks + 1)]
        # by layer; where its costs are another's, so is the table
        tables: dict[int, dict[tuple[int, int, int], tuple[int, int]]] = {}
        self._piece_costs = {
            layer: tables.setdefault(id(own), {}) for layer, own in self._compute_costs.items()
        }
        self._least: dict[tuple[int, Sequence[int]], list[int]] = {}  # by table and rows' widths
        self._layer_costs: dict[tuple[int, int], tuple[int, int]] = {}
        self._env: Any = simpy.Environment()  # SimPy types times as floats too; here they are whole
        self._until = [-1, -1]  # when each stream's activity ends; -1: it has none
        self._link_event: SimEvent = self._env.event()  # what the link waits for
        self._link_process = self._link_event
        self._asleep = False  # the link has nothing to do
        self._load: Load | None = None  # what it loads
        self._load_ns = 0  # what that takes alone
        self._link_since: int | None = None  # when that began
        self._number = -1  # of the step
        rule = sharing(cost, (_LINK, _COMPUTE))
        self._shared = None if rule is None else Shared(self._env, rule, self._until)

    def run(self, steps: Iterable[Step]) -> int:
        """Execute the steps; returns the total time in ns."""
        self._link_process = self._env.process(self._link())
        self._env.run(until=self._env.process(self._compute(steps)))
        self._recorder.flush(self._env.now, self._link_since, always=True)
        return int(self._env.now)

    def _link(self) -> Generator[SimEvent, None, None]:
        env, until, scheduler, add = self._env, self._until, self._scheduler, self._recorder.add
        try:
            while True:
                self._link_event = env.event()
                self._asleep = True
                self._begin_load(env.now)
                yield self._link_event  # a load has arrived; compute may have begun it meanwhile
                load, start, now = self._load, self._link_since, env.now
                assert load is not None
                assert start is not None
                until[_LINK], self._link_since = -1, None
                scheduler.loaded(load)
                kind, layer = PREFETCH if load.prefetch else LOAD, self._layers[load.row]
                event = -1 if load.prefetch else scheduler.event
                add((self._number, event, layer, kind, load.expert, load.first, load.blocks,
                     start, now, self._load_ns, scheduler.residency.landed))  # fmt: skip
                if until[_COMPUTE] == now:
                    self._link_event = Instant(env, _CHOICES)
                    yield self._link_event
        finally:  # what stops the link stops compute too, if it waits for the link
            self._link_event, self._asleep = self._link_process, False

    def _begin_load(self, now: int) -> None:
        """Put the next load on the idle link at ``now``, if there is one.

        Its event then fires when the load arrives. Compute calls this too, for a link that sleeps:
        it need not be woken first, and its load may begin ahead of SimPy's clock.
        """
        load = self._scheduler.next_load()
        if load is None:
            return
        self._load, self._link_since, self._asleep = load, now, False
        ns, traffic = self._load_costs[load.row][load.blocks]
        if self._pages is not None:
            ns = self._pages.request(load.row, load.expert, load.first, load.blocks)
        self._load_ns = ns
        arrived = self._link_event
        if self._shared is None:
            self._until[_LINK] = now + ns
            arrived._ok, arrived._value = True, None
            self._env.schedule(arrived, delay=now + ns - self._env.now)
        else:
            self._shared.occupy(_LINK, ns, traffic, arrived)

    def _compute(self, steps: Iterable[Step]) -> Generator[SimEvent, None, None]:
        env, until, scheduler, add = self._env, self._until, self._scheduler, self._recorder.add
        apart = self._shared is None
        step: Step | None = None
        now = 0  # runs ahead of SimPy's clock while the link sleeps: nobody looks at it then
        for event in self._workload.events(steps):
            if event.step is not step:
                self._close(step, now)
                step = event.step
                self._number += 1
            layer, start = event.layer, now
            ns, traffic = self._layer_cost(layer, len(step.rows))
            if ns and self._asleep and scheduler.wants_link:
                self._begin_load(now)
            if self._asleep and apart:
                now += ns
            elif ns:
                yield self._occupy(now, ns, traffic)
                now = env.now
                if until[_LINK] == now:
                    yield Instant(env, _STARTS)
                until[_COMPUTE] = -1
            of_event = -1 if event.experts is None else scheduler.event + 1
            add((self._number, of_event, layer, LAYER, -1, 0, 0,
                 start, now, ns, scheduler.residency.landed))  # fmt: skip
            if event.experts is None:
                continue
            event = self._workload.choose(event, self._residents)
            tasks = self._workload.tasks(event, self._residents)
            routed = self._workload.routed(event) if scheduler.weighs else None
            scheduler.start(layer, tasks, event.guess, routed)
            self._add_jobs(layer, tasks)
            while not scheduler.done:
                if self._asleep and scheduler.wants_link:
                    self._begin_load(now)
                while (task := scheduler.next_compute()) is None:
                    yield self._link_event  # the link, which began to wait first, resumes first
                    now = env.now
                first, last = task.ended, task.started
                ns, traffic = self._piece_cost(layer, task, first, last)
                start = now
                if self._asleep and apart:
                    now += ns
                else:
                    yield self._occupy(now, ns, traffic)
                    now = env.now
                    if until[_LINK] == now:
                        yield Instant(env, _STARTS)
                    until[_COMPUTE] = -1
                scheduler.computed(task)
                add((self._number, scheduler.event, layer, COMPUTE, task.expert, first,
                     last - first, start, now, ns, scheduler.residency.landed))  # fmt: skip
            if self._watch is not None:
                self._watch(scheduler)
        self._close(step, now)
        yield env.timeout(now - env.now)

    def _occupy(self, now: int, ns: int, traffic: int) -> SimEvent:
        """Occupy compute from ``now`` on for ``ns``, or longer if the link slows it down."""
        if self._shared is not None:
            done: SimEvent = self._env.event()
            self._shared.occupy(_COMPUTE, ns, traffic, done)
            return done
        self._until[_COMPUTE] = end = now + ns
        timeout: SimEvent = self._env.timeout(end - self._env.now)
        return timeout

    def _close(self, step: Step | None, now: int) -> None:
        if step is not None:
            self._log.add(step, now, self._scheduler.bytes_loaded)
            self._recorder.flush(now, self._link_since)

    def _add_jobs(self, layer: int, tasks: Sequence[Task]) -> None:
        """Note what an event has to do: a job is a task, or at granularity block a block."""
        event, add_jobs = self._scheduler.event, self._recorder.add_jobs
        for task in tasks:
            load_ns = self._least_loads[task.entry // self._experts]
            if self._scheduler.by_block:
                one, issued = load_ns[1], task.issued
                for block, ns in enumerate(self._least_times(layer, task)):
                    add_jobs((event, one if block >= issued else 0, ns))
            else:
                missing = max(0, task.width - task.issued)
                loads = load_ns[missing] if missing else 0
                add_jobs((event, loads, self._piece_cost(layer, task, 0, task.width)[0]))

    def _residents(self, layer: int) -> Sequence[int]:
        start = self._layers.index(layer) * self._experts
        return self._scheduler.residency.resident[start : start + self._experts]

    def _piece_cost(self, layer: int, task: Task, first: int, last: int) -> tuple[int, int]:
        pieces = self._piece_costs[layer]
        key = first, last, task.neurons(first, last, self._upto)
        cost = pieces.get(key)
        if cost is None:
            own = self._compute_costs[layer]
            cost = own.compute(*key), own.compute_traffic(first, last)
            pieces[key] = cost
        return cost

    def _least_times(self, layer: int, task: Task) -> list[int]:
        """Return what each of a task's blocks takes at least, see `least_times`."""
        key = id(self._piece_costs[layer]), tuple(task.widths)
        least = self._least.get(key)
        if least is None:
            piece_ns = np.zeros((1, task.width, task.width), np.int64)
            for first, last in combinations(range(task.width + 1), 2):
                piece_ns[0, first, last - 1] = self._piece_cost(layer, task, first, last)[0]
            self._least[key] = least = least_times(piece_ns)[0].tolist()
        return least

    def _layer_cost(self, layer: int, rows: int) -> tuple[int, int]:
        cost = self._layer_costs.get((layer, rows))
        if cost is None:
            cost = self._cost.layer(layer, rows), self._cost.layer_traffic(layer)
            self._layer_costs[layer, rows] = cost
        return cost
