"""Evidence: the runs that the claims need, and their results in the units of the paper."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

from crisp.reproduce.arithmetic import LAYERS, PaperCosts, figure5_costs, table1_costs
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
class RequiredRun:
    """A run that a claim needs: a named policy with parts replaced.

    prompt: tokens before those generated.
    """

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
        """The number of rows to run; None: all."""
        return MACHINE_ROWS if self.machine == ORIN else None


def speed_run(machine: str, policy: str, budget: int) -> RequiredRun:
    """Return a policy as it is; full offloading keeps nothing, whatever the budget."""
    return RequiredRun(machine, policy, BUDGETS[0] if policy == "fo" else budget)


def bound_run(policy: str, budget: int) -> RequiredRun:
    """Return the run whose tasks a bound is computed from.

    All layers share its budget, by single blocks, so that it is neither split nor rounded down.
    """
    name = "lru" if policy == "mo" else policy  # prefetches are no tasks
    return RequiredRun(TABLE1, name, budget, scope="global", unit="block")


def order_run(order: str) -> RequiredRun:
    """Return the tiered widths in another order (Figure 14)."""
    return RequiredRun(TABLE1, "crisp", ORDER_BUDGET, order=order)


def strategy_run(width: str, cache: str) -> RequiredRun:
    """Return the widths of an execution policy (Figure 13); cache: lru or none."""
    return RequiredRun(TABLE1, "lru", ORDER_BUDGET, width=width, cache=cache)


def prompt_run(policy: str, length: int) -> RequiredRun:
    """Return tokens generated after a prompt (Figure 17)."""
    return RequiredRun(TABLE1, policy, ORDER_BUDGET, prompt=length)


def required_runs(rows: int) -> list[RequiredRun]:
    """Return all runs, each once; rows: how many of the trace can be run."""
    policies = POLICIES.values()
    runs = [speed_run(TABLE1, name, budget) for name in ("lru", *policies) for budget in BUDGETS]
    runs += bound_runs()
    runs += [speed_run(machine, name, BUDGETS[0]) for machine in (GPU, ORIN) for name in policies]
    runs += [order_run(order) for order in ORDERS.values()]
    runs += [
        strategy_run(width, cache) for width in STRATEGIES.values() for cache in ("lru", "none")
    ]
    runs += [prompt_run(name, length) for name in policies for length in prompt_lengths(rows)]
    return list(dict.fromkeys(runs))


def bound_runs() -> list[RequiredRun]:
    """Return the runs of `required_runs` from which bounds are computed."""
    runs = [bound_run(name, budget) for name in ("lru", "up", "crisp") for budget in BUDGETS]
    runs += [
        speed_run(machine, name, BUDGETS[0])
        for machine in (TABLE1, FIGURE5)
        for name in ("up", "mo", "crisp")
    ]
    return [*runs, speed_run(TABLE1, "fo", BUDGETS[0]), speed_run(TABLE1, "mo", 50)]


def prompt_lengths(rows: int) -> list[int]:
    """Return the prompt lengths for which there are enough rows."""
    return [length for length in LENGTHS if length + GENERATED <= rows]


@dataclass(frozen=True)
class Evidence:
    """The results of all runs on one routing; shares are 0 to 1."""

    trace_name: str | None  # the trace that was given, if any
    routing_source: str  # where the routing comes from, in words
    mo_prefetches: str  # what MO prefetches, in words
    described: Description  # of the whole trace
    pairs: tuple[float, ...]  # shares of the combinations, falling, mean over layers
    rows: int  # that were run
    runs: Mapping[RequiredRun, Mapping[str, float | None]]  # their metrics
    gpu: PaperCosts  # what the built-in profile of the paper's GPU has
    expert_bytes: int
    skewed: Evidence | None = None  # `bound_runs` on routing as unequal as the paper's Figure 3
    other: Evidence | None = None  # `bound_runs` on OTHER; not Mixtral's, so no bound uses it

    @property
    def routings(self) -> tuple[Evidence, ...]:
        """The routings over which bounds are taken."""
        return (self,) if self.skewed is None else (self, self.skewed)

    @property
    def layers(self) -> int:
        """The layers of the trace; a model of 32 takes proportionally longer."""
        return self.described.n_layers

    def metric(self, run: RequiredRun, name: str) -> float:
        """Return a metric that every run has."""
        value = self.runs[run][name]
        assert value is not None, (run, name)
        return value

    def ms(self, run: RequiredRun, name: str = "ms_per_token_mean") -> float:
        """Return a time of a token, scaled to all 32 layers, ms."""
        return self.metric(run, name) * LAYERS / self.layers

    def speed(self, run: RequiredRun) -> float:
        """Return the speed, scaled to all 32 layers, tokens/s."""
        return self.metric(run, "tokens_per_second") * self.layers / LAYERS

    def joules(self, run: RequiredRun) -> float:
        """Return the energy of a token, scaled to all 32 layers, J."""
        return self.metric(run, "energy_j_per_token") * LAYERS / self.layers

    def loads(self, run: RequiredRun, name: str = "bytes_per_token") -> float:
        """Return the full-width experts that a token loads, scaled to all 32 layers."""
        return self.metric(run, name) / self.expert_bytes * LAYERS / self.layers

    def fewest_loads(self, policy: str, budget: int) -> float:
        """Return the full-width experts that any cache of this budget has to load for these widths.

        The bound holds whatever it evicts, and whichever layers it gives its memory to, by single
        blocks.
        """
        return self.loads(bound_run(policy, budget), "belady_bytes_per_token")

    def fewest_ms(self, policy: str, budget: int) -> float:
        """Return a lower bound on the time of a token, ms, for any cache, prefetcher and order.

        It is the kinder of the paper's two sets of costs, and of either routing.
        """
        return min(routing.fewest_ms_here(policy, budget) for routing in self.routings)

    def most_speed_up(self, policy: str, other: str, budget: int) -> float:
        """Return an upper bound on the speed-up over another policy, as simulated.

        It is the kinder routing's.
        """
        return max(
            routing.ms(speed_run(TABLE1, other, budget)) / routing.fewest_ms_here(policy, budget)
            for routing in self.routings
        )

    def mo_is_lru(self, budget: int) -> bool:
        """Return whether all that MO prefetches is resident already: it then loads as LRU does."""
        names = "bytes_per_token", "ms_per_token_mean"
        mo, lru = (speed_run(TABLE1, name, budget) for name in ("mo", "lru"))
        return all(self.metric(mo, name) == self.metric(lru, name) for name in names)

    def fewest_ms_here(self, policy: str, budget: int) -> float:
        """Return `fewest_ms` on this routing alone.

        It is the longer of all computing, and of loading the fewest bytes that any cache of this
        budget could load for these widths.
        """
        fewest = self.fewest_loads(policy, budget)
        computing = {
            machine: self.ms(speed_run(machine, policy, BUDGETS[0]), "compute_bound_ms_per_token")
            for machine in (TABLE1, FIGURE5)
        }
        return min(
            max(fewest * table1_costs().load, computing[TABLE1]),
            max(fewest * figure5_costs().load, computing[FIGURE5]),
        )
