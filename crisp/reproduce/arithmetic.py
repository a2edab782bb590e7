"""What the paper's own figures make of one another: no trace and no machine is needed."""

from __future__ import annotations

from typing import NamedTuple

from crisp.reproduce.claims import printed

LAYERS, TOP_K = 32, 2  # of Mixtral-8x7B
HOT, WARM, COLD = 0.6, 0.3, 0.1  # shares of the tokens, with Eq. 4
NARROW = 0.5  # the width of a Warm combination's auxiliary
MOST_OVERLAP = 2.0  # of two streams: together they take no less than half the sum of their times


class Costs(NamedTuple):
    """Times of one full-width expert and of the rest of a layer, ms."""

    load: float
    compute: float
    layer: float


def table1() -> Costs:
    """Of Table 1, which has two experts."""
    return Costs(
        printed("T1.load") / TOP_K,
        printed("T1.compute") / TOP_K,
        printed("T1.router") + printed("T1.other"),
    )


def figure5() -> Costs:
    """Of Figure 5, which has no layer: Table 1's."""
    return Costs(printed("F5.io.full"), printed("F5.comp.full"), table1().layer)


def total(costs: Costs) -> float:
    """A layer that loads and computes its experts one after the other, ms."""
    return TOP_K * (costs.load + costs.compute) + costs.layer


def touched(hot: float = HOT, warm: float = WARM, cold: float = COLD) -> float:
    """Eq. 4: expert bytes a token touches, of those at full width.

    >>> touched()
    0.875
    """
    return (hot * TOP_K + warm * (1 + NARROW) + cold) / TOP_K


def bubble(costs: Costs) -> float:
    """Share of the time in which compute idles while each expert is loaded, then computed."""
    return costs.load / (costs.load + costs.compute)


def bubble_overlapped(costs: Costs) -> float:
    """The least such share if loads hide all that is computed, and nothing is in a cache.

    Widths change nothing: loads and computations are both linear in them.
    """
    return max(0.0, 1 - (TOP_K * costs.compute + costs.layer) / (TOP_K * costs.load))


def most_hidden() -> float:
    """Share of the experts' compute time that loads can hide, one token at a time.

    The expert that is loaded last computes when its event has nothing more to load. So a Hot
    combination hides one of two equal computations, a Warm one the wider, a Cold one none.
    """
    hidden = HOT + WARM
    return hidden / (TOP_K * touched())


def cold_time(costs: Costs, auxiliary: float) -> float:
    """An event that loads its dominant expert and ``auxiliary`` of the other, overlapped, ms.

    The dominant one computes while the other is loaded, or what of it takes longer.
    """
    over = max(auxiliary * costs.load, costs.compute)
    return costs.layer + costs.load + over + auxiliary * costs.compute


def all_resident(costs: Costs, width: float = 1.0) -> float:
    """A token that loads nothing, ms: what no cache and no order can make faster."""
    return LAYERS * (TOP_K * width * costs.compute + costs.layer)
