"""The cpu device's kernels, compiled by numba: an expert's blocks, for one row or many.

Weights of half precision are widened in registers, eight at a time, and never copied; sums are in
float32. Against torch 2.13 on one thread of an AMD EPYC with AVX2, 1792 x 4096 in bf16: a row by
gate or up 0.6 ms (torch 1.4), by the down projection 0.6 ms (1.1 at best, 47 as one writes it); 64
rows 23 ms (85) and 28 ms (3,160), because torch multiplies halves slowly without instructions for
them. Rows are slices, because an index that might be negative makes their loops six times as slow.
Quantised blocks have kernels of their tile, in `crisp.hw.devices.cpu.quantized`.
One call computes several blocks, because 40 us of Python around each of them would be half the time
of small ones. `benchmarks/compute.py` has the speeds of whole experts.

Arrays: pool is [slots, numbers of a block]; rest is the same memory as numbers of the type of
biases and scales; x [r, d_model], out [r, d_model] and hidden ([r, projections, block], or one of
these for every block; without a gate there is one projection) are float32. For int4 the columns of
x are in the order of `crisp.hw.devices.cpu.groups.SIXTEEN`.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np
from llvmlite import ir
from numba import njit, types
from numba.extending import intrinsic, overload

from crisp.hw.devices.cpu.activations import apply_activation
from crisp.hw.devices.cpu.groups import widen_half
from crisp.hw.devices.cpu.quantized import gather_groups, project_groups
from crisp.model.quantization import GROUP

# Numba's cache is valid as long as this file is unchanged, whatever else was compiled in. So this
# file names the content of the others: activations.py 9f8418ba3b0e565b,
# groups.py 330422ff2c5c7485, quantized.py 3d2d9307d5c7a965.

POOL_TYPES = {
    "bf16": np.uint16, "fp16": np.int16, "fp32": np.float32, "int8": np.int8, "int4": np.uint8,
}  # fmt: skip
"""The numpy type of a pool by the store's dtype: bf16 and fp16 as bits, told apart by the sign."""

_TILE = 4096  # columns of the result that are summed up in a core's cache
_FREE = {"reassoc", "contract", "nsz", "arcp"}  # the order within a sum; infinities stay
_ZERO = np.float32(0)

_JIT_OPTIONS: Any = {"nogil": True, "fastmath": _FREE, "error_model": "numpy"}
# A column's sum must not depend on where a loop over columns begins and ends, or threads would
# decide about it: some columns are computed in vectors and the rest one by one.
_COLUMN_OPTIONS: Any = _JIT_OPTIONS | {"fastmath": _FREE - {"reassoc"}}


def _compiled(function: Callable[..., Any]) -> Any:
    """Compile a function at its first call, which takes seconds, and cache the code on disk.

    Only functions of a module can be cached: a closure is another object in every process.
    """
    try:
        return njit(function, cache=True, **_JIT_OPTIONS)
    except RuntimeError:  # no folder can be written to
        return njit(function, **_JIT_OPTIONS)


def _widening(context: Any, number: Any) -> Any:
    """Return a number of the pool as float32: an intrinsic."""

    def code(context: Any, builder: Any, signature: Any, args: Any) -> Any:
        if number == types.float32:
            return args[0]
        if number == types.int16:
            return widen_half(builder, args[0])
        wide = builder.zext(args[0], ir.IntType(32))
        return builder.bitcast(builder.shl(wide, ir.Constant(wide.type, 16)), ir.FloatType())

    return types.float32(number), code


_widen: Any = intrinsic(_widening)


def project(
    x: Any, pool: Any, rest: Any, slot: int, at: int, scales: int, hidden: Any, which: int,
    first: int, last: int,
) -> None:  # fmt: skip
    """Project: hidden[:, which] = x w^T of neurons [first, last).

    w begins at number ``at`` of the slot, its scales (if it is quantised) at number ``scales`` of
    rest. Compiled code only: see the overload below.
    """


def _project(
    x: Any, pool: Any, rest: Any, slot: int, at: int, scales: int, hidden: Any, which: int,
    first: int, last: int,
) -> None:  # fmt: skip
    """Compute `project` for weights in floating point."""
    rows, d = x.shape
    block = pool[slot]
    end = last - (last - first) % 4
    for i in range(first, end, 4):  # four neurons share what is read of x
        w = at + i * d
        p, q, s, t = block[w:], block[w + d :], block[w + 2 * d :], block[w + 3 * d :]
        for r in range(rows):
            row = x[r]
            a, b, c, e = _ZERO, _ZERO, _ZERO, _ZERO
            for j in range(d):
                v = row[j]
                a += v * _widen(p[j])
                b += v * _widen(q[j])
                c += v * _widen(s[j])
                e += v * _widen(t[j])
            hidden[r, which, i], hidden[r, which, i + 1] = a, b
            hidden[r, which, i + 2], hidden[r, which, i + 3] = c, e
    for i in range(end, last):
        p = block[at + i * d :]
        for r in range(rows):
            row = x[r]
            a = _ZERO
            for j in range(d):
                a += row[j] * _widen(p[j])
            hidden[r, which, i] = a


@overload(project, jit_options=_JIT_OPTIONS, strict=False)
def _(x: Any, pool: Any, *_: Any) -> Any:
    return project_groups if pool.dtype.bitwidth == 8 else _project


@_compiled
def activate(
    hidden: Any, rest: Any, slot: int, at: int, block: int, kind: int, constants: Any, biased: bool,
    first: int, last: int,
) -> None:  # fmt: skip
    """Replace hidden[:, 0] of neurons [first, last) by the activation of the projections.

    Biases begin at number ``at`` of rest: gate's, then up's. constants: of the activation.
    """
    rows, projections = hidden.shape[:2]
    for r in range(rows):
        if biased:
            for w in range(projections):
                for i in range(first, last):
                    hidden[r, w, i] += _widen(rest[slot, at + w * block + i])
        apply_activation(hidden[r], kind, projections == 2, constants[0], constants[1], first, last)


def gather(
    hidden: Any, pool: Any, rest: Any, slot: int, at: int, scales: int, neurons: int, out: Any,
    first: int, last: int,
) -> None:  # fmt: skip
    """Add the down projection: out += hidden[:, 0] w of columns [first, last).

    at, scales: as in `project`. Compiled code only: see the overload below.
    """


def _gather(
    hidden: Any, pool: Any, rest: Any, slot: int, at: int, scales: int, neurons: int, out: Any,
    first: int, last: int,
) -> None:  # fmt: skip
    """Compute `gather` for weights in floating point."""
    d = out.shape[1]
    block = pool[slot]
    whole = np.empty(_TILE, np.float32)
    for low in range(first, last, _TILE):
        size = min(last - low, _TILE)
        tile = whole[:size]
        for r in range(out.shape[0]):
            tile[:] = _ZERO
            for i in range(0, neurons - 7, 8):  # eight neurons share a pass over the tile
                w = at + i * d + low
                a, b, c, e = hidden[r, 0, i : i + 4]
                f, g, k, m = hidden[r, 0, i + 4 : i + 8]
                n, o, p, q = block[w:], block[w + d :], block[w + 2 * d :], block[w + 3 * d :]
                w += 4 * d
                s, t, u, v = block[w:], block[w + d :], block[w + 2 * d :], block[w + 3 * d :]
                for j in range(size):
                    tile[j] += (
                        a * _widen(n[j]) + b * _widen(o[j]) + c * _widen(p[j]) + e * _widen(q[j])
                    ) + (
                        f * _widen(s[j]) + g * _widen(t[j]) + k * _widen(u[j]) + m * _widen(v[j])
                    )  # fmt: skip
            for i in range(neurons - neurons % 8, neurons):
                a, n = hidden[r, 0, i], block[at + i * d + low :]
                for j in range(size):
                    tile[j] += a * _widen(n[j])
            for j in range(size):
                out[r, low + j] += tile[j]


@overload(gather, jit_options=_COLUMN_OPTIONS, strict=False)
def _(hidden: Any, pool: Any, *_: Any) -> Any:
    return gather_groups if pool.dtype.bitwidth == 8 else _gather


@_compiled
def part_range(n: int, whole: int, part: int, parts: int) -> tuple[int, int]:
    """Return [first, last) of n items for thread ``part`` of ``parts``.

    Every boundary is a multiple of ``whole``, so that sums do not depend on the number of threads.
    """
    each = whole * -(-n // (whole * parts))
    return min(n, part * each), min(n, (part + 1) * each)


@_compiled
def front(
    x: Any, pool: Any, rest: Any, slots: Any, counts: Any, neurons: Any, block: int, matrix: int,
    behind: int, biased: bool, kind: int, constants: Any, hidden: Any, part: int, parts: int,
) -> None:  # fmt: skip
    """Compute hidden[b] of each block b for its leading counts[b] rows: one thread's neurons.

    matrix: numbers of the pool in one matrix; behind: the number of rest behind all of them.
    """
    projections = hidden.shape[2]
    scales, groups = behind + projections * block * biased, block * x.shape[1] // GROUP
    for b in range(len(slots)):
        slot, rows = slots[b], counts[b]
        block_hidden = hidden[b, :rows]
        first, last = part_range(neurons[b], 16, part, parts)
        for w in range(projections):
            at = w * matrix, scales + w * groups
            project(x[:rows], pool, rest, slot, at[0], at[1], block_hidden, w, first, last)
        activate(block_hidden, rest, slot, behind, block, kind, constants, biased, first, last)


@_compiled
def back(
    pool: Any, rest: Any, slots: Any, counts: Any, neurons: Any, block: int, matrix: int,
    behind: int, biased: bool, hidden: Any, out: Any, part: int, parts: int,
) -> None:  # fmt: skip
    """Add each block's down projection of hidden[b] to out, in turn: one thread's columns."""
    d, projections = out.shape[1], hidden.shape[2]
    first, last = part_range(d, GROUP, part, parts)
    scales = behind + projections * (block * biased + block * d // GROUP)
    for b in range(len(slots)):
        rows = counts[b]
        block_hidden, into = hidden[b, :rows], out[:rows]
        down = projections * matrix
        gather(block_hidden, pool, rest, slots[b], down, scales, neurons[b], into, first, last)


@_compiled
def run(
    x: Any, pool: Any, rest: Any, slots: Any, counts: Any, neurons: Any, block: int, matrix: int,
    behind: int, biased: bool, kind: int, constants: Any, hidden: Any, out: Any,
) -> None:  # fmt: skip
    """Compute `front` and `back` in one thread."""
    front(
        x, pool, rest, slots, counts, neurons, block, matrix, behind, biased, kind, constants,
        hidden, 0, 1,
    )  # fmt: skip
    back(pool, rest, slots, counts, neurons, block, matrix, behind, biased, hidden, out, 0, 1)


@_compiled
def weigh(sums: Any, weights: Any, rows: Any, out: Any) -> None:
    """Add sums times weights to out[rows], rounded in between; ``rows`` are distinct."""
    for i in range(len(rows)):
        row, into, weight = sums[i], out[rows[i]], weights[i]
        for j in range(len(row)):
            into[j] += row[j] * weight
