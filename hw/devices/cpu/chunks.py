"""A chunk of a block's neurons, for some rows: what they add to the output."""

from __future__ import annotations

from typing import Any

from llvmlite import ir
from numba import types
from numba.extending import intrinsic, register_jitable

from crisp.hw.devices.cpu.activations import apply_activation
from crisp.hw.devices.cpu.products import adds, clear, dots, increase
from crisp.hw.devices.cpu.vectors import FLOAT, INT, WIDE, address, widen_half
from crisp.model.quantization import GROUP

# Computed together, as many as the processor has registers for. Of bf16 on a Xeon with AVX-512, in
# GFLOP/s: dots of 4 rows and 3 neurons 130, 4 and 2 105, 6 and 2 122, 12 and 1 82; adds of 4 and 4
# 134, 6 and 4 106, 4 and 6 93.
ROWS = 4 if WIDE else 2
_THREE, _FOUR = 3, 4  # neurons
_SET = 32  # rows whose activations are kept at once
_TILE = 512  # columns of the rows' sums that stay in a core's nearest cache
_one_dot, _dots, _dots_alone = dots(1, 1), dots(ROWS, _THREE), dots(ROWS, 1)
_one_add, _adds, _adds_alone = adds(1, 1), adds(ROWS, _FOUR), adds(ROWS, 1)


def scratch_size(d_model: int, chunk: int) -> int:
    """Return the float32 numbers that a thread needs beside the arrays of a call."""
    tile = max(d_model, ROWS * min(_TILE, d_model))
    return 2 * _SET * chunk + chunk * (d_model // GROUP) + tile + 64


def _widening(context: Any, number: Any) -> Any:
    """Return a number of rest as float32: an intrinsic."""

    def code(context: Any, builder: Any, signature: Any, args: Any) -> Any:
        if number == types.float32:
            return args[0]
        if number == types.int16:
            return widen_half(builder, args[0])
        wide = builder.zext(args[0], INT)
        return builder.bitcast(builder.shl(wide, INT(16)), FLOAT)

    return types.float32(number), code


_widen: Any = intrinsic(_widening)


def _grouping(context: Any, pool: Any) -> Any:
    """Return whether a pool's numbers are in groups with scales: an intrinsic, so a constant."""
    value = ir.Constant(ir.IntType(1), pool.dtype.bitwidth == 8)
    return types.boolean(pool), lambda *_: value


_grouped: Any = intrinsic(_grouping)


@register_jitable
def add_chunk(
    pool: Any, rest: Any, shape: Any, constants: Any, slot: int, first: int, last: int, x: int,
    rows: int, out: int, scratch: Any,
) -> None:  # fmt: skip
    """Add neurons [first, last) of the block in a slot to some rows of out.

    x, out: addresses of rows [rows, d_model] of float32. shape, constants: as in
    `crisp.hw.devices.cpu.kernels.run`. scratch: float32 [scratch_size(...)].
    """
    d, projections, chunk = shape[0], shape[2], shape[7]
    size = projections * _SET * chunk
    hidden = scratch[:size].reshape((_SET, projections, chunk))
    scales = scratch[2 * _SET * chunk :]
    tile = address(scales[chunk * (d // GROUP) :]) + 63 & ~63
    for r in range(0, rows, _SET):
        some = min(_SET, rows - r)
        at = 4 * r * d
        _project(pool, rest, shape, slot, first, last, x + at, some, hidden, scales)
        _activate(rest, shape, constants, slot, first, last, some, hidden)
        _gather(pool, rest, shape, slot, first, last, some, hidden, scales, tile, out + at)


@register_jitable
def _widen_scales(
    pool: Any, rest: Any, shape: Any, slot: int, which: int, first: int, last: int, scales: Any
) -> None:
    """Write neurons' scales of one matrix as float32, if there are any."""
    if _grouped(pool):
        groups = shape[0] // GROUP
        begin = shape[4] + shape[2] * shape[1] * shape[5] + (which * shape[1] + first) * groups
        from_ = rest[slot, begin : begin + (last - first) * groups]
        for i in range(len(from_)):
            scales[i] = _widen(from_[i])


@register_jitable
def _place(pool: Any, shape: Any, slot: int, which: int, first: int) -> tuple[int, int]:
    """Return the address of a neuron's weights in one matrix, and the bytes of a neuron."""
    each = shape[3] // shape[1] * pool.itemsize
    begin = (slot * pool.shape[1] + which * shape[3]) * pool.itemsize
    return address(pool) + begin + first * each, each


@register_jitable
def _project(
    pool: Any, rest: Any, shape: Any, slot: int, first: int, last: int, x: int, rows: int,
    hidden: Any, scales: Any,
) -> None:  # fmt: skip
    """Compute hidden[:rows, w, : last - first] = x w^T for each projection w."""
    d, n = shape[0], last - first
    groups, s = d // GROUP, address(scales)
    for which in range(shape[2]):
        w, each = _place(pool, shape, slot, which, first)
        _widen_scales(pool, rest, shape, slot, which, first, last, scales)
        whole = rows - rows % ROWS
        together = n - n % _THREE
        for i in range(0, together, _THREE):
            for r in range(0, whole, ROWS):
                v = _dots(pool, x + 4 * r * d, w + i * each, s + 4 * i * groups, d)
                for k in range(ROWS):
                    for j in range(_THREE):
                        hidden[r + k, which, i + j] = v[_THREE * k + j]
        for i in range(together, n):
            for r in range(0, whole, ROWS):
                u = _dots_alone(pool, x + 4 * r * d, w + i * each, s + 4 * i * groups, d)
                for k in range(ROWS):
                    hidden[r + k, which, i] = u[k]
        for r in range(whole, rows):
            for i in range(n):
                one = _one_dot(pool, x + 4 * r * d, w + i * each, s + 4 * i * groups, d)
                hidden[r, which, i] = one[0]


@register_jitable
def _activate(
    rest: Any, shape: Any, constants: Any, slot: int, first: int, last: int, rows: int, hidden: Any
) -> None:
    """Replace hidden[:rows, 0] by the activation of the projections."""
    block, projections, behind, n = shape[1], shape[2], shape[4], last - first
    for r in range(rows):
        if shape[5]:
            for w in range(projections):
                for i in range(n):
                    hidden[r, w, i] += _widen(rest[slot, behind + w * block + first + i])
        gated = projections == 2
        apply_activation(hidden[r], shape[6], gated, constants[0], constants[1], 0, n)


@register_jitable
def _gather(
    pool: Any, rest: Any, shape: Any, slot: int, first: int, last: int, rows: int, hidden: Any,
    scales: Any, tile: int, out: int,
) -> None:  # fmt: skip
    """Add hidden[:rows, 0] times the down projection to rows of out."""
    d, n, groups = shape[0], last - first, shape[0] // GROUP
    s, between = address(scales), shape[2] * shape[7]
    w, each = _place(pool, shape, slot, shape[2], first)
    _widen_scales(pool, rest, shape, slot, shape[2], first, last, scales)
    whole = rows - rows % ROWS
    together = n - n % _FOUR
    for low in range(0, d if whole else 0, _TILE):
        columns = min(_TILE, d - low)
        at, of = w + low * each // d, s + 4 * (low // GROUP)
        for r in range(0, whole, ROWS):
            h = address(hidden[r:])
            clear(tile, ROWS * columns)
            for i in range(0, together, _FOUR):
                _adds(
                    pool, tile, columns, h + 4 * i, between, at + i * each, of + 4 * i * groups, d,
                    columns,
                )  # fmt: skip
            for i in range(together, n):
                _adds_alone(
                    pool, tile, columns, h + 4 * i, between, at + i * each, of + 4 * i * groups, d,
                    columns,
                )  # fmt: skip
            for k in range(ROWS):
                increase(out + 4 * ((r + k) * d + low), tile + 4 * k * columns, columns)
    for r in range(whole, rows):
        h = address(hidden[r:])
        clear(tile, d)
        for i in range(n):
            _one_add(pool, tile, d, h + 4 * i, between, w + i * each, s + 4 * i * groups, d, d)
        increase(out + 4 * r * d, tile, d)
