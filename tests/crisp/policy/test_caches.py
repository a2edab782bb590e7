"""Caches: small facts, libCacheSim's counts, and what no cache can beat."""

from __future__ import annotations

from fractions import Fraction
from pathlib import Path
from typing import Any

import numba
import numpy as np
import pandas as pd
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from crisp.errors import CrispError
from crisp.model.spec import ModelSpec
from crisp.policy import eviction as rules
from crisp.policy import expert_tiers, named
from crisp.policy.cache import CACHES
from crisp.policy.retention import routed_weights
from crisp.profile import Profile
from crisp.scheduler.oracle import NEVER, soonest
from crisp.scheduler.residency import StartingState
from crisp.scheduler.scheduler import EventScheduler
from crisp.scheduler.tasks import Task
from tests.oracles.caches import fewest_loads, forced_belady
from tests.sim.toys import Toy

ONLINE = [name for name, rule in CACHES.items() if not rule.oracle and name != "static"]


def replay(toy: Toy, rows: int | None = None) -> EventScheduler:
    """Event after event, without a clock; rows: only the first of what the toy says will come."""
    scheduler, trace = toy.scheduler(), toy.trace()
    assert trace.weights is not None
    for experts, widths in zip(trace.experts[:rows], trace.weights[:rows], strict=True):
        for layer in trace.moe_layers:
            asked = zip(experts[layer].tolist(), widths[layer].tolist(), strict=True)
            tasks = [Task(e, (int(w),)) for e, w in asked if e >= 0 and w > 0]
            routed = routed_weights(experts[layer][None].tolist(), widths[layer][None])
            scheduler.start(layer, tasks, (), routed)
            while not scheduler.done:
                load = scheduler.next_load()
                if load is not None:
                    scheduler.loaded(load)
                while (task := scheduler.next_compute()) is not None:
                    scheduler.computed(task)
            store = scheduler.residency
            assert store.landed == sum(store.resident) == sum(store.used)
    return scheduler


def one_by_one(accesses: list[int], cache: str, room: int, n: int) -> Toy:
    """One layer, one expert an event, of one block."""
    experts = np.array(accesses).reshape(-1, 1, 1)
    return Toy(experts, np.ones_like(experts), n, 1, cache=cache, share=Fraction(room, n))


def held(scheduler: EventScheduler) -> list[int]:
    """The entries that have blocks."""
    return [entry for entry, blocks in enumerate(scheduler.residency.resident) if blocks]


@pytest.mark.parametrize(
    ("cache", "left"),
    [
        ("lru", [0, 1, 3]),  # 2 was used longest ago
        ("fifo", [1, 2, 3]),  # 0 came first
        ("lfu-in-cache", [0, 1, 3]),  # 2 was used once
        ("slru", [0, 1, 3]),  # 1 is protected; 0 was, until 1 took its place
        ("tier-aware", [1, 2, 3]),  # warmth 0, 1, 2, 0
        ("belady", [0, 1, 2]),  # 3 comes last and is not kept
        ("belady-blocks", [0, 1, 2]),
        ("belady-forced", [0, 1, 3]),  # of the others 2 comes last
    ],
)
def test_who_is_left(cache: str, left: list[int]) -> None:
    toy = one_by_one([0, 1, 2, 0, 1, 3, 0, 1, 2, 3], cache, 3, 4)
    assert held(replay(toy, rows=6)) == left


def test_slru_protects_half_of_the_room() -> None:
    # 0 and 1 are used again, but one of them may be protected: 0, not any more, goes before 3
    assert held(replay(one_by_one([0, 1, 2, 0, 1, 3, 2], "slru", 3, 4))) == [1, 2, 3]


def test_counts_since_the_start_or_of_this_stay() -> None:
    # 0 twice; 1 and 2 push each other out, and each is used twice in all
    accesses = [0, 0, 1, 2, 1, 2]
    assert held(replay(one_by_one(accesses, "lfu", 2, 3))) == [1, 2]
    assert held(replay(one_by_one(accesses, "lfu-in-cache", 2, 3))) == [0, 2]


def test_least_stale_gives_up_the_lowest_layer_that_this_pass_has_not_used() -> None:
    # layers 0 and 1 with two experts each, room for 3: entries 0, 2 and 3; then entry 1 comes.
    # 2 was used longest ago; the older layer is that of 0
    experts = np.array([[[0], [0]], [[0], [1]], [[1], [1]]])
    toys = {
        cache: Toy(
            experts, np.ones_like(experts), 2, 1, cache=cache, share=Fraction(3, 4), scope="global"
        )
        for cache in ("lru", "least-stale")
    }
    assert held(replay(toys["lru"])) == [0, 1, 3]
    assert held(replay(toys["least-stale"])) == [1, 2, 3]


def test_suffixes_go_before_prefixes() -> None:
    # three experts of two blocks, room for four
    experts = np.array([0, 1, 2]).reshape(-1, 1, 1)
    for cache, left in {"lru": [0, 2, 2], "suffix-lru": [1, 1, 2], "suffix-lfu": [1, 1, 2]}.items():
        toy = Toy(
            experts,
            2 * np.ones_like(experts),
            3,
            2,
            cache=cache,
            share=Fraction(2, 3),
            unit="block",
        )
        assert replay(toy).residency.resident == left


def test_lfru_compares_uses_for_their_age() -> None:
    resident, held, last = [1, 1, 1], [0, 0, 1], [0, 8, 10]
    assert rules.lfru_victim(resident, held, last, [6, 1, 1], 0, 3) == 1  # 6 / 10 against 1 / 2
    assert rules.lfru_victim(resident, held, last, [5, 1, 1], 0, 3) == 0  # equal: least recent
    assert rules.lfru_victim(resident, [1, 1, 1], last, [5, 1, 1], 0, 3) == -1


def test_random_is_drawn_anew_in_every_event() -> None:
    accesses = [0, 1, 2] * 600  # room for two
    misses = replay(one_by_one(accesses, "random", 2, 3)).blocks_loaded
    # a hit is followed by a miss, a miss by a hit half of the time: two of three miss
    assert abs(misses - 1200) < 80
    assert replay(one_by_one(accesses, "lru", 2, 3)).blocks_loaded == 1800


def test_soonest_by_hand() -> None:
    here, soon = np.array([2, 1]), np.array([[3, 5], [4, NEVER]], np.int32)
    assert soonest(here, soon, 2, whole=False).tolist() == [1, 1]
    assert soonest(here, soon, 2, whole=True).tolist() == [2, 0]
    assert soonest(here, soon, 1, whole=True).tolist() == [0, 1]  # the first one does not fit


@st.composite
def small(draw: st.DrawFn) -> dict[str, Any]:
    """One layer, 2 or 3 experts of up to 3 blocks, and up to 10 events."""
    n, blocks = draw(st.integers(2, 3)), draw(st.integers(1, 3))
    rng = np.random.default_rng(draw(st.integers(0, 2**32 - 1)))
    k = draw(st.integers(1, n))
    experts = rng.random((draw(st.integers(1, 10)), 1, n)).argsort(axis=2)[:, :, :k]
    full = draw(st.booleans())
    widths = np.full(experts.shape, blocks) if full else rng.integers(0, blocks + 1, experts.shape)
    return {
        "experts": experts,
        "widths": widths,
        "n_experts": n,
        "n_blocks": blocks,
        "share": Fraction(draw(st.integers(1, 8)), 8),
        "unit": draw(st.sampled_from(["expert", "block"])),
    }


@settings(max_examples=100, deadline=None)
@given(small())
def test_belady_is_what_trying_everything_finds_and_nothing_beats_it(case: dict[str, Any]) -> None:
    events = [
        {e: w for e, w in zip(row[0], wide[0], strict=True) if w}
        for row, wide in zip(case["experts"].tolist(), case["widths"].tolist(), strict=True)
    ]
    (room,) = Toy(**case).capacity()

    def loads(cache: str) -> int:
        return replay(Toy(**case, cache=cache)).blocks_loaded

    best = fewest_loads(events, case["n_experts"], room, whole=False)
    assert loads("belady-blocks") == best
    if case["unit"] == "block":
        assert loads("belady") == best
    elif (case["widths"] == case["n_blocks"]).all():
        assert loads("belady") == fewest_loads(events, case["n_experts"], room, whole=True)
    for cache in [*ONLINE, "belady-forced"]:
        if case["unit"] == "block" or not CACHES[cache].needs_blocks:
            assert loads(cache) >= best, cache


@given(st.lists(st.integers(0, 5), min_size=1, max_size=30), st.integers(1, 6))
def test_forced_belady_equals_the_oracle(accesses: list[int], room: int) -> None:
    found = replay(one_by_one(accesses, "belady-forced", room, 6)).blocks_loaded
    assert found == forced_belady(accesses, room)


# ------------------------------------------------------------------------------ real routing

REAL = (0, 11, 23)  # layers
BUDGETS = [Fraction(share, 10) for share in range(1, 6)]


@pytest.fixture(scope="module")
def routed(shared: Path) -> np.ndarray:
    """gpt-oss-20b's experts in some layers [rows, layers, 4], of 32."""
    file = shared / "traces" / "gpt-oss-20b__mmlu-gpqa-mix.parquet"
    columns = ["sequence", "token", "layer", "e0", "e1", "e2", "e3"]
    table = pd.read_parquet(file, columns=columns, filters=[("layer", "in", REAL)])
    table = table[table["sequence"] < 5].sort_values(["sequence", "token", "layer"])
    return table[columns[3:]].to_numpy(np.int64).reshape(-1, len(REAL), 4)


@pytest.mark.parametrize("share", BUDGETS)
def test_nothing_beats_belady_on_real_routing(share: Fraction, routed: np.ndarray) -> None:
    experts = routed[:150, 1:2]

    def loads(cache: str) -> int:
        unit = "block" if CACHES[cache].needs_blocks else "expert"  # of one block: the same
        toy = Toy(experts, np.ones_like(experts), 32, 1, cache=cache, share=share, unit=unit)
        return replay(toy).blocks_loaded

    found = {cache: loads(cache) for cache in [*ONLINE, "belady-forced", "belady"]}
    assert found["belady"] == min(found.values())
    assert found["belady"] < found["lru"] < found["none"]


STRAIGHT = [cache for cache in ONLINE if cache != "none" and not CACHES[cache].needs_blocks]


@pytest.mark.parametrize("cache", STRAIGHT)
def test_events_equal_the_straight_line_on_real_routing(cache: str, routed: np.ndarray) -> None:
    """Two layers, event by event; each budget, by layer or over both."""
    experts = routed[:100, :2]
    for share, scope in zip(BUDGETS, ["layer", "global"] * 3, strict=False):
        toy = Toy(experts, np.ones_like(experts), 32, 1, cache=cache, share=share, scope=scope)
        assert replay(toy).blocks_loaded == toy.oracle()["blocks_loaded"]


@pytest.mark.parametrize("cache", ["suffix-lru", "suffix-lfu"])
def test_suffixes_equal_the_straight_line_on_real_routing(cache: str, routed: np.ndarray) -> None:
    """The heaviest expert in full, four blocks, the others at half width or not at all."""
    experts = routed[:100, 1:2]
    widths = np.broadcast_to([4, 2, 2, 0], experts.shape)
    for share in BUDGETS:
        toy = Toy(experts, widths, 32, 4, cache=cache, share=share, unit="block")
        assert replay(toy).blocks_loaded == toy.oracle()["blocks_loaded"]


# ------------------------------------------------------------------------------ libCacheSim

THEIRS = {"fifo": "FIFO", "lru": "LRU", "lfu-in-cache": "LFU", "belady-forced": "Belady"}


@pytest.mark.parametrize("cache", THEIRS)
def test_misses_equal_libcachesims(cache: str) -> None:
    rng = np.random.default_rng(1)
    for room in (1, 3, 5, 8):
        accesses = rng.choice(12, 500, p=rng.dirichlet(np.full(12, 0.5))).tolist()
        ours = replay(one_by_one(accesses, cache, room, 12)).blocks_loaded
        assert ours == their_misses(THEIRS[cache], accesses, room)


@pytest.mark.parametrize("cache", THEIRS)
def test_misses_equal_libcachesims_on_real_routing(cache: str, routed: np.ndarray) -> None:
    """gpt-oss-20b, layer by layer, one access at a time: 32 experts, 10 to 50 % of them.

    All layers and tokens are compared in docs/caches.md.
    """
    for layer in range(len(REAL)):
        accesses = routed[:150, layer].ravel().tolist()
        for share in BUDGETS:
            room = int(32 * share)
            ours = replay(one_by_one(accesses, cache, room, 32)).blocks_loaded
            assert ours == their_misses(THEIRS[cache], accesses, room)


def their_misses(name: str, accesses: list[int], room: int) -> int:
    """Misses of a cache of libCacheSim, one access at a time."""
    theirs = pytest.importorskip("libcachesim")
    never = 2**62
    soon: dict[int, int] = {}
    following = []
    for at in range(len(accesses) - 1, -1, -1):
        following.append(soon.get(accesses[at], never))
        soon[accesses[at]] = at
    cache = getattr(theirs, name)(cache_size=room)
    requests = (
        theirs.Request(obj_size=1, obj_id=expert, next_access_vtime=then)
        for expert, then in zip(accesses, reversed(following), strict=True)
    )
    return sum(not cache.get(request) for request in requests)


# ------------------------------------------------------------------------------ rules, names

entries = st.integers(1, 8).flatmap(
    lambda n: st.tuples(
        *(st.lists(st.integers(0, high), min_size=n, max_size=n) for high in (2, 1, 3, 3))
    )
)


@pytest.mark.parametrize(
    "rule", [rules.lfru_victim, rules.suffix_lru_victim, rules.suffix_lfu_victim]
)
def test_victims_compiled(rule: Any) -> None:
    compiled = numba.njit(rule)

    @given(entries)
    def same(arrays: tuple[list[int], ...]) -> None:
        assert compiled(*map(np.array, arrays), 0, len(arrays[0])) == rule(
            *arrays, 0, len(arrays[0])
        )

    same()


@pytest.mark.parametrize("rule", [rule.used for rule in CACHES.values() if rule.used is not None])
def test_notes_of_uses_compiled(rule: Any) -> None:
    compiled = numba.njit(rule)

    @given(entries, st.integers(0, 8))
    def same(arrays: tuple[list[int], ...], room: int) -> None:
        resident, mark, stamp, _ = arrays
        theirs = [np.array(mark), np.array(stamp)]
        compiled(*theirs, np.array(resident), 0, 9, 0, len(mark), room)
        rule(mark, stamp, resident, 0, 9, 0, len(mark), room)
        assert [one.tolist() for one in theirs] == [mark, stamp]

    same()


@pytest.mark.parametrize(
    "rule", [rule.admitted for rule in CACHES.values() if rule.admitted is not None]
)
def test_notes_of_arrivals_compiled(rule: Any) -> None:
    for last in (4, 5):
        mark, stamp = [7, 7], [7, 7]
        theirs = [np.array(mark), np.array(stamp)]
        numba.njit(rule)(*theirs, np.array([0, last]), 1, 5)
        rule(mark, stamp, [0, last], 1, 5)
        assert [one.tolist() for one in theirs] == [mark, stamp]


def test_warmth_follows_the_share_before() -> None:
    spec = ModelSpec.named("mixtral-8x7b").first_layers(1)
    counts = np.array([[1, 6, 0, 2, 1, 0, 0, 0]])  # shares before: 1: 0, 3: .6, 0: .8, 4: .9
    profile = Profile(counts, np.zeros((1, 8, 8), np.int64), True)
    assert expert_tiers(spec, profile) == [1, 2, 0, 1, 0, 0, 0, 0]


def test_oracles_are_labelled_and_seeds_are_shown() -> None:
    shown = named("lru", cache="belady").to_dict()
    assert (shown["cache"], shown["oracle"]) == ("belady", "cache belady")
    assert named("lru", prefetch="perfect").to_dict()["oracle"] == "prefetch perfect"
    assert "oracle" not in named("lru").to_dict()
    assert named("lru", cache="random(7)").to_dict()["cache"] == "random(7)"
    assert named("lru", cache="random", seed=3).to_dict()["cache"] == "random(3)"
    assert named("lru", cache="tier-aware").profiled


@pytest.mark.parametrize(
    ("parts", "message"),
    [
        ({"cache": "suffix-lru"}, "needs unit block, found expert"),
        ({"cache": "belady", "prefetch": "previous"}, "prefetch must be none"),
        ({"cache": "random(.5)"}, "not a whole number"),
        ({"cache": "lfu-incache"}, "did you mean 'lfu-in-cache'"),
    ],
)
def test_caches_that_are_refused(parts: dict[str, str], message: str) -> None:
    with pytest.raises(CrispError, match=message):
        named("lru", **parts)  # type: ignore[arg-type]


def test_an_oracle_needs_a_future() -> None:
    spec = ModelSpec.named("mixtral-8x7b")
    with pytest.raises(CrispError, match="cache belady is an oracle, and what comes next"):
        EventScheduler(
            spec,
            named("lru", cache="belady"),
            StartingState([8] * 32),
            granularity="expert",
            cost=None,
        )
