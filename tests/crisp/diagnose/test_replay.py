"""Every rule against straight code with lists, and by hand."""

from __future__ import annotations

from itertools import combinations

import numpy as np
import pytest

from crisp.diagnose.calls import Calls
from crisp.diagnose.contracts import BEST, CONTRACTS, CURVES, EnginePolicy
from crisp.diagnose.replay import Replayed, replay
from crisp.trace import DECODE, PREFILL, Header, RoutingTrace
from tests.crisp.diagnose.route_log import random_routing
from tests.oracles.engine_caches import Call, straight_hits

E = 12
SIZES = (100, 130, 100)


def trace_of(prompt: list, decoded: list, sizes: tuple[int, ...] = SIZES) -> RoutingTrace:
    """A trace of one sequence; a layer without experts is -1."""
    tokens = [*prompt, *decoded]
    k = max(len(layer) for token in tokens for layer in token)
    experts = np.full((len(tokens), len(sizes), k), -1, np.int16)
    for row, token in enumerate(tokens):
        for layer, ids in enumerate(token):
            experts[row, layer, : len(ids)] = ids
    return RoutingTrace(
        experts=experts,
        sequence=np.zeros(len(tokens), np.int32),
        position=np.arange(len(tokens), dtype=np.int32),
        phase=np.array([PREFILL] * len(prompt) + [DECODE] * len(decoded), np.uint8),
        header=Header(n_experts=E, top_k=k, ordered=True, origin="synthetic", seed=0),
    )


def straight_calls(prompt: list, decoded: list) -> list[Call]:
    """The same as calls: all of a prompt's tokens of a layer, then the tokens one by one."""
    layers = len(SIZES)
    whole = [
        (layer, [e for token in prompt for e in token[layer]], False) for layer in range(layers)
    ]
    single = [(layer, token[layer], True) for token in decoded for layer in range(layers)]
    return [call for call in (*whole, *single) if call[1]]


STRAIGHT = {"colibri-lfru": "lfru"}  # as its source has it; ours says the same in other words
RULES = {name: contract.policy for name, contract in CONTRACTS.items()} | CURVES | {"best": BEST}


@pytest.mark.parametrize("name", RULES)
@pytest.mark.parametrize("budget", [0, 250, 700, 1300, 2500, 10**6])
@pytest.mark.parametrize("seed", [1, 2])
def test_every_rule_is_the_straight_one(name: str, budget: int, seed: int) -> None:
    prompt = random_routing(seed, 7, 3, E, 3, pruned=True)
    decoded = random_routing(seed + 10, 40, 3, E, 3)
    policy = RULES[name]
    contract = CONTRACTS.get(name)
    lookups = contract.counting.lookups if contract else "expert"
    each_row = lookups == "row"
    if lookups == "tensor":
        lookups = "expert"  # the tensors are tested below
    calls = Calls.from_trace(trace_of(prompt, decoded), SIZES, lookups=lookups)
    found = replay(calls, policy, budget)
    expected = straight_hits(
        straight_calls(prompt, decoded), STRAIGHT.get(name, policy.rule), budget, SIZES,
        per_layer=policy.scope == "layer", at_once=policy.at_once, protects=policy.protects,
        each_row=each_row,
    )  # fmt: skip
    assert found.hit.tolist() == [hit for call in expected for hit in call]


def by_hand(policy: EnginePolicy, budget: int, *ids: list[int]) -> Replayed:
    """One layer, experts of 10 bytes, decoded tokens."""
    tokens = [[layer] for layer in ids]
    return replay(Calls.from_trace(trace_of([], tokens, (10,)), (10,)), policy, budget)


def test_eviction_comes_after_the_call_and_never_of_what_it_used() -> None:
    # room for two: 1 2 3 are all kept until the next call, which asks for 1, the oldest
    found = by_hand(EnginePolicy("lru"), 20, [1, 2, 3], [1], [2], [3])
    assert found.hit.tolist() == [False, False, False, True, False, False]
    # by [1] two may stay: 1 itself, and of 2 and 3 the later
    found = by_hand(EnginePolicy("lru"), 20, [1, 2, 3], [1], [3], [2])
    assert found.hit.tolist() == [False, False, False, True, True, False]


def test_eviction_at_each_miss() -> None:
    kept = EnginePolicy("lru", at_once=True)
    found = by_hand(kept, 20, [1, 2, 3], [1], [2], [3])
    assert found.hit.tolist() == [False, False, False, True, True, False]  # 3 found no room
    bare = EnginePolicy("lru", at_once=True, protects=False)
    found = by_hand(bare, 20, [1, 2, 3], [1], [2], [3])
    assert found.hit.tolist() == [False] * 6  # each evicts what is asked for next


def test_counts_survive_eviction_and_ties_go_to_the_oldest() -> None:
    # room for one: 1 was used twice, 2 once; 3 comes, and goes again at once
    found = by_hand(EnginePolicy("lfu"), 20, [1], [1], [2], [3], [1], [2], [3])
    assert found.hit.tolist() == [False, True, False, False, True, False, False]


def test_a_duplicate_promotes() -> None:
    """The prompt asks for 1, 2 and 1 again: 2 is the least recent, and goes when 3 comes."""
    trace = trace_of([[[1]], [[2]], [[1]]], [[[3]], [[1]], [[2]]], (10,))
    found = replay(Calls.from_trace(trace, (10,)), EnginePolicy("lru"), 20)
    assert found.hit.tolist() == [False, False, False, True, False]
    assert found.per_call().tolist() == [[2, 0], [1, 0], [1, 1], [1, 0]]


def test_a_layers_budget_is_its_share_rounded_down() -> None:
    tokens = [[[1], [1]], [[2], [2]], [[1], [1]]]
    calls = Calls.from_trace(trace_of([], tokens, (10, 10)), (10, 10))
    policy = EnginePolicy("lru", scope="layer")
    assert replay(calls, policy, 40).hit.sum() == 2
    assert replay(calls, policy, 39).hit.sum() == 0


def test_the_best_cache_may_let_go_what_was_just_used() -> None:
    ids = [[1], [2], [1], [3], [1], [4], [1]]
    assert by_hand(BEST, 10, *ids).hit.sum() == 3
    assert by_hand(CURVES["belady"], 10, *ids).hit.sum() == 0


@pytest.mark.parametrize("seed", range(8))
def test_no_choice_of_what_to_keep_loads_less_than_the_best(seed: int) -> None:
    """All choices, call by call: any part of what was there or used, as far as it fits."""
    rng = np.random.default_rng(seed)
    ids = [rng.choice(5, rng.integers(1, 3), replace=False).tolist() for _ in range(9)]
    loads = {frozenset[int](): 0}  # what is kept -> the fewest loads that lead there
    for used in ids:
        after: dict[frozenset[int], int] = {}
        for kept, so_far in loads.items():
            total = so_far + len(set(used) - kept)
            for size in range(3):
                for choice in map(frozenset, combinations(sorted(kept | set(used)), size)):
                    after[choice] = min(after.get(choice, total), total)
        loads = after
    found = by_hand(BEST, 20, *ids)
    assert (~found.hit).sum() == min(loads.values())


def test_hot_fades() -> None:
    """Expert 1 is used 16 times, then never: after 64 tokens it is colder than what comes twice."""
    ids = [[1]] * 16 + [[2]] * 16 + [[3]] * 40 + [[2]]
    assert by_hand(CONTRACTS["ds4"].policy, 20, *ids).hit.tolist()[-1]
    assert not by_hand(EnginePolicy("lfu", at_once=True), 10, [1], [1], [2], [1]).hit[-2]


def test_bytes_rates_and_tokens() -> None:
    trace = trace_of([[[0, 1], [0, 1]]], [[[0, 2], [0, 1]], [[0, 1], [3, 1]]], (100, 1000))
    found = replay(Calls.from_trace(trace, (100, 1000)), EnginePolicy("lru"), 10**6)
    assert found.per_call().tolist() == [[2, 0], [2, 0], [2, 1], [2, 2], [2, 2], [2, 1]]
    assert found.read_bytes().tolist() == [200, 2000, 100, 0, 0, 1000]
    assert found.read_bytes(aligned=5).tolist() == [210, 2010, 105, 0, 0, 1005]
    assert found.cumulative().tolist() == [3 / 8, 6 / 12]
    assert found.hit_rate() == 0.5 and found.hit_rate(decode=True) == 0.75
