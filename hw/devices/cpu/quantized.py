"""The cpu device's kernels for quantised weights; `crisp.hw.devices.cpu.kernels` calls them.

Against bf16 on one thread of an AMD EPYC with AVX2, blocks of 1792 neurons of 4096: a row takes 2.0
ms in int8 and in int4 (bf16: 2.3), 64 rows 61 and 70 ms (76).
"""

from __future__ import annotations

from typing import Any

import numpy as np
from llvmlite import ir
from numba import types
from numba.extending import intrinsic, register_jitable

from crisp.hw.devices.cpu.groups import add_one, add_row, add_rows, dot, dots_of_row, dots_of_rows
from crisp.model.quantization import GROUP

_TILE = 4096  # columns of the result that are summed up in a core's cache


def _group_size(context: Any, pool: Any) -> Any:
    """Return the bytes of a group of quantised weights: an intrinsic, so a constant."""
    size = GROUP if pool.dtype == types.int8 else GROUP // 2
    return types.intp(pool), lambda *_: ir.Constant(ir.IntType(64), size)


group_size: Any = intrinsic(_group_size)


def project_groups(
    x: Any, pool: Any, rest: Any, slot: int, at: int, scales: int, hidden: Any, which: int,
    first: int, last: int,
) -> None:  # fmt: skip
    """Compute `crisp.hw.devices.cpu.kernels.project` for quantised weights.

    Rows go in pairs where there are more than two; the rest one by one.
    """
    rows, groups = x.shape[0], x.shape[1] // GROUP
    w, s, size = pool[slot], rest[slot], groups * group_size(pool)
    paired = rows - rows % 2 if rows > 2 else 0
    end = last - (last - first) % 2
    for i in range(first, end, 2):
        for r in range(0, paired, 2):
            a, b, c, e = dots_of_rows(x, r, w, at + i * size, s, scales + i * groups, groups)
            hidden[r, which, i], hidden[r, which, i + 1] = a, b
            hidden[r + 1, which, i], hidden[r + 1, which, i + 1] = c, e
    for r in range(rows):
        begin = first if r >= paired else end
        alone = last - (last - begin) % 4
        for i in range(begin, alone, 4):
            a, b, c, e = dots_of_row(x, r, w, at + i * size, s, scales + i * groups, groups)
            hidden[r, which, i], hidden[r, which, i + 1] = a, b
            hidden[r, which, i + 2], hidden[r, which, i + 3] = c, e
        for i in range(alone, last):
            hidden[r, which, i] = dot(x, r, w, at + i * size, s, scales + i * groups, groups)[0]


def gather_groups(
    hidden: Any, pool: Any, rest: Any, slot: int, at: int, scales: int, neurons: int, out: Any,
    first: int, last: int,
) -> None:  # fmt: skip
    """Compute `crisp.hw.devices.cpu.kernels.gather` for quantised weights.

    The columns are whole groups.
    """
    rows, groups = out.shape[0], out.shape[1] // GROUP
    w, s, size = pool[slot], rest[slot], group_size(pool)
    whole = np.empty((4 if rows >= 4 else 1, min(last - first, _TILE)), np.float32)
    for low in range(first, last, _TILE):
        count, r = min(last - low, _TILE) // GROUP, 0
        begin, scale = at + low // GROUP * size, scales + low // GROUP
        while r < rows:
            together = 4 if r + 4 <= rows else 1
            tile = whole[:together]
            tile[:] = 0
            for i in range(0, neurons - 7, 8):
                here = begin + i * groups * size, scale + i * groups
                if together == 4:
                    add_rows(tile, hidden, r, i, w, here[0], s, here[1], groups, count)
                else:
                    add_row(tile, hidden, r, i, w, here[0], s, here[1], groups, count)
            for i in range(neurons - neurons % 8, neurons):
                here = begin + i * groups * size, scale + i * groups
                for k in range(together):
                    one = tile[k : k + 1]
                    add_one(one, hidden, r + k, i, w, here[0], s, here[1], groups, count)
            for k in range(together):
                _put(tile[k], out[r + k, low:], count * GROUP, size)
            r += together


@register_jitable
def _put(tile: Any, out: Any, columns: int, size: int) -> None:
    """Add a tile to out; int4's columns are in the order of `SIXTEEN` in the tile, not in out."""
    if size == GROUP:
        for j in range(columns):
            out[j] += tile[j]
        return
    for i in range(0, columns, 16):
        low, high, into = tile[i:], tile[i + 8 :], out[i:]
        for j in range(8):
            into[2 * j] += low[j]
            into[2 * j + 1] += high[j]
