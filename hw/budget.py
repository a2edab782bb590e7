"""The largest budget for experts that this machine's memory allows: ``--budget auto``.

Why the largest: with one policy and direct reads more blocks at hand mean fewer loads, and what the
page cache holds has to be copied, where the budget's own is not loaded at all. What makes more
cache slower is a budget that takes the room of pages that every token uses: the weights mapped from
the checkpoint, and code. So they are counted like memory in use, and `crisp plan` simulates less,
too.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from fractions import Fraction
from typing import Any

from crisp.errors import CrispError
from crisp.hw.memory import ADDRESSES, DATA, PAGES, MemoryLimit, memory_limits
from crisp.model.spec import ModelSpec
from crisp.policy import Budget, Policy
from crisp.policy.cache import AUTO, Cache, capacity_bytes
from crisp.scheduler.scheduler import STAGING_EXPERTS
from crisp.units import format_bytes

MB = 10**6
# Measured in `crisp generate` on a Mixtral, by what a limit counts (docs/device.md): what Python
# and its libraries take once the model is loaded, and what comes on top until the first token: the
# kernels' compiler and the threads, of which each beyond the first takes what stands last.
_LIBRARIES = {PAGES: 210 * MB, ADDRESSES: 720 * MB, DATA: 210 * MB}
_TO_COME = {PAGES: (100 * MB, 5 * MB), ADDRESSES: (600 * MB, 200 * MB), DATA: (160 * MB, 40 * MB)}
_CODE = 32 * MB  # pages of libraries that each token uses, 18 MB there
_LEAST_RESERVE, _RESERVE = 64 * MB, 20  # or the limit's 20th part
_ROWS = 256  # that the cpu device computes at a time


@dataclass(frozen=True)
class RunNeeds:
    """What a run takes beside its budget, before and while it computes; all in bytes."""

    staging: int  # for what has no place in the budget, and for prefetching
    skeleton: int = 0  # weights that are no routed experts', mapped from the checkpoint
    kv_cache: int = 0
    workspace: int = 0  # of a chunk of rows
    threads: int = 1
    checkpoint: int | None = None  # None: libraries and model are in this process, and are measured


@dataclass(frozen=True)
class MemoryPlan:
    """A limit, and all that has to fit into it beside the experts."""

    limit: MemoryLimit
    parts: tuple[tuple[str, int], ...]  # what takes how many bytes, the reserve included

    @property
    def room(self) -> int:
        """Bytes that are left for the budget; below 0: so many are missing."""
        return self.limit.n_bytes - sum(size for _, size in self.parts)


def run_needs(
    spec: ModelSpec,
    policies: Iterable[Policy],
    rows: int,
    *,
    skeleton: int = 0,
    kv_cache: int = 0,
    threads: int = 1,
    checkpoint: int | None = None,
) -> RunNeeds:
    """Return what runs take at most of which one step has at most so many rows.

    skeleton, kv_cache, threads: as in `RunNeeds`. checkpoint: the bytes of the files that will be
    mapped, for a run that has not begun; None: of this process.
    """
    prefetches = any(policy.prefetch.name != "none" for policy in policies)
    staging = (STAGING_EXPERTS + prefetches) * spec.n_blocks * spec.block_bytes
    workspace = workspace_bytes(spec, rows)
    return RunNeeds(staging, skeleton, kv_cache, workspace, threads, checkpoint)


def workspace_bytes(spec: ModelSpec, rows: int) -> int:
    """Return the bytes of activations for a step of so many rows.

    Inputs and sums of every expert, float32, of two events; attention's and the router's, 32 bytes
    for each of d_model; and between the projections of an expert float32 for 256 rows at a time.
    """
    hidden = rows * spec.d_model * (2 * 2 * 4 * spec.top_k + 32)
    return hidden + min(rows, _ROWS) * (spec.matrices - 1) * spec.d_ff * 4


def kv_cache_bytes(config: Mapping[str, Any], tokens: int, itemsize: int) -> int:
    """Return at most how many bytes keys and values of so many tokens take.

    config: of the language model, by the names of Hugging Face. Twice their size, for the cache
    grows by copies of it; sliding windows are counted as if all were kept.
    """
    heads = config.get("num_attention_heads") or 1
    if config.get("qk_nope_head_dim"):  # latent attention: kept as it is expanded
        keys = config["qk_nope_head_dim"] + config.get("qk_rope_head_dim", 0)
        numbers = heads * (keys + config.get("v_head_dim", keys))
    else:
        size = config.get("head_dim") or config["hidden_size"] // heads
        numbers = 2 * (config.get("num_key_value_heads") or heads) * size
    return 2 * tokens * int(config["num_hidden_layers"]) * int(numbers) * itemsize


def plan_memory(needs: RunNeeds, limits: Iterable[MemoryLimit] | None = None) -> MemoryPlan:
    """Return the plan for the limit that leaves least room; None: the limits of this process.

    Raises CrispError if there is no limit that could be read.
    """
    limits = memory_limits() if limits is None else limits
    plans = [MemoryPlan(limit, _parts(needs, limit)) for limit in limits]
    if not plans:
        raise CrispError(f"--budget {AUTO}: nobody says how much memory can be had; give bytes")
    return min(plans, key=lambda plan: plan.room)


def _parts(needs: RunNeeds, limit: MemoryLimit) -> tuple[tuple[str, int], ...]:
    kind = limit.counts
    first, more = _TO_COME[kind]
    if needs.checkpoint is None:
        own = limit.used
    else:
        own = _LIBRARIES[kind] + (0 if kind == PAGES else needs.checkpoint)
    files = [("code in use", _CODE), ("other weights", needs.skeleton)] if kind == PAGES else []
    return (
        ("libraries", own),
        ("kernels, threads", first + more * (needs.threads - 1)),
        *files,
        ("KV cache", needs.kv_cache),
        ("workspace", needs.workspace),
        ("staging", needs.staging),
        ("reserve", max(_LEAST_RESERVE, limit.n_bytes // _RESERVE)),
    )


def largest_budget(spec: ModelSpec, cache: Cache, plan: MemoryPlan) -> Budget:
    """Return the budget of most experts (or blocks) for a cache that a plan has room for.

    Raises CrispError if there is no room for one.
    """
    blocks = spec.n_blocks if cache.unit == "expert" else 1
    all_units = spec.n_routed * spec.n_blocks // blocks
    units = min(all_units, plan.room // (blocks * spec.block_bytes))
    if units < 1:
        taken = plan.limit.n_bytes - plan.room
        unit = blocks * spec.block_bytes
        raise CrispError(
            f"--budget {AUTO}: {plan.limit.what} allows {format_bytes(plan.limit.n_bytes)}, of "
            f"which all but experts takes {format_bytes(taken)}, and {cache.unit}s "
            f"{format_bytes(unit)} each: {format_bytes(unit - plan.room)} are missing"
        )
    share = Fraction(units, all_units)
    n_bytes = capacity_bytes(spec, Budget(str(share), share, None).capacity(spec, cache))
    return Budget(f"{n_bytes}B", None, n_bytes)


def auto_budget(
    spec: ModelSpec, policies: Sequence[Policy], needs: RunNeeds
) -> tuple[Budget, MemoryPlan]:
    """Return the largest budget that is safe for each of some policies in this process, and why.

    The model, if there is one, has to be loaded: what the process takes now is measured. Raises
    CrispError if not one expert has room.
    """
    plan = plan_memory(needs)
    budgets = [largest_budget(spec, policy.cache, plan) for policy in policies]
    return min(budgets, key=lambda budget: budget.n_bytes or 0), plan


def describe_budget(spec: ModelSpec, budget: Budget, plan: MemoryPlan) -> str:
    """Return the line about a chosen budget."""
    n_bytes = budget.n_bytes or 0
    return (
        f"budget {AUTO}: {format_bytes(n_bytes)}, {100 * n_bytes / spec.routed_bytes:.0f}% of the "
        f"experts; {plan.limit.what} allows {format_bytes(plan.limit.n_bytes)}"
    )
