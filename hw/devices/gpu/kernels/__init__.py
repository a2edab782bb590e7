"""The arithmetic of an expert's blocks on a GPU, read from the slots of a pool.

Triton kernels with a torch reference beside them; ``benchmarks/kernels`` compiles them for GPUs
that are not here.
"""

from __future__ import annotations

import os
from functools import cache
from importlib.util import find_spec
from typing import Any

from crisp.hw.devices.gpu.kernels import reference
from crisp.hw.devices.gpu.kernels.layout import BlockLayout

__all__ = ["BlockLayout", "add_blocks", "jitted"]


def add_blocks(
    layout: BlockLayout,
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
    neurons[i] neurons. A block's partial sum is complete before it is added, so blocks give the
    same bits one by one and all at once. No other part of the pool, of x or of sums is used.

    pool: uint8 [n_slots, stride]. slots, counts, neurons: int32 [n], n >= 1: by block its slot, how
    many leading rows use it (not more than the block before), its neurons. x: [r, d_model] of fp32,
    fp16 or bf16; sums: [r, d_model] float32; both contiguous. All on one device. hidden: the buffer
    between the two kernels, float32 [crisp.hw.devices.gpu.kernels.calls.hidden_size() or more];
    allocated if not given.

    One row is computed in float32. For more rows, operands are of x's type where the weights are of
    that type too (or quantised), and hidden is rounded to it; otherwise they are float32.

    Computed by Triton where x is on a GPU or Triton interprets; otherwise by the reference, which
    is in float32 throughout and does wait.
    """
    if jitted(x):
        from crisp.hw.devices.gpu.kernels import calls

        calls.add_blocks(layout, pool, slots, counts, neurons, x, sums, hidden)
    else:
        reference.add_blocks(layout, pool, slots, counts, neurons, x, sums)


def jitted(x: Any) -> bool:
    """Return whether the Triton kernels compute for a tensor, and not the reference."""
    return _installed() and (x.is_cuda or os.environ.get("TRITON_INTERPRET") == "1")


@cache
def _installed() -> bool:
    return find_spec("triton") is not None
