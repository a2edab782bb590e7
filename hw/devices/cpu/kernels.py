"""The cpu device's kernels, compiled by numba: an expert's blocks, for one row or many.

A block's neurons are computed in chunks: their projections and activations, then their share of
the output, which is summed apart and added to the sums in the order of the chunks. So the sums
depend on no thread and on no range of blocks, and a chunk's weights are read from end to end.

A call is cut into items, which threads take as they come: chunks, each summed in a place of its
own, or, of many rows, ranges of rows. A thread that gets no core, as when the reading thread or
another program needs it, takes no items, and the others compute them.

docs/device.md has speeds of whole experts, beside plain reads of memory and torch;
`benchmarks/compute.py` prints them.

Arrays: pool is [slots, numbers of a block]; rest is the same memory as numbers of the type of
biases and scales. x [r, d_model] and out [r, d_model] are float32. For int4 the columns of both are
in the order of `crisp.hw.devices.cpu.weights.column_order`.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np
from numba import njit
from numba.extending import register_jitable

from crisp.hw.devices.cpu.chunks import add_chunk
from crisp.hw.devices.cpu.products import clear, increase
from crisp.hw.devices.cpu.signals import assign, count, post, start, wait
from crisp.hw.devices.cpu.vectors import address

# Numba's cache is valid as long as this file is unchanged, whatever else was compiled in. So this
# file names the content of the others: activations.py 9f8418ba3b0e565b, chunks.py a64bb7c118ece77f,
# products.py b80671ddf6491dc4, signals.py 35d7f23ffb2676fd,
# vectors.py a68e19b69e0b8fe3, weights.py 9efa0584e9b51976.

POOL_TYPES = {
    "bf16": np.uint16, "fp16": np.int16, "fp32": np.float32, "int8": np.int8, "int4": np.uint8,
}  # fmt: skip
"""The numpy type of a pool by the store's dtype: bf16 and fp16 as bits, told apart by the sign."""

JOB = 64  # 64-bit numbers of a job, and of its two semaphores
_LEFT, _UNDONE = 0, 8  # items, in cache lines of their own
_ITEMS, _KIND, _X, _OUT, _ROWS, _BLOCKS, _FIRST, _END = range(16, 24)
_GO, _DONE = 32, 48
_CHUNKS, _RANGES, _SUMS = range(3)
_MANY = 16  # rows for each thread, from which on threads share rows instead of chunks
_COLUMNS = 1024  # of an item of sums
_SMALL = 1 << 17  # weights of a call that is not worth handing over: some 10 us

_JIT_OPTIONS: Any = {"nogil": True, "error_model": "numpy"}


def _compiled(function: Callable[..., Any]) -> Any:
    """Compile a function at its first call, which takes seconds, and cache the code on disk.

    Only functions of a module can be cached: a closure is another object in every process.
    """
    try:
        return njit(function, cache=True, **_JIT_OPTIONS)
    except RuntimeError:  # no folder can be written to
        return njit(function, **_JIT_OPTIONS)


@register_jitable(**_JIT_OPTIONS)
def _rows(
    pool: Any, rest: Any, shape: Any, constants: Any, table: Any, scratch: Any, x: int, out: int,
    blocks: int, first: int, last: int,
) -> None:  # fmt: skip
    """Add all blocks to rows [first, last) of out."""
    d, chunk = shape[0], shape[7]
    for b in range(blocks):
        rows = min(last, table[1, b]) - first
        if rows > 0:
            for begin in range(0, table[2, b], chunk):
                add_chunk(
                    pool, rest, shape, constants, table[0, b], begin,
                    min(begin + chunk, table[2, b]), x + 4 * first * d, rows,
                    out + 4 * first * d, scratch,
                )  # fmt: skip


@register_jitable(**_JIT_OPTIONS)
def _take(
    pool: Any, rest: Any, shape: Any, constants: Any, table: Any, sums: Any, scratch: Any, job: Any
) -> bool:
    """Compute items of the job until none is left; return whether the last one ended here."""
    d, each, chunk = shape[0], -(-shape[1] // shape[7]), shape[7]
    last = False
    while True:
        left = count(address(job) + 8 * _LEFT, -1)
        if left <= 0:
            return last
        item, kind, all_rows = job[_ITEMS] - left, job[_KIND], job[_ROWS]
        if kind == _RANGES:
            share = -(-all_rows // job[_ITEMS])
            begin = min(item * share, all_rows)
            _rows(
                pool, rest, shape, constants, table, scratch, job[_X], job[_OUT], job[_BLOCKS],
                begin, min(begin + share, all_rows),
            )  # fmt: skip
        elif kind == _CHUNKS:
            b, k = divmod(job[_FIRST] + item, each)
            rows, begin = table[1, b], k * chunk
            into = address(sums) + 4 * item * all_rows * d
            if begin < table[2, b]:
                clear(into, rows * d)
                add_chunk(
                    pool, rest, shape, constants, table[0, b], begin,
                    min(begin + chunk, table[2, b]), job[_X], rows, into, scratch,
                )  # fmt: skip
        else:
            column = item * _COLUMNS
            size = min(_COLUMNS, d - column)
            for n in range(job[_END] - job[_FIRST]):
                b, k = divmod(job[_FIRST] + n, each)
                if k * chunk < table[2, b]:
                    for r in range(table[1, b]):
                        more = address(sums) + 4 * ((n * all_rows + r) * d + column)
                        increase(job[_OUT] + 4 * (r * d + column), more, size)
        last = count(address(job) + 8 * _UNDONE, -1) == 1


@_compiled
def prepare(job: Any) -> None:
    """Make a job's semaphores."""
    start(address(job) + 8 * _GO)
    start(address(job) + 8 * _DONE)


@_compiled
def end(job: Any, helpers: int) -> None:
    """Let all helper threads end."""
    job[_ITEMS] = 0
    for _ in range(helpers):
        post(address(job) + 8 * _GO)


@register_jitable(**_JIT_OPTIONS)
def _share(
    pool: Any, rest: Any, shape: Any, constants: Any, table: Any, sums: Any, scratch: Any, job: Any,
    items: int, helpers: int,
) -> None:  # fmt: skip
    """Compute items of the job's kind together with the helper threads, and wait for all."""
    job[_ITEMS] = items
    assign(address(job) + 8 * _UNDONE, items)
    assign(address(job) + 8 * _LEFT, items)  # last: a helper that wakes up late may take one now
    for _ in range(min(helpers, items - 1)):
        post(address(job) + 8 * _GO)
    if not _take(pool, rest, shape, constants, table, sums, scratch, job):
        wait(address(job) + 8 * _DONE)


@_compiled
def run(
    x: Any, pool: Any, rest: Any, shape: Any, constants: Any, table: Any, blocks: int, out: Any,
    sums: Any, scratch: Any, job: Any, helpers: int,
) -> None:  # fmt: skip
    """Add blocks to out, in turn.

    shape: int64 [d_model, neurons of a block, projections, numbers of the pool in a matrix, the
    number of rest behind all matrices, whether there are biases, the activation's kind, neurons of
    a chunk]; constants: of the activation. table: int64 [3, blocks]: a block's slot, how many
    leading rows use it, its neurons. sums: float32 [any], for the sums of chunks. scratch: float32,
    of this thread. job: int64 [JOB], shared with so many helper threads.

    helpers: -1: be one of them, and return at the `end`. That is no function of its own, because
    both would hold all of the code above, which takes seconds to compile.
    """
    while helpers < 0:
        wait(address(job) + 8 * _GO)
        if job[_ITEMS] == 0:
            return
        if _take(pool, rest, shape, constants, table, sums, scratch, job):
            post(address(job) + 8 * _DONE)
    rows, d = x.shape
    job[_X], job[_OUT], job[_ROWS], job[_BLOCKS] = address(x), address(out), rows, blocks
    items = blocks * -(-shape[1] // shape[7])
    if helpers == 0 or items * shape[7] * d < _SMALL:
        _rows(
            pool, rest, shape, constants, table, scratch, address(x), address(out), blocks, 0, rows
        )
        return
    room = len(sums) // (rows * d)
    if rows >= _MANY * (helpers + 1) or room < 2:
        job[_KIND] = _RANGES
        _share(pool, rest, shape, constants, table, sums, scratch, job, helpers + 1, helpers)
        return
    for first in range(0, items, room):
        job[_FIRST], job[_END], job[_KIND] = first, min(first + room, items), _CHUNKS
        size = job[_END] - first
        _share(pool, rest, shape, constants, table, sums, scratch, job, size, helpers)
        job[_KIND], size = _SUMS, -(-d // _COLUMNS)
        _share(pool, rest, shape, constants, table, sums, scratch, job, size, helpers)


@_compiled
def weigh(sums: Any, weights: Any, rows: Any, out: Any) -> None:
    """Add sums times weights to out[rows], rounded in between; ``rows`` are distinct."""
    for i in range(len(rows)):
        row, into, weight = sums[i], out[rows[i]], weights[i]
        for j in range(len(row)):
            into[j] += row[j] * weight
