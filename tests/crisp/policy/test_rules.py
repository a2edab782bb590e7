"""The rules that decide: small facts, and the same answers when numba compiles them."""

from __future__ import annotations

from fractions import Fraction
from itertools import permutations

import numba
import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from crisp.errors import CrispError
from crisp.model.spec import ModelSpec
from crisp.policy import Budget, Cache, named, static_residents
from crisp.policy.cache import capacity_bytes, kept_blocks, lfu_victim, lru_victim
from crisp.policy.order import (
    ORDERS,
    by_random_key,
    hash_key,
    johnson,
    narrowest_first,
    resident_first,
    widest_first,
)
from crisp.policy.widths.base import Full, Single, Tiered, Uniform, table_widths
from crisp.profile import Profile, anchors
from crisp.profile.tiers import sorted_tiers
from tests.oracles import offline

MIXTRAL = ModelSpec.named("mixtral-8x7b")


def test_lru_evicts_the_least_recent_unprotected_entry() -> None:
    resident, held, last = [8, 8, 0, 8, 8], [0, 1, 0, 0, 0], [5, 1, 0, 4, 4]
    assert lru_victim(resident, held, last, [0] * 5, 0, 5) == 3  # 1 is held, 2 empty, 3 ties with 4
    assert lru_victim(resident, held, last, [0] * 5, 0, 2) == 0
    assert lru_victim(resident, held, last, [0] * 5, 1, 3) == -1


def test_lfu_breaks_ties_by_recency_then_id() -> None:
    resident, held = [8] * 4, [0] * 4
    assert lfu_victim(resident, held, [0, 9, 3, 3], [5, 2, 2, 2], 0, 4) == 2
    assert lfu_victim(resident, held, [0, 9, 3, 3], [1, 2, 2, 2], 0, 4) == 0


def test_a_load_is_kept_whole_or_as_the_prefix_that_fits() -> None:
    assert kept_blocks(8, 3, 5, True) == kept_blocks(8, 3, 5, False) == 8
    assert kept_blocks(8, 3, 4, True) == 0
    assert kept_blocks(8, 3, 4, False) == 7


entries = st.integers(1, 12).flatmap(
    lambda n: st.tuples(
        *(st.lists(st.integers(0, high), min_size=n, max_size=n) for high in (2, 1, 3, 3))
    )
)


@pytest.mark.parametrize("rule", [lru_victim, lfu_victim])
def test_victims_compiled(rule: object) -> None:
    compiled = numba.njit(rule)

    @given(entries)
    def same(arrays: tuple[list[int], ...]) -> None:
        n = len(arrays[0])
        assert compiled(*map(np.array, arrays), 0, n) == rule(*arrays, 0, n)  # type: ignore[operator]

    same()


def test_other_rules_compiled() -> None:
    for rule in ORDERS.values():
        if rule.key is None:
            continue
        for args in [(8, 5, 9, 3), (4, 9, 5, 7), (1, 5, 5, 1)]:
            assert numba.njit(rule.key)(*args) == rule.key(*args)
    assert numba.njit(hash_key)(7, 123_456, 3) == hash_key(7, 123_456, 3)
    assert numba.njit(kept_blocks)(8, 3, 4, False) == 7
    counts = np.array([50, 20, 20, 10, 0])
    assert numba.njit(sorted_tiers)(counts, 3, 5, 9, 10).tolist() == [0, 0, 1, 2, 2]
    assert sorted_tiers(counts, 3, 5, 9, 10).tolist() == [0, 0, 1, 2, 2]
    table = np.arange(9, dtype=np.int16).reshape(3, 3)
    experts, first = np.array([[0, 2], [1, -1]]), np.array([0, 1])
    assert numba.njit(table_widths)(experts, first, table).tolist() == [[0, 2], [4, 0]]
    assert table_widths(experts, first, table).tolist() == [[0, 2], [4, 0]]


def flow_shop(jobs: list[tuple[int, int]]) -> int:
    """The time of jobs (load, compute) in this order on two machines."""
    loaded = computed = 0
    for load, compute in jobs:
        loaded += load
        computed = max(computed, loaded) + compute
    return computed


@given(st.lists(st.tuples(st.integers(0, 9), st.integers(0, 9)), min_size=1, max_size=6))
def test_johnson_equals_brute_force(jobs: list[tuple[int, int]]) -> None:
    order = sorted(jobs, key=lambda job: johnson(0, *job, 0))
    assert flow_shop(order) == min(flow_shop(list(other)) for other in permutations(jobs))


def test_widest_first_can_lose_to_johnson() -> None:
    """A wide expert that is long to load and short to compute should not go first."""
    jobs = {8: (8, 2), 1: (1, 7)}  # width: (load, compute)
    widest = sorted(jobs, key=lambda width: widest_first(width, *jobs[width], 0))
    best = sorted(jobs, key=lambda width: johnson(width, *jobs[width], 0))
    assert flow_shop([jobs[w] for w in widest]) == 17
    assert flow_shop([jobs[w] for w in best]) == 11


def test_narrowest_and_resident_first() -> None:
    tasks = {"a": (4, 2), "b": (8, 0), "c": (2, 2), "d": (4, 0)}  # width, missing blocks
    for rule, expected in ((narrowest_first, "cadb"), (resident_first, "bdac")):
        assert "".join(sorted(tasks, key=lambda name: rule(*tasks[name], 0, 0))) == expected


def test_random_draws_from_seed_and_event() -> None:
    def ranking(seed: int, event: int) -> tuple[int, ...]:
        return tuple(
            sorted(range(3), key=lambda place: by_random_key(0, 0, 0, hash_key(seed, event, place)))
        )

    seen = [ranking(0, event) for event in range(600)]
    counts = {order: seen.count(order) for order in permutations(range(3))}
    # uniform over 6 permutations: 100 each, standard deviation 9.1; 4 of them
    assert all(abs(count - 100) < 37 for count in counts.values()), counts
    assert seen != [ranking(1, event) for event in range(600)]


def test_anchor_of_unordered_rows_is_the_more_frequent_expert() -> None:
    experts = np.array([[0, 1], [2, 1], [1, 0], [3, -1]])
    counts = np.array([5, 9, 9, 0])
    assert anchors(experts, counts, ordered=True).tolist() == [0, 2, 1, 3]
    assert anchors(experts, counts, ordered=False).tolist() == [1, 1, 1, 3]  # 2 ties with 1


@given(st.integers(0, 10_000), st.integers(2, 4), st.booleans())
def test_widths_equal_the_oracles(seed: int, k: int, ordered: bool) -> None:
    rng = np.random.default_rng(seed)
    experts = rng.random((30, 2, 8)).argsort(axis=2)[:, :, :k].astype(np.int16)
    experts[rng.random(30) < 0.2, 1, -1] = -1
    pairs = offline.pair_counts(experts, 8, ordered)
    counts = offline.expert_counts(experts, 8)
    profile = Profile(counts, pairs, ordered)
    spec = MIXTRAL.first_layers(2)
    of_anchor = None if ordered else counts
    tier = offline.tiers(pairs)
    expected = {
        Full(): offline.widths_full(experts, 8),
        Uniform(Fraction(3, 10)): np.where(experts >= 0, 3, 0),
        Single(): offline.widths_single(experts, 8, of_anchor),
        Tiered(): offline.widths_tiered(experts, 8, tier, 4, 0, of_anchor),
        Tiered(warm=Fraction(3, 4), cold=Fraction(1, 8)): offline.widths_tiered(
            experts, 8, tier, 6, 1, of_anchor
        ),
    }
    for policy, widths in expected.items():
        bound = policy.bind(spec, profile, ordered)
        for layer in range(2):
            found = bound.widths(layer, experts[:, layer], None, None)
            assert found.tolist() == widths[:, layer].tolist(), policy


@given(
    st.fractions(Fraction(1, 100), 1, max_denominator=100),
    st.sampled_from(["layer", "global"]),
    st.sampled_from(["expert", "block"]),
)
def test_capacity_and_static_set_equal_the_oracles(share: Fraction, scope: str, unit: str) -> None:
    spec, cache = MIXTRAL.first_layers(3), Cache("static", scope, unit)
    room = Budget("", share, None).capacity(spec, cache)
    assert room == offline.capacities(share, 3, 8, 8, scope, unit)
    counts = np.random.default_rng(0).integers(0, 5, (3, 8))
    residents = static_residents(spec, Profile(counts, np.zeros((3, 8, 8)), True), cache, room)
    expected = offline.static_set(counts, (0, 1, 2), share, 8, scope, unit)
    found = {divmod(entry, 8): blocks for entry, blocks in enumerate(residents) if blocks}
    assert found == expected


def test_capacity_by_hand() -> None:
    """10 % of 256 experts are 25: one for each of the first 25 layers."""
    room = Budget.parse("10%").capacity(MIXTRAL, Cache("lru"))
    assert room == [8] * 25 + [0] * 7
    assert Budget.parse("10%").capacity(MIXTRAL, Cache("lru", "global", "block")) == [204]
    size = MIXTRAL.expert_bytes
    assert Budget.parse(f"{3 * size - 1}B").capacity(MIXTRAL, Cache("lru", "global")) == [16]


def test_bytes_where_layers_differ_in_size() -> None:
    """Layer by layer each pays its own; in common every block pays as the largest does."""
    spec = MIXTRAL.first_layers(3).with_layer_bits([Fraction(16), Fraction(4), Fraction(8)])
    large, small, middle = (spec.n_blocks * size for size in spec.row_block_bytes)
    assert (large, small) == (4 * small, middle // 2)
    for asked, experts in (
        (2 * (large + small + middle) + large, [3, 2, 2]),
        (2 * (large + small + middle) + large - 1, [2, 2, 2]),
        (large + small, [1, 1, 0]),
    ):
        room = Budget.parse(f"{asked}B").capacity(spec, Cache("lru"))
        assert room == [spec.n_blocks * n for n in experts]
        assert capacity_bytes(spec, room) <= asked
    room = Budget.parse(f"{3 * large + small}B").capacity(spec, Cache("lru", "global"))
    assert (room, capacity_bytes(spec, room)) == ([3 * spec.n_blocks], 3 * large)
    assert Budget.parse("50%").capacity(spec, Cache("lru", "global")) == [12 * spec.n_blocks]


@given(
    share=st.fractions(Fraction(1, 1000), 1),
    bits=st.lists(st.sampled_from([2, 4, 8, 16]), min_size=3, max_size=3),
    unit=st.sampled_from(["expert", "block"]),
    scope=st.sampled_from(["layer", "global"]),
)
def test_bytes_are_never_exceeded_nor_left(
    share: Fraction, bits: list[int], unit: str, scope: str
) -> None:
    spec = MIXTRAL.first_layers(3).with_layer_bits([Fraction(n) for n in bits])
    asked = int(share * spec.routed_bytes)
    room = Budget("", None, asked).capacity(spec, Cache("lru", scope, unit))
    assert capacity_bytes(spec, room) <= asked
    blocks = spec.n_blocks if unit == "expert" else 1
    if scope == "layer":  # one unit more, to the next layer in turn, would not fit
        following = room.index(min(room))
        room[following] += blocks
        assert capacity_bytes(spec, room) > asked


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("0", "must be above 0"),
        ("0GB", "must be above 0"),
        ("-5%", "must be above 0"),
        ("101%", "above 100 %"),
        ("ten", "is not a size"),
        ("%", "is not a number"),
        ("", "is not a number"),
    ],
)
def test_budgets_that_are_refused(text: str, message: str) -> None:
    with pytest.raises(CrispError, match=message):
        Budget.parse(text)


def test_a_budget_above_the_model_is_refused() -> None:
    with pytest.raises(CrispError, match=r"more than all routed experts .*write 100%"):
        Budget.parse("1TB").capacity(MIXTRAL, Cache("lru"))


def test_named_policies_are_what_they_say() -> None:
    shown = {name: named(name).to_dict() for name in ("fo", "lru", "mo", "up", "crisp")}
    assert [(p["width"], p["order"], p["cache"], p["prefetch"]) for p in shown.values()] == [
        ("full", "sequential", "none", "none"),
        ("full", "fifo", "lru", "none"),
        ("full", "fifo", "lru", "guess"),
        ("uniform(share=0.5)", "fifo", "lru", "none"),
        ("tiered(alpha=0.6,beta=0.9,warm=0.5,cold=0)", "widest", "lru", "none"),
    ]
    assert named("mo", has_guess=False).to_dict()["prefetch"] == "previous"
    assert named("lru", order="random(7)").to_dict()["order"] == "random(7)"
    assert named("lru", order="random", seed=3).to_dict()["order"] == "random(3)"


@pytest.mark.parametrize(
    ("name", "parts", "message"),
    [
        ("crips", {}, "did you mean 'crisp'"),
        ("lru", {"order": "widset"}, "did you mean 'widest'"),
        ("lru", {"cache": "lur"}, "unknown cache 'lur'"),
        ("lru", {"width": "tierd"}, "did you mean 'tiered'"),
        ("lru", {"width": "tiered(alfa=.5)"}, "did you mean 'alpha'"),
        ("lru", {"width": "tiered(alpha=.5,alpha=.6)"}, "given twice"),
        ("lru", {"width": "tiered(alpha=.9,beta=.5)"}, "alpha must not be above beta"),
        ("lru", {"width": "uniform(2)"}, "2 is not between 0 and 1"),
        ("lru", {"width": "uniform(0)"}, "nothing would be executed"),
        ("lru", {"width": "uniform(x)"}, "is not a number"),
        ("lru", {"width": "uniform(.5,.5)"}, "takes 1 values at most"),
        ("lru", {"width": "uniform(.5"}, "expected a name"),
        ("lru", {"order": "random(.5)"}, "not a whole number"),
        ("lru", {"scope": "word"}, "unknown scope"),
        ("lru", {"unit": "page"}, "unknown unit"),
        # empty is not absent
        ("lru", {"width": ""}, "width ''"),
        ("lru", {"order": ""}, "unknown order ''"),
        ("lru", {"cache": ""}, "unknown cache ''"),
        ("lru", {"prefetch": ""}, "unknown prefetch ''"),
        ("lru", {"prefetch": "guess", "has_guess": False}, "the trace has no guess"),
        ("fo", {"prefetch": "previous"}, "lets nothing overlap"),
    ],
)
def test_policies_that_are_refused(name: str, parts: dict[str, str], message: str) -> None:
    with pytest.raises(CrispError, match=message):
        named(name, **parts)  # type: ignore[arg-type]
