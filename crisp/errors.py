"""The exceptions of the package: `CrispError` for mistakes of a user, `InvariantError` for ours.

The command line prints the message of a CrispError as one line and exits with code 2.
"""

from __future__ import annotations

import difflib
from collections.abc import Iterable


class CrispError(Exception):
    """A mistake in the input: one line that says where, what was found and what was expected."""


class InvariantError(Exception):
    """A broken rule of a run: a fault of the program, never of its input."""


def unknown_name(name: str, known_names: Iterable[str], what: str) -> CrispError:
    """Return the error for an unknown ``what`` called ``name``, with the closest known name.

    >>> print(unknown_name("crips", ["fo", "lru", "crisp"], "policy"))
    unknown policy 'crips'; did you mean 'crisp'? known: fo, lru, crisp
    """
    names = list(known_names)
    close = difflib.get_close_matches(name.lower(), names, n=1, cutoff=0.5)
    hint = f"; did you mean '{close[0]}'?" if close else ";"
    return CrispError(f"unknown {what} '{name}'{hint} known: {', '.join(names)}")
