"""Rules of plugins: each compiled by itself, and called by its address.

What compiled code knows by number it calls itself; it was compiled before a plugin's rule was
there. So such a rule becomes a C function of whole numbers, and its address a part of the machine.
For a run without plugins that part is None, for which numba compiles no such calls at all: with
them even built-in rules took an eighth longer.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Sequence
from functools import cache
from typing import Any

import numba
import numpy as np
from llvmlite import ir
from numba import cfunc, njit, types
from numba.extending import intrinsic

from crisp.errors import CrispError
from crisp.policy.prefetch import FUTURE, Predict
from crisp.sim.compiling import compiled

_INT = types.int64
_INTS = types.Array(_INT, 1, "C")
_WORD = ir.IntType(64)
carray: Any = numba.carray  # type: ignore[attr-defined]


def _call_address(typing_context: Any, address: Any, arguments: Any) -> Any:
    """Call the function at an address with a tuple of 64-bit numbers; it returns one, too."""

    def generate(context: Any, builder: Any, signature: Any, values: Any) -> Any:
        kind = ir.FunctionType(_WORD, [_WORD] * len(arguments))
        function = builder.inttoptr(values[0], kind.as_pointer())
        given = [builder.extract_value(values[1], place) for place in range(len(arguments))]
        return builder.call(function, given)

    return _INT(address, arguments), generate


def _address_of(typing_context: Any, array: Any) -> Any:
    """Return where an array's first number stands."""

    def generate(context: Any, builder: Any, signature: Any, values: Any) -> Any:
        data = context.make_array(array)(context, builder, values[0]).data
        return builder.ptrtoint(data, _WORD)

    return _INT(array), generate


_as_intrinsic: Callable[[Any], Any] = intrinsic  # typed as it is used, in compiled functions
call_address: Callable[[int, tuple[int, ...]], int] = _as_intrinsic(_call_address)
address_of: Callable[[Any], int] = _as_intrinsic(_address_of)


def _numbers_at(kind: Any) -> Any:
    """Return an intrinsic that takes an address for a pointer to numbers of a kind."""

    numbers: Any = types.CPointer
    numbers = numbers(kind)

    def pointer(typing_context: Any, address: Any) -> Any:
        def generate(context: Any, builder: Any, signature: Any, values: Any) -> Any:
            return builder.inttoptr(values[0], context.get_value_type(numbers))

        return numbers(address), generate

    return intrinsic(pointer)


_ints_at, _shorts_at = _numbers_at(_INT), _numbers_at(types.int16)


@compiled
def evictable(resident: Any, protected: Any, entry: int, low: int, high: int) -> bool:
    """Return whether a victim is in [low, high), has blocks, and is not protected."""
    return low <= entry < high and resident[entry] > 0 and protected[entry] == 0


@cache
def victim_address(rule: Callable[..., int], what: str) -> Any:
    """Return the address of a victim rule, see `crisp.policy.eviction`.

    It takes where resident, protected, last and count begin, their length, low and high.
    """
    choose = _inner(rule, what, [_INTS] * 4 + [_INT] * 2, _is_whole)

    def call(
        resident: int, protected: int, last: int, count: int, size: int, low: int, high: int
    ) -> int:
        entry: int = choose(
            carray(_ints_at(resident), size), carray(_ints_at(protected), size),
            carray(_ints_at(last), size), carray(_ints_at(count), size), low, high,
        )  # fmt: skip
        return entry

    return _outer(call, 7, what)


@cache
def use_address(rule: Callable[..., None], what: str) -> Any:
    """Return the address of a rule that notes the use of an entry.

    It takes where mark, stamp and resident begin, their length, entry, event, low, high and room.
    """
    note = _inner(rule, what, [_INTS] * 3 + [_INT] * 5, _is_none)

    def call(
        mark: int, stamp: int, resident: int, size: int,
        entry: int, event: int, low: int, high: int, room: int,
    ) -> int:  # fmt: skip
        note(
            carray(_ints_at(mark), size), carray(_ints_at(stamp), size),
            carray(_ints_at(resident), size), entry, event, low, high, room,
        )  # fmt: skip
        return 0

    return _outer(call, 9, what)


@cache
def entry_address(rule: Callable[..., None], what: str) -> Any:
    """Return the address of a rule that notes the admission of an entry.

    It takes where mark, stamp and last begin, their length, entry and event.
    """
    note = _inner(rule, what, [_INTS] * 3 + [_INT] * 2, _is_none)

    def call(mark: int, stamp: int, last: int, size: int, entry: int, event: int) -> int:
        note(
            carray(_ints_at(mark), size), carray(_ints_at(stamp), size),
            carray(_ints_at(last), size), entry, event,
        )  # fmt: skip
        return 0

    return _outer(call, 6, what)


@cache
def key_address(rule: Callable[..., tuple[int, int]], what: str) -> Any:
    """Return the address of an order's key function.

    It takes width, load, compute and random key, and where the two parts of the key are to stand.
    """
    key = _inner(rule, what, [_INT] * 4, _is_pair)

    def call(
        width: int, load: int, compute: int, random_key: int, first_at: int, second_at: int
    ) -> int:
        first, second = key(width, load, compute, random_key)
        carray(_ints_at(first_at), 1)[0] = first
        carray(_ints_at(second_at), 1)[0] = second
        return 0

    return _outer(call, 6, what)


@cache
def prefetch_address(rule: Predict, source: str, what: str) -> Any:
    """Return the address of a prefetch rule.

    It takes where the guesses [tokens, rows, k] begin, their shape, the row, the step's first token
    and end; where the batch's entries begin, the next event's first and end among them, and the
    first entry of its row; where the experts used before and those to fetch stand, their numbers
    first; and how many experts there are. It returns -1 for an expert that there is not.
    """
    # what is predicted, and what was used before; how many are wanted is known when it has said so
    predict = _inner(rule, what, [_INTS] * 2, _is_sequence)
    future, asks = source == FUTURE, source != ""

    def call(
        guess_at: int, tokens: int, rows: int, k: int, row: int, first_token: int, end_token: int,
        entry_at: int, first: int, end: int, base: int, used_at: int, wanted_at: int, experts: int,
    ) -> int:  # fmt: skip
        predicted = np.empty(0, np.int64)
        if future:
            predicted = carray(_ints_at(entry_at), end)[first:].copy() - base
        elif asks:
            guess = carray(_shorts_at(guess_at), (tokens, rows, k))
            predicted = np.empty((end_token - first_token) * k, np.int64)
            for token in range(first_token, end_token):
                for rank in range(k):
                    predicted[(token - first_token) * k + rank] = guess[token, row, rank]
        used = carray(_ints_at(used_at), 1 + experts)
        wanted = carray(_ints_at(wanted_at), 1 + experts)
        count = 0
        for expert in predict(predicted, used[1 : 1 + used[0]].copy()):
            if expert >= experts:
                return -1
            place = 1
            while place <= count and wanted[place] != expert:
                place += 1
            if place > count and expert >= 0:
                wanted[place] = expert
                count = place
        wanted[0] = count
        return count

    return _outer(call, 14, what)


def _inner(
    rule: Callable[..., Any], what: str, kinds: Sequence[Any], good: Callable[[Any], str]
) -> Any:
    """Return a plugin's function compiled; good: what was expected of its result, if it is not."""
    function: Any = njit(rule)
    signature = tuple(kinds)
    try:
        function.compile(signature)
    except Exception as error:  # numba raises what it finds
        raise _not_compiled(what, _reason(error)) from error
    expected = good(function.overloads[signature].signature.return_type)
    if expected:
        raise _not_compiled(what, f"it returns another thing than {expected}")
    return function


def _outer(call: Callable[..., int], n: int, what: str) -> Any:
    try:
        return cfunc(_INT(*[_INT] * n))(call)
    except Exception as error:
        raise _not_compiled(what, _reason(error)) from error


def _not_compiled(what: str, reason: str) -> CrispError:
    return CrispError(f"engine fast: cannot compile {what}: {reason}; use --engine simpy")


def _reason(error: Exception) -> str:
    """Return the first line of numba's that says something."""
    plain = re.sub(r"\x1b\[[0-9;]*m", "", str(error))
    lines = [line.strip() for line in plain.splitlines()]
    lines = [line for line in lines if line and not line.startswith("Failed in ")]
    return lines[0].rstrip(".") if lines else type(error).__name__


def _is_whole(kind: Any) -> str:
    return "" if isinstance(kind, types.Integer) else "a whole number"


def _is_none(kind: Any) -> str:
    return "" if kind == types.none else "nothing"


def _is_pair(kind: Any) -> str:
    whole = isinstance(kind, types.BaseTuple) and len(kind) == 2
    whole = whole and all(isinstance(part, types.Integer) for part in kind)
    return "" if whole else "a pair of whole numbers"


def _is_sequence(kind: Any) -> str:
    inner = getattr(kind, "dtype", None)
    return "" if isinstance(inner, types.Integer) else "a sequence of whole numbers"
