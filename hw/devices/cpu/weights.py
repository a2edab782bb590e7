"""How a pool's weights are read: one step of columns as vectors of float32, in registers.

| format | a step | widened by |
|---|---|---|
| fp32 | two vectors of columns | nothing |
| bf16 | two vectors of columns | a shift |
| fp16 | two vectors of columns | `crisp.hw.devices.cpu.vectors.widen_half` |
| int8 | a group of 64 columns | converting; sums are scaled |
| int4 | a group of 64 columns | looking it up among 16 products with the scale, or as int8 |

A whole number times a scale is exact in float32: of int4 it has at most 4 + 11 bits.

A group of int4 is eight 32-bit numbers of eight weights: the first weights of all of them are read,
then the second ones, ... So x and the sums have their columns in that order: `column_order`.
"""

from __future__ import annotations

from typing import Any

import numpy as np
from llvmlite import ir
from numba import types

from crisp.hw.devices.cpu.vectors import (
    BYTE,
    FLOAT,
    INT,
    LANES,
    SHORT,
    WIDE,
    constant,
    load,
    named,
    plus,
    spread,
    vector,
    widen_half,
)
from crisp.model.quantization import GROUP

# Bytes that a row's weights are prefetched ahead. Of what plain reads of memory reach (17 GB/s, one
# thread of a Xeon with AVX-512, virtual, huge pages), one row in bf16 reaches 0.83 by dots and adds
# without, 0.81 and 0.86 at 1536, 0.94 and 0.98 at 3072, 0.89 and 0.95 at 4096; in int8 0.45 to 0.60
# without, 0.80 and 0.89 at 3072; in fp32, whose rows are longer, 0.97 and 0.91 at 2048, 0.87 and
# 0.85 at 4096. Into the nearest cache instead of the second, bf16 has 0.89 and 0.92. Two or four
# neurons side by side, each a stream of its own, reach 0.75 to 0.82.
_AHEAD, _AHEAD_FP32 = 3072, 2048


class WeightReader:
    """Builds the reads of one format."""

    def __init__(self, kind: Any) -> None:
        """kind: numba's type of the pool's numbers."""
        self.kind = kind
        self.grouped = kind.bitwidth == 8
        self.packed = kind == types.uint8
        self.size = 4 if kind == types.float32 else 1 if self.grouped else 2  # bytes of a number
        self.step = GROUP if self.grouped else 2 * LANES  # columns
        self.turns = 4 if self.packed and WIDE else 1 if self.grouped else 2  # partial sums
        self.ahead = _AHEAD_FP32 if kind == types.float32 else _AHEAD
        self.bytes = self.step // 2 if self.packed else self.step * self.size

    def vectors(self, builder: Any, address: Any, scale: Any) -> tuple[list[Any], Any]:
        """Return the weights of the step at an address, and what they are times, or None.

        scale: the address of its group's scale.
        """
        each = LANES * self.size
        if self.grouped:
            by = spread(builder, load(builder, scale, FLOAT, 4), LANES)
            if self.packed:
                return self._nibbles(builder, load(builder, address, vector(INT, 8), 1), by)
        places = [plus(builder, address, i) for i in range(0, self.bytes, each)]
        if self.kind == types.float32:
            return [load(builder, place, vector(FLOAT, LANES), 4) for place in places], None
        if self.grouped:
            numbers = [load(builder, place, vector(BYTE, LANES), 1) for place in places]
            wide = [builder.sext(number, vector(INT, LANES)) for number in numbers]
            return [builder.sitofp(number, vector(FLOAT, LANES)) for number in wide], by
        numbers = [load(builder, place, vector(SHORT, LANES), 2) for place in places]
        return [self._widen(builder, number, LANES) for number in numbers], None

    def single(self, builder: Any, address: Any) -> Any:
        """Return the one weight at an address; not of a group."""
        if self.kind == types.float32:
            return load(builder, address, FLOAT, 4)
        return self._widen(builder, load(builder, address, SHORT, 2), 0)

    def _widen(self, builder: Any, bits: Any, lanes: int) -> Any:
        """Return the float32 of bf16 or fp16 bits."""
        if self.kind == types.int16:
            return widen_half(builder, bits)
        whole, number = (vector(INT, lanes), vector(FLOAT, lanes)) if lanes else (INT, FLOAT)
        by = constant(16, INT, lanes) if lanes else INT(16)
        return builder.bitcast(builder.shl(builder.zext(bits, whole), by), number)

    def _nibbles(self, builder: Any, eight: Any, by: Any) -> tuple[list[Any], Any]:
        """Return the first weights of all eight numbers, the second ones, ...: as `vectors`."""
        kind = vector(FLOAT, LANES)
        if not WIDE:
            places = [constant(28 - 4 * k, INT, 8) for k in range(8)]
            top = [builder.shl(eight, place) for place in places]
            signed = [builder.ashr(bits, constant(28, INT, 8)) for bits in top]
            return [builder.sitofp(bits, kind) for bits in signed], by
        # vpermps looks a lane's lowest four bits up in a register: with a shift and the sum that is
        # 3 instructions for 16 weights. Masking and converting take one more.
        kinds = [kind, vector(INT, 16)]
        function = named(builder, ir.FunctionType(kind, kinds), "llvm.x86.avx512.permvar.sf.512")
        values = ir.Constant(kind, [float(n if n < 8 else n - 16) for n in range(16)])
        table = builder.fmul(values, by)
        twice = ir.Constant(vector(INT, 16), [*range(8), *range(8)])
        both = builder.shuffle_vector(eight, eight, twice)
        shifts = [ir.Constant(vector(INT, 16), [k] * 8 + [k + 4] * 8) for k in range(0, 32, 8)]
        return [builder.call(function, [table, builder.lshr(both, k)]) for k in shifts], None


def column_order(columns: int) -> Any:
    """Return the order in which int4's columns are computed: int64 [columns]."""
    group = np.arange(GROUP).reshape(8, 8).T.reshape(-1)
    return (np.arange(0, columns, GROUP)[:, None] + group).reshape(-1)
