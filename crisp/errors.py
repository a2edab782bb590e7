"""The exceptions of the package: `CrispError` for mistakes of a user, `InvariantError` for ours.

The command line prints the message of a CrispError as one line and exits with code 2.
"""

from __future__ import annotations

import difflib
import re
from collections.abc import Iterable
from numbers import Integral

_LONGEST = 200  # characters of a value in a message


class CrispError(Exception):
    """A mistake in the input: one line that says where, what was found and what was expected."""


class InvariantError(Exception):
    """A broken rule of a run: a fault of the program, never of its input."""


class FormerNameWarning(DeprecationWarning):
    """A name that has been replaced by another, and is still understood."""


def unknown_name(name: str, known_names: Iterable[str], what: str) -> CrispError:
    """Return the error for an unknown ``what`` called ``name``, with the closest known name.

    >>> print(unknown_name("crips", ["fo", "lru", "crisp"], "policy"))
    unknown policy 'crips'; did you mean 'crisp'? known: fo, lru, crisp
    """
    names, name = list(known_names), shorten(str(name))
    close = difflib.get_close_matches(name.lower(), names, n=1, cutoff=0.5)
    hint = f"; did you mean '{close[0]}'?" if close else ";"
    return CrispError(f"unknown {what} '{name}'{hint} known: {', '.join(names)}")


def wrong_type(value: object, what: str, expected: str) -> CrispError:
    """Return the error for a ``what`` that is a value of the wrong type.

    >>> print(wrong_type(1.5, "limit", "a whole number"))
    limit 1.5: expected a whole number
    """
    return CrispError(f"{what} {shorten(repr(value))}: expected {expected}")


def check_whole(value: object, what: str) -> None:
    """Raise CrispError unless ``value`` is a whole number; True and False are none."""
    if isinstance(value, bool) or not isinstance(value, Integral):
        raise wrong_type(value, what, "a whole number")


def shorten(text: str) -> str:
    """Return a text as one line that fits into a message."""
    text = " ".join(text.splitlines())
    return text if len(text) <= _LONGEST else f"{text[:40]}…"


def reason_of(error: BaseException) -> str:
    """Return what a library says of a file, short, on one line and without its words for experts.

    >>> reason_of(ValueError("bad value " + 90 * "9" + " in row 1\\nsee the manual"))
    'bad value 99999999999999999999… in row 1'
    >>> reason_of(KeyError())
    'KeyError'
    """
    if isinstance(error, RecursionError):
        return "nested too deeply"
    text = str(error).strip()
    if "for integer string conversion" in text:  # Python's advice is for programmers
        return "a number of more than 4,300 digits"
    line = text.splitlines()[0] if text else type(error).__name__
    line = re.sub(r"(\S{20})\S{60,}", r"\1…", line)
    return line if len(line) <= _LONGEST else f"{line[: _LONGEST - 40]}…"
