"""What has to be simulated for the claims, and how its results are read."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

from crisp.reproduce.arithmetic import LAYERS, Costs, figure5, table1
from crisp.reproduce.routing import GENERATED, LENGTHS
from crisp.trace.describe import Description

TABLE1, FIGURE5, GPU, ORIN = (
    "paper-table1", "paper-figure5", "rtx4090-pcie4", "jetson-agx-orin-32gb",
)  # fmt: skip
OTHER = "tiny-mixtral-docs"  # a bundled trace, which shows what other routing does to a bound
BUDGETS = (10, 20, 30, 40, 50)  # percent
MACHINE_ROWS = 200  # of a run with shared memory, which only the slower engine can do
MODEL, BITS = "mixtral-8x7b", "4.25"  # 4 bits, and a 16-bit scale for 64 weights
POLICIES = {"FO": "fo", "UP": "up", "MO": "mo", "CRISP": "crisp"}  # as the paper calls them
ORDERS = {
    "sequential": "sequential", "FIFO": "fifo", "random": "random", "width-aware": "widest",
}  # fmt: skip
STRATEGIES = {"all full": "full", "all 50 %": "uniform(.5)", "single": "single", "tiered": "tiered"}
ORDER_BUDGET = 20  # percent, of Figures 13, 14 and 17


@dataclass(frozen=True)
class Wanted:
    """One run: a named policy with parts replaced; prompt: tokens before those generated."""

    machine: str
    policy: str
    budget: int  # percent
    width: str | None = None
    order: str | None = None
    cache: str | None = None
    scope: str = "layer"
    unit: str | None = None
    prompt: int | None = None

    @property
    def limit(self) -> int | None:
        """Rows that are run, if not all."""
        return MACHINE_ROWS if self.machine == ORIN else None


def speeds(machine: str, policy: str, budget: int) -> Wanted:
    """A policy as it is; full offloading keeps nothing, whatever the budget."""
    return Wanted(machine, policy, BUDGETS[0] if policy == "fo" else budget)


def bounding(policy: str, budget: int) -> Wanted:
    """The run whose tasks a bound is counted for: its budget is neither split nor rounded down.

    All layers share it, by single blocks.
    """
    asked = "lru" if policy == "mo" else policy  # what is prefetched is no task
    return Wanted(TABLE1, asked, budget, scope="global", unit="block")


def ordered(order: str) -> Wanted:
    """The tiered widths in another order (Figure 14)."""
    return Wanted(TABLE1, "crisp", ORDER_BUDGET, order=order)


def strategy(width: str, cache: str) -> Wanted:
    """The widths of an execution policy (Figure 13); cache: lru or none."""
    return Wanted(TABLE1, "lru", ORDER_BUDGET, width=width, cache=cache)


def after_prompt(policy: str, length: int) -> Wanted:
    """Tokens generated after a prompt (Figure 17)."""
    return Wanted(TABLE1, policy, ORDER_BUDGET, prompt=length)


def wanted(rows: int) -> list[Wanted]:
    """All runs, each once; rows: how many of the trace there are to run."""
    own = POLICIES.values()
    runs = [speeds(TABLE1, name, budget) for name in ("lru", *own) for budget in BUDGETS]
    runs += bounds()
    runs += [speeds(machine, name, BUDGETS[0]) for machine in (GPU, ORIN) for name in own]
    runs += [ordered(order) for order in ORDERS.values()]
    runs += [strategy(width, cache) for width in STRATEGIES.values() for cache in ("lru", "none")]
    runs += [after_prompt(name, length) for name in own for length in lengths(rows)]
    return list(dict.fromkeys(runs))


def bounds() -> list[Wanted]:
    """The runs of `wanted` that bounds are made of."""
    runs = [bounding(name, budget) for name in ("lru", "up", "crisp") for budget in BUDGETS]
    runs += [
        speeds(machine, name, BUDGETS[0])
        for machine in (TABLE1, FIGURE5)
        for name in ("up", "mo", "crisp")
    ]
    return [*runs, speeds(TABLE1, "fo", BUDGETS[0]), speeds(TABLE1, "mo", 50)]


def lengths(rows: int) -> list[int]:
    """The prompts that so many rows are enough for."""
    return [length for length in LENGTHS if length + GENERATED <= rows]


@dataclass(frozen=True)
class Evidence:
    """All that was computed; shares are 0 to 1."""

    given: str | None  # the trace that was asked for
    made: str  # where its routing comes from, in words
    ahead: str  # what MO prefetches, in words
    described: Description  # of the whole trace
    pairs: tuple[float, ...]  # shares of the combinations, falling, mean over layers
    rows: int  # that were run
    runs: Mapping[Wanted, Mapping[str, float | None]]  # their metrics
    gpu: Costs  # what the built-in profile of the paper's GPU has
    expert_bytes: int
    skewed: Evidence | None = None  # `bounds` on routing as unequal as the paper's Figure 3
    other: Evidence | None = None  # `bounds` on OTHER: no Mixtral's, so no bound is taken over it

    @property
    def routings(self) -> tuple[Evidence, ...]:
        """All that a bound is taken over."""
        return (self,) if self.skewed is None else (self, self.skewed)

    @property
    def layers(self) -> int:
        """Of the trace; a model of 32 takes so many times as long."""
        return self.described.n_layers

    def metric(self, run: Wanted, name: str) -> float:
        """A metric that every run has."""
        value = self.runs[run][name]
        assert value is not None, (run, name)
        return value

    def ms(self, run: Wanted, name: str = "ms_per_token_mean") -> float:
        """A time of a token, of all 32 layers."""
        return self.metric(run, name) * LAYERS / self.layers

    def speed(self, run: Wanted) -> float:
        """tokens/s, of all 32 layers."""
        return self.metric(run, "tokens_per_second") * self.layers / LAYERS

    def joules(self, run: Wanted) -> float:
        """J a token, of all 32 layers."""
        return self.metric(run, "energy_j_per_token") * LAYERS / self.layers

    def loads(self, run: Wanted, name: str = "bytes_per_token") -> float:
        """Full-width experts that a token loads, of all 32 layers."""
        return self.metric(run, name) / self.expert_bytes * LAYERS / self.layers

    def fewest_loads(self, policy: str, budget: int) -> float:
        """Full-width experts that a cache of this budget has to load for these very widths.

        Whatever it evicts, and whichever layers it gives its memory to, by single blocks.
        """
        return self.loads(bounding(policy, budget), "belady_bytes_per_token")

    def fewest_ms(self, policy: str, budget: int) -> float:
        """A token in less time is possible with no cache, prefetcher or order, as the paper has it.

        Either of its two sets of costs and either routing, the kinder ones.
        """
        return min(routing.fewest_ms_here(policy, budget) for routing in self.routings)

    def most_speed_up(self, policy: str, other: str, budget: int) -> float:
        """How much faster than another policy, as simulated, one can be; by the kinder routing."""
        return max(
            routing.ms(speeds(TABLE1, other, budget)) / routing.fewest_ms_here(policy, budget)
            for routing in self.routings
        )

    def mo_is_lru(self, budget: int) -> bool:
        """Whether what MO prefetches is resident already, so that it loads as LRU alone does."""
        names = "bytes_per_token", "ms_per_token_mean"
        mo, lru = (speeds(TABLE1, name, budget) for name in ("mo", "lru"))
        return all(self.metric(mo, name) == self.metric(lru, name) for name in names)

    def fewest_ms_here(self, policy: str, budget: int) -> float:
        """`fewest_ms` on this routing alone.

        The longer of all computing, and of the fewest bytes that any cache of this budget could
        load for these very widths.
        """
        fewest = self.fewest_loads(policy, budget)
        computing = {
            machine: self.ms(speeds(machine, policy, BUDGETS[0]), "compute_bound_ms_per_token")
            for machine in (TABLE1, FIGURE5)
        }
        return min(
            max(fewest * table1().load, computing[TABLE1]),
            max(fewest * figure5().load, computing[FIGURE5]),
        )
