"""Words of what is printed."""

from __future__ import annotations

import re
from collections.abc import Iterable
from fractions import Fraction
from unicodedata import category

from crisp.model.spec import ModelSpec

# Control and format characters, halves of others, breaks of lines and paragraphs.
_UNPRINTABLE = ("Cc", "Cf", "Cs", "Zl", "Zp")


def printable(line: str) -> str:
    """Return the line without what a terminal would obey: control characters and the like.

    >>> printable("\\x1b[2Jlru – 3\\n")
    '�[2Jlru – 3�'
    """
    if line.isprintable():
        return line
    return "".join("�" if category(letter) in _UNPRINTABLE else letter for letter in line)


def describe_rounding(widths: Iterable[str], spec: ModelSpec) -> list[str]:
    """Say where the shares of neurons in widths are rounded up to whole blocks.

    And where a last block is shorter than it is stored.
    """
    shares = {
        Fraction(text)
        for width in widths
        if width.startswith(("uniform", "tiered", "resident"))
        for text in re.findall(r"(?:share|warm|cold|floor)=([0-9.]+)", width)
    }
    lines = [
        f"{float(share):g} of an expert: {spec.width(share)} of {spec.n_blocks} blocks, "
        f"{spec.neurons(0, spec.width(share)):,} of {spec.d_ff:,} neurons"
        for share in sorted(shares)
        if spec.neurons(0, spec.width(share)) != share * spec.d_ff
    ]
    stored = spec.n_blocks * spec.block
    if lines and stored > spec.d_ff:
        lines[-1] += (
            f"; an expert is stored and loaded as {stored:,}, as its blocks are of one size"
        )
    return lines
