"""The rules by which engines cache experts, and how each counts: one contract an engine.

What is not said in an engine's sources as they were read, or is simplified here, is listed among
its assumptions.
"""

from __future__ import annotations

from dataclasses import dataclass

from crisp.diagnose.calls import LOOKUPS
from crisp.errors import unknown_name

RULES = ("lru", "lfu", "hot", "heat", "furthest")
HEAT_USES = 4  # hits from which on an entry is hot (rule `heat`)
HOT_TOKENS = 16  # decoded tokens after which counts are halved (rule `hot`)


@dataclass(frozen=True)
class EnginePolicy:
    """A cache of experts in a budget of bytes, every miss of which is admitted.

    The victim is the least by ``rule``; ties: the least recently used.
    - ``lru``: last use. ``lfu``: lookups since the start.
    - ``hot``: the same counts, halved every 16 decoded tokens.
    - ``heat``: what was hit at most 4 times in this stay goes before the rest; each by last use.
    - ``furthest``: the furthest next use; it knows the future.
    """

    rule: str
    scope: str = "global"  # or layer: the budget is divided by the layers, rounded down
    at_once: bool = False  # evicts before each miss; else after the call
    protects: bool = True  # evicts nothing that the call uses

    def __post_init__(self) -> None:
        for value, known, what in (
            (self.rule, RULES, "rule"),
            (self.scope, ("global", "layer"), "scope"),
        ):
            if value not in known:
                raise unknown_name(value, known, what)


@dataclass(frozen=True)
class Counting:
    """What an engine counts as a lookup, and what a miss reads."""

    lookups: str = "expert"  # as `Calls.from_trace` takes it
    aligned: int = 0  # bytes that a miss reads beside the expert, for each of its projections

    def __post_init__(self) -> None:
        if self.lookups not in LOOKUPS:
            raise unknown_name(self.lookups, LOOKUPS, "kind of lookup")


@dataclass(frozen=True)
class Contract:
    """How one engine caches experts, where that is from, and what was assumed."""

    name: str
    title: str
    policy: EnginePolicy
    counting: Counting
    source: str
    assumptions: tuple[str, ...] = ()


CONTRACTS = {
    contract.name: contract
    for contract in (
        Contract(
            "bigmoeonedge",
            "one LRU for all layers, in bytes; evicts after a call",
            EnginePolicy("lru"),
            Counting(aligned=4096),
            "github.com/Helldez/BigMoeOnEdge at 2d4f2b1, core/src/moe/expert_stream_source.cpp",
            ("no prefetch (its default), and the whole prompt in one forward pass",),
        ),
        Contract(
            "llama.cpp-mmap",
            "the system's page cache: LRU of expert tensors; evicts as it reads",
            EnginePolicy("lru", at_once=True, protects=False),
            Counting(lookups="tensor"),
            "llama.cpp maps the file (its default), the system decides what stays",
            (
                "pages are approximated by whole tensors of one expert, all of one size: a call "
                "reads the first projection of all its experts, then the second, and so on",
                "the kernel's two lists of pages are taken as one exact LRU; it reads no further "
                "than what is asked for",
                "the budget is what the page cache has for experts, besides all other weights",
            ),
        ),
        Contract(
            "llama.cpp-moe-cache",
            "one cache for all layers: what was hit at most 4 times goes first, then LRU",
            EnginePolicy("heat", at_once=True),
            Counting(),
            "github.com/TheTom/llama-cpp-turboquant, pull requests 284 and 300 (after leloch's "
            "branch moe-cache-v2-pr), GGML_CUDA_MOE_CACHE_HOT_USES=4",
            (
                "an expert is one entry, although the engine caches its tensors for themselves, "
                "and all sizes share one budget, although it keeps a pool for each",
                "every miss is admitted: no limit of fills a call, no second chance",
                "the threshold is its default; with 0 it is an LRU",
            ),
        ),
        Contract(
            "colibri",
            "an LRU for each layer, in slots, asked for each routed token; evicts at each miss",
            EnginePolicy("lru", scope="layer", at_once=True, protects=False),
            Counting(lookups="row"),
            "github.com/JustVugg/colibri, c/olmoe.c (expert_get)",
            ("no pinned experts and no prefetch (its defaults)",),
        ),
        Contract(
            "colibri-lfru",
            "each layer by uses, then by age: the least of uses << 8 | 255 - age goes",
            EnginePolicy("lfu", scope="layer", at_once=True, protects=False),
            Counting(lookups="row"),
            "github.com/JustVugg/colibri, c/olmoe.c (lfru_score)",
            (
                "what was last used over 255 lookups ago still goes by its last use",
                "uses are counted since the start, from no history (COLI_USAGE)",
            ),
        ),
        Contract(
            "omlx",
            "an LRU for each layer, in slots; evicts during the call",
            EnginePolicy("lru", scope="layer", at_once=True, protects=False),
            Counting(),
            "github.com/jundot/omlx, omlx/patches/expert_streaming",
            (
                "a miss takes the slot of the least recently used, even of one that the same call "
                "has used",
                "the same number of slots in every layer; a prompt is one call, although the "
                "engine cuts it up",
            ),
        ),
        Contract(
            "moe-infinity",
            "one cache for all layers: the least visited goes; evicts at each miss",
            EnginePolicy("lfu", at_once=True),
            Counting(),
            "github.com/EfficientMoE/MoE-Infinity, ExpertDispatcher::FindExpertEvict",
            (
                "visits survive eviction: nothing in the dispatcher takes them back",
                "ties go to the least recently used; the engine takes what its hash table has "
                "first",
                "no prefetch; what a prompt brings beyond the budget stays like everything else",
            ),
        ),
        Contract(
            "ds4",
            "one cache for all layers: the least hot goes, then the least recent",
            EnginePolicy("hot", at_once=True),
            Counting(),
            "github.com/antirez/ds4, ds4_metal.m (route hotness)",
            (
                "an expert gets hotter by one for each call, and all are halved every 16 decoded "
                "tokens",
                "it starts cold: no hot list is loaded before; all layers have one size class",
            ),
        ),
    )
}

# The five rules of BigMoeOnEdge's own replay of its traces (scripts/route-replay.py), and the bound
# that may let go what was just used.
CURVES = {
    "belady": EnginePolicy("furthest"),
    "lru": EnginePolicy("lru"),
    "lfu": EnginePolicy("lfu"),
    "layer": EnginePolicy("lru", scope="layer"),
    "layerlfu": EnginePolicy("lfu", scope="layer"),
}
BEST = EnginePolicy("furthest", protects=False)


def contract_of(engine: str) -> Contract:
    """Return an engine's contract; CrispError, with the nearest name, for an unknown one."""
    if engine not in CONTRACTS:
        raise unknown_name(engine, CONTRACTS, "engine")
    return CONTRACTS[engine]
