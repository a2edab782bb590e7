"""The diagnosis of a log: the engine's own rule and all others, replayed on the same routing."""

from __future__ import annotations

from collections.abc import Callable, Collection

import numpy as np

from crisp.diagnose.calls import Calls
from crisp.diagnose.contracts import BEST, CURVES, Contract, EnginePolicy
from crisp.diagnose.diagnosis import LogDiagnosis, Setting
from crisp.diagnose.logged_run import LoggedRun
from crisp.diagnose.others import cache_policies, run_policy, stand_in_spec, width_policies
from crisp.diagnose.reads import Cost, LoadTime, Reads, cost_of, load_time_of
from crisp.diagnose.replay import Replayed, replay
from crisp.hardware.profile import HardwareProfile
from crisp.policy import Budget, Policy
from crisp.trace import DECODE

BUDGETS = ("0.5", "1.5", "2", "3", "4")  # times the budget
WINDOWS = (1, 4, 16, 64)  # tokens whose distinct experts are added up
SHARES = (0.02, 0.05, 0.1, 0.15, 0.2, 0.3, 0.4, 0.5, 0.75, 1.0)  # of all experts, of a curve
ONLINE = ("lru", "lfu", "layer", "layerlfu")  # of the curves, those without foresight
_EVERYTHING = 1 << 62  # bytes that hold all experts of any model


def diagnose(
    run: LoggedRun,
    contract: Contract,
    budget: Budget,
    hardware: HardwareProfile | None = None,
    *,
    curves: bool = False,
    progress: Callable[[], None] = lambda: None,
) -> LogDiagnosis:
    """Replay a log by an engine's contract and by other rules; return all figures.

    curves: also replay at other budgets, for pictures. progress: called after each of
    `steps(..)` replays. Raises CrispError where the log does not fit.
    """
    trace = run.trace
    case = _Investigation(run, contract, run.budget_bytes(budget), hardware, progress)
    decoded = int((trace.phase == DECODE).sum())
    sizes = [run.expert_bytes[layer] for layer in trace.moe_layers]
    return LogDiagnosis(
        log=run.name,
        model=trace.header.model,
        contract=contract,
        budget=budget.text,
        budget_bytes=case.budget,
        total_bytes=run.total_bytes,
        prompt_tokens=trace.rows - decoded,
        tokens=decoded,
        layers=len(trace.moe_layers),
        experts=trace.header.n_experts,
        top_k=trace.k,
        expert_bytes=(min(sizes), max(sizes)),
        machine=None if hardware is None else hardware.name,
        own=case.own(case.budget),
        best=case.cost(BEST, case.budget),
        uncached=case.uncached(),
        first_use_bytes=case.cost(CURVES["lru"], _EVERYTHING).bytes_per_token,
        settings=(*case.caches(), *case.budgets(), *case.widths()),
        windows=_windows(case.calls),
        curves=case.curves() if curves else {},
        notes=run.notes,
    )


def steps(run: LoggedRun, contract: Contract, curves: bool) -> int:
    """Return how many replays `diagnose` makes, or a few more."""
    ours = len(cache_policies()) + len(width_policies(run.trace))
    pictures = curves * len(SHARES) * (2 + len(_compared(contract)))
    return 3 + len(ONLINE) + ours + len(BUDGETS) + pictures


class _Investigation:
    """A log and a budget, on which one rule after the other is run."""

    def __init__(
        self,
        run: LoggedRun,
        contract: Contract,
        budget: int,
        hardware: HardwareProfile | None,
        progress: Callable[[], None],
    ) -> None:
        self._run, self._contract, self.budget = run, contract, budget
        self._progress = progress
        self._spec = run.spec or stand_in_spec(run.trace, run.expert_bytes)
        self._aligned = contract.counting.aligned * run.projections
        self._time: LoadTime | None = None
        if hardware is not None:
            self._time = load_time_of(hardware, self._spec)
        self.calls = run.calls()
        self._own_calls = run.calls(contract.counting.lookups)

    def cost(self, policy: EnginePolicy, budget: int, calls: Calls | None = None) -> Cost:
        """Return what a token costs by a rule that looks up each expert of a call once."""
        done = replay(self.calls if calls is None else calls, policy, budget)
        self._progress()
        return cost_of(Reads.of(done, self._aligned), self._time)

    def own(self, budget: int) -> Cost:
        """Return what a token costs by the engine's contract."""
        return self.cost(self._contract.policy, budget, self._own_calls)

    def uncached(self) -> Cost:
        """Return what a token costs where nothing is kept from one call to the next."""
        missed = np.zeros(self._own_calls.starts()[-1], np.bool_)
        return cost_of(Reads.of(Replayed(missed, self._own_calls), self._aligned), self._time)

    def caches(self) -> list[Setting]:
        """Return other caches of the same size: by bytes, and CRISP's own, by slots."""
        run, policies = self._run, {name: CURVES[name] for name in ONLINE}
        part = self.budget // len(run.trace.moe_layers)
        if part < run.trace.k * max(run.expert_bytes):
            # evicting after the call, a layer would keep more than its part
            policies = {n: policy for n, policy in policies.items() if policy.scope == "global"}
        by_bytes = [
            Setting("cache", f"{name}, in bytes", self.cost(policy, self.budget))
            for name, policy in policies.items()
        ]
        return by_bytes + [
            Setting("cache", f"{policy.cache.name}, per layer", self._ours(policy))
            for policy in cache_policies()
        ]

    def budgets(self) -> list[Setting]:
        """Return other sizes of the engine's own cache."""
        sizes = {times: int(float(times) * self.budget) for times in BUDGETS}
        return [
            Setting("memory", f"{times} x the budget", self.own(size))
            for times, size in sizes.items()
            if size <= self._run.total_bytes
        ]

    def widths(self) -> list[Setting]:
        """Return narrower experts, over CRISP's LRU by block."""
        return [
            Setting("width", str(policy.to_dict()["width"]), self._ours(policy), True)
            for policy in width_policies(self._run.trace)
        ]

    def curves(self) -> dict[str, list[tuple[int, float]]]:
        """Return bytes of a token against the budget: by its rule, the best, and others."""
        rules = {
            self._contract.name: (self._contract.policy, self._own_calls),
            "best": (BEST, self.calls),
        }
        rules |= {name: (policy, self.calls) for name, policy in _compared(self._contract).items()}
        sizes = sorted({int(share * self._run.total_bytes) for share in SHARES})
        return {
            name: [(size, self.cost(policy, size, calls).bytes_per_token) for size in sizes]
            for name, (policy, calls) in rules.items()
        }

    def _ours(self, policy: Policy) -> Cost:
        run = self._run
        reads = run_policy(
            run.trace, self._spec, run.expert_bytes, policy, self.budget, self._aligned
        )
        self._progress()
        return cost_of(reads, self._time)


def _compared(contract: Contract) -> dict[str, EnginePolicy]:
    """Return the rules that an engine's is compared with at other budgets."""
    return {name: CURVES[name] for name in ONLINE if CURVES[name] != contract.policy}


def _windows(calls: Calls) -> tuple[tuple[int, float], ...]:
    """Return (tokens in a row, bytes of their distinct experts on average)."""
    by_token: list[set[int]] = [set() for _ in range(calls.tokens)]
    for token, entries in zip(calls.token.tolist(), calls.last_used, strict=True):
        if token >= 0:
            by_token[token].update(entries)
    found: list[tuple[int, float]] = []
    for window in sorted({*WINDOWS, len(by_token)}):
        if 0 < window <= len(by_token):
            starts = range(0, len(by_token) - window + 1, max(1, window // 4))
            distinct = [set().union(*by_token[start : start + window]) for start in starts]
            found.append((window, float(np.mean([_bytes_of(calls, some) for some in distinct]))))
    return tuple(found)


def _bytes_of(calls: Calls, entries: Collection[int]) -> int:
    return sum(calls.size[entry // calls.entries_per_layer] for entry in entries)
