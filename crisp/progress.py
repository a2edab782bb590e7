"""The callback by which long work reports its progress."""

from __future__ import annotations

from collections.abc import Callable

Progress = Callable[[int, int], None]
"""Called with ``(done, total)``, in the unit that the function's docstring names."""


def no_progress(done: int, total: int) -> None:
    """Report nothing."""


def counter(progress: Progress, total: int) -> Callable[[int], None]:
    """Return ``advance(more)``, which adds up what is done and reports it to ``progress``.

    >>> advance = counter(print, 10)
    >>> advance(3), advance(4)
    3 10
    7 10
    (None, None)
    """
    done = 0

    def advance(more: int) -> None:
        nonlocal done
        done += more
        progress(done, total)

    return advance
