"""Rates from the record of a run, and whether the marks are met."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from statistics import median
from typing import Any

OWN = "crisp"
TIMES_AT_TIGHTEST = 2.0
TIMES_RESIDENT = 0.9
_NOTHING = "nothing to compare"


@dataclass(frozen=True)
class Cell:
    """What one contestant did under one cap."""

    rates: tuple[float, ...]  # tokens a second of each turn, ascending; none: it did not run
    failed: str = ""  # why it did not

    @property
    def rate(self) -> float | None:
        """The median of the rates; None: it did not run."""
        return median(self.rates) if self.rates else None


@dataclass(frozen=True)
class Mark:
    """A mark, what was found, and the verdict."""

    mark: str
    found: str
    met: bool | None  # None: there was nothing to compare

    @property
    def verdict(self) -> str:
        """The verdict in a word."""
        return {True: "met", False: "missed", None: _NOTHING}[self.met]


def cells(record: Mapping[str, Any]) -> dict[tuple[str, int | None], Cell]:
    """Return what every contestant did under every cap of a format; None: without a cap."""
    found: dict[tuple[str, int | None], Cell] = {}
    for run in record["runs"]:
        key = run["contestant"], run["cap"]
        before = found.get(key, Cell(()))
        if "failed" in run or before.failed:  # in any turn: then there is no figure
            found[key] = Cell((), before.failed or run["failed"])
        else:
            rate = run["tokens"] / run["seconds"]
            found[key] = Cell(tuple(sorted((*before.rates, rate))))
    return found


def ratios(record: Mapping[str, Any]) -> dict[int, tuple[float, str]]:
    """Return by cap CRISP's rate over the best of the others, and who that is; where both run."""
    by_cap, found = dict[int, tuple[float, str]](), cells(record)
    for cap in record["caps"]:
        others = {
            name: cell.rate for (name, at), cell in found.items() if at == cap and name != OWN
        }
        best = max(others, key=lambda name: others[name] or 0, default=None)
        own = found[OWN, cap].rate if (OWN, cap) in found else None
        if own and best and others[best]:
            by_cap[cap] = own / others[best], best
    return by_cap


def marks(record: Mapping[str, Any], shown: Mapping[str, str]) -> list[Mark]:
    """Return the three marks of a format. shown: names of contestants."""
    by_cap, found = ratios(record), cells(record)
    tight = Mark(
        f"{TIMES_AT_TIGHTEST:g} times the best other at the tightest cap both run in", "-", None
    )
    if by_cap:
        cap = min(by_cap)
        ratio, name = by_cap[cap]
        at = f"{ratio:.2f} times {shown[name]} at {cap / 1e6:,.0f} MB"
        tight = Mark(tight.mark, at, ratio >= TIMES_AT_TIGHTEST)
    slower = [f"{cap / 1e6:,.0f} MB ({by_cap[cap][0]:.2f})" for cap in by_cap if by_cap[cap][0] < 1]
    never = Mark(
        "not slower than any other at any cap",
        f"slower at {', '.join(slower)}" if slower else "nowhere slower",
        not slower if by_cap else None,
    )
    own = found.get((OWN, None), Cell(())).rate
    theirs = [
        cell.rate for (name, cap), cell in found.items()
        if cap is None and name.startswith("llama.cpp") and cell.rate
    ]  # fmt: skip
    resident = Mark(f"{TIMES_RESIDENT:g} of llama.cpp, all resident", "-", None)
    if own and theirs:
        share = own / max(theirs)
        resident = Mark(resident.mark, f"{share:.2f} of it", share >= TIMES_RESIDENT)
    return [tight, never, resident]


def same_tokens(record: Mapping[str, Any], other: str) -> tuple[int, int]:
    """Return how many first tokens CRISP and another write alike without a cap, and of how many."""
    own, theirs = (
        next(
            (r["ids"] for r in record["runs"]
             if r["contestant"] == name and r["cap"] is None and "ids" in r), []
        )
        for name in (OWN, other)
    )  # fmt: skip
    pairs = list(zip(own, theirs, strict=False))
    return next((i for i, (a, b) in enumerate(pairs) if a != b), len(pairs)), len(pairs)
