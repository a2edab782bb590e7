"""LLVM instructions on vectors, for the cpu device's kernels, and what the processor has.

Numba's own loops end at eight numbers a vector on processors with AVX-512 (LLVM prefers 256 bits
there), begin with a check of overlap, and prefetch nothing. So the kernels' inner loops are built
here, of vectors as long as the processor's registers. LLVM splits them where it has shorter ones.
"""

from __future__ import annotations

from platform import machine
from typing import Any

from llvmlite import binding, ir
from numba import config, types
from numba.core import cgutils
from numba.extending import intrinsic

BYTE, SHORT, INT, LONG = (ir.IntType(bits) for bits in (8, 16, 32, 64))
FLOAT = ir.FloatType()


def has(feature: str) -> bool:
    """Return whether the processor that numba compiles for has an instruction set of x86-64."""
    if machine() != "x86_64":
        return False
    chosen: str | None = vars(config)["CPU_FEATURES"]  # made as numba starts
    if chosen is not None:  # by NUMBA_CPU_NAME or NUMBA_CPU_FEATURES
        return f"+{feature}" in chosen.split(",")
    return bool(binding.get_host_cpu_features().get(feature))


WIDE = has("avx512f")  # registers of sixteen float32, and 32 of them
LANES = 16 if WIDE else 8


def vector(kind: Any, lanes: int) -> Any:
    """Return the type of a vector."""
    return ir.VectorType(kind, lanes)


def constant(value: float, kind: Any, lanes: int) -> Any:
    """Return a vector with a constant in all lanes."""
    return ir.Constant(vector(kind, lanes), [value] * lanes)


def zeros(lanes: int) -> Any:
    """Return a vector of zeros."""
    return ir.Constant(vector(FLOAT, lanes), None)


def plus(builder: Any, place: Any, step: Any, times: Any = 1) -> Any:
    """Return the integer place + step * times, folding constants."""
    if isinstance(step, int) and isinstance(times, int):
        step, times = step * times, 1
    if isinstance(step, int):
        step = LONG(step)
    if isinstance(times, int) and times == 1:
        return builder.add(place, step)
    return builder.add(place, builder.mul(step, LONG(times) if isinstance(times, int) else times))


def load(builder: Any, address: Any, kind: Any, align: int) -> Any:
    """Return what is at an address."""
    value = builder.load(builder.inttoptr(address, kind.as_pointer()))
    value.align = align
    return value


def store(builder: Any, value: Any, address: Any) -> None:
    """Put a float32, or a vector of them, at an address."""
    builder.store(value, builder.inttoptr(address, value.type.as_pointer())).align = 4


def named(builder: Any, kind: Any, name: str) -> Any:
    """Return one of LLVM's own functions."""
    insert: Any = cgutils.get_or_insert_function
    return insert(builder.module, kind, name)


def prefetch(builder: Any, address: Any) -> None:
    """Ask for a cache line, to be brought into the second level's cache."""
    pointer = BYTE.as_pointer()
    kind = ir.FunctionType(ir.VoidType(), [pointer, INT, INT, INT])
    function = named(builder, kind, "llvm.prefetch.p0")
    builder.call(function, [builder.inttoptr(address, pointer), INT(0), INT(2), INT(1)])


def multiply_add(builder: Any, a: Any, b: Any, to: Any) -> Any:
    """Return a * b + to, rounded once where the processor can."""
    product = builder.fmul(a, b, flags=("contract",))
    return builder.fadd(to, product, flags=("contract",))


def spread(builder: Any, number: Any, lanes: int) -> Any:
    """Return a vector with a number in all lanes."""
    one = builder.insert_element(ir.Constant(vector(FLOAT, lanes), ir.Undefined), number, INT(0))
    return builder.shuffle_vector(one, one, ir.Constant(vector(INT, lanes), None))


def total(builder: Any, value: Any) -> Any:
    """Return the sum of all lanes: halves are added until one number is left."""
    lanes = value.type.count
    while lanes > 1:
        lanes //= 2
        low, high = (
            builder.shuffle_vector(
                value, value, ir.Constant(vector(INT, lanes), list(range(i, i + lanes)))
            )
            for i in (0, lanes)
        )
        value = builder.fadd(low, high)
    return builder.extract_element(value, INT(0))


def widen_half(builder: Any, bits: Any) -> Any:
    """Return the float16 of 16 ``bits``, or of a vector of them, as float32, exactly."""
    lanes = bits.type.count if isinstance(bits.type, ir.VectorType) else 0

    def kind(single: Any) -> Any:
        return vector(single, lanes) if lanes else single

    def number(value: Any, single: Any) -> Any:
        return constant(value, single, lanes) if lanes else single(value)

    if machine() != "x86_64" or has("f16c"):  # of others, those that numba knows have it
        return builder.fpext(builder.bitcast(bits, kind(ir.HalfType())), kind(FLOAT))
    # Without that instruction LLVM calls a function that numba does not have, and aborts. So the
    # exponent and fraction are shifted into place; 2^112 makes up for the exponents' biases, of
    # subnormal numbers too. Infinities and what is no number get the highest exponent.
    wide = builder.zext(bits, kind(INT))
    sign = builder.shl(builder.and_(wide, number(0x8000, INT)), number(16, INT))
    shifted = builder.shl(builder.and_(wide, number(0x7FFF, INT)), number(13, INT))
    finite = builder.fmul(builder.bitcast(shifted, kind(FLOAT)), number(2.0**112, FLOAT))
    beyond = builder.icmp_unsigned(">=", shifted, number(0x7C00 << 13, INT))
    high = builder.or_(shifted, number(0x7F800000, INT))
    size = builder.select(beyond, high, builder.bitcast(finite, kind(INT)))
    return builder.bitcast(builder.or_(sign, size), kind(FLOAT))


def _address(context: Any, array: Any) -> Any:
    def code(context: Any, builder: Any, signature: Any, args: Any) -> Any:
        data = context.make_array(signature.args[0])(context, builder, args[0]).data
        return builder.ptrtoint(data, LONG)

    return types.int64(array), code


address: Any = intrinsic(_address)
"""``address(array)`` -> int64: where an array's numbers begin, in compiled code."""


def _widening(context: Any, bits: Any) -> Any:
    return types.float32(bits), lambda context, builder, signature, args: widen_half(builder, *args)


half: Any = intrinsic(_widening)
"""``half(bits)`` -> float32: the float16 of 16 bits, in compiled code."""
