"""Let the threads of a computation wait for each other, in compiled code without Python's lock."""

from __future__ import annotations

from platform import machine
from typing import Any

from llvmlite import ir
from numba import types
from numba.extending import intrinsic, register_jitable

from crisp.hw.devices.cpu.vectors import LONG, named

SEMAPHORE = 8  # 64-bit numbers: more than any C library's sem_t
_SPINS = 200  # looks before a thread sleeps: some 10 us, for waking up takes longer than that

_call: Any = types.ExternalFunction
_start, _post, _try, _sleep = (
    _call("sem_init", types.int32(types.int64, types.int32, types.int32)),
    *(_call(f"sem_{name}", types.int32(types.int64)) for name in ("post", "trywait", "wait")),
)


def _atomic(operation: str) -> Any:
    """Build the intrinsic of an operation on the int64 at an address, which no other interrupts.

    What other threads wrote before theirs is seen after it.
    """

    def typed(context: Any, place: Any, value: Any) -> Any:
        def code(context: Any, builder: Any, signature: Any, args: Any) -> Any:
            pointer = builder.inttoptr(args[0], LONG.as_pointer())
            return builder.atomic_rmw(operation, pointer, args[1], "seq_cst")

        return types.int64(types.int64, types.int64), code

    return intrinsic(typed)


count, assign = _atomic("add"), _atomic("xchg")
"""``(address, value)``: add to the int64 at an address, or replace it; returns what it was."""


def _relaxing(context: Any) -> Any:
    def code(context: Any, builder: Any, signature: Any, args: Any) -> Any:
        if machine() == "x86_64":
            kind = ir.FunctionType(ir.VoidType(), [])
            builder.call(named(builder, kind, "llvm.x86.sse2.pause"), [])
        return context.get_dummy_value()

    return types.void(), code


_relax: Any = intrinsic(_relaxing)


@register_jitable
def start(semaphore: int) -> None:
    """Make a semaphore, of count 0, at an address."""
    _start(semaphore, 0, 0)


@register_jitable
def post(semaphore: int) -> None:
    """Let one thread that waits, or will wait, go on."""
    _post(semaphore)


@register_jitable
def wait(semaphore: int) -> None:
    """Wait until a thread posts."""
    for _ in range(_SPINS):
        if _try(semaphore) == 0:
            return
        _relax()
    while _sleep(semaphore) != 0:  # interrupted by a signal
        pass
