"""Products of groups of 64 quantised weights with float32, as LLVM vector instructions.

A group is too short for one of numba's loops, which takes as long to begin and end as it runs. So
this builds LLVM IR, eight numbers at a time, which LLVM splits into the vectors that a processor
has. Weights are widened in registers and used for several rows at once; a row's result does not
depend on how many rows those are.

An int8 store's pool is of int8, an int4 store's of uint8. Of int4 eight bytes are read at a time,
their low halves and then the high ones: sixteen columns in the order of `SIXTEEN`, which x and the
sums have too.
"""

from __future__ import annotations

from platform import machine
from typing import Any

from llvmlite import binding, ir
from numba import config, types
from numba.core import cgutils
from numba.extending import intrinsic

from crisp.model.quantization import GROUP

SIXTEEN = (0, 2, 4, 6, 8, 10, 12, 14, 1, 3, 5, 7, 9, 11, 13, 15)
"""The columns of eight bytes of int4, in the order in which they are computed."""

_LANES = 8
_FLOAT, _INT, _LONG = ir.FloatType(), ir.IntType(32), ir.IntType(64)
_FLOATS, _INTS = ir.VectorType(_FLOAT, _LANES), ir.VectorType(_INT, _LANES)
_BYTES = ir.VectorType(ir.IntType(8), _LANES)
_NONE = ir.Constant(_FLOATS, None)
_variable: Any = cgutils.alloca_once_value  # on the stack, for a loop to add to
_tuple: Any = types.UniTuple


def _dots(rows: int, neurons: int) -> Any:
    """Build the numba intrinsic of the dot products of some rows with some neurons."""

    def typed(
        context: Any, x: Any, row: Any, pool: Any, at: Any, halves: Any, scales: Any, groups: Any
    ) -> Any:
        def code(context: Any, builder: Any, signature: Any, args: Any) -> Any:
            x, row, pool, at, halves, scales, groups = args
            kinds = signature.args
            read = _Read(builder, kinds[2])
            x = _data(context, builder, kinds[0], x)
            first = builder.gep(_data(context, builder, kinds[2], pool), [at])
            scale = builder.gep(_data(context, builder, kinds[4], halves), [scales])
            pairs = [(r, i) for r in range(rows) for i in range(neurons)]
            sums = [_variable(builder, _NONE) for _ in pairs]
            with cgutils.for_range(builder, groups) as loop:
                parts: list[tuple[Any, Any]] = [(_NONE, _NONE)] * len(pairs)
                place = [_step(builder, loop.index, groups, i) for i in range(neurons)]
                of_row = [_step(builder, loop.index, groups, r, row) for r in range(rows)]
                numbers = [_scaled(builder, x, where, GROUP) for where in of_row]
                weights = [_scaled(builder, first, where, read.bytes) for where in place]
                for k in range(0, GROUP, 2 * _LANES):
                    wide = [read(_at(builder, begin, k * read.bytes // GROUP)) for begin in weights]
                    for n, (r, i) in enumerate(pairs):
                        low, high = (
                            _floats(builder, _at(builder, numbers[r], k + j)) for j in (0, _LANES)
                        )
                        parts[n] = (
                            _added(builder, low, wide[i][0], parts[n][0]),
                            _added(builder, high, wide[i][1], parts[n][1]),
                        )
                by = [_spread(builder, _half(builder, builder.gep(scale, [p]))) for p in place]
                for n, (_, i) in enumerate(pairs):
                    whole = builder.fadd(*read.true(parts[n]))
                    builder.store(_added(builder, whole, by[i], builder.load(sums[n])), sums[n])
            totals = [_total(builder, builder.load(one)) for one in sums]
            return context.make_tuple(builder, signature.return_type, totals)

        result = _tuple(types.float32, rows * neurons)
        return result(x, row, pool, at, halves, scales, groups), code

    return intrinsic(typed)


dots_of_rows, dots_of_row, dot = _dots(2, 2), _dots(1, 4), _dots(1, 1)
"""``(x, row, pool, at, halves, scales, groups)`` -> float32 x w^T: of two rows and two neurons, of
one row and four neurons, of one row and one neuron.

x: [r, d_model], of which the rows from ``row`` on are taken; pool: a slot, in which weights begin
at ``at``; halves: the slot as int16, in which scales begin at ``scales``; groups: of one neuron.
"""


def _adds(rows: int, neurons: int) -> Any:
    """Build the numba intrinsic that adds some neurons' share to some rows of the result."""

    def typed(
        context: Any, tile: Any, hidden: Any, row: Any, neuron: Any, pool: Any, at: Any,
        halves: Any, scales: Any, groups: Any, count: Any,
    ) -> Any:  # fmt: skip
        def code(context: Any, builder: Any, signature: Any, args: Any) -> Any:
            tile, hidden, row, neuron, pool, at, halves, scales, groups, count = args
            kinds = signature.args
            read = _Read(builder, kinds[4])
            tile = context.make_array(kinds[0])(context, builder, tile)
            hidden = context.make_array(kinds[1])(context, builder, hidden)
            first = builder.gep(_data(context, builder, kinds[4], pool), [at])
            scale = builder.gep(_data(context, builder, kinds[6], halves), [scales])
            wide = builder.extract_value(tile.shape, 1)
            each = builder.mul(*(builder.extract_value(hidden.shape, i) for i in (1, 2)))
            mids = [
                [
                    builder.load(_at(builder, hidden.data, _step(builder, neuron, each, r, row, i)))
                    for i in range(neurons)
                ]
                for r in range(rows)
            ]
            with cgutils.for_range(builder, count) as loop:
                place = [_step(builder, loop.index, groups, i) for i in range(neurons)]
                weights = [_scaled(builder, first, where, read.bytes) for where in place]
                column = builder.mul(loop.index, ir.Constant(_LONG, GROUP))
                into = [
                    _at(builder, tile.data, _step(builder, column, wide, r)) for r in range(rows)
                ]
                by = [_half(builder, builder.gep(scale, [where])) for where in place]
                shares = [
                    [_spread(builder, builder.fmul(m, s)) for m, s in zip(mid, by, strict=True)]
                    for mid in mids
                ]
                for k in range(0, GROUP, 2 * _LANES):
                    sums: list[tuple[Any, Any]] = [(_NONE, _NONE)] * rows
                    for i, begin in enumerate(weights):
                        low, high = read(_at(builder, begin, k * read.bytes // GROUP))
                        sums = [
                            (_added(builder, share[i], low, a), _added(builder, share[i], high, b))
                            for share, (a, b) in zip(shares, sums, strict=True)
                        ]
                    for r, both in enumerate(sums):
                        for j, more in zip((0, _LANES), read.true(both), strict=True):
                            _add(builder, more, _at(builder, into[r], k + j))
            return context.get_dummy_value()

        result = types.void(tile, hidden, row, neuron, pool, at, halves, scales, groups, count)
        return result, code

    return intrinsic(typed)


add_rows, add_row, add_one = _adds(4, 8), _adds(1, 8), _adds(1, 1)
"""``(tile, hidden, row, neuron, pool, at, halves, scales, groups, count)``: tile += hidden w, of
four rows and eight neurons, of one row and eight neurons, of one row and one neuron.

tile: float32 [rows, columns], ``count`` groups of columns; hidden: [r, 2, block], of which the
first of the two and rows and neurons from ``row`` and ``neuron`` on are taken; pool: a slot, where
the first neuron's weights for these columns begin at ``at``; halves and scales: likewise its
scales; groups: of a whole neuron.
"""


class _Read:
    """Builds reads of 16 neighbouring weights as two vectors, in the order of `SIXTEEN`."""

    def __init__(self, builder: Any, pool: Any) -> None:
        self._builder, self._packed = builder, pool.dtype == types.uint8
        self.bytes = GROUP // 2 if self._packed else GROUP

    def __call__(self, pointer: Any) -> tuple[Any, Any]:
        """Return the 16 weights at a pointer to bytes; int4's times 2^28 and 2^4: fewer shifts."""
        builder = self._builder
        if self._packed:
            both = builder.sext(_load(builder, pointer, _BYTES, 1), _INTS)
            parts = (
                builder.shl(both, ir.Constant(_INTS, [28] * _LANES)),
                builder.and_(both, ir.Constant(_INTS, [-16] * _LANES)),
            )
        else:
            parts = tuple(_load(builder, _at(builder, pointer, i), _BYTES, 1) for i in (0, _LANES))
        return builder.sitofp(parts[0], _FLOATS), builder.sitofp(parts[1], _FLOATS)

    def true(self, sums: tuple[Any, Any]) -> tuple[Any, Any]:
        """Return sums over weights as they were read as sums over the weights themselves."""
        if not self._packed:
            return sums
        low, high = (ir.Constant(_FLOATS, [share] * _LANES) for share in (2.0**-28, 2.0**-4))
        return self._builder.fmul(sums[0], low), self._builder.fmul(sums[1], high)


# -- LLVM instructions -----------------------------------------------------------------------------


def _data(context: Any, builder: Any, kind: Any, array: Any) -> Any:
    return context.make_array(kind)(context, builder, array).data


def _step(builder: Any, at: Any, step: Any, times: int, more: Any = None, extra: int = 0) -> Any:
    """Return at + step * (times + more) + extra."""
    by = ir.Constant(_LONG, times)
    by = by if more is None else builder.add(by, more)
    at = builder.add(at, builder.mul(step, by))
    return builder.add(at, ir.Constant(_LONG, extra)) if extra else at


def _scaled(builder: Any, pointer: Any, index: Any, size: int) -> Any:
    return builder.gep(pointer, [builder.mul(index, ir.Constant(_LONG, size))])


def _at(builder: Any, pointer: Any, offset: Any) -> Any:
    index = ir.Constant(_LONG, offset) if isinstance(offset, int) else offset
    return builder.gep(pointer, [index])


def _load(builder: Any, pointer: Any, kind: Any, align: int) -> Any:
    vector = builder.load(builder.bitcast(pointer, kind.as_pointer()))
    vector.align = align
    return vector


def _floats(builder: Any, pointer: Any) -> Any:
    return _load(builder, pointer, _FLOATS, 4)


def _add(builder: Any, more: Any, pointer: Any) -> None:
    """Add a vector to what is at a pointer."""
    place = builder.bitcast(pointer, _FLOATS.as_pointer())
    builder.store(builder.fadd(_floats(builder, pointer), more), place).align = 4


def _half(builder: Any, pointer: Any) -> Any:
    """Return the float16 at a pointer as float32."""
    return widen_half(builder, builder.load(pointer))


def widen_half(builder: Any, bits: Any) -> Any:
    """Return the float16 of 16 ``bits`` as float32, exactly."""
    if _has_half_conversion():
        return builder.fpext(builder.bitcast(bits, ir.HalfType()), _FLOAT)
    # Without that instruction LLVM calls a function that numba does not have, and aborts. So the
    # exponent and fraction are shifted into place; 2^112 makes up for the exponents' biases, of
    # subnormal numbers too. Infinities and what is no number get the highest exponent.
    wide = builder.zext(bits, _INT)
    sign = builder.shl(builder.and_(wide, _INT(0x8000)), _INT(16))
    shifted = builder.shl(builder.and_(wide, _INT(0x7FFF)), _INT(13))
    finite = builder.fmul(builder.bitcast(shifted, _FLOAT), _FLOAT(2.0**112))
    beyond = builder.icmp_unsigned(">=", shifted, _INT(0x7C00 << 13))
    size = builder.select(
        beyond, builder.or_(shifted, _INT(0x7F800000)), builder.bitcast(finite, _INT)
    )
    return builder.bitcast(builder.or_(sign, size), _FLOAT)


def _has_half_conversion() -> bool:
    """Return whether the processor that numba compiles for widens halves by an instruction."""
    if machine() != "x86_64":
        return True  # of others, those that numba knows have it
    chosen: str | None = vars(config)["CPU_FEATURES"]  # made as numba starts
    if chosen is not None:  # by NUMBA_CPU_NAME or NUMBA_CPU_FEATURES
        return "+f16c" in chosen
    return bool(binding.get_host_cpu_features().get("f16c"))


def _spread(builder: Any, number: Any) -> Any:
    """Return a vector with a number in all lanes."""
    empty = ir.Constant(_FLOATS, ir.Undefined)
    one = builder.insert_element(empty, number, ir.Constant(_INT, 0))
    return builder.shuffle_vector(one, one, ir.Constant(_INTS, None))


def _added(builder: Any, a: Any, b: Any, to: Any) -> Any:
    """Return a * b + to, rounded once where the processor can."""
    product = builder.fmul(a, b, flags=("contract",))
    return builder.fadd(to, product, flags=("contract",))


def _total(builder: Any, vector: Any) -> Any:
    """Return the sum of all lanes."""
    lanes = _LANES
    while lanes > 1:
        lanes //= 2
        kind = ir.VectorType(_INT, lanes)
        low, high = (
            builder.shuffle_vector(vector, vector, ir.Constant(kind, list(range(i, i + lanes))))
            for i in (0, lanes)
        )
        vector = builder.fadd(low, high)
    return builder.extract_element(vector, ir.Constant(_INT, 0))
