# mypy: allow-untyped-defs, allow-incomplete-defs
"""The Triton kernels: ``front``, then ``back`` compute some blocks, for one row of x or for many.

``front`` writes hidden[b, r, n] = sigma(x Wg^T) * (x Wu^T) of all blocks, ``back`` adds each
block's hidden Wd to the sums, one block after the other. A program owns its part of the result:
there are no atomics, each sum is in float32 in an order that the launch parameters fix, and a
block's partial sum is complete before it is added, so that blocks give the same bits one by one and
all at once.

The block table is ``slots``, ``counts`` and ``neurons``, int32 [blocks]: a block's slot in the
pool, how many leading rows use it, and how many neurons it has. Rows behind the count and neurons
behind the width are neither read nor written, except that hidden gets zeros up to a multiple of 16
neurons: with that, loads of it are as wide as they can be.

For one row products are taken in float32. For many, tensor cores take them in the type of
``hidden``: quantised weights are rounded to it, and so is hidden itself.

``numbers`` and ``halves`` are the pool as numbers of the type of its weights, and of that of its
biases and scales; the constants in capitals are made by crisp.hw.devices.gpu.kernels.calls.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import triton
import triton.language as tl

from crisp.model.quantization import GROUP

_GROUP = tl.constexpr(GROUP)  # neighbours along d_model that share a scale


def _kernel(function: Callable[..., Any]) -> Any:
    """Make a Triton kernel that is compiled once for all tables and numbers of blocks and rows.

    By default Triton specialises on a number that is 1 and on a table's alignment: other code, and
    so other bits, for a block that comes alone.
    """
    tables = ["slots", "counts", "neurons", "blocks", "rows"]
    return triton.jit(function, do_not_specialize=tables)


@_kernel
def _weights(
    numbers, halves, which: tl.constexpr, n, width, first,
    D: tl.constexpr, BLOCK: tl.constexpr, BITS: tl.constexpr, SCALES_AT: tl.constexpr,
    NEURONS: tl.constexpr, COLUMNS: tl.constexpr,
):  # fmt: skip
    """Load columns [first, first + COLUMNS) of rows n of a matrix: [NEURONS, COLUMNS], 0 past the
    end.

    Quantised weights are multiplied by their scales, in float32; others come as they are stored.
    numbers, halves: pointers to the slot's begin.
    """
    inside = (n < width)[:, None]
    if BITS >= 16:
        d = first + tl.arange(0, COLUMNS)
        at = which * BLOCK * D + n[:, None] * D + d[None, :]
        weights = tl.load(numbers + at, mask=inside & (d < D)[None, :], other=0.0)
    else:
        each: tl.constexpr = 8 // BITS  # weights in a byte
        c = first // each + tl.arange(0, COLUMNS // each)
        at = (which * BLOCK + n[:, None]) * (D // each) + c[None, :]
        whole = tl.load(numbers + at, mask=inside & (c < D // each)[None, :], other=0).to(tl.int32)
        if BITS == 4:  # the even column is the low half; shifting it up and down brings its sign
            whole = tl.join((whole << 28) >> 28, whole >> 4)
        share: tl.constexpr = _GROUP if COLUMNS > _GROUP else COLUMNS  # of these columns, a scale's
        g = first // _GROUP + tl.arange(0, COLUMNS // share)
        at = SCALES_AT + (which * BLOCK + n[:, None]) * (D // _GROUP) + g[None, :]
        scales = tl.load(halves + at, mask=inside & (g < D // _GROUP)[None, :], other=0.0)
        grouped = tl.reshape(whole, (NEURONS, COLUMNS // share, share)).to(tl.float32)
        weights = tl.reshape(grouped * scales.to(tl.float32)[:, :, None], (NEURONS, COLUMNS))
    return weights


@_kernel
def _activated(
    gate, up, halves, n, width,
    BLOCK: tl.constexpr, BIASES_AT: tl.constexpr, GATED: tl.constexpr,
    ACTIVATION: tl.constexpr, FIRST: tl.constexpr, SECOND: tl.constexpr,
):  # fmt: skip
    """Return the activation of neurons n from both projections [..., len(n)]; NaN stays NaN.

    Without a gate ``gate`` is the only projection.
    """
    if BIASES_AT >= 0:
        inside = n < width
        gate += tl.load(halves + BIASES_AT + n, mask=inside, other=0.0).to(tl.float32)
        if GATED:
            up += tl.load(halves + BIASES_AT + BLOCK + n, mask=inside, other=0.0).to(tl.float32)
    if ACTIVATION == "silu":
        passed = gate / (1 + tl.exp(-gate))
    elif ACTIVATION == "gelu":
        passed = gate * 0.5 * (1 + tl.erf(gate * 0.7071067811865476))
    elif ACTIVATION == "gelu_tanh":
        passed = gate / (1 + tl.exp(-1.5957691216057308 * (gate + 0.044715 * gate * gate * gate)))
    elif ACTIVATION == "relu":
        passed = tl.where(gate < 0.0, 0.0, gate)
    elif ACTIVATION == "relu2":
        passed = tl.where(gate < 0.0, 0.0, gate * gate)
    elif ACTIVATION == "gpt_oss":
        gate = tl.where(gate > SECOND, SECOND, gate)
        up = tl.where(up > SECOND, SECOND, tl.where(up < -SECOND, -SECOND, up)) + 1
        passed = gate / (1 + tl.exp(-FIRST * gate))
    elif ACTIVATION == "clamped_silu":
        gate = tl.where(gate > FIRST, FIRST, gate)
        up = tl.where(up > FIRST, FIRST, tl.where(up < -FIRST, -FIRST, up))
        passed = gate / (1 + tl.exp(-gate))
    elif ACTIVATION == "silu_clamped":
        passed = gate / (1 + tl.exp(-gate))
        passed = tl.where(passed > FIRST, FIRST, passed)
        up = tl.where(up > FIRST, FIRST, tl.where(up < -FIRST, -FIRST, up))
    else:  # softcapped_silu: tanh(x) = 1 - 2 / (exp(2 x) + 1)
        passed = FIRST * (1 - 2 / (tl.exp(2 * gate / FIRST) + 1)) / (1 + tl.exp(-gate))
        up = SECOND * (1 - 2 / (tl.exp(2 * up / SECOND) + 1))
    if GATED:
        passed *= up
    return passed


@_kernel
def front_row(
    numbers, halves, slots, counts, neurons, x, hidden,
    D: tl.constexpr, BLOCK: tl.constexpr, WIDTH: tl.constexpr, BITS: tl.constexpr,
    STRIDE: tl.constexpr, HALVES: tl.constexpr, BIASES_AT: tl.constexpr, SCALES_AT: tl.constexpr,
    GATED: tl.constexpr, ACTIVATION: tl.constexpr, FIRST: tl.constexpr, SECOND: tl.constexpr,
    NEURONS: tl.constexpr, COLUMNS: tl.constexpr, STAGES: tl.constexpr,
):  # fmt: skip
    """Compute hidden [blocks, WIDTH] of x [D]; grid: (tiles of NEURONS, blocks)."""
    b = tl.program_id(1)
    n = tl.program_id(0) * NEURONS + tl.arange(0, NEURONS)
    slot = tl.load(slots + b).to(tl.int64)
    width = tl.load(neurons + b)
    if (tl.program_id(0) * NEURONS >= width) | (tl.load(counts + b) == 0):
        return
    numbers += slot * STRIDE
    halves += slot * HALVES
    gates = tl.zeros((NEURONS, COLUMNS), tl.float32)
    ups = tl.zeros((NEURONS, COLUMNS), tl.float32)
    for first in tl.range(0, D, COLUMNS, num_stages=STAGES):
        d = first + tl.arange(0, COLUMNS)
        row = tl.load(x + d, mask=d < D, other=0.0).to(tl.float32)[None, :]
        gate = _weights(
            numbers, halves, 0, n, width, first, D, BLOCK, BITS, SCALES_AT, NEURONS, COLUMNS
        )
        gates += row * gate.to(tl.float32)
        if GATED:
            up = _weights(
                numbers, halves, 1, n, width, first, D, BLOCK, BITS, SCALES_AT, NEURONS, COLUMNS
            )
            ups += row * up.to(tl.float32)
    passed = _activated(
        tl.sum(gates, 1), tl.sum(ups, 1), halves, n, width, BLOCK, BIASES_AT, GATED, ACTIVATION,
        FIRST, SECOND,
    )  # fmt: skip
    tl.store(hidden + b * WIDTH + n, passed, mask=n < width)


@_kernel
def back_row(
    numbers, halves, slots, counts, neurons, hidden, sums,
    blocks,
    D: tl.constexpr, BLOCK: tl.constexpr, WIDTH: tl.constexpr, BITS: tl.constexpr,
    STRIDE: tl.constexpr, HALVES: tl.constexpr, SCALES_AT: tl.constexpr, DOWN: tl.constexpr,
    NEURONS: tl.constexpr, COLUMNS: tl.constexpr, STAGES: tl.constexpr,
):  # fmt: skip
    """Add the partial sum of each block to sums [D]; grid: (tiles of COLUMNS,)."""
    first = tl.program_id(0) * COLUMNS
    d = first + tl.arange(0, COLUMNS)
    total = tl.load(sums + d, mask=d < D, other=0.0)
    for b in range(blocks):
        slot = tl.load(slots + b).to(tl.int64)
        width = tl.where(tl.load(counts + b) > 0, tl.load(neurons + b), 0)
        matrices = numbers + slot * STRIDE
        scales = halves + slot * HALVES
        products = tl.zeros((NEURONS, COLUMNS), tl.float32)
        for i in tl.range(0, width, NEURONS, num_stages=STAGES):
            n = i + tl.arange(0, NEURONS)
            passed = tl.load(hidden + b * WIDTH + n, mask=n < width, other=0.0)
            down = _weights(
                matrices, scales, DOWN, n, width, first, D, BLOCK, BITS, SCALES_AT, NEURONS, COLUMNS
            )
            products += passed[:, None] * down.to(tl.float32)
        total += tl.sum(products, 0)
    tl.store(sums + d, total, mask=d < D)


@_kernel
def front_rows(
    numbers, halves, slots, counts, neurons, x, hidden,
    rows,
    D: tl.constexpr, BLOCK: tl.constexpr, WIDTH: tl.constexpr, BITS: tl.constexpr,
    STRIDE: tl.constexpr, HALVES: tl.constexpr, BIASES_AT: tl.constexpr, SCALES_AT: tl.constexpr,
    GATED: tl.constexpr, ACTIVATION: tl.constexpr, FIRST: tl.constexpr, SECOND: tl.constexpr,
    ROWS: tl.constexpr, NEURONS: tl.constexpr, COLUMNS: tl.constexpr, STAGES: tl.constexpr,
):  # fmt: skip
    """Compute hidden [blocks, rows, WIDTH] of x [rows, D].

    Grid: (tiles of ROWS, tiles of NEURONS, blocks), so programs that share weights are neighbours.
    """
    b = tl.program_id(2)
    top = tl.program_id(0) * ROWS
    n = tl.program_id(1) * NEURONS + tl.arange(0, NEURONS)
    r = tl.arange(0, ROWS)
    slot = tl.load(slots + b).to(tl.int64)
    width = tl.load(neurons + b)
    count = tl.load(counts + b) - top  # of this program's rows
    written = (width + 15) // 16 * 16
    if (tl.program_id(1) * NEURONS >= width) | (count <= 0):
        return
    numbers += slot * STRIDE
    halves += slot * HALVES
    x += top.to(tl.int64) * D
    gates = tl.zeros((ROWS, NEURONS), tl.float32)
    ups = tl.zeros((ROWS, NEURONS), tl.float32)
    operand: tl.constexpr = hidden.dtype.element_ty
    for first in tl.range(0, D, COLUMNS, num_stages=STAGES):
        d = first + tl.arange(0, COLUMNS)
        inside = (r < count)[:, None] & (d < D)[None, :]
        tile = tl.load(x + r[:, None] * D + d[None, :], mask=inside, other=0.0).to(operand)
        gate = _weights(
            numbers, halves, 0, n, width, first, D, BLOCK, BITS, SCALES_AT, NEURONS, COLUMNS
        )
        gates = tl.dot(tile, tl.trans(gate.to(operand)), gates, input_precision="ieee")
        if GATED:
            up = _weights(
                numbers, halves, 1, n, width, first, D, BLOCK, BITS, SCALES_AT, NEURONS, COLUMNS
            )
            ups = tl.dot(tile, tl.trans(up.to(operand)), ups, input_precision="ieee")
    passed = _activated(
        gates, ups, halves, n, width, BLOCK, BIASES_AT, GATED, ACTIVATION, FIRST, SECOND
    )
    hidden += (rows.to(tl.int64) * b + top) * WIDTH
    inside = (r < count)[:, None] & (n < written)[None, :]
    tl.store(hidden + r[:, None] * WIDTH + n[None, :], passed.to(operand), mask=inside)


@_kernel
def back_rows(
    numbers, halves, slots, counts, neurons, hidden, sums,
    blocks, rows,
    D: tl.constexpr, BLOCK: tl.constexpr, WIDTH: tl.constexpr, BITS: tl.constexpr,
    STRIDE: tl.constexpr, HALVES: tl.constexpr, SCALES_AT: tl.constexpr, DOWN: tl.constexpr,
    ROWS: tl.constexpr, NEURONS: tl.constexpr, COLUMNS: tl.constexpr, STAGES: tl.constexpr,
):  # fmt: skip
    """Add the partial sum of each block to sums [rows, D]; grid: (tiles of ROWS, of COLUMNS)."""
    top = tl.program_id(0) * ROWS
    first = tl.program_id(1) * COLUMNS
    r = tl.arange(0, ROWS)
    d = first + tl.arange(0, COLUMNS)
    sums += top.to(tl.int64) * D
    result = sums + r[:, None] * D + d[None, :]
    inside = (top + r < rows)[:, None] & (d < D)[None, :]
    total = tl.load(result, mask=inside, other=0.0)
    operand: tl.constexpr = hidden.dtype.element_ty
    for b in range(blocks):
        slot = tl.load(slots + b).to(tl.int64)
        count = tl.load(counts + b) - top  # of this program's rows
        width = tl.where(count > 0, tl.load(neurons + b), 0)
        written = (width + 15) // 16 * 16
        matrices = numbers + slot * STRIDE
        scales = halves + slot * HALVES
        begin = hidden + (rows.to(tl.int64) * b + top) * WIDTH
        partial = tl.zeros((ROWS, COLUMNS), tl.float32)
        for i in tl.range(0, width, NEURONS, num_stages=STAGES):
            n = i + tl.arange(0, NEURONS)
            used = (r < count)[:, None] & (n < written)[None, :]
            passed = tl.load(begin + r[:, None] * WIDTH + n[None, :], mask=used, other=0.0)
            down = _weights(
                matrices, scales, DOWN, n, width, first, D, BLOCK, BITS, SCALES_AT, NEURONS, COLUMNS
            )
            partial = tl.dot(passed, down.to(operand), partial, input_precision="ieee")
        total = tl.where((r < count)[:, None], total + partial, total)
    tl.store(result, total, mask=inside)
