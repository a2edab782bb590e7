"""Findings about speed: simulated with the paper's own times, beside what is possible."""

from __future__ import annotations

from collections.abc import Callable

from crisp.reproduce.arithmetic import (
    MOST_OVERLAP,
    all_resident_ms,
    figure5_costs,
    most_hidden_share,
    table1_costs,
)
from crisp.reproduce.claims import claims
from crisp.reproduce.evidence import (
    BUDGETS,
    GPU,
    ORDER_BUDGET,
    ORDERS,
    POLICIES,
    TABLE1,
    Evidence,
    order_run,
    prompt_lengths,
    prompt_run,
    speed_run,
)
from crisp.reproduce.findings.on_paper import Answer, single_answer
from crisp.reproduce.verdict import PartFigures
from crisp.reproduce.words import format_figure

_OURS = "ours: Table 1's times, LRU in each layer"
_BOUND = (
    "the bound: all computing, or the fewest bytes of any cache for these widths, by Table 1 or "
    "Figure 5, on this routing or one as unequal as Figure 3, the kinder"
)


def token_times(evidence: Evidence) -> Answer:
    """Answer Figure 9: ms a token at 40 %.

    Dropping leaves two full experts a token, all resident.
    """
    parts = {
        part: PartFigures(
            ours=evidence.ms(speed_run(TABLE1, name, 40)), least=evidence.fewest_ms(name, 40)
        )
        for part, name in (("CRISP", "crisp"), ("uniform", "up"))
    }
    resident = all_resident_ms(table1_costs()), all_resident_ms(figure5_costs())
    parts["dropping"] = PartFigures(ours=resident[0], least=min(resident))
    return (
        parts,
        f"{_OURS}; uniform: 50 % width; dropping: two full experts a token, all resident; {_BOUND}",
    )


def throughput(claim: str, budget: int) -> Callable[[Evidence], Answer]:
    """Answer tokens/s at a budget.

    Full offloading has neither cache nor overlap: nothing bounds it.
    """

    def answer(evidence: Evidence) -> Answer:
        parts = {}
        for part in claims()[claim].values:
            name = POLICIES[part]
            most = None if part == "FO" else 1000 / evidence.fewest_ms(name, budget)
            parts[part] = PartFigures(
                ours=evidence.speed(speed_run(TABLE1, name, budget)), most=most
            )
        how = f"{_OURS}; {_BOUND}"
        return parts, how + (_plain_mo(evidence, budget) if "MO" in parts else "")

    return answer


def on_gpu(evidence: Evidence) -> Answer:
    """Answer Figure 11: the speed of Figure 10 again.

    The profile's speed, which the picture draws, stands beside.
    """
    parts, how = throughput("F11.4090", BUDGETS[0])(evidence)
    bar = evidence.speed(speed_run(GPU, POLICIES["CRISP"], BUDGETS[0]))
    return parts, (
        f"{how}; the bar in the picture, {format_figure(bar)} tokens/s, is by the data sheets of "
        f"the profile {GPU}, which loads an expert in {format_figure(evidence.gpu.load)} ms and "
        f"not in {format_figure(table1_costs().load)}"
    )


def speed_up(claim: str, budget: int) -> Callable[[Evidence], Answer]:
    """Answer CRISP's speed over another's at the same budget."""

    def answer(evidence: Evidence) -> Answer:
        crisp_ms = evidence.ms(speed_run(TABLE1, POLICIES["CRISP"], budget))
        parts = {}
        for part in claims()[claim].values:
            name = POLICIES[part.removeprefix("over ")]
            other = evidence.ms(speed_run(TABLE1, name, budget))
            most = evidence.most_speed_up(POLICIES["CRISP"], name, budget)
            parts[part] = PartFigures(ours=other / crisp_ms, most=most)
        how = f"{_OURS}; {_BOUND}, over the other as simulated"
        return parts, how + (_plain_mo(evidence, budget) if "over MO" in parts else "")

    return answer


def _plain_mo(evidence: Evidence, budget: int) -> str:
    if not evidence.mo_is_lru(budget):
        return ""
    return (
        f"; MO is plain LRU here: all that it would prefetch ({evidence.mo_prefetches}) is resident"
    )


def orders(evidence: Evidence) -> Answer:
    """Answer Figure 14: tokens/s."""
    most = 1000 / evidence.fewest_ms(POLICIES["CRISP"], ORDER_BUDGET)
    return {
        part: PartFigures(ours=evidence.speed(order_run(order)), most=most)
        for part, order in ORDERS.items()
    }, f"{_OURS}; {_BOUND}"


def gain(evidence: Evidence) -> Answer:
    """Answer Figure 14: what an order alone brings."""
    speed = {part: evidence.speed(order_run(order)) for part, order in ORDERS.items()}
    width_aware = speed["width-aware"]
    return {
        "over sequential": PartFigures(ours=width_aware / speed["sequential"], most=MOST_OVERLAP),
        "over FIFO": PartFigures(ours=width_aware / speed["FIFO"]),
    }, f"{_OURS}; the bound: two streams take at least half the sum of their times"


def overlap(evidence: Evidence) -> Answer:
    """Answer Figure 14: the share of the experts' computation that loads hide."""
    return (
        {
            part: PartFigures(
                ours=100 * evidence.metric(order_run(ORDERS[part]), "compute_hidden"),
                most=100 * most_hidden_share(),
            )
            for part in claims()["F14.overlap"].values
        },
        f"{_OURS}; the bound: what is loaded last computes unhidden (shares of Eq. 4)",
    )


def length(evidence: Evidence) -> Answer:
    """Answer Figure 17: CRISP's advantage over MO, from the shortest prompt to the longest."""
    lengths = prompt_lengths(evidence.rows)
    first, last = (advantage(evidence, length) for length in (lengths[0], lengths[-1]))
    how = f"{_OURS}; {lengths[-1]:,} over {lengths[0]:,} tokens"
    return single_answer("F17.length", how, ours=last / first)


def advantage(evidence: Evidence, length: int) -> float:
    """Return CRISP's speed over MO's after a prompt."""
    crisp, other = (
        evidence.speed(prompt_run(POLICIES[name], length)) for name in ("CRISP", "MO")
    )  # fmt: skip
    return crisp / other
