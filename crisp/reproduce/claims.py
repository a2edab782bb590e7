"""The claims: every figure that the paper prints, as data (``data/claims.toml``)."""

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
    within: float = 0.1  # tolerance, as a share of the value
    relation: str = EQUAL  # of the figure found to the printed one
    small: tuple[str, ...] = ()  # claims of docs/quality.md: do small models show the same

    def __post_init__(self) -> None:
        assert self.by in BASES, self.id
        assert self.relation in RELATIONS, self.id
        assert self.values, self.id

    def meets(self, value: float, printed: float) -> bool:
        """Return whether the figure found bears out the printed one.

        >>> claim = Claim("", "", "", "", "", PAPER, {"": 4.0}, within=0.25)
        >>> claim.meets(5, 4), claim.meets(2.9, 4)
        (True, False)
        """
        slack = self.within * abs(printed)
        if self.relation == MORE:
            return value > printed + slack
        return (self.relation == AT_MOST or value >= printed - slack) and (
            self.relation == AT_LEAST or value <= printed + slack
        )


@cache
def claims() -> Mapping[str, Claim]:
    """Return all claims by their id, in the order of the paper."""
    text = (files("crisp.reproduce") / "data" / "claims.toml").read_text(encoding="utf-8")
    ordered = [_claim(entry) for entry in tomllib.loads(text)["claim"]]
    assert len({claim.id for claim in ordered}) == len(ordered)
    return {claim.id: claim for claim in ordered}


def printed(id: str, part: str | None = None) -> float:
    """Return a figure of the paper; without ``part`` that of a claim that has only one."""
    values = claims()[id].values
    if part is None:
        (value,) = values.values()
        return value
    return values[part]


def _claim(entry: dict[str, Any]) -> Claim:
    """Return the claim of an entry of the file."""
    assert entry.keys() <= {field.name for field in fields(Claim)}, entry
    entry["small"] = tuple(entry.get("small", ()))
    return Claim(**entry)
