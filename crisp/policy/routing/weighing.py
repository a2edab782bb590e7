"""How a model makes the weights of the chosen experts from its router's scores of all.

A rule that changes the choice has to weigh experts that the router did not choose. Families weigh
in few ways: by softmax or by sigmoid of the scores, and with or without dividing by the sum over
the chosen. Which of them a model follows is read off what its router has chosen, so that no family
needs code of its own; a model that follows none is refused.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import numpy as np
import numpy.typing as npt

from crisp.errors import CrispError
from crisp.trace import RoutingTrace

Floats = npt.NDArray[np.float64]
Halves = npt.NDArray[np.float16]
Ids = npt.NDArray[np.int16]
Flags = npt.NDArray[np.bool_]

_MOST_ROWS = 4096  # of a trace, to read its model's ways off
_LEAST_WEIGHT = 2.0**-14  # below it float16 is not exact to 2^-11
# Weights may have been rounded to bfloat16 twice, at the router's softmax and at the division by
# the sum (2^-8 in all), and scores are float16. Both sides of a comparison are rounded so.
_OF_WEIGHTS, _OF_SCORES = 2.0**-7, 2.0**-10


@dataclass(frozen=True)
class Weighing:
    """The way of one layer's router."""

    sigmoid: bool  # a weight goes by the sigmoid of its expert's score; else by the exponential
    normalised: bool  # the weights of the chosen always have the same sum
    by_score: bool  # nothing but the scores decides which experts are chosen

    def log_shares(self, scores: npt.NDArray[Any]) -> Floats:
        """Return logarithms of what weights are proportional to: [rows, experts].

        scores [rows, experts]. With softmax they are the scores themselves.
        """
        exact = scores.astype(np.float64)
        return -np.logaddexp(0, -exact) if self.sigmoid else exact

    def weights(self, shares: Floats, chosen: Flags, experts: Ids, weights: Halves) -> Halves:
        """Return the weights of other experts than the router chose: [rows, k], 0 where absent.

        shares [rows, experts]: proportional to what `log_shares` has the logarithms of; chosen
        [rows, experts]: what the router chose, and weights [rows, k]: how it weighed that; experts
        [rows, k]: what is used, -1 = none.
        """
        total = weights.astype(np.float64).sum(axis=1)  # [rows]
        used = np.take_along_axis(shares, np.maximum(experts, 0).astype(np.int64), 1)
        used = np.where(experts >= 0, used, 0)  # [rows, k]
        over = used if self.normalised else np.where(chosen, shares, 0)
        halves: Halves = (used * (total / over.sum(axis=1))[:, None]).astype(np.float16)
        return halves


def understand(scores: Halves, experts: Ids, weights: Halves, who: str) -> Weighing:
    """Return the way in which a router made these weights of these scores.

    scores [rows, experts]; experts, weights [rows, k], -1 = absent. who: what needs to know, for
    errors. Raises CrispError where no known way gives the weights, within the rounding of float16
    scores and bfloat16 weights.
    """
    exact, present = scores.astype(np.float64), experts >= 0
    places = np.maximum(experts, 0).astype(np.int64)
    own = np.take_along_axis(exact, places, 1)  # [rows, k]
    w = np.where(present, weights, 0).astype(np.float64)
    counted = present & (w >= _LEAST_WEIGHT)
    rounding = _OF_WEIGHTS + _OF_SCORES * np.abs(np.where(counted, own, 0)).max(axis=1)  # [rows]
    rows = counted.any(axis=1)
    ways = []
    for sigmoid in (False, True):
        way = Weighing(sigmoid, True, _by_score(exact, places, present))
        ratio = np.log(np.where(counted, w, 1)) - np.take_along_axis(
            way.log_shares(exact), places, 1
        )
        spread = _spread(ratio, counted)
        if (spread > rounding).any():
            continue
        shares = np.exp(way.log_shares(exact) - (0 if sigmoid else _log_sum(exact)))
        used = np.take_along_axis(shares, places, 1)
        sums = w.sum(axis=1)[rows]
        scales = sums / np.where(present, used, 0).sum(axis=1)[rows]
        for normalised, constants in ((True, sums), (False, scales)):
            logs = np.log(constants)
            differ = float(logs.max() - logs.min()) if len(logs) else 0.0
            if differ <= 2 * rounding.max(initial=0):
                # Of several that fit, the best; of one row alone, the one that needs no constant.
                fit = differ, float(np.abs(logs).max(initial=0))
                ways.append((fit, Weighing(sigmoid, normalised, way.by_score)))
    if not ways:
        raise CrispError(f"{who}: how this model makes weights of scores is not understood")
    return min(ways, key=lambda one: one[0])[1]


def weighings_of(trace: RoutingTrace, who: str) -> dict[int, Weighing]:
    """Return how each MoE layer's router weighs, as the rows of a trace show it.

    Raises CrispError for a trace without scores or weights, and for what is not understood.
    """
    if trace.scores is None or trace.weights is None:
        missing = "scores" if trace.scores is None else "weights"
        raise CrispError(
            f"{who}: asks for the router's scores of all experts, but the trace has no {missing}; "
            "crisp trace capture --scores records both"
        )
    some = slice(0, _MOST_ROWS)
    return {
        layer: understand(
            trace.scores[some, layer], trace.experts[some, layer], trace.weights[some, layer], who
        )
        for layer in trace.moe_layers
    }


def _by_score(exact: Floats, places: npt.NDArray[np.int64], present: Flags) -> bool:
    """Return whether every chosen expert's score is at least that of every other one."""
    least = np.where(present, np.take_along_axis(exact, places, 1), np.inf).min(axis=1)
    others = exact.copy()
    np.put_along_axis(others, places, -np.inf, 1)
    return bool((least >= others.max(axis=1))[present.all(axis=1)].all())


def _spread(values: Floats, counted: Flags) -> Floats:
    """Return the largest less the smallest of each row's counted values, 0 without any."""
    high = np.where(counted, values, -np.inf).max(axis=1)
    low = np.where(counted, values, np.inf).min(axis=1)
    return np.where(counted.any(axis=1), high - low, 0)


def _log_sum(exact: Floats) -> Floats:
    """Return the logarithm of the sum of exponentials of each row: [rows, 1]."""
    most = exact.max(axis=1, keepdims=True)
    total: Floats = most + np.log(np.exp(exact - most).sum(axis=1, keepdims=True))
    return total
