"""The cpu device's inner loops, compiled: an expert's blocks, for one row or many.

Weights of half precision are widened in registers, eight at a time, and never copied; sums are in
float32. Against torch 2.13 on one thread of an AMD EPYC with AVX2, 1792 x 4096 in bf16: a row by
gate or up 0.6 ms (torch 1.4), by the down projection 0.6 ms (1.1 at best, 47 as one writes it); 64
rows 23 ms (85) and 28 ms (3,160), for torch multiplies halves slowly without instructions for them.
A call takes all blocks of a piece, for 40 us of Python around each of them would be half the time
of small ones. `benchmarks/compute.py` has the speeds of whole experts.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from functools import cache
from typing import Any, NamedTuple

import numpy as np

_TILE = 4096  # columns of the result that are summed up in a core's cache
_FREE = {"reassoc", "contract", "nsz", "arcp"}  # the order within a sum; infinities stay
_ALPHA, _LIMIT = np.float32(1.702), np.float32(7)  # gpt-oss's clamped activation

SILU, GELU, GPT_OSS = range(3)


class Kernels(NamedTuple):
    """All take the pool as numbers, [slots, numbers of a block]; a matrix is where in it begins.

    x [r, d_model], hidden [r, 2, block] and out [r, d_model] are float32.
    project(x, pool, slot, at, hidden, which, i, j): hidden[:, which] = x w^T of neurons [i, j).
    activate(hidden, pool, slot, at, block, neurons, kind, biased): hidden[:, 0] from both, in place.
    gather(hidden, pool, slot, at, neurons, out, i, j): out += hidden[:, 0] w of columns [i, j).
    run(x, pool, slots, counts, neurons, block, kind, biased, hidden, out): all blocks in turn, each
    for its leading counts[b] rows.
    """

    project: Callable[..., None]
    activate: Callable[..., None]
    gather: Callable[..., None]
    run: Callable[..., None]


@cache
def kernels(dtype: str) -> Kernels:
    """For weights in ``bf16``, ``fp16`` (their bits as uint16) or ``fp32`` (float32).

    The first call of each compiles, for some seconds.
    """
    from numba import njit

    compiled: Any = njit(nogil=True, fastmath=_FREE, error_model="numpy")
    widen, zero, one = _widen(dtype), np.float32(0), np.float32(1)

    def project(
        x: Any, pool: Any, slot: int, at: int, hidden: Any, which: int, first: int, last: int
    ) -> None:
        rows, d = x.shape
        rest = last - (last - first) % 4
        for i in range(first, rest, 4):  # four neurons share what is read of x
            w = at + i * d
            for r in range(rows):
                a, b, c, e = zero, zero, zero, zero
                for j in range(d):
                    v = x[r, j]
                    a += v * widen(pool[slot, w + j])
                    b += v * widen(pool[slot, w + d + j])
                    c += v * widen(pool[slot, w + 2 * d + j])
                    e += v * widen(pool[slot, w + 3 * d + j])
                hidden[r, which, i], hidden[r, which, i + 1] = a, b
                hidden[r, which, i + 2], hidden[r, which, i + 3] = c, e
        for i in range(rest, last):
            for r in range(rows):
                a = zero
                for j in range(d):
                    a += x[r, j] * widen(pool[slot, at + i * d + j])
                hidden[r, which, i] = a

    def activate(
        hidden: Any, pool: Any, slot: int, at: int, block: int, neurons: int, kind: int,
        biased: bool,
    ) -> None:  # fmt: skip
        for r in range(hidden.shape[0]):
            for i in range(neurons):
                gate, up = hidden[r, 0, i], hidden[r, 1, i]
                if biased:
                    gate += widen(pool[slot, at + i])
                    up += widen(pool[slot, at + block + i])
                if kind == GPT_OSS:
                    gate, up = min(gate, _LIMIT), min(max(up, -_LIMIT), _LIMIT)
                    hidden[r, 0, i] = (up + one) * gate / (one + np.exp(-_ALPHA * gate))
                elif kind == SILU:
                    hidden[r, 0, i] = up * gate / (one + np.exp(-gate))
                else:
                    phi = np.float32(0.5) * (one + np.float32(math.erf(gate / math.sqrt(2.0))))
                    hidden[r, 0, i] = up * gate * phi

    def gather(
        hidden: Any, pool: Any, slot: int, at: int, neurons: int, out: Any, first: int, last: int
    ) -> None:
        d = out.shape[1]
        own = np.empty(_TILE, np.float32)
        for low in range(first, last, _TILE):
            size = min(last - low, _TILE)
            for r in range(out.shape[0]):
                own[:size] = zero
                for i in range(0, neurons - 7, 8):  # eight neurons share a pass over the tile
                    a, b, c, e = hidden[r, 0, i : i + 4]
                    f, g, k, m = hidden[r, 0, i + 4 : i + 8]
                    w = at + i * d + low
                    for j in range(size):
                        q = w + j
                        own[j] += (
                            a * widen(pool[slot, q]) + b * widen(pool[slot, q + d])
                            + c * widen(pool[slot, q + 2 * d]) + e * widen(pool[slot, q + 3 * d])
                        ) + (
                            f * widen(pool[slot, q + 4 * d]) + g * widen(pool[slot, q + 5 * d])
                            + k * widen(pool[slot, q + 6 * d]) + m * widen(pool[slot, q + 7 * d])
                        )  # fmt: skip
                for i in range(neurons - neurons % 8, neurons):
                    for j in range(size):
                        own[j] += hidden[r, 0, i] * widen(pool[slot, at + i * d + low + j])
                for j in range(size):
                    out[r, low + j] += own[j]

    project, activate, gather = compiled(project), compiled(activate), compiled(gather)

    def run(
        x: Any, pool: Any, slots: Any, counts: Any, neurons: Any, block: int, kind: int,
        biased: bool, hidden: Any, out: Any,
    ) -> None:  # fmt: skip
        d = x.shape[1]
        matrix = block * d
        for b in range(len(slots)):
            slot, rows, n = slots[b], counts[b], neurons[b]
            own = hidden[:rows]
            project(x[:rows], pool, slot, 0, own, 0, 0, n)
            project(x[:rows], pool, slot, matrix, own, 1, 0, n)
            activate(own, pool, slot, 3 * matrix, block, n, kind, biased)
            gather(own, pool, slot, 2 * matrix, n, out[:rows], 0, d)

    return Kernels(project, activate, gather, compiled(run))


def _widen(dtype: str) -> Any:
    """A stored number as float32, in compiled code."""
    from llvmlite import ir
    from numba import types
    from numba.extending import intrinsic

    stored = types.float32 if dtype == "fp32" else types.uint16

    def code(context: Any, builder: Any, signature: Any, args: Any) -> Any:
        if dtype == "fp32":
            return args[0]
        if dtype == "fp16":
            return builder.fpext(builder.bitcast(args[0], ir.HalfType()), ir.FloatType())
        wide = builder.zext(args[0], ir.IntType(32))
        return builder.bitcast(builder.shl(wide, ir.Constant(wide.type, 16)), ir.FloatType())

    def widen(context: Any, number: Any) -> Any:
        """uint16 or float32 -> float32."""
        return types.float32(stored), code

    return intrinsic(widen)
