"""Claims about speed: simulated with the paper's own times, and held against what is possible."""

from __future__ import annotations

from collections.abc import Callable

from crisp.reproduce.arithmetic import MOST_OVERLAP, all_resident, figure5, most_hidden, table1
from crisp.reproduce.claims import claims
from crisp.reproduce.evidence import (
    BUDGETS,
    GPU,
    ORDER_BUDGET,
    ORDERS,
    POLICIES,
    TABLE1,
    Evidence,
    after_prompt,
    lengths,
    ordered,
    speeds,
)
from crisp.reproduce.findings.on_paper import Answer, one
from crisp.reproduce.verdict import Found
from crisp.reproduce.words import figure

_OURS = "ours: Table 1's times, LRU in each layer"
_BOUND = (
    "the bound: all computing, or the fewest bytes of any cache for these widths, by Table 1 or "
    "Figure 5, on this routing or one as unequal as Figure 3, the kinder"
)


def token_times(evidence: Evidence) -> Answer:
    """Figure 9: ms a token at 40 %. Dropping leaves two full experts a token, all resident."""
    parts = {
        part: Found(ours=evidence.ms(speeds(TABLE1, name, 40)), least=evidence.fewest_ms(name, 40))
        for part, name in (("CRISP", "crisp"), ("uniform", "up"))
    }
    resident = all_resident(table1()), all_resident(figure5())
    parts["dropping"] = Found(ours=resident[0], least=min(resident))
    return (
        parts,
        f"{_OURS}; uniform: 50 % width; dropping: two full experts a token, all resident; {_BOUND}",
    )


def throughput(claim: str, budget: int) -> Callable[[Evidence], Answer]:
    """tokens/s at a budget. Full offloading has neither cache nor overlap: nothing bounds it."""

    def answer(evidence: Evidence) -> Answer:
        parts = {}
        for part in claims()[claim].values:
            name = POLICIES[part]
            most = None if part == "FO" else 1000 / evidence.fewest_ms(name, budget)
            parts[part] = Found(ours=evidence.speed(speeds(TABLE1, name, budget)), most=most)
        how = f"{_OURS}; {_BOUND}"
        return parts, how + (_plain_mo(evidence, budget) if "MO" in parts else "")

    return answer


def on_gpu(evidence: Evidence) -> Answer:
    """Figure 11: the speed of Figure 10 again; the profile's, which the picture draws, beside."""
    parts, how = throughput("F11.4090", BUDGETS[0])(evidence)
    bar = evidence.speed(speeds(GPU, POLICIES["CRISP"], BUDGETS[0]))
    return parts, (
        f"{how}; the bar in the picture, {figure(bar)} tokens/s, is by the data sheets of the "
        f"profile {GPU}, which loads an expert in {figure(evidence.gpu.load)} ms and not in "
        f"{figure(table1().load)}"
    )


def speed_up(claim: str, budget: int) -> Callable[[Evidence], Answer]:
    """CRISP's speed over another's at the same budget."""

    def answer(evidence: Evidence) -> Answer:
        own = evidence.ms(speeds(TABLE1, POLICIES["CRISP"], budget))
        parts = {}
        for part in claims()[claim].values:
            name = POLICIES[part.removeprefix("over ")]
            other = evidence.ms(speeds(TABLE1, name, budget))
            most = evidence.most_speed_up(POLICIES["CRISP"], name, budget)
            parts[part] = Found(ours=other / own, most=most)
        how = f"{_OURS}; {_BOUND}, over the other as simulated"
        return parts, how + (_plain_mo(evidence, budget) if "over MO" in parts else "")

    return answer


def _plain_mo(evidence: Evidence, budget: int) -> str:
    if not evidence.mo_is_lru(budget):
        return ""
    return f"; MO is plain LRU here: all that it would prefetch ({evidence.ahead}) is resident"


def orders(evidence: Evidence) -> Answer:
    """Figure 14: tokens/s."""
    most = 1000 / evidence.fewest_ms(POLICIES["CRISP"], ORDER_BUDGET)
    return {
        part: Found(ours=evidence.speed(ordered(order)), most=most)
        for part, order in ORDERS.items()
    }, f"{_OURS}; {_BOUND}"


def gain(evidence: Evidence) -> Answer:
    """Figure 14: what an order alone brings."""
    speed = {part: evidence.speed(ordered(order)) for part, order in ORDERS.items()}
    own = speed["width-aware"]
    return {
        "over sequential": Found(ours=own / speed["sequential"], most=MOST_OVERLAP),
        "over FIFO": Found(ours=own / speed["FIFO"]),
    }, f"{_OURS}; the bound: two streams take at least half the sum of their times"


def overlap(evidence: Evidence) -> Answer:
    """Figure 14: the share of the experts' computation that loads hide."""
    return (
        {
            part: Found(
                ours=100 * evidence.metric(ordered(ORDERS[part]), "compute_hidden"),
                most=100 * most_hidden(),
            )
            for part in claims()["F14.overlap"].values
        },
        f"{_OURS}; the bound: what is loaded last computes unhidden (shares of Eq. 4)",
    )


def length(evidence: Evidence) -> Answer:
    """Figure 17: how CRISP's advantage over MO grows from the shortest prompt to the longest."""
    known = lengths(evidence.rows)
    first, last = (advantage(evidence, length) for length in (known[0], known[-1]))
    how = f"{_OURS}; {known[-1]:,} over {known[0]:,} tokens"
    return one("F17.length", how, ours=last / first)


def advantage(evidence: Evidence, length: int) -> float:
    """CRISP's speed over MO's after a prompt."""
    own, other = (
        evidence.speed(after_prompt(POLICIES[name], length)) for name in ("CRISP", "MO")
    )  # fmt: skip
    return own / other
