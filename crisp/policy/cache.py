"""Cache policies: what is admitted to the budget and what is evicted for it.

The rules that decide are plain functions over arrays (`crisp.policy.eviction`); here they get their
names.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from fractions import Fraction

import numpy as np

from crisp.errors import CrispError
from crisp.extensions import find_name
from crisp.model.spec import ModelSpec
from crisp.policy.eviction import (
    AdmittedRule,
    Array,
    UsedRule,
    VictimRule,
    count_from_here,
    count_use,
    lfru_victim,
    lfu_victim,
    lru_victim,
    on_probation,
    promote,
    stamp_entry,
    suffix_lfu_victim,
    suffix_lru_victim,
    use_current,
)
from crisp.profile import Profile
from crisp.profile.tiers import sorted_tiers
from crisp.units import format_bytes, parse_bytes, parse_fraction


def kept_blocks(missing: int, free: int, evictable: int, whole: bool) -> int:
    """Return how many of a load's missing blocks enter the budget; the rest is transient.

    ``whole`` (unit expert): all or none. Otherwise (unit block) the prefix that fits.
    """
    if missing <= free + evictable:
        return missing
    return 0 if whole else free + evictable


@dataclass(frozen=True)
class CacheRule:
    """A cache policy: a victim rule, which arrays of `Residency` it looks at, what fills them.

    ``last`` and ``count`` name the two arrays that the victim rule sees: ``last`` (event of the
    last use), ``count`` (events taken part in), or ``mark`` and ``stamp``, which the rule's own
    functions fill.
    """

    victim: VictimRule | None  # None: nothing is evicted for what is loaded
    last: str = "last"  # the array in the place of last uses
    count: str = "count"  # the one in the place of counts
    used: UsedRule | None = None  # notes that an event uses an entry
    admitted: AdmittedRule | None = None  # notes that an entry comes that had no block
    drawn: bool = False  # stamps are random keys, drawn anew in every event
    by_pass: bool = False  # marks start from the layer's number in every forward pass
    suffixes: bool = False  # one block is taken at a time, from any entry
    preloaded: bool = False  # holds the profile's most frequent experts from the start
    tiered: bool = False  # marks are the experts' tiers, from the profile
    retains: bool = False  # an event's start decides what stays, see `crisp.policy.retention`
    oracle: bool = False  # knows the future: see `crisp.scheduler.oracle`
    by_block: bool = False  # an oracle that keeps single blocks whatever the cache's unit
    keeps_used: bool = False  # an oracle that keeps what was just used before all else

    @property
    def needs_blocks(self) -> bool:
        """Whether it only goes with unit block."""
        return self.suffixes or self.retains


CACHES: dict[str, CacheRule] = {
    "none": CacheRule(None),
    "static": CacheRule(None, preloaded=True),
    "lru": CacheRule(lru_victim),
    # Counts since the start: an expert that comes back is as frequent as it was.
    "lfu": CacheRule(lfu_victim),
    # Counts begin anew with every stay, as in libCacheSim's LFU.
    "lfu-in-cache": CacheRule(lfu_victim, count="mark", used=count_use, admitted=count_from_here),
    "fifo": CacheRule(lru_victim, last="stamp", admitted=stamp_entry),
    # Karedla, Love and Wherry, Caching strategies to improve disk system performance, 1994; that
    # half of the room is protected is our choice.
    "slru": CacheRule(lfu_victim, "stamp", "mark", used=promote, admitted=on_probation),
    # After the expert cache of vLLM's pull request 37190: the lowest frequency over age, which is
    # counted in single accesses there and in events here.
    "lfru": CacheRule(lfru_victim, count="mark", used=count_use, admitted=count_from_here),
    # After Hoang et al., SpecMD (arXiv 2602.03921), 2026: what this forward pass has not used goes
    # first, then the layer decides. The lowest first, and last use within a layer, is how we do it.
    "least-stale": CacheRule(lfu_victim, count="mark", used=use_current, by_pass=True),
    "random": CacheRule(lru_victim, last="stamp", drawn=True),
    # The paper's cuts (3.3.1), drawn between single experts: COLD ones go before WARM and HOT ones.
    "tier-aware": CacheRule(lfu_victim, count="mark", tiered=True),
    # A prefix is worth more than a suffix (paper, 3.3.4): the deepest block goes, whosever it is.
    "suffix-lru": CacheRule(suffix_lru_victim, suffixes=True),
    "suffix-lfu": CacheRule(suffix_lfu_victim, suffixes=True),
    # Ours: what is worth most stays, whether it came now or long ago.
    "saliency": CacheRule(None, retains=True),
    # Belady, A study of replacement algorithms for a virtual-storage computer, 1966: see
    # `crisp.scheduler.oracle`.
    "belady": CacheRule(None, oracle=True),
    "belady-blocks": CacheRule(None, oracle=True, by_block=True),
    "belady-forced": CacheRule(None, oracle=True, keeps_used=True),
}
SCOPES = ("layer", "global")
UNITS = ("expert", "block")


@dataclass(frozen=True)
class Cache:
    """A cache policy by name, with the scope it chooses within and the unit it moves."""

    name: str
    scope: str = "layer"
    unit: str = "expert"
    seed: int = 0  # of a rule that draws

    def __post_init__(self) -> None:
        if self.rule.needs_blocks and self.unit != "block":
            raise CrispError(f"cache {self.name}: needs unit block, found {self.unit}")

    @property
    def rule(self) -> CacheRule:
        """How it chooses."""
        return find_name(CACHES, self.name, "cache")

    @property
    def victim(self) -> VictimRule | None:
        """Whom to evict; None where nothing is ever admitted, or an oracle decides."""
        return self.rule.victim

    @property
    def in_step(self) -> bool:
        """Whether decisions depend on the order of events of different layers."""
        return self.scope == "global" or self.rule.drawn

    @property
    def profiled(self) -> bool:
        """Whether anything is decided from a profile."""
        return self.rule.preloaded or self.rule.tiered or self.rule.retains


AUTO = "auto"  # a budget that this machine's memory decides


@dataclass(frozen=True)
class Budget:
    """Device memory for routed experts: an exact share of them, or bytes."""

    text: str
    share: Fraction | None
    n_bytes: int | None

    @classmethod
    def parse(cls, text: str) -> Budget:
        """Read ``10%``, ``.1``, ``4GB`` or ``512MiB``; CrispError if it is none of these or 0."""
        text = text.strip()
        what = f"budget '{text}'"
        if text == AUTO:
            raise CrispError(
                f"{what}: is for crisp generate and crisp replay, which know how much memory there "
                "is; crisp plan says what it would be"
            )
        if text[-1:].isalpha():
            budget = cls(text, None, parse_bytes(text, what))
        else:
            budget = cls(text, parse_fraction(text, what), None)
            if budget.share is not None and budget.share > 1:
                raise CrispError(f"{what}: above 100 %; write 10%, 0.1 or a size such as 4GB")
        if not (budget.share or budget.n_bytes or 0) > 0:
            raise CrispError(f"{what}: must be above 0")
        return budget

    def capacity(self, spec: ModelSpec, cache: Cache) -> list[int]:
        """Return the blocks that each part may hold: one number a MoE layer, or one for all.

        Floored to whole units; scope ``layer`` gives the remainder to the first layers. Where the
        layers' blocks differ in size, scope ``layer`` counts each layer's own, and bytes buy the
        most units whose split costs no more; scope ``global`` counts every block as the largest,
        for any may come to stand in its place.
        """
        layers, n, blocks = len(spec.moe_layers), spec.n_experts, spec.n_blocks
        per_unit = blocks if cache.unit == "expert" else 1
        units = layers * n * blocks // per_unit
        if self.share is not None:
            units = int(self.share * units)
        else:
            held = self._units_of_bytes(spec, cache, per_unit)
            if held > units:
                raise CrispError(
                    f"budget '{self.text}': more than all routed experts "
                    f"({format_bytes(spec.routed_bytes)}); write 100%"
                )
            units = held
        if cache.scope == "global":
            return [units * per_unit]
        each, more = divmod(units, layers)
        return [(each + (layer < more)) * per_unit for layer in range(layers)]

    def _units_of_bytes(self, spec: ModelSpec, cache: Cache, per_unit: int) -> int:
        """Return how many units of so many blocks the bytes buy."""
        n_bytes = self.n_bytes or 0
        if spec.layer_bits is None or cache.scope == "global":
            return n_bytes // (per_unit * spec.block_bytes)
        sizes = [per_unit * size for size in spec.row_block_bytes]
        each, left = divmod(n_bytes, sum(sizes))
        more = 0
        while more < len(sizes) and sum(sizes[: more + 1]) <= left:
            more += 1
        return each * len(sizes) + more


def capacity_bytes(spec: ModelSpec, capacity: Sequence[int]) -> int:
    """Return the bytes that parts of so many blocks take, as `Budget.capacity` counts them."""
    if len(capacity) == len(spec.moe_layers) > 1:
        return sum(n * size for n, size in zip(capacity, spec.row_block_bytes, strict=True))
    return min(sum(capacity) * spec.block_bytes, spec.routed_bytes)


def static_residents(spec: ModelSpec, profile: Profile, cache: Cache, room: Array) -> list[int]:
    """Return the blocks of each entry in a static cache of the profile's most frequent experts.

    room: blocks per part, as `Budget.capacity` gives them. Full width, in falling order of count
    (ties: lowest layer, then id); at unit block the last one holds the prefix that still fits.
    """
    counts = profile.expert_counts[list(spec.moe_layers)]
    parts = counts if cache.scope == "layer" else counts.reshape(1, -1)
    residents: list[int] = []
    for part, free in zip(parts, room, strict=True):
        by_count = np.argsort(-part, kind="stable")
        resident = np.zeros(len(part), np.int64)  # [entries of the part]
        resident[by_count] = np.clip(free - np.arange(len(part)) * spec.n_blocks, 0, spec.n_blocks)
        residents += resident.tolist()
    return residents


def expert_tiers(spec: ModelSpec, profile: Profile) -> list[int]:
    """Return each entry's tier by its frequency in its layer: 2 HOT, 1 WARM, 0 COLD.

    The paper's rule for combinations (3.3.1) with its cuts: HOT while the share of activations of
    the more frequent experts (ties: lowest id) is below .6, WARM while below .9.
    """
    warm: list[int] = []
    for counts in profile.expert_counts[list(spec.moe_layers)]:
        by_count = np.argsort(-counts, kind="stable")
        tier = np.empty(len(counts), np.int64)
        tier[by_count] = sorted_tiers(counts[by_count], 6, 10, 9, 10)
        warm += (2 - tier).tolist()
    return warm
