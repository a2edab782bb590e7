"""Numbers and sizes as users write them, parsed exactly and formatted."""

from __future__ import annotations

import re
from fractions import Fraction

from crisp.errors import CrispError

_DECIMAL = re.compile(r"[+-]?(\d+\.?\d*|\.\d+)([eE][+-]?\d{1,2})?")
_SIZE = re.compile(r"(?P<number>(\d+\.?\d*|\.\d+)(e\+?\d{1,2})?)\s*(?P<unit>[a-z]*)", re.IGNORECASE)
_BYTES = {"": 1, "b": 1}
_BYTES |= {f"{p}b": 1000**i for i, p in enumerate("kmgt", 1)}
_BYTES |= {f"{p}ib": 1024**i for i, p in enumerate("kmgt", 1)}
_LONGEST = 100  # characters; Python refuses numbers of thousands of digits


def parse_fraction(text: str | int | Fraction, what: str = "number") -> Fraction:
    """Return a decimal or a percentage as an exact fraction; CrispError names ``what`` otherwise.

    >>> parse_fraction(".1"), parse_fraction("10%"), parse_fraction("4.25")
    (Fraction(1, 10), Fraction(1, 10), Fraction(17, 4))
    """
    if isinstance(text, (int, Fraction)):
        return Fraction(text)
    number = text.strip()
    percent = number.endswith("%")
    number = number.removesuffix("%").strip()
    if len(text) > _LONGEST or not _DECIMAL.fullmatch(number):
        raise CrispError(f"{what}: {_quoted(text)} is not a number")
    return Fraction(number) / (100 if percent else 1)


def parse_bytes(text: str, what: str = "size") -> int:
    """Return the bytes of ``4GB`` (powers of 1000), ``512MiB`` (of 1024) or a bare count.

    >>> parse_bytes("1.5kB"), parse_bytes("2 KiB"), parse_bytes("77")
    (1500, 2048, 77)
    """
    match = _SIZE.fullmatch(text.strip()) if len(text) <= _LONGEST else None
    unit = match and _BYTES.get(match["unit"].lower())
    if not match or not unit:
        raise CrispError(
            f"{what}: {_quoted(text)} is not a size; write 4GB, 512MiB or a number of bytes"
        )
    return int(Fraction(match["number"]) * unit)


def parse_rate(text: str, what: str = "rate") -> int:
    """Return the bytes a second of ``200MB/s``, at least one; the /s may be left out.

    >>> parse_rate("200MB/s"), parse_rate("1 MiB")
    (200000000, 1048576)
    """
    rate = parse_bytes(text.strip().removesuffix("/s"), what)
    if not rate:
        raise CrispError(f"{what}: '{text}' is less than 1 byte a second")
    return rate


def _quoted(text: str) -> str:
    """Return the text in quotes, cut where it is very long."""
    return f"'{text}'" if len(text) <= _LONGEST else f"'{text[:20]}…'"


def format_count(n: int, thing: str) -> str:
    """Return so many of a thing, in the singular or plural.

    >>> format_count(1, "row"), format_count(1908, "row")
    ('1 row', '1,908 rows')
    """
    return f"{n:,} {thing}" if n == 1 else f"{n:,} {thing}s"


def format_bytes(n: float) -> str:
    """Format bytes for people, in powers of 1000.

    >>> format_bytes(93_600_000), format_bytes(512)
    ('93.6 MB', '512 B')
    """
    for unit in ("B", "kB", "MB", "GB"):
        if abs(n) < 999.5:  # from here on, three digits would be shown as 1e+03
            return f"{n:.3g} {unit}"
        n /= 1000
    return f"{n:.3g} TB"
