"""The arithmetic of a piece on a GPU: blocks of an expert, from the slots they lie in.

Triton kernels with a torch reference beside them; ``crisp.hw.devices.gpu.kernels.compiling``
compiles them for cards that are not here.
"""

from __future__ import annotations

import os
from functools import cache
from importlib.util import find_spec
from typing import Any

from crisp.hw.devices.gpu.kernels import reference
from crisp.hw.devices.gpu.kernels.layout import Layout

__all__ = ["Layout", "add_blocks", "jitted"]


def add_blocks(
    layout: Layout,
    pool: Any,
    slots: Any,
    counts: Any,
    neurons: Any,
    x: Any,
    sums: Any,
    hidden: Any = None,
) -> None:
    """Add blocks of one expert to its rows' sums, on the current stream, without waiting for it.

    For each block i in turn, sums[: counts[i]] += sigma(x Wg_i^T) * (x Wu_i^T) Wd_i of its leading
    neurons[i] neurons. A block's partial sum is whole before it is added, so blocks give the same
    bits one by one and all at once. Nothing else of the pool, of x or of sums matters or changes.

    pool: uint8 [n_slots, stride]. slots, counts, neurons: int32 [n], n >= 1: the slot of a block,
    how many leading rows use it (none more than the block before), its neurons. x: [r, d_model] of
    fp32, fp16 or bf16; sums: [r, d_model] float32; both contiguous. All on one device. hidden: room
    between the two kernels, float32 [at least crisp.hw.devices.gpu.kernels.calls.room()]; allocated
    if not given.

    One row is computed in float32. For more, what is multiplied is of x's type where that is the
    weights' (or weights are quantised), and hidden is rounded to it; otherwise of float32.

    Triton where x is on a GPU or Triton interprets; otherwise the reference, which is of float32
    throughout and does wait.
    """
    if jitted(x):
        from crisp.hw.devices.gpu.kernels import calls

        calls.add_blocks(layout, pool, slots, counts, neurons, x, sums, hidden)
    else:
        reference.add_blocks(layout, pool, slots, counts, neurons, x, sums)


def jitted(x: Any) -> bool:
    """Whether the kernels are what computes for a tensor, and not the reference."""
    return _installed() and (x.is_cuda or os.environ.get("TRITON_INTERPRET") == "1")


@cache
def _installed() -> bool:
    return find_spec("triton") is not None
