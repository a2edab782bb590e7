"""Compilation by numba, and the reuse of what was compiled before."""

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
"""Options for functions that allocate nothing: arrays that they pass on need not be counted, which
would take three quarters of the time."""


_PART: Any = BARE | {"no_cpython_wrapper": True, "no_cfunc_wrapper": True}
"""Options for functions that only compiled ones call."""


def compiled(function: Callable[P, T]) -> Callable[P, T]:
    """Compile a function as a part of whatever calls it; it allocates nothing."""
    dispatcher: Any = njit(function, **_PART)
    typed: Callable[P, T] = dispatcher
    return typed


def allocating(function: Callable[P, T]) -> Callable[P, T]:
    """Compile a part of a function that allocates nothing, though it does so itself."""
    dispatcher: Any = njit(function, **(_PART | {"_nrt": True}))
    typed: Callable[P, T] = dispatcher
    return typed


def inlined(function: Callable[P, T]) -> Callable[P, T]:
    """Compile a function into every place that calls it: passing arrays takes longer than it."""
    dispatcher: Any = njit(function, forceinline=True, **_PART)
    typed: Callable[P, T] = dispatcher
    return typed


def kept(function: Callable[P, T], **options: Any) -> Callable[P, T]:
    """Compile a function at its first call, some seconds, and keep it on disk for others.

    Numba knows by the file of ``function`` alone whether it has changed. One that calls functions
    of other files must enclose a digest of theirs.
    """
    try:
        dispatcher: Any = njit(function, cache=True, **options)
        _drop_unreadable_index(dispatcher)
    except RuntimeError:  # no folder can be written to
        dispatcher = njit(function, **options)
    typed: Callable[P, T] = dispatcher
    return typed


def _drop_unreadable_index(dispatcher: Any) -> None:
    """Empty the index of what was compiled before, if it names types that are no longer there.

    Numba reads it whole before it looks whether it is of today's source, and would fail.
    """
    index = dispatcher._cache._cache_file
    try:
        index._load_index()
    except Exception:  # whatever unpickling a vanished type raises
        index.flush()


def digest(modules: Iterable[ModuleType]) -> str:
    """Return the sha256 of the sources of some modules."""
    whole: Any = hashlib.sha256()
    for module in modules:
        whole.update(inspect.getsource(module).encode())
    text: str = whole.hexdigest()
    return text
