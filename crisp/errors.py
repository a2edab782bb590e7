"""One exception for everything a user can get wrong.

The command line prints its message as one line and exits with code 2; library callers catch it.
"""

from __future__ import annotations

import difflib
from collections.abc import Iterable


class CrispError(Exception):
    """A mistake in the input: one line that says where, what was found and what was expected."""


class InvariantError(Exception):
    """A run broke one of its own rules. This is a fault of the program, never of its input."""


def nearest(name: str, known: Iterable[str], what: str) -> CrispError:
    """The error for an unknown ``what`` called ``name``, with the closest known name.

    >>> print(nearest("crips", ["fo", "lru", "crisp"], "policy"))
    unknown policy 'crips'; did you mean 'crisp'? known: fo, lru, crisp
    """
    names = list(known)
    close = difflib.get_close_matches(name.lower(), names, n=1, cutoff=0.5)
    hint = f"; did you mean '{close[0]}'?" if close else ";"
    return CrispError(f"unknown {what} '{name}'{hint} known: {', '.join(names)}")
