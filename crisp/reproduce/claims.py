"""What the paper prints: every figure of it, as data (``claims.toml``)."""

from __future__ import annotations

import tomllib
from collections.abc import Mapping
from dataclasses import dataclass, fields
from functools import cache
from importlib.resources import files
from typing import Any

PAPER, TRACE, MODEL, HARDWARE = "paper", "trace", "model", "hardware"
BASES = (PAPER, TRACE, MODEL, HARDWARE)
EQUAL, AT_LEAST, AT_MOST, MORE = "equal", "at least", "at most", "more than"
RELATIONS = (EQUAL, AT_LEAST, AT_MOST, MORE)


@dataclass(frozen=True)
class Claim:
    """One statement of the paper, with one figure for each of its parts."""

    id: str
    where: str  # in the paper
    says: str
    setting: str
    unit: str
    by: str  # what decides it, one of BASES
    values: Mapping[str, float]  # part -> as printed, in ``unit``
    within: float = 0.1  # of the value: what is not farther off agrees
    relation: str = EQUAL  # of what is found to what is printed
    small: tuple[str, ...] = ()  # claims of docs/quality.md: do small models show the same

    def __post_init__(self) -> None:
        assert self.by in BASES, self.id
        assert self.relation in RELATIONS, self.id
        assert self.values, self.id

    def meets(self, found: float, printed: float) -> bool:
        """Whether what is found bears out what is printed.

        >>> claim = Claim("", "", "", "", "", PAPER, {"": 4.0}, within=0.25)
        >>> claim.meets(5, 4), claim.meets(2.9, 4)
        (True, False)
        """
        slack = self.within * abs(printed)
        if self.relation == MORE:
            return found > printed + slack
        return (self.relation == AT_MOST or found >= printed - slack) and (
            self.relation == AT_LEAST or found <= printed + slack
        )


@cache
def claims() -> Mapping[str, Claim]:
    """All claims by their id, in the order of the paper."""
    text = (files("crisp.reproduce") / "data" / "claims.toml").read_text(encoding="utf-8")
    found = [_claim(entry) for entry in tomllib.loads(text)["claim"]]
    assert len({claim.id for claim in found}) == len(found)
    return {claim.id: claim for claim in found}


def printed(id: str, part: str | None = None) -> float:
    """A figure of the paper; without ``part`` that of a claim that has only one."""
    values = claims()[id].values
    if part is None:
        (value,) = values.values()
        return value
    return values[part]


def _claim(entry: dict[str, Any]) -> Claim:
    known = {field.name for field in fields(Claim)}
    assert entry.keys() <= known, entry
    entry["small"] = tuple(entry.get("small", ()))
    return Claim(**entry)
