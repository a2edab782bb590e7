"""EventScheduler: Algorithm 1 of the paper as a state machine without clock or device.

It is told an event's tasks, which loads have arrived and which computations have ended; it answers
what to load and what to compute next, which blocks to evict, and what to prefetch. The simulator
drives it, and so can real streams:

    scheduler.start(layer, tasks, guess)
    while not scheduler.done:
        load = scheduler.next_load()        # when the link is free; issues it
        task = scheduler.next_compute()     # when compute is free; issues its next piece
        ... and, as they complete, scheduler.loaded(load) and scheduler.computed(task)
"""

from __future__ import annotations

from collections.abc import Sequence
from heapq import heappop, heappush

from crisp.errors import CrispError
from crisp.extensions import origin_of
from crisp.hardware.cost import costs_by_row
from crisp.hardware.profile import CostModel
from crisp.model.spec import ModelSpec
from crisp.policy import Policy
from crisp.policy.order import check_keys, hash_key
from crisp.scheduler.oracle import BeladyResidency, Future
from crisp.scheduler.predictions import Predictions
from crisp.scheduler.prefetch_queue import PrefetchQueue
from crisp.scheduler.residency import EVENT, Eviction, Residency, StartingState
from crisp.scheduler.retention import RetainingResidency, Routed
from crisp.scheduler.tasks import Fetch, Load, Task

STAGING_EXPERTS = 2  # full experts that transient loads may occupy, apart from the budget


class EventScheduler:
    """The decisions of a run: loads, computations, evictions and prefetches, event by event."""

    def __init__(
        self,
        spec: ModelSpec,
        policy: Policy,
        start: StartingState,
        *,
        granularity: str,
        cost: CostModel | None,
        future: Future | None = None,
    ) -> None:
        """Begin with what ``start`` says; `crisp.scheduler.assembly` works that out.

        granularity: ``expert`` or ``block``. The cost model is asked by orders that need times
        and may be None for the others. future: the tasks of all events, for policies that are
        oracles; CrispError if they lack it.
        """
        if policy.oracle and future is None:
            raise CrispError(
                f"policy {policy.name}: {policy.oracle} is an oracle, and what comes next is not "
                "known here; it can be simulated with a trace"
            )
        self.residency = Residency(spec, policy.cache, start)
        self._oracle: BeladyResidency | None = None
        if policy.cache.rule.oracle and future is not None:
            self.residency = self._oracle = BeladyResidency(
                spec, policy.cache, start.capacity, future
            )
        self._retains: RetainingResidency | None = None
        if policy.cache.rule.retains:
            self.residency = self._retains = RetainingResidency(spec, policy.cache, start)
        self.evicted: Sequence[Eviction] = ()  # as the current event started
        self.ahead: PrefetchQueue | None = None
        if policy.prefetch.active:
            self.ahead = PrefetchQueue(spec, self.residency, start.anticipation)
        self._predictions = Predictions(spec, policy.prefetch, start.anticipation, future)
        self._rows = {layer: row for row, layer in enumerate(spec.moe_layers)}
        self._experts = spec.n_experts
        self.weighs = policy.weighs  # whether `start` has to be told the router's weights
        self._order, self._rule = policy.order, policy.order.rule
        self._plugged_order = origin_of("order", policy.order.name) is not None
        self._cost, self._block_bytes = cost, spec.row_block_bytes
        self._costs = None if cost is None else costs_by_row(cost, spec)
        self._upto = [spec.neurons(0, blocks) for blocks in range(spec.n_blocks + 1)]
        self._sequential = policy.order.sequential
        self.by_block = granularity == "block"  # loads single blocks
        self._streams_blocks = self.by_block and not self._sequential
        self._staging = STAGING_EXPERTS * spec.n_blocks  # free blocks
        self._row = self._part = 0
        self._tasks: list[Task] = []  # by rank
        self._entries: list[int] = []  # of the tasks
        self._pending: list[Task] = []  # by rank; those before _next have been issued in full
        self._next = 0
        self._ready: list[int] = []  # heap of ranks
        self._turn = 0  # sequential: the rank whose task is loaded and computed now
        self._left = 0  # tasks to compute
        self.done = True  # whether every task of the event has been computed
        self.wants_link = False  # whether `next_load` may have something to issue
        self.event = -1
        self.tasks = self.hits = self.partial_hits = self.blocks_loaded = self.bytes_loaded = 0

    def start(
        self,
        layer: int,
        tasks: list[Task],
        guess: Sequence[int] = (),
        routed: Routed | None = None,
    ) -> None:
        """Begin an event: its tasks by first appearance, and the trace's guess for the next layer.

        routed: the router's weights, of experts without a task too; for policies that weigh them.
        What is resident now decides hits; all tasks become equally recent and protected.
        """
        self.event += 1
        self._row = self._rows[layer]
        self._part = self.residency.part_of_row[self._row]
        self.residency.begin(self.event, self._row)
        self._access(tasks)
        if self._oracle is not None:
            widths = [task.width for task in tasks]
            self._oracle.plan(self.event, self._part, self._entries, widths)
        if self.ahead is not None:
            self.ahead.drop_rest()
        if self._retains is not None:
            self._retain(self._retains, tasks, routed)
        if self.ahead is not None:
            following = self._predictions.after(self.event, self._row, tasks, guess, routed)
            self.ahead.predict(following)
        self._queue(tasks if self._rule.key is None else self._ranked(tasks))

    def next_load(self) -> Load | None:
        """Issue the next request, for the link that a simulator or `crisp.run.driver.Driver` runs;
        the link must be free. None: nothing may be loaded now.
        """
        if self._next == len(self._pending):
            load = self.ahead.next() if self.ahead is not None else None
            if load is not None:
                self.blocks_loaded += 1
                self.bytes_loaded += self._block_bytes[load.row]
            return load
        task = self._pending[self._next]
        if self._sequential and task.rank != self._turn:
            return None
        evicted: Sequence[Eviction] = ()
        if not task.placed:
            placed = self._place(task)
            if placed is None:
                return None
            evicted = placed
        first = task.issued
        blocks = 1 if self.by_block else task.width - first
        task.issued = first + blocks
        self.blocks_loaded += blocks
        self.bytes_loaded += blocks * self._block_bytes[self._row]
        if task.issued == task.width:
            self._next += 1
            self.wants_link = self.ahead is not None or self._next < len(self._pending)
        return Load(self._row, task.expert, first, blocks, evicted, task)

    def loaded(self, load: Load) -> None:
        """Take note that a request has arrived."""
        if isinstance(load, Fetch) and self.ahead is not None:
            self.ahead.landed(load)
            self.residency.landed += not load.staged
        task = load.task
        if task is None:
            return
        before = task.have
        task.have = before + load.blocks
        if not load.prefetch and task.transient > load.first:
            self.residency.landed += min(task.transient, task.have) - load.first
        if self._streams_blocks:
            if before == task.started == task.ended:  # else a piece is running; it looks again
                heappush(self._ready, task.rank)
        elif task.have >= task.width:
            heappush(self._ready, task.rank)

    def next_compute(self) -> Task | None:
        """Issue the next piece, blocks [ended, started) of the task: all that it has of what is to
        be computed. Compute must be free. None: no task has what it needs.
        """
        ready = self._ready
        if not ready or (self._sequential and ready[0] != self._turn):
            return None
        task = self._tasks[heappop(ready)]
        task.started = min(task.have, task.width)
        return task

    def computed(self, task: Task) -> None:
        """Take note that a task's piece has ended: staging is free, and perhaps the event over."""
        last = task.started
        if task.staged or 0 <= task.transient < last:
            self._free_staging(task, task.ended, last)
        task.ended = last
        if last < task.width:
            if min(task.have, task.width) > last:
                heappush(self._ready, task.rank)
            return
        self._turn += 1
        self._left -= 1
        if not self._left:
            self.done = True
            self.residency.release(self._entries, self._part, EVENT)
            if self._oracle is not None:
                self._oracle.commit(self._part)

    def _access(self, tasks: list[Task]) -> None:
        """Protect the event's entries, note their use, and see what of them is here."""
        ahead, base = self.ahead, self._row * self._experts
        self._entries = [base + task.expert for task in tasks]
        for task, entry in zip(tasks, self._entries, strict=True):
            task.entry = entry
            task.have = task.issued = task.low = self.residency.use(entry, self._part, self.event)
            task.staged = 0
            if ahead is not None:
                task.have, task.staged, late = ahead.claim(entry, task.width)
                task.issued = task.have
                if late is not None:
                    late.task = task
                    task.issued += 1
            if task.have >= task.width:
                self.hits += 1
            elif task.have:
                self.partial_hits += 1
        self.tasks += len(tasks)

    def _queue(self, ranked: list[Task]) -> None:
        """Line up what is to be loaded and what can be computed at once."""
        self._tasks = ranked
        self._left, self._turn, self._next = len(ranked), 0, 0
        self.done = not ranked
        self._pending = pending = []
        self._ready = ready = []  # rising ranks are a heap
        for rank, task in enumerate(ranked):
            task.rank = rank
            if task.issued < task.width:
                pending.append(task)
            if task.have >= task.width or (task.have and self._streams_blocks):
                ready.append(rank)
        self.wants_link = self.ahead is not None or bool(pending)

    def _place(self, task: Task) -> Sequence[Eviction] | None:
        """Decide where a task's missing blocks go, and evict for them; None: staging is full.

        A task with blocks in the prefetch staging keeps none of the rest: a prefix has no hole.
        """
        missing = wanted = task.width - task.issued
        if self._retains is not None:
            wanted = max(0, self._retains.kept(task) - task.issued)
        elif self._oracle is not None:
            wanted = self._oracle.wanted(task.entry, task.issued)
        kept = 0 if task.staged else self.residency.admissible(self._part, wanted)
        if missing - kept > self._staging:
            return None
        self._staging -= missing - kept
        task.placed = True
        if task.transient < 0:
            task.transient = task.issued + kept
        return self.residency.admit(task.entry, self._part, kept) if kept else ()

    def _retain(
        self, residency: RetainingResidency, tasks: list[Task], routed: Routed | None
    ) -> None:
        """Decide what stays after the event; what goes and is asked for moves to staging."""
        residency.note(self._row, routed)
        self.evicted = residency.plan(self._part, tasks)
        for task in tasks:
            stays, readable = residency.kept(task), min(task.issued, task.width)
            if stays < readable and not task.staged:  # what is staged has its place already
                self._staging -= readable - stays
                task.transient = stays

    def _free_staging(self, task: Task, first: int, last: int) -> None:
        if 0 <= task.transient < last:
            self._staging += last - max(first, task.transient)
        if task.staged and self.ahead is not None:
            used = min(last, task.low + task.staged) - max(first, task.low)
            self.ahead.give_back(max(0, used))

    def _ranked(self, tasks: list[Task]) -> list[Task]:
        rule = self._rule
        assert rule.key is not None
        seed, event = self._order.seed, self.event
        keys = []
        for place, task in enumerate(tasks):
            missing = max(0, task.width - task.issued)
            load_ns, compute_ns = self._times(task, missing) if rule.timed else (missing, 0)
            random_key = hash_key(seed, event, place) if rule.drawn else 0
            keys.append(rule.key(task.width, load_ns, compute_ns, random_key))
        if self._plugged_order:
            check_keys(self._order.name, keys)
        if keys == sorted(keys):
            return tasks
        return [tasks[place] for place in sorted(range(len(tasks)), key=keys.__getitem__)]

    def _times(self, task: Task, missing: int) -> tuple[int, int]:
        """Return (ns to load the missing blocks, ns to compute all of it), by the cost model."""
        assert self._cost is not None
        assert self._costs is not None
        load_ns = self._cost.load(missing * self._block_bytes[self._row]) if missing else 0
        neurons = task.neurons(0, task.width, self._upto)
        return load_ns, self._costs[self._row].compute(0, task.width, neurons)
