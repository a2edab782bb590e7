"""Policy: every part of it in one frozen object, and those with a name."""

from __future__ import annotations

import warnings
from collections.abc import Mapping
from dataclasses import dataclass, field

from crisp.errors import CrispError, FormerNameWarning, unknown_name, wrong_type
from crisp.extensions import describe_origins, find_name
from crisp.policy.cache import CACHES, SCOPES, UNITS, Cache, CacheRule
from crisp.policy.magnitude import MAGNITUDES, PREDICTED
from crisp.policy.order import ORDERS, Drawn, Order, OrderRule
from crisp.policy.prefetch import FUTURE, PROFILE, ROUTER, Prefetch
from crisp.policy.rescaling import MEASURED, RESCALES
from crisp.policy.routing.rules import ROUTINGS, Routing, routing_name
from crisp.policy.spelling import build, show
from crisp.policy.widths.base import WidthPolicy
from crisp.policy.widths.names import WIDTHS


@dataclass(frozen=True)
class Policy:
    """All decisions of a run, in one frozen object."""

    name: str
    width: WidthPolicy
    order: Order
    cache: Cache
    prefetch: Prefetch
    rescale: str = "none"  # measured: see `crisp.policy.rescaling`
    routing: Routing = field(default_factory=Routing)  # see `crisp.policy.routing.rules`
    magnitude: str = "none"  # predicted: see `crisp.policy.magnitude`

    def __post_init__(self) -> None:
        if self.order.sequential and self.prefetch.active:
            raise CrispError(
                f"policy {self.name}: order sequential lets nothing overlap, so prefetch must be "
                f"none, found {self.prefetch.name}"
            )
        if self.predicts and self.routing.active:
            raise CrispError(
                f"policy {self.name}: routing {self.routing_name} uses other experts than those "
                "whose magnitudes are predicted; --magnitude none was expected"
            )
        if self.cache.rule.oracle and self.prefetch.active:
            raise CrispError(
                f"policy {self.name}: cache {self.cache.name} bounds what is loaded on demand, so "
                f"prefetch must be none, found {self.prefetch.name}"
            )

    @property
    def profiled(self) -> bool:
        """Whether anything is decided from a profile."""
        return (
            self.width.profiled
            or self.cache.profiled
            or self.prefetch.source == PROFILE
            or self.prefetch.rule.salient
            or self.rescales
            or self.routing.profiled
        )

    @property
    def rescales(self) -> bool:
        """Whether experts' outputs are multiplied by a factor of their width."""
        return self.rescale == MEASURED

    @property
    def weighs(self) -> bool:
        """Whether what is kept, or prefetched, goes by the router's weights."""
        return self.cache.rule.retains or self.prefetch.rule.salient

    @property
    def predicts(self) -> bool:
        """Whether widths ask for the magnitudes of experts' outputs."""
        return self.magnitude == PREDICTED

    @property
    def oracle(self) -> str:
        """The part that knows what is yet to come, in words; empty if there is none."""
        if self.cache.rule.oracle:
            return f"cache {self.cache.name}"
        return f"prefetch {self.prefetch.name}" if self.prefetch.source == FUTURE else ""

    @property
    def width_name(self) -> str:
        """What the width policy is called, without its parameters."""
        return next(name for name, kind in WIDTHS.items() if kind is type(self.width))

    @property
    def routing_name(self) -> str:
        """What the routing rule is called, with its parameters."""
        return show(routing_name(self.routing), self.routing)

    def to_dict(self) -> dict[str, str | int]:
        """Return the policy with every parameter, as it is printed into a run.

        ``plugins`` says where its parts come from that are not crisp's own, if there are any.
        """
        order, cache = (
            f"{part.name}({part.seed})" if part.rule.drawn else part.name
            for part in (self.order, self.cache)
        )
        plugins = describe_origins(
            [
                ("width", self.width_name),
                ("order", self.order.name),
                ("cache", self.cache.name),
                ("prefetch", self.prefetch.name),
            ]
        )
        shown: dict[str, str | int] = {"oracle": self.oracle} if self.oracle else {}
        return shown | {
            "name": self.name,
            "width": show(self.width_name, self.width),
            "order": order,
            "cache": cache,
            "scope": self.cache.scope,
            "unit": self.cache.unit,
            "prefetch": self.prefetch.name,
            **({"rescale": self.rescale} if self.rescales else {}),
            **({"routing": self.routing_name} if self.routing.active else {}),
            **({"magnitude": self.magnitude} if self.predicts else {}),
            **({"plugins": plugins} if plugins else {}),
        }


@dataclass(frozen=True)
class Parts:
    """The pieces of a named policy as they are spelled."""

    width: str
    order: str
    cache: str
    prefetch: str = "none"
    unit: str = "expert"
    rescale: str = "none"
    routing: str = "router"


# `mo` stands for MoE-Offload (speculative loading over an LRU cache); the trace decides whether it
# can follow the router's guess or has to repeat the previous token's experts.
NAMED = {
    "fo": Parts("full", "sequential", "none"),
    "lru": Parts("full", "fifo", "lru"),
    "mo": Parts("full", "fifo", "lru", "guess"),
    "up": Parts("uniform(.5)", "fifo", "lru"),
    "crisp": Parts("tiered", "widest", "lru"),
    # After EdgeMoE (arXiv 2308.14352): experts used less go first, and a profile says which follow
    # which. Theirs asks the two layers before, ours the combination of one; its eviction also
    # weighs how far a layer is. Its bits by expert are not modelled: --bits gives their mean.
    "em": Parts("full", "fifo", "lfu", "frequent"),
    # Expert dropping, as the paper compares with (Figure 9).
    "drop": Parts("drop(.25)", "fifo", "lru"),
    # Ours: a block is executed, or loaded, where it is worth it.
    "contribution": Parts("contribution(.75)", "widest", "lru", unit="block"),
    "contribution-resident": Parts("contribution-resident(.75)", "widest", "lru", unit="block"),
    # Ours too: a block is loaded, and stays, by what the loss would grow by without it.
    "saliency": Parts("saliency", "widest", "saliency", unit="block", rescale=MEASURED),
}
ALIASES = {"worth": "contribution-resident"}
"""Former names of policies, which are still understood."""


def policy_name(text: str) -> str:
    """Return the name of a policy that may be called by a former one, with a FormerNameWarning.

    Raises CrispError if it is unknown.
    """
    if not isinstance(text, str):
        raise wrong_type(text, "policy", "the name of a policy")
    name = ALIASES.get(text, text)
    if name not in NAMED:
        raise unknown_name(text, NAMED, "policy")
    if name != text:
        warnings.warn(f"policy {text} is called {name} now", FormerNameWarning, stacklevel=2)
    return name


def named(
    name: str,
    *,
    width: str | None = None,
    order: str | None = None,
    cache: str | None = None,
    scope: str = "layer",
    unit: str | None = None,
    prefetch: str | None = None,
    rescale: str | None = None,
    routing: str | None = None,
    magnitude: str = "none",
    has_guess: bool = True,
    seed: int = 0,
) -> Policy:
    """Return the policy called ``name`` with any of its parts replaced.

    has_guess: whether the trace recorded the look-ahead guess; without it ``mo`` prefetches the
    previous token's experts, and an explicit ``guess`` is refused. seed: of whatever is
    called ``random``.
    """
    name = policy_name(name)
    parts = NAMED[name]
    spelled = {
        "width": width, "order": order, "cache": cache, "prefetch": prefetch, "rescale": rescale,
        "routing": routing, "magnitude": magnitude,
    }  # fmt: skip
    for what, value in spelled.items():
        if not isinstance(value, str | None):
            raise wrong_type(value, what, f"a name, as --{what} takes it")
    width = parts.width if width is None else width
    order = parts.order if order is None else order
    cache = parts.cache if cache is None else cache
    unit = parts.unit if unit is None else unit
    rescale = parts.rescale if rescale is None else rescale
    for value, names, what in (
        (scope, SCOPES, "scope"),
        (unit, UNITS, "unit"),
        (rescale, RESCALES, "rescale"),
        (magnitude, MAGNITUDES, "magnitude"),
    ):
        if value not in names:
            raise unknown_name(value, names, what)
    if prefetch is None:
        prefetch = parts.prefetch
        if not has_guess and Prefetch(prefetch).source == ROUTER:
            prefetch = "previous"
    elif Prefetch(prefetch).source == ROUTER and not has_guess:
        raise CrispError(
            f"prefetch {prefetch}: the trace has no guess tensor; use previous or none"
        )
    width_policy: WidthPolicy = build(width, WIDTHS, "width")
    return Policy(
        name,
        width_policy,
        read_order(order, seed),
        read_cache(cache, scope, unit, seed),
        Prefetch(prefetch),
        rescale,
        build(parts.routing if routing is None else routing, ROUTINGS, "routing"),
        magnitude,
    )


def read_order(text: str, seed: int) -> Order:
    """Return an order by its spelling; one that draws takes a seed, as in ``random(7)``."""
    return Order(*_read_seed(text, ORDERS, "order", seed))


def read_cache(text: str, scope: str, unit: str, seed: int) -> Cache:
    """Return a cache by its spelling, in the same way."""
    name, seed = _read_seed(text, CACHES, "cache", seed)
    return Cache(name, scope, unit, seed)


def _read_seed(
    text: str, rules: Mapping[str, OrderRule | CacheRule], kind: str, seed: int
) -> tuple[str, int]:
    """Return (name, seed): the one that is written, else ``seed``; 0 of a rule that never draws."""
    text = text.strip()
    name = text.partition("(")[0].rstrip()
    if find_name(rules, name, kind).drawn:
        drawn = build(text, {name: Drawn}, kind)
        return name, seed if drawn.seed is None else int(drawn.seed)
    if text != name:
        raise unknown_name(text, rules, kind)
    return name, 0
