"""The inner loops of the cpu device: some rows times some neurons, in vector instructions.

The order of additions is the same for any number of rows and neurons at once, so a row's result
depends on neither. `dots` has vectors of partial sums for a row and a neuron, two or four by turns,
whose lanes are added at the end, and then takes what is left of the columns one by one. `adds` adds
to each column the neurons in turn.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from numba import types
from numba.core import cgutils
from numba.extending import intrinsic

from crisp.hw.devices.cpu.vectors import (
    BYTE,
    FLOAT,
    LANES,
    LONG,
    load,
    multiply_add,
    plus,
    prefetch,
    spread,
    store,
    total,
    vector,
    zeros,
)
from crisp.hw.devices.cpu.weights import WeightReader
from crisp.model.quantization import GROUP

_LINE = 64  # bytes
_tuple: Any = types.UniTuple
_fill: Any = cgutils.memset
_variable: Any = cgutils.alloca_once_value  # on the stack, for a loop to add to


def dots(rows: int, neurons: int) -> Any:
    """Build the numba intrinsic of the dot products of some rows with some neurons.

    ``(pool, x, w, scales, d)`` -> rows * neurons float32: x w^T, a row's together. pool is there
    for its type. x, w, scales: addresses of rows of d float32, of neurons of d weights, and of
    their groups' scales in float32, if they have groups: all one behind the other.
    """

    def typed(context: Any, pool: Any, x: Any, w: Any, scales: Any, d: Any) -> Any:
        def code(context: Any, builder: Any, signature: Any, args: Any) -> Any:
            read, b = WeightReader(pool.dtype), builder
            _, x, w, scales, d = args
            turns = read.turns
            sums = [
                [[_variable(b, zeros(LANES)) for _ in range(turns)] for _ in range(neurons)]
                for _ in range(rows)
            ]

            def step(column: Any, ahead: bool) -> None:
                numbers = [
                    [
                        load(b, _row(b, x, d, r, column, v), vector(FLOAT, LANES), 4)
                        for v in range(0, read.step, LANES)
                    ]
                    for r in range(rows)
                ]
                for i in range(neurons):
                    place = _weight(b, read, w, d, i, column)
                    if rows == 1 and ahead:
                        _fetch(b, place, read.ahead, read.bytes)
                    weights, by = read.vectors(b, place, _scale(b, scales, d, i, column))
                    for r in range(rows):
                        mine = sums[r][i]
                        parts = [zeros(LANES)] * 2 if by else [b.load(place) for place in mine]
                        for v, weight in enumerate(weights):
                            into = v % len(parts)
                            parts[into] = multiply_add(b, numbers[r][v], weight, parts[into])
                        if by:
                            parts = [multiply_add(b, b.fadd(*parts), by, b.load(mine[0]))]
                        for part, kept in zip(parts, mine, strict=True):
                            b.store(part, kept)

            done = _steps(b, read, d, step)
            found = []
            for r in range(rows):
                for i in range(neurons):
                    parts = [b.load(place) for place in sums[r][i]]
                    while len(parts) > 1:
                        parts = [b.fadd(*parts[k : k + 2]) for k in range(0, len(parts), 2)]
                    found.append(total(b, parts[0]))
            if not read.grouped:
                places = [_variable(b, one) for one in found]
                with cgutils.for_range(b, b.sub(d, done)) as loop:
                    column = b.add(done, loop.index)
                    for i in range(neurons):
                        weight = read.single(b, _weight(b, read, w, d, i, column))
                        for r in range(rows):
                            place = places[r * neurons + i]
                            number = load(b, _row(b, x, d, r, column, 0), FLOAT, 4)
                            b.store(multiply_add(b, number, weight, b.load(place)), place)
                found = [b.load(place) for place in places]
            return context.make_tuple(b, signature.return_type, found)

        return _tuple(types.float32, rows * neurons)(pool, x, w, scales, d), code

    return intrinsic(typed)


def adds(rows: int, neurons: int) -> Any:
    """Build the numba intrinsic that adds some neurons' share to some rows of sums.

    ``(pool, sums, across, hidden, between, w, scales, stride, columns)``: sums += hidden w. pool is
    there for its type. sums: address of the rows' sums in float32, ``across`` numbers apart.
    hidden: address of what the neurons are multiplied by in float32: rows are ``between`` numbers
    apart. w: address of the neurons' weights of these ``columns`` columns; scales: of these
    columns' groups; stride: columns from one neuron to the next.
    """

    def typed(
        context: Any, pool: Any, sums: Any, across: Any, hidden: Any, between: Any, w: Any,
        scales: Any, stride: Any, columns: Any,
    ) -> Any:  # fmt: skip
        def code(context: Any, builder: Any, signature: Any, args: Any) -> Any:
            read, b = WeightReader(pool.dtype), builder
            _, sums, across, hidden, between, w, scales, stride, columns = args
            shares = [
                [load(b, plus(b, plus(b, hidden, between, 4 * r), 4 * i), FLOAT, 4)
                 for i in range(neurons)]
                for r in range(rows)
            ]  # fmt: skip
            wide = [[spread(b, one, LANES) for one in row] for row in shares]

            def step(column: Any, ahead: bool) -> None:
                if rows == 1 and ahead:
                    # one behind the other over all neurons, though they are read side by side
                    begin = _weight(b, read, w, stride, 0, b.mul(column, LONG(neurons)))
                    _fetch(b, begin, read.ahead, read.bytes * neurons)
                weights, by = [], []
                for i in range(neurons):
                    place = _weight(b, read, w, stride, i, column)
                    read_here = read.vectors(b, place, _scale(b, scales, stride, i, column))
                    weights.append(read_here[0])
                    by.append(read_here[1])
                times = [
                    [
                        b.fmul(one, scale) if scale else one
                        for one, scale in zip(row, by, strict=True)
                    ]
                    for row in wide
                ]
                for v in range(read.step // LANES):
                    for r in range(rows):
                        place = _row(b, sums, across, r, column, v * LANES)
                        value = load(b, place, vector(FLOAT, LANES), 4)
                        for i in range(neurons):
                            value = multiply_add(b, times[r][i], weights[i][v], value)
                        store(b, value, place)

            done = _steps(b, read, columns, step)
            if not read.grouped:
                with cgutils.for_range(b, b.sub(columns, done)) as loop:
                    column = b.add(done, loop.index)
                    singles = [
                        read.single(b, _weight(b, read, w, stride, i, column))
                        for i in range(neurons)
                    ]
                    for r in range(rows):
                        place = _row(b, sums, across, r, column, 0)
                        value = load(b, place, FLOAT, 4)
                        for i in range(neurons):
                            value = multiply_add(b, shares[r][i], singles[i], value)
                        store(b, value, place)
            return context.get_dummy_value()

        kinds = pool, sums, across, hidden, between, w, scales, stride, columns
        return types.void(*kinds), code

    return intrinsic(typed)


def _steps(b: Any, read: WeightReader, columns: Any, step: Callable[[Any, bool], None]) -> Any:
    """Build loops over a whole number of steps of the columns; return how many columns they are.

    Two steps of half a cache line each are one turn of a loop, which prefetches the line once.
    """
    together = max(1, _LINE // read.bytes)
    size = read.step * together
    turns = b.udiv(columns, LONG(size))
    done = b.mul(turns, LONG(size))
    with cgutils.for_range(b, turns) as loop:
        for k in range(together):
            step(plus(b, b.mul(loop.index, LONG(size)), read.step * k), k == 0)
    if together > 1:
        more = b.udiv(b.sub(columns, done), LONG(read.step))
        with cgutils.for_range(b, more) as loop:
            step(plus(b, done, loop.index, read.step), False)
        done = plus(b, done, more, read.step)
    return done


def _fetch(b: Any, address: Any, ahead: int, size: int) -> None:
    """Prefetch as many bytes as a turn of a loop reads, so many bytes ahead of an address."""
    for line in range(0, size, _LINE):
        prefetch(b, plus(b, address, ahead + line))


def _row(builder: Any, first: Any, apart: Any, row: int, column: Any, more: int) -> Any:
    """Return the address of a column of a row of float32."""
    place = plus(builder, plus(builder, first, column, 4), 4 * more)
    return plus(builder, place, apart, 4 * row) if row else place


def _weight(
    builder: Any, read: WeightReader, first: Any, apart: Any, neuron: int, column: Any
) -> Any:
    """Return the address of a neuron's weights from a column on."""
    place = plus(builder, column, apart, neuron) if neuron else column
    if read.packed:
        return plus(builder, first, builder.udiv(place, LONG(2)))
    return plus(builder, first, place, read.size)


def _scale(builder: Any, first: Any, apart: Any, neuron: int, column: Any) -> Any:
    """Return the address of the scale of a neuron's group that begins at a column."""
    place = plus(builder, column, apart, neuron) if neuron else column
    return plus(builder, first, builder.udiv(place, LONG(GROUP)), 4)


def _increasing(context: Any, into: Any, more: Any, count: Any) -> Any:
    def code(context: Any, builder: Any, signature: Any, args: Any) -> Any:
        b, (into, more, count) = builder, args
        steps = b.udiv(count, LONG(LANES))
        for kind, begin, size, turns in (
            (vector(FLOAT, LANES), LONG(0), LANES, steps),
            (FLOAT, b.mul(steps, LONG(LANES)), 1, b.urem(count, LONG(LANES))),
        ):
            with cgutils.for_range(b, turns) as loop:
                at = plus(b, begin, loop.index, size)
                place = plus(b, into, at, 4)
                store(
                    b,
                    b.fadd(load(b, place, kind, 4), load(b, plus(b, more, at, 4), kind, 4)),
                    place,
                )
        return context.get_dummy_value()

    return types.void(types.int64, types.int64, types.int64), code


increase: Any = intrinsic(_increasing)
"""``increase(into, more, count)``: add ``count`` float32 at an address to those at another."""


def _clearing(context: Any, place: Any, count: Any) -> Any:
    def code(context: Any, builder: Any, signature: Any, args: Any) -> Any:
        size = builder.mul(args[1], LONG(4))
        _fill(builder, builder.inttoptr(args[0], BYTE.as_pointer()), size, 0)
        return context.get_dummy_value()

    return types.void(types.int64, types.int64), code


clear: Any = intrinsic(_clearing)
"""``clear(place, count)``: make ``count`` float32 at an address 0."""
