"""Small runs with given widths and costs, through the simulator and through the oracle."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from fractions import Fraction
from typing import Any

import numpy as np

from crisp.hardware.measured import TimeCurve
from crisp.hardware.page_cache import PageCacheCost
from crisp.model.spec import PAGE, ModelSpec
from crisp.policy import Budget, Cache, Order, Policy, Prefetch
from crisp.policy.anticipation import Anticipation
from crisp.policy.order import hash_key
from crisp.policy.retention import ONE
from crisp.policy.widths.base import Full
from crisp.run.timeline import COLUMNS, COMPUTE, LAYER, PREFETCH, Recorder, Rows, Sink, StepLog
from crisp.scheduler.oracle import Future, coming_routing, look_ahead
from crisp.scheduler.residency import StartingState, Worth
from crisp.scheduler.scheduler import EventScheduler
from crisp.scheduler.tasks import Task
from crisp.scheduler.workload import Workload, chosen_rows, plan
from crisp.sim.streams import SimulatedStreams
from crisp.trace import Header, RoutingTrace
from tests.oracles import straight

BLOCK = 16  # neurons
CACHED = TimeCurve((PAGE, 2 * PAGE), (Fraction(2), Fraction(3)))  # 1 ns, and 1 for each page


@dataclass(frozen=True)
class Costs:
    """ns: a request and each of its blocks; a launch, a block, and a row's block; a layer."""

    request: int = 5
    load_block: int = 15
    launch: int = 20
    compute_block: int = 5
    row_block: int = 0
    router: int = 20
    row: int = 0
    block_bytes: int = 4096

    memory_bandwidth = None

    def load(self, n_bytes: int) -> int:
        return self.request + self.load_block * n_bytes // self.block_bytes

    def compute(self, first: int, last: int, row_neurons: int) -> int:
        work = self.compute_block * (last - first) + self.row_block * row_neurons // BLOCK
        return self.launch + work

    def layer(self, layer: int, rows: int) -> int:
        return self.router + self.row * rows

    def load_traffic(self, n_bytes: int) -> int:
        return 0

    def compute_traffic(self, first: int, last: int) -> int:
        return 0

    def layer_traffic(self, layer: int) -> int:
        return 0

    def io_bound(self, n_bytes: int) -> float:
        return float(self.load(n_bytes))

    def oracle(self) -> dict[str, Callable[..., int]]:
        """The same costs as the oracle takes them."""

        def compute(first: int, last: int, widths: Sequence[int]) -> int:
            row_blocks = sum(max(0, min(width, last) - first) for width in widths)
            return self.compute(first, last, row_blocks * BLOCK)

        return {
            "load_ns": self.load,
            "compute_ns": compute,
            "layer_ns": self.layer,
        }


@dataclass(frozen=True)
class GivenWidths:
    """Widths that stand in the trace's weights, floored. Not a table unless it says so."""

    tabled: bool

    @property
    def residency(self) -> bool:
        return not self.tabled

    def widths(self, layer: int, experts: Any, weights: Any, resident: Any) -> Any:
        assert (resident is None) == self.tabled
        return weights.astype(np.int16)

    def table(self) -> Any:
        return np.zeros(0, np.int16) if self.tabled else None


class Watched(EventScheduler):
    """Notes what is resident after every event."""

    def __init__(self, *args: Any, **options: Any) -> None:
        super().__init__(*args, **options)
        self.after: list[dict[tuple[int, int], int]] = []

    def computed(self, task: Task) -> None:
        super().computed(task)
        if self.done:
            self.after.append(residents(self))


def residents(scheduler: EventScheduler) -> dict[tuple[int, int], int]:
    """{(MoE layer, expert): blocks of the budget}, one that is on its way included."""
    found = enumerate(scheduler.residency.resident)
    return {divmod(entry, scheduler._experts): blocks for entry, blocks in found if blocks}


def with_flight(event: dict[str, Any]) -> dict[tuple[int, int], int]:
    """The same of an event in the oracle's log."""
    found: dict[tuple[int, int], int] = dict(event["resident"])
    if event["in_flight"] is not None and event["in_flight"][3] == "budget":
        key = event["in_flight"][:2]
        found[key] = found.get(key, 0) + 1
    return found


@dataclass(frozen=True)
class Toy:
    """A whole run: routing, widths, policy, costs."""

    experts: Any  # [rows, layers, k]
    widths: Any
    n_experts: int
    n_blocks: int
    sequence: Any = None
    phase: Any = None
    guess: Any = None
    order: str = "fifo"
    cache: str = "lru"
    share: Fraction = Fraction(1, 2)
    scope: str = "layer"
    unit: str = "expert"
    granularity: str = "expert"
    prefetch: str = "none"
    batch: int = 1
    chunk: int = 512
    costs: Costs = field(default_factory=Costs)
    tabled: bool = True
    page_cache: int | None = None  # bytes
    pages: tuple[int, ...] | None = None  # of a block in each MoE layer; None: one in each
    weights: Any = 0  # [rows, layers, k]: the router's; quarters below 1, on top of the widths

    def arrays(self) -> tuple[Any, Any, Any, Any]:
        experts = np.asarray(self.experts, np.int16)
        rows = len(experts)
        sequence = np.zeros(rows) if self.sequence is None else self.sequence
        phase = np.ones(rows) if self.phase is None else self.phase
        return (
            experts,
            np.where(experts < 0, 0, np.asarray(self.widths)),
            np.asarray(sequence, np.int32),
            np.asarray(phase, np.uint8),
        )

    def spec(self) -> ModelSpec:
        experts = self.arrays()[0]
        moe = tuple(int(x) for x in np.flatnonzero((experts >= 0).any(axis=(0, 2))))
        layers = experts.shape[1]
        spec = ModelSpec(
            name="toy", n_layers=layers, moe_layers=moe, n_experts=self.n_experts,
            top_k=experts.shape[2], d_model=1 if self.pages is None else 2048,
            d_ff=BLOCK * self.n_blocks, dtype_bits=16,
            bits=Fraction(16), matrices=3, biases=False, dense_params=(0,) * layers, block=BLOCK,
            config_hash=None,
        )  # fmt: skip
        if self.pages is None:
            return spec
        # 16 neurons x 3 matrices x 2048 are 3 pages a bit
        return spec.with_layer_bits([Fraction(pages, 3) for pages in self.pages[: len(moe)]])

    def trace(self) -> RoutingTrace:
        experts, widths, sequence, phase = self.arrays()
        return RoutingTrace(
            experts=experts, weights=(widths + self.weights).astype(np.float16),
            sequence=sequence, phase=phase,
            position=np.arange(len(experts), dtype=np.int32),
            guess=None if self.guess is None else np.asarray(self.guess, np.int16),
            header=Header(
                n_experts=self.n_experts, top_k=experts.shape[2], ordered=True, origin="synthetic"
            ),
        )  # fmt: skip

    def policy(self) -> Policy:
        cache = Cache(self.cache, self.scope, self.unit, seed=3)
        return Policy("toy", Full(), Order(self.order), cache, Prefetch(self.prefetch))

    def capacity(self) -> list[int]:
        return Budget("", self.share, None).capacity(self.spec(), self.policy().cache)

    def initial(self) -> list[int] | None:
        """A static cache holds the experts with the lowest ids: whole ones, then a prefix."""
        if self.cache != "static":
            return None
        size = self.n_experts * len(self.spec().moe_layers) // len(self.capacity())
        return [
            min(self.n_blocks, max(0, room - place * self.n_blocks))
            for room in self.capacity()
            for place in range(size)
        ]

    def start(self) -> StartingState:
        """What is on the device before the first event."""
        tiers = self.expert_tiers() if self.cache == "tier-aware" else None
        worth = self.worth() if self.cache == "saliency" else None
        ahead = self.anticipation() if self.policy().prefetch.rule.salient else None
        return StartingState(self.capacity(), self.initial(), tiers, worth, ahead)

    def scheduler(self) -> Watched:
        return Watched(
            self.spec(), self.policy(), self.start(),
            granularity=self.granularity, cost=self.costs, future=self.future(),
        )  # fmt: skip

    def expert_tiers(self) -> list[int]:
        """Whatever: here by the experts' ids."""
        return [expert % 3 for _ in self.spec().moe_layers for expert in range(self.n_experts)]

    def worth(self) -> Worth:
        """Whatever, with ties and with differences that weights cannot make up for; the sizes of
        an expert's blocks are not in falling order.
        """
        entries = len(self.spec().moe_layers) * self.n_experts
        expected = [(1 + entry % 2) * ONE // 4 for entry in range(entries)]
        blocks = range(entries * self.n_blocks)
        return Worth(expected, [(1, 2, 40)[hash_key(5, 0, block) % 3] for block in blocks])

    def anticipation(self) -> Anticipation:
        """Whatever, with ties: of weights, which are quarters, 1/4 is too little for some blocks,
        just enough for others, and more than that for the rest.
        """
        spec = self.spec()
        blocks = range(spec.n_routed * self.n_blocks)
        sizes = [(1, 3, 4, 4, 9)[hash_key(6, 0, block) % 5] * ONE for block in blocks]
        ranks = [
            [max(0, 2 + row - rank) * ONE // 4 for rank in range(spec.top_k)]
            for row in range(len(spec.moe_layers))
        ]
        return Anticipation(sizes, ranks)

    def future(self) -> Future | None:
        if not self.policy().oracle:
            return None
        trace = self.trace()
        workload = Workload(trace, GivenWidths(True), guess=False)
        steps = plan(trace, chosen_rows(trace, "all", None), self.batch, self.chunk)
        events = (event for event in workload.events(steps) if event.experts is not None)
        if self.policy().prefetch.rule.salient:
            return coming_routing(workload.routed(event) for event in events)
        return look_ahead(
            self.spec(), ((event.layer, workload.tasks(event, lambda _: ())) for event in events)
        )

    def simulated(self, *sinks: Sink) -> dict[str, Any]:
        """The run as our simulator does it, in the oracle's terms."""
        trace, spec, scheduler = self.trace(), self.spec(), self.scheduler()
        workload = Workload(trace, GivenWidths(self.tabled), guess="guess" in self.prefetch)
        rows = _Rows()
        recorder = Recorder([rows, *sinks])
        cost: Any = self.costs
        if self.page_cache is not None:
            cost = PageCacheCost(
                cost, CACHED, Fraction(1, PAGE), spec.row_block_bytes, self.page_cache
            )
        streams = SimulatedStreams(spec, scheduler, cost, workload, recorder, StepLog())
        steps = plan(trace, chosen_rows(trace, "all", None), self.batch, self.chunk)
        total = streams.run(steps)
        return {
            "total_ns": total, "tasks": scheduler.tasks, "hits": scheduler.hits,
            "partial": scheduler.partial_hits, "blocks_loaded": scheduler.blocks_loaded,
            "size_loaded": scheduler.bytes_loaded,
            "skipped_entries": workload.skipped, "activities": rows.activities(total),
            "residency": [
                {(spec.moe_layers[row], expert): n for (row, expert), n in after.items()}
                for after in scheduler.after
            ],
            "order_bound": recorder.sums.order_bound,
        }  # fmt: skip

    def oracle(self) -> dict[str, Any]:
        """The run as the oracle does it."""
        experts, widths, sequence, phase = self.arrays()
        spec, initial = self.spec(), self.initial()
        static = None
        keys = [(layer, e) for layer in spec.moe_layers for e in range(self.n_experts)]
        if initial is not None:
            static = {key: n for key, n in zip(keys, initial, strict=True) if n}
        result = straight.simulate(
            experts, sequence=sequence, phase=phase, n_experts=self.n_experts,
            n_blocks=self.n_blocks, widths=widths, order=self.order, cache=self.cache,
            ranking=self._ranking, share=self.share, scope=self.scope, unit=self.unit,
            granularity=self.granularity, static=static, prefetch=self.prefetch,
            guess=self.guess, batch=self.batch, chunk=self.chunk, **self.costs.oracle(),
            sizes=dict(zip(spec.moe_layers, spec.row_block_bytes, strict=True)),
            page_cache=self.page_cache, cached_ns=lambda size: 1 + size // PAGE,
            lots=lambda event, key: hash_key(3, event, keys.index(key)),
            warmth=dict(zip(keys, self.expert_tiers(), strict=True)),
            weights=((widths + self.weights) * ONE).astype(int).tolist(),
            relative={
                key: list(self.anticipation().sizes[place * self.n_blocks :][: self.n_blocks])
                for place, key in enumerate(keys)
            },
            by_rank=dict(zip(spec.moe_layers, self.anticipation().by_rank, strict=True)),
            expected=dict(zip(keys, self.worth().expected, strict=True)),
            worth={
                key: list(self.worth().sizes[place * self.n_blocks :][: self.n_blocks])
                for place, key in enumerate(keys)
            },
        )  # fmt: skip
        logs = [
            ("link" if log[0] in ("load", "prefetch") else "compute", *log[:1], *log[2:])
            for log in [*result["link"], *result["compute"]]
        ]
        return {
            **{k: v for k, v in result.items() if isinstance(v, int)},
            "activities": _sorted(logs, result["total_ns"]),
            "residency": [with_flight(event) for event in result["log"] if event["tasks"]],
        }

    def _ranking(self, event: int, experts: list[int]) -> list[int]:
        places = sorted(range(len(experts)), key=lambda place: hash_key(0, event, place))
        return [experts[place] for place in places]


class _Rows:
    def __init__(self) -> None:
        self.rows = np.zeros((0, len(COLUMNS)), np.int64)

    def write(self, rows: Rows) -> None:
        self.rows = np.vstack([self.rows, rows])

    def activities(self, total: int) -> list[tuple[Any, ...]]:
        kinds = {LAYER: "layer", COMPUTE: "task", PREFETCH: "prefetch"}
        found = []
        for _, _, layer, kind, expert, first, blocks, start, end, _, _ in self.rows.tolist():
            stream = "compute" if kind in (LAYER, COMPUTE) else "link"
            name = kinds.get(kind, "load")
            expert = None if expert < 0 else expert
            found.append((stream, name, layer, expert, first, blocks, start, end))
        return _sorted(found, total)


def _sorted(activities: list[tuple[Any, ...]], total: int) -> list[tuple[Any, ...]]:
    """By time. What takes no time, or a prefetch that the end of the run cut off, is left out."""
    kept = [a for a in activities if a[-2] < a[-1] and (a[-1] < total or a[0] == "compute")]
    return sorted(kept, key=lambda a: (a[-2], a[0]))
