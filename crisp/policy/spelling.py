"""The spelling of rules: ``name`` or ``name(value, key=value)``, numbers read exactly."""

from __future__ import annotations

import re
from collections.abc import Callable, Mapping
from dataclasses import MISSING, fields
from fractions import Fraction
from typing import Any, TypeVar

from crisp.errors import CrispError, unknown_name
from crisp.extensions import find_name
from crisp.units import parse_fraction

T = TypeVar("T")
_CALL = re.compile(r"\s*([a-z_][a-z0-9_-]*)\s*(?:\((.*)\))?\s*", re.S)


def build(text: str, known: Mapping[str, Callable[..., T]], what: str) -> T:
    """Build the object that ``text`` names: a class of ``known`` with exact numbers.

    Raises CrispError for an unknown name or parameter, an unreadable value, or what the class
    itself refuses.
    """
    match = _CALL.fullmatch(text)
    if not match:
        raise CrispError(f"{what} '{text}': expected a name or name(key=value,...)")
    name, inside = match.groups()
    kind = find_name(known, name, what)
    names = [field.name for field in fields(kind)]  # type: ignore[arg-type]
    given: dict[str, Fraction] = {}
    for place, part in enumerate(filter(str.strip, (inside or "").split(","))):
        key, equals, value = (piece.strip() for piece in part.partition("="))
        if not equals:
            if place >= len(names):
                raise CrispError(f"{what} '{text}': takes {len(names)} values at most")
            key, value = names[place], part
        if key not in names:
            raise unknown_name(key, names, f"parameter of {what} {name}")
        if key in given:
            raise CrispError(f"{what} '{text}': {key} is given twice")
        given[key] = parse_fraction(value, f"{what} '{text}'")
    for field in fields(kind):  # type: ignore[arg-type]
        if field.name not in given and field.default is field.default_factory is MISSING:
            raise CrispError(
                f"{what} '{text}': {field.name} has to be given, as {name}({field.name}=...)"
            )
    return kind(**given)


def show(name: str, policy: Any) -> str:
    """Return the spelling that gives ``policy`` back, with every parameter.

    >>> from crisp.policy.widths.base import Tiered
    >>> show("tiered", Tiered())
    'tiered(alpha=0.6,beta=0.9,warm=0.5,cold=0)'
    """
    values = [f"{f.name}={decimal(getattr(policy, f.name))}" for f in fields(policy)]
    return f"{name}({','.join(values)})" if values else name


def decimal(value: Fraction | int) -> str:
    """Return a fraction as a short exact decimal (it was read from one).

    >>> decimal(Fraction(1, 2)), decimal(Fraction(3)), decimal(Fraction(17, 4))
    ('0.5', '3', '4.25')
    """
    value = Fraction(value)
    places = 0
    while value * 10**places % 1:
        places += 1
        if places > 30:
            return f"{value.numerator}/{value.denominator}"
    return f"{float(value):.{places}f}" if places < 15 else str(float(value))
