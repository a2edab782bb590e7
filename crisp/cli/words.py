"""Words of what is printed."""

from __future__ import annotations


def counted(n: int, thing: str) -> str:
    """So many of a thing.

    >>> counted(1, "row"), counted(1908, "row")
    ('1 row', '1,908 rows')
    """
    return f"{n:,} {thing}" if n == 1 else f"{n:,} {thing}s"
