"""How functions are compiled, and when what was compiled before may be used again."""

from __future__ import annotations

import hashlib
import inspect
from collections.abc import Callable, Iterable
from types import ModuleType
from typing import Any, ParamSpec, TypeVar

from numba import njit

P = ParamSpec("P")
T = TypeVar("T")

BARE: Any = {"_nrt": False, "error_model": "numpy"}
"""Of functions that allocate nothing: arrays that are handed over or cut need not be counted, which
would take three quarters of the time."""


_PART: Any = BARE | {"no_cpython_wrapper": True, "no_cfunc_wrapper": True}
"""Of functions that only compiled ones call."""


def compiled(function: Callable[P, T]) -> Callable[P, T]:
    """Compiled as a part of whatever calls it, without memory of its own."""
    made: Any = njit(function, **_PART)
    found: Callable[P, T] = made
    return found


def inlined(function: Callable[P, T]) -> Callable[P, T]:
    """`compiled` into every place that calls it: handing arrays over takes longer than the work."""
    made: Any = njit(function, forceinline=True, **_PART)
    found: Callable[P, T] = made
    return found


def kept(function: Callable[P, T], **options: Any) -> Callable[P, T]:
    """Compiled at its first call, for some seconds, and kept on the disk for other processes.

    Numba knows by the file of ``function`` alone whether it has changed. One that calls functions
    of other files must enclose a digest of theirs.
    """
    try:
        made: Any = njit(function, cache=True, **options)
    except RuntimeError:  # no folder can be written to
        made = njit(function, **options)
    found: Callable[P, T] = made
    return found


def digest(modules: Iterable[ModuleType]) -> str:
    """Sha256 of the sources of some modules."""
    whole: Any = hashlib.sha256()
    for module in modules:
        whole.update(inspect.getsource(module).encode())
    text: str = whole.hexdigest()
    return text
