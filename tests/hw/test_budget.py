"""The budget that a limit leaves, by hand: 1,000 MB, of which all but experts is known."""

from __future__ import annotations

from dataclasses import replace
from fractions import Fraction

import pytest

from crisp.errors import CrispError
from crisp.hw import budget as module
from crisp.hw.budget import (
    MB,
    RunNeeds,
    auto_budget,
    kv_cache_bytes,
    largest_budget,
    plan_memory,
    run_needs,
    workspace_bytes,
)
from crisp.hw.memory import ADDRESSES, DATA, MemoryLimit
from crisp.model.spec import ModelSpec
from crisp.policy import Budget, named

SPEC = ModelSpec.named("mixtral-8x7b").with_(bits=Fraction("4.25"))
EXPERT = 93_585_408  # bytes: docs/hardware.md counts them; 11,698,176 a block
NEEDS = RunNeeds(staging=30 * MB, skeleton=40 * MB, kv_cache=5 * MB, workspace=6 * MB)


def limit(megabytes: int, counts: str = "pages") -> MemoryLimit:
    return MemoryLimit("a group", megabytes * MB, 200 * MB, counts)


def test_what_takes_what_of_a_limit() -> None:
    """1000 - 200 - 100 - 32 - 40 - 5 - 6 - 30 - 64, the least reserve: more than 1000 / 20."""
    plan = plan_memory(NEEDS, [limit(1000)])
    assert [size // MB for _, size in plan.parts] == [200, 100, 32, 40, 5, 6, 30, 64]
    assert plan.room == 523 * MB
    assert plan_memory(NEEDS, [limit(4000)]).room == (4000 - 413 - 200) * MB  # 4000 / 20
    two = plan_memory(replace(NEEDS, threads=2), [limit(1000)])
    assert two.room == 518 * MB


def test_files_are_in_the_addresses_that_are_used_already() -> None:
    """1000 - 200 - 600 - 5 - 6 - 30 - 64, and 1000 - 200 - 160 - ...: no page of a file beside."""
    assert plan_memory(NEEDS, [limit(1000, ADDRESSES)]).room == 95 * MB
    assert plan_memory(NEEDS, [limit(1000, DATA)]).room == 535 * MB


def test_before_a_run_libraries_and_the_checkpoint_are_foreseen() -> None:
    foreseen = replace(NEEDS, checkpoint=50 * MB)
    assert plan_memory(foreseen, [limit(1000)]).room == 513 * MB  # libraries 210 in place of 200
    assert (
        plan_memory(foreseen, [limit(2000, ADDRESSES)]).room == (2000 - 720 - 50 - 641 - 100) * MB
    )


def test_the_limit_with_least_room_decides() -> None:
    limits = [limit(3000), limit(1000, ADDRESSES), limit(900)]
    assert plan_memory(NEEDS, limits).limit == limits[1]
    with pytest.raises(CrispError, match="nobody says how much memory can be had"):
        plan_memory(NEEDS, [])


def test_the_budget_is_whole_experts_or_blocks() -> None:
    """523 MB are 5 experts (467.9 MB), or 44 blocks (514.7 MB)."""
    plan, experts = plan_memory(NEEDS, [limit(1000)]), named("lru").cache
    budget = largest_budget(SPEC, experts, plan)
    assert budget == Budget(f"{5 * EXPERT}B", None, 5 * EXPERT)
    assert sum(budget.capacity(SPEC, experts)) == 5 * 8
    by_block = replace(experts, unit="block")
    assert largest_budget(SPEC, by_block, plan).n_bytes == 44 * EXPERT // 8
    whole = largest_budget(SPEC, experts, plan_memory(NEEDS, [limit(100_000)]))
    assert whole.n_bytes == SPEC.routed_bytes == 256 * EXPERT


def test_layers_of_several_sizes_take_slots_of_the_largest() -> None:
    """A slot has the largest block's size; so many blocks of the smaller layers have to fit."""
    bits = [Fraction(16 if layer == 31 else 4) for layer in range(32)]
    spec = ModelSpec.named("mixtral-8x7b").with_layer_bits(bits)
    plan = plan_memory(NEEDS, [limit(10_000)])
    for unit in ("expert", "block"):
        for scope in ("layer", "global"):
            cache = replace(named("lru").cache, unit=unit, scope=scope)
            capacity = largest_budget(spec, cache, plan).capacity(spec, cache)
            assert 0 < sum(capacity) * spec.block_bytes <= plan.room


def test_too_little_for_one_expert_is_refused_in_one_line() -> None:
    """540 - 477 of all else = 63 MB, 30.6 MB less than an expert."""
    plan = plan_memory(NEEDS, [limit(540)])
    with pytest.raises(CrispError) as refusal:
        largest_budget(SPEC, named("lru").cache, plan)
    assert str(refusal.value) == (
        "--budget auto: a group allows 540 MB, of which all but experts takes 477 MB, and experts "
        "93.6 MB each: 30.6 MB are missing"
    )


def test_keys_and_values_twice() -> None:
    """Mixtral: 32 layers x 2 x 8 heads x 128 numbers; a latent one as it is expanded."""
    mixtral = {
        "num_hidden_layers": 32, "hidden_size": 4096, "num_attention_heads": 32,
        "num_key_value_heads": 8,
    }  # fmt: skip
    assert kv_cache_bytes(mixtral, 100, 2) == 2 * 100 * 32 * 2 * 8 * 128 * 2
    assert kv_cache_bytes({**mixtral, "num_key_value_heads": None}, 1, 2) == 2 * 32 * 2 * 4096 * 2
    latent = {
        "num_hidden_layers": 27, "hidden_size": 2048, "num_attention_heads": 16,
        "qk_nope_head_dim": 128, "qk_rope_head_dim": 64, "v_head_dim": 128,
    }  # fmt: skip
    assert kv_cache_bytes(latent, 1, 4) == 2 * 27 * 16 * (192 + 128) * 4


def test_a_step_of_rows() -> None:
    """64 bytes x d_model a row at top-2 (docs/device.md), and gate and up of 256 rows, float32."""
    assert workspace_bytes(SPEC, 1) == 64 * 4096 + 2 * 14336 * 4
    assert workspace_bytes(SPEC, 512) == 512 * 64 * 4096 + 256 * 2 * 14336 * 4


def test_prefetching_takes_a_third_expert() -> None:
    assert run_needs(SPEC, [named("lru")], 1).staging == 2 * EXPERT
    fetching = named("lru", prefetch="previous")
    assert run_needs(SPEC, [named("lru"), fetching], 1).staging == 3 * EXPERT


def test_of_several_policies_the_smallest_budget(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(module, "memory_limits", lambda: [limit(1000)])
    policies = [named("lru", unit="block"), named("lru")]
    budget, plan = auto_budget(SPEC, policies, NEEDS)
    assert (budget.n_bytes, plan.room) == (5 * EXPERT, 523 * MB)
