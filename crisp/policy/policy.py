"""Policy: widths, order, cache and prefetcher in one frozen object, and those with a name."""

from __future__ import annotations

from collections.abc import Collection
from dataclasses import dataclass

from crisp.errors import CrispError, nearest
from crisp.policy.cache import CACHES, SCOPES, UNITS, Cache
from crisp.policy.order import RULES, Drawn, Order
from crisp.policy.prefetch import PREFETCHERS, Prefetch
from crisp.policy.spelling import build, show
from crisp.policy.widths.base import WidthPolicy
from crisp.policy.widths.names import WIDTHS


@dataclass(frozen=True)
class Policy:
    """Everything that is decided while a model runs, in one object for whatever runs it."""

    name: str
    width: WidthPolicy
    order: Order
    cache: Cache
    prefetch: Prefetch

    def __post_init__(self) -> None:
        if self.order.sequential and self.prefetch.name != "none":
            raise CrispError(
                f"policy {self.name}: order sequential lets nothing overlap, so prefetch must be "
                f"none, found {self.prefetch.name}"
            )
        if self.cache.rule.oracle and self.prefetch.name != "none":
            raise CrispError(
                f"policy {self.name}: cache {self.cache.name} bounds what is loaded on demand, so "
                f"prefetch must be none, found {self.prefetch.name}"
            )

    @property
    def profiled(self) -> bool:
        """Whether anything is decided from a profile."""
        return self.width.profiled or self.cache.profiled or self.prefetch.name == "frequent"

    @property
    def oracle(self) -> str:
        """The part that knows what is yet to come, in words; empty if there is none."""
        if self.cache.rule.oracle:
            return f"cache {self.cache.name}"
        return "prefetch perfect" if self.prefetch.name == "perfect" else ""

    @property
    def width_name(self) -> str:
        """What the width policy is called, without its parameters."""
        return next(name for name, kind in WIDTHS.items() if kind is type(self.width))

    def to_dict(self) -> dict[str, str | int]:
        """The policy with every parameter, as it is printed into a run."""
        order, cache = (
            f"random({part.seed})" if part.name == "random" else part.name
            for part in (self.order, self.cache)
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
        }


@dataclass(frozen=True)
class Parts:
    """The pieces of a named policy as they are spelled."""

    width: str
    order: str
    cache: str
    prefetch: str = "none"
    unit: str = "expert"


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
    "worth": Parts("contribution-resident(.75)", "widest", "lru", unit="block"),
}


def named(
    name: str,
    *,
    width: str | None = None,
    order: str | None = None,
    cache: str | None = None,
    scope: str = "layer",
    unit: str | None = None,
    prefetch: str | None = None,
    has_guess: bool = True,
    seed: int = 0,
) -> Policy:
    """The policy called ``name`` with any of its parts replaced.

    has_guess: whether the trace recorded the look-ahead guess; without it ``mo`` prefetches the
    previous token's experts, and an explicit ``guess`` is refused. seed: of whatever is
    called ``random``.
    """
    if name not in NAMED:
        raise nearest(name, NAMED, "policy")
    parts = NAMED[name]
    width = parts.width if width is None else width
    order = parts.order if order is None else order
    cache = parts.cache if cache is None else cache
    unit = parts.unit if unit is None else unit
    for value, known, what in (
        (scope, SCOPES, "scope"),
        (unit, UNITS, "unit"),
        ("none" if prefetch is None else prefetch, PREFETCHERS, "prefetch"),
    ):
        if value not in known:
            raise nearest(value, known, what)
    if prefetch == "guess" and not has_guess:
        raise CrispError("prefetch guess: the trace has no guess tensor; use previous or none")
    if prefetch is None:
        prefetch = parts.prefetch if has_guess or parts.prefetch != "guess" else "previous"
    width_policy: WidthPolicy = build(width, WIDTHS, "width")
    return Policy(
        name,
        width_policy,
        read_order(order, seed),
        read_cache(cache, scope, unit, seed),
        Prefetch(prefetch),
    )


def read_order(text: str, seed: int) -> Order:
    """An order by its spelling; ``random`` and ``random(7)`` take a seed, the others nothing."""
    return Order(*_drawn(text, RULES, "order", seed))


def read_cache(text: str, scope: str, unit: str, seed: int) -> Cache:
    """A cache by its spelling, in the same way."""
    name, seed = _drawn(text, CACHES, "cache", seed)
    return Cache(name, scope, unit, seed)


def _drawn(text: str, known: Collection[str], what: str, seed: int) -> tuple[str, int]:
    text = text.strip()
    if text.startswith("random"):
        drawn = build(text, {"random": Drawn}, what)
        return "random", seed if drawn.seed is None else int(drawn.seed)
    if text not in known:
        raise nearest(text, known, what)
    return text, 0
