"""Arithmetic on the paper's own figures, which needs no trace and no machine."""

from __future__ import annotations

from typing import NamedTuple

from crisp.reproduce.claims import printed

LAYERS, TOP_K = 32, 2  # of Mixtral-8x7B
HOT, WARM, COLD = 0.6, 0.3, 0.1  # shares of the tokens, with Eq. 4
NARROW = 0.5  # the width of a Warm combination's auxiliary
MOST_OVERLAP = 2.0  # of two streams: together they take no less than half the sum of their times


class PaperCosts(NamedTuple):
    """The times of one full-width expert and of the rest of a layer, ms."""

    load: float
    compute: float
    layer: float


def table1_costs() -> PaperCosts:
    """Return the costs of Table 1, which has two experts."""
    return PaperCosts(
        printed("T1.load") / TOP_K,
        printed("T1.compute") / TOP_K,
        printed("T1.router") + printed("T1.other"),
    )


def figure5_costs() -> PaperCosts:
    """Return the costs of Figure 5, which has no layer: Table 1's."""
    return PaperCosts(printed("F5.io.full"), printed("F5.comp.full"), table1_costs().layer)


def sequential_layer_ms(costs: PaperCosts) -> float:
    """Return the time of a layer that loads and computes its experts one after the other, ms."""
    return TOP_K * (costs.load + costs.compute) + costs.layer


def touched_share(hot: float = HOT, warm: float = WARM, cold: float = COLD) -> float:
    """Return the expert bytes a token touches, of those at full width (Eq. 4).

    >>> touched_share()
    0.875
    """
    return (hot * TOP_K + warm * (1 + NARROW) + cold) / TOP_K


def idle_share(costs: PaperCosts) -> float:
    """Return the share of time that compute idles while each expert is loaded, then computed."""
    return costs.load / (costs.load + costs.compute)


def overlapped_idle_share(costs: PaperCosts) -> float:
    """Return the least idle share of compute if loads hide all computing and nothing is cached.

    Widths change nothing: loads and computations are both linear in them.
    """
    return max(0.0, 1 - (TOP_K * costs.compute + costs.layer) / (TOP_K * costs.load))


def most_hidden_share() -> float:
    """Return the share of the experts' compute time that loads can hide, one token at a time.

    The expert that is loaded last computes when its event has nothing more to load. So a Hot
    combination hides one of two equal computations, a Warm one the wider, a Cold one none.
    """
    hidden = HOT + WARM
    return hidden / (TOP_K * touched_share())


def cold_event_ms(costs: PaperCosts, auxiliary: float) -> float:
    """Return the time of an event that loads its dominant expert and a part of the other, ms.

    auxiliary: the width of the other, 0 to 1. The dominant expert computes while the other is
    loaded, or what of it takes longer.
    """
    over = max(auxiliary * costs.load, costs.compute)
    return costs.layer + costs.load + over + auxiliary * costs.compute


def all_resident_ms(costs: PaperCosts, width: float = 1.0) -> float:
    """Return the time of a token that loads nothing, ms: no cache and no order can be faster."""
    return LAYERS * (TOP_K * width * costs.compute + costs.layer)
