"""Routing rules: use of what is resident in the place of what the router would choose.

A rule is asked when an event starts. It sees the router's scores of all experts and the blocks of
each that are resident, and says which experts each token uses. The token's first expert, of most
weight, is always among them. Tokens whose choice a rule leaves alone keep their weights to the bit;
those of the others are made of the scores as the model makes them (`weighing`).
"""

from __future__ import annotations

from abc import abstractmethod
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from fractions import Fraction
from typing import ClassVar

import numpy as np

from crisp.errors import CrispError
from crisp.model.spec import ModelSpec
from crisp.policy.routing.weighing import Flags, Floats, Halves, Ids, Weighing
from crisp.policy.spelling import decimal
from crisp.policy.widths.contribution import spread_blocks
from crisp.profile import Profile


@dataclass(frozen=True)
class Routing:
    """A rule for the choice of experts; its fields are its parameters. This one changes nothing."""

    active: ClassVar[bool] = False
    """Whether it may change anything at all."""
    profiled: ClassVar[bool] = False
    """Whether it asks the profile."""


@dataclass(frozen=True)
class RoutingRule(Routing):
    """A rule that changes the choice."""

    active: ClassVar[bool] = True

    def check(self, weighing: Weighing, who: str) -> None:
        """Raise CrispError for a router that the rule cannot follow."""

    @abstractmethod
    def use(self, log_shares: Floats, chosen: Flags, ranked: Ids, resident: Floats) -> Flags:
        """Return the experts that each token uses: [rows, experts].

        log_shares [rows, experts], see `Weighing.log_shares`; chosen [rows, experts]: by the
        router, ranked [rows, k]: the same by falling weight, -1 = absent; resident [experts]: the
        share of each expert that is on the device, between 0 and 1.
        """


@dataclass(frozen=True)
class CachePrior(RoutingRule):
    """Of all but the first expert, those of largest log share + strength x resident share.

    After Skliar et al., Mixture of cache-conditional experts for efficient mobile device inference
    (arXiv 2412.00099): a prior for what is cached, kept from touching the top experts and the
    weights. Theirs is added to the scores, times the mean range that scores have had so far, and
    an expert is cached or not; here it is a number of nats, and counts by the share of the expert
    that is resident: of its contribution where the profile says so, else of its blocks.
    """

    profiled: ClassVar[bool] = True
    strength: Fraction = Fraction(1, 2)

    def __post_init__(self) -> None:
        if self.strength < 0:
            raise CrispError(f"routing cache-prior: strength {float(self.strength):g} is negative")

    def check(self, weighing: Weighing, who: str) -> None:
        """Raise CrispError for a router that chooses by a bias, or within groups, too."""
        if not weighing.by_score:
            raise CrispError(
                f"{who}: this model does not choose the experts of largest score, so there is "
                "nothing to add to; substitute or skip-missing was expected"
            )

    def use(self, log_shares: Floats, chosen: Flags, ranked: Ids, resident: Floats) -> Flags:
        """Choose as many as the router did; among equals its own, then the lowest id."""
        value = log_shares + float(self.strength) * resident
        np.put_along_axis(value, ranked[:, :1].astype(np.int64), np.inf, 1)
        order = np.lexsort((~chosen, -value), axis=-1)  # [rows, experts]
        among = np.arange(value.shape[1]) < chosen.sum(axis=1, keepdims=True)
        used = np.zeros_like(chosen)
        np.put_along_axis(used, order, among, 1)
        return used


@dataclass(frozen=True)
class Substitute(RoutingRule):
    """Put the best resident expert in the place of one of which nothing is resident.

    If its share is at least ``ratio`` times that of the missing one. After Wang et al., BuddyMoE
    (arXiv 2511.10054), which finds buddies by how often experts are chosen together, and decides by
    several measures whether a token may take one. Here the token's own scores say both.
    """

    ratio: Fraction

    def __post_init__(self) -> None:
        if not 0 <= self.ratio <= 1:
            raise CrispError(
                f"routing substitute: ratio {float(self.ratio):g} is not between 0 and 1"
            )

    def use(self, log_shares: Floats, chosen: Flags, ranked: Ids, resident: Floats) -> Flags:
        """Replace missing experts by falling weight; nobody stands in for two."""
        shares = np.exp(log_shares - log_shares.max(axis=1, keepdims=True))
        used, rows = chosen.copy(), np.arange(len(chosen))
        for missing in ranked[:, 1:].T.astype(np.int64):
            free = ~used & (resident > 0)
            best = np.where(free, shares, -1.0).argmax(axis=1)
            takes = (missing >= 0) & (resident[missing] == 0) & free[rows, best]
            takes &= shares[rows, best] >= float(self.ratio) * shares[rows, missing]
            used[rows[takes], missing[takes]] = False
            used[rows[takes], best[takes]] = True
        return used


@dataclass(frozen=True)
class SkipMissing(RoutingRule):
    """Do without experts of which nothing is resident, but for the ``keep`` of most weight.

    The weights of the others are what the model would give them without the skipped ones. What
    systems do that drop an expert on a miss, among the baselines of BuddyMoE (arXiv 2511.10054).
    """

    keep: Fraction = Fraction(1)

    def __post_init__(self) -> None:
        if self.keep < 1 or self.keep.denominator != 1:
            raise CrispError(
                f"routing skip-missing: keep {decimal(self.keep)}: expected a whole number from 1"
            )

    def use(self, log_shares: Floats, chosen: Flags, ranked: Ids, resident: Floats) -> Flags:
        """Keep what is resident, and the first ones."""
        used = chosen & (resident > 0)
        first = ranked[:, : int(self.keep)].astype(np.int64)
        np.put_along_axis(used, np.maximum(first, 0), True, 1)
        return used & chosen


ROUTINGS: dict[str, type[Routing]] = {
    "router": Routing,
    "cache-prior": CachePrior,
    "substitute": Substitute,
    "skip-missing": SkipMissing,
}


def routing_name(rule: Routing) -> str:
    """Return what a rule is called, without its parameters."""
    return next(name for name, kind in ROUTINGS.items() if kind is type(rule))


class BoundRouting:
    """A rule bound to a model, whose routers' ways are known."""

    def __init__(
        self,
        rule: RoutingRule,
        spec: ModelSpec,
        profile: Profile,
        weighings: Mapping[int, Weighing],
    ) -> None:
        """weighings: by layer. Raises CrispError for a router that the rule cannot follow."""
        self._rule, self._weighings = rule, weighings
        for weighing in weighings.values():
            rule.check(weighing, f"routing {routing_name(rule)}")
        self._upto = _shares_upto(spec, profile) if rule.profiled else _even(spec)

    def choose(
        self, layer: int, scores: Halves, experts: Ids, weights: Halves, resident: Sequence[int]
    ) -> tuple[Ids, Halves]:
        """Return what each token uses, by falling weight, and its weights: [rows, k] each.

        scores [rows, experts]; experts, weights [rows, k]: what the router chose, by falling
        weight, -1 = absent; resident [experts]: blocks of each on the device. Rows whose choice is
        kept come back as they are.
        """
        weighing = self._weighings[layer]
        share = self._upto[layer][np.arange(scores.shape[1]), np.asarray(resident)]  # [experts]
        log_shares = weighing.log_shares(scores)
        chosen = np.zeros((len(experts), scores.shape[1] + 1), np.bool_)  # the last: absent ones
        np.put_along_axis(chosen, experts.astype(np.int64), True, 1)
        chosen = chosen[:, :-1]
        used = self._rule.use(log_shares, chosen, experts, share)
        changed = (used != chosen).any(axis=1)
        if not changed.any():
            return experts, weights
        rows = np.flatnonzero(changed)
        logs = np.where(used[rows], log_shares[rows], -np.inf)
        order = np.argsort(-logs, axis=1, kind="stable")[:, : experts.shape[1]]
        present = np.take_along_axis(used[rows], order, 1)
        now = np.where(present, order, -1).astype(np.int16)
        shares = np.exp(log_shares[rows] - log_shares[rows].max(axis=1, keepdims=True))
        experts, weights, before = experts.copy(), weights.copy(), weights[rows]
        experts[rows] = now
        weights[rows] = weighing.weights(shares, chosen[rows], now, before)
        return experts, weights


def _even(spec: ModelSpec) -> Floats:
    """Return the share of an expert in its first blocks: [layers, experts, blocks + 1]."""
    upto = np.arange(spec.n_blocks + 1) / spec.n_blocks
    return np.broadcast_to(upto, (spec.n_layers, spec.n_experts, spec.n_blocks + 1))


def _shares_upto(spec: ModelSpec, profile: Profile) -> Floats:
    """Return the same by contribution, where the profile has any."""
    even = _even(spec)
    if profile.contributions is None:
        return even
    sizes = spread_blocks(profile.contributions.astype(np.float64), spec.n_blocks)
    upto = np.zeros(even.shape)
    np.cumsum(sizes, axis=2, out=upto[:, :, 1:])
    whole = upto[:, :, -1:]
    return np.where(whole > 0, upto / np.where(whole > 0, whole, 1), even)
