"""Under which conditions runs were made: what they share, what differs, what may be one line."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Hashable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from fractions import Fraction

from crisp.report.table import JOULES_FROM, MADE_BY, OBJECTS, Table

# What a reader asks first, in this order; all else stands below it.
LABELS = {
    "model.name": "model",
    "model.n_layers": "layers",
    "model.n_experts": "experts a layer",
    "model.top_k": "experts a token",
    "model.bits": "bits a weight",
    "model.block": "neurons a block",
    "trace.model": "routing of",
    "trace.dataset": "text",
    "trace.rows": "rows",
    "machine": "machine",
    "hardware.kind": "kind of machine",
    "phase": "phase",
    "batch": "batch",
    "granularity": "granularity",
    "chunk": "rows of a chunk",
    "seed": "seed",
    "limit": "limit of rows",
    "profile.from": "counts from",
    JOULES_FROM: JOULES_FROM,
    MADE_BY: MADE_BY,
}
# Shown as a column of its own only where it is not the same for all of one model, one machine.
_OF = dict.fromkeys((name for name in LABELS if name.startswith("model.")), "model.name") | {
    "hardware.kind": "machine",
    JOULES_FROM: "machine",
}
_NAMES = ("hardware.name", "device.name")  # are the machine
_SAME_ROUTING = "trace.file."  # another file of the same trace changes nothing
_PARTS = ("width", "order", "cache", "scope", "unit", "prefetch", "oracle")
NONE = "none"


@dataclass(frozen=True)
class Differing:
    """A setting that differs between runs; None: does not apply to the run."""

    name: str
    label: str
    values: list[str | None]


@dataclass(frozen=True)
class Conditions:
    """The settings of a table of runs but for policy, budget and engine.

    common, rest: (label, value), the latter what few ask for. implied: names of settings that
    follow from the ``differing`` ones and the policy. lines: of each row, the line that it may
    stand on: same policy, same conditions, measured or not.
    """

    common: list[tuple[str, str]]
    rest: list[tuple[str, str]]
    differing: list[Differing]
    implied: list[str]
    policies: list[str]
    lines: list[int]


def conditions(table: Table) -> Conditions:
    """What the runs of a table share, and what differs."""
    settings = {
        name: values
        for name, values in table.settings.items()
        if name != "engine" and not name.startswith(("policy.", "budget.", _SAME_ROUTING))
    }
    varying = [values for values in settings.values() if len(set(values)) > 1]
    columns = {"machine": table.machines(), **settings}
    if "model.bits" in columns:
        columns["model.bits"] = [decimal(bits) for bits in columns["model.bits"]]
    common: list[tuple[str, str]] = []
    rest: list[tuple[str, str]] = []
    other: dict[str, list[str | None]] = {}
    there = {of: table.there(of) for of in OBJECTS}
    for name in sorted(columns.keys() - {*_NAMES}, key=_rank(columns)):
        told = _told_of(name, columns[name], there)
        known = set(told) - {None}
        if len(known) > 1:
            other[name] = told
        elif known:
            line = (LABELS.get(name, name), str(known.pop()))
            (common if name in LABELS else rest).append(line)
    policies, measured = policy_labels(table), table.measured()
    differing, implied = _shown(other, policies, measured)
    return Conditions(
        common,
        rest,
        differing,
        implied,
        policies,
        _lines(zip(_wholes(table), measured, *varying, strict=True), table.shares()),
    )


def policy_labels(table: Table) -> list[str]:
    """The name of each row's policy, and what tells it from others of that name."""
    parts = [table.setting(f"policy.{part}") for part in _PARTS]
    names = [name or NONE for name in table.setting("policy.name")]
    found: dict[str, list[set[str | None]]] = {}
    rows = list(zip(*parts, strict=True))
    for name, row in zip(names, rows, strict=True):
        seen = found.setdefault(name, [set() for _ in _PARTS])
        for values, value in zip(seen, row, strict=True):
            values.add(value)
    labels = []
    for name, row in zip(names, rows, strict=True):
        differ = [
            _part(part, value)
            for part, value, values in zip(_PARTS, row, found[name], strict=True)
            if len(values) > 1
        ]
        labels.append(" ".join([name, *filter(None, differ)]))
    return labels


def values_of(differing: Differing) -> list[tuple[str, int]]:
    """The values of a setting and how many runs have each, the most frequent first."""
    counted = Counter(value for value in differing.values if value is not None)
    return sorted(counted.items(), key=lambda item: (-item[1], item[0]))


def _part(part: str, value: str | None) -> str:
    if part in ("width", "order", "cache") or value is None:
        return value or ""
    return {"scope": f"per {value}", "unit": f"by {value}"}.get(part, f"{part} {value}")


def _shown(
    other: dict[str, list[str | None]], policies: Sequence[str], measured: Sequence[bool]
) -> tuple[list[Differing], list[str]]:
    """(what is shown of what differs, what follows from that and the policy)."""
    shown: list[Differing] = []
    implied = []
    keys: list[Hashable] = list(zip(policies, measured, strict=True))
    for name, values in other.items():
        of = other.get(_OF.get(name, "")) if name in LABELS else keys
        if of is not None and of is not values and _follows(values, of):
            implied.append(LABELS.get(name, name))
            continue
        shown.append(Differing(name, LABELS.get(name, name), values))
        keys = list(zip(keys, values, strict=True))
    return shown, implied


def _follows(values: Sequence[str | None], keys: Sequence[Hashable]) -> bool:
    """Whether runs of the same key have the same value."""
    first: dict[Hashable, str | None] = {}
    return all(
        first.setdefault(key, value) == value for key, value in zip(keys, values, strict=True)
    )


def _lines(keys: Iterable[Hashable], shares: Sequence[float | None]) -> list[int]:
    """A number for each line; runs that repeat another one stand on lines of their own."""
    numbers: dict[Hashable, int] = {}
    seen: Counter[Hashable] = Counter()
    found = []
    for key, share in zip(keys, shares, strict=True):
        place = (key, share)
        found.append(numbers.setdefault((key, seen[place]), len(numbers)))
        seen[place] += 1
    return found


def _wholes(table: Table) -> list[Hashable]:
    """Each row's policy, every part of it."""
    parts = [values for name, values in table.settings.items() if name.startswith("policy.")]
    return list(zip(*parts, strict=True))


def decimal(bits: str | None) -> str | None:
    """A fraction as people write it, if it is one."""
    try:
        return None if bits is None else f"{float(Fraction(bits)):g}"
    except (ValueError, ZeroDivisionError, OverflowError):
        return bits


def _told_of(
    name: str, values: list[str | None], there: Mapping[str, Sequence[bool]]
) -> list[str | None]:
    """A setting's values, those that are none by that word; None: it does not apply to the run."""
    if name in ("machine", JOULES_FROM, MADE_BY):
        return values
    of = next((of for of in there if name.startswith(f"{of}.")), None)
    applies = there[of] if of else [True] * len(values)
    return [
        NONE if value is None and own else value for value, own in zip(values, applies, strict=True)
    ]


def _rank(columns: Iterable[str]) -> Callable[[str], int]:
    """Those with a label first, in its order, then the others as they came."""
    places = {name: place for place, name in enumerate(dict.fromkeys([*LABELS, *columns]))}
    return places.__getitem__
