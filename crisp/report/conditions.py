"""The conditions of runs: those they share, those that differ, and the runs that form one line."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Hashable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from fractions import Fraction

from crisp.report.table import JOULES_FROM, MADE_BY, OBJECTS, RunTable

# The settings shown first, in this order; all others stand below them.
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
# Settings that follow from another: shown only where they differ for one model or one machine.
_IMPLIED_BY = dict.fromkeys(
    (name for name in LABELS if name.startswith("model.")), "model.name"
) | {
    "hardware.kind": "machine",
    JOULES_FROM: "machine",
}
_MACHINE_NAMES = ("hardware.name", "device.name")  # shown together as the machine
_SAME_ROUTING = "trace.file."  # another file of the same trace changes nothing
_PARTS = (
    "width", "order", "cache", "scope", "unit", "prefetch", "rescale", "routing", "magnitude",
    "oracle",
)  # fmt: skip
NONE = "none"


@dataclass(frozen=True)
class DifferingSetting:
    """A setting that differs between runs; a value of None: it does not apply to the run."""

    name: str
    label: str
    values: list[str | None]


@dataclass(frozen=True)
class SharedConditions:
    """The settings of a table of runs, without policy, budget and engine.

    common, rest: (label, value) of those that all runs share; rest has those that few readers want.
    implied: names of settings that follow from the ``differing`` ones and the policy. lines: for
    each row, the line that it may stand on: same policy, same conditions, measured or not.
    """

    common: list[tuple[str, str]]
    rest: list[tuple[str, str]]
    differing: list[DifferingSetting]
    implied: list[str]
    policies: list[str]
    lines: list[int]


def conditions(table: RunTable) -> SharedConditions:
    """Return what the runs of a table share, and what differs."""
    settings = {
        name: values
        for name, values in table.settings.items()
        if name != "engine" and not name.startswith(("policy.", "budget.", _SAME_ROUTING))
    }
    varying = [values for values in settings.values() if len(set(values)) > 1]
    columns = {"machine": table.machines(), **settings}
    if "model.bits" in columns:
        columns["model.bits"] = [format_bits(bits) for bits in columns["model.bits"]]
    common: list[tuple[str, str]] = []
    rest: list[tuple[str, str]] = []
    differing_values: dict[str, list[str | None]] = {}
    present = {name: table.has_object(name) for name in OBJECTS}
    for name in sorted(columns.keys() - {*_MACHINE_NAMES}, key=_rank(columns)):
        values = _shown_values(name, columns[name], present)
        distinct = set(values) - {None}
        if len(distinct) > 1:
            differing_values[name] = values
        elif distinct:
            line = (LABELS.get(name, name), str(distinct.pop()))
            (common if name in LABELS else rest).append(line)
    policies, measured = policy_labels(table), table.measured()
    differing, implied = _split_implied(differing_values, policies, measured)
    return SharedConditions(
        common,
        rest,
        differing,
        implied,
        policies,
        _number_lines(zip(_policy_keys(table), measured, *varying, strict=True), table.shares()),
    )


def policy_labels(table: RunTable) -> list[str]:
    """Return the name of each row's policy, with what distinguishes it from others of that name."""
    parts = [table.setting(f"policy.{part}") for part in _PARTS]
    names = [name or NONE for name in table.setting("policy.name")]
    values_by_name: dict[str, list[set[str | None]]] = {}
    rows = list(zip(*parts, strict=True))
    for name, row in zip(names, rows, strict=True):
        seen = values_by_name.setdefault(name, [set() for _ in _PARTS])
        for values, value in zip(seen, row, strict=True):
            values.add(value)
    labels = []
    for name, row in zip(names, rows, strict=True):
        differ = [
            _format_part(part, value)
            for part, value, values in zip(_PARTS, row, values_by_name[name], strict=True)
            if len(values) > 1
        ]
        labels.append(" ".join([name, *filter(None, differ)]))
    return labels


def count_values(differing: DifferingSetting) -> list[tuple[str, int]]:
    """Return the values of a setting and how many runs have each, the most frequent first."""
    counted = Counter(value for value in differing.values if value is not None)
    return sorted(counted.items(), key=lambda item: (-item[1], item[0]))


def _format_part(part: str, value: str | None) -> str:
    """Return a part of a policy as a label shows it."""
    if part in ("width", "order", "cache") or value is None:
        return value or ""
    return {"scope": f"per {value}", "unit": f"by {value}"}.get(part, f"{part} {value}")


def _split_implied(
    values_by_name: dict[str, list[str | None]], policies: Sequence[str], measured: Sequence[bool]
) -> tuple[list[DifferingSetting], list[str]]:
    """Return (the differing settings to show, the labels of those that follow from them)."""
    shown: list[DifferingSetting] = []
    implied = []
    keys: list[Hashable] = list(zip(policies, measured, strict=True))
    for name, values in values_by_name.items():
        source = values_by_name.get(_IMPLIED_BY.get(name, "")) if name in LABELS else keys
        if source is not None and source is not values and _follows(values, source):
            implied.append(LABELS.get(name, name))
            continue
        shown.append(DifferingSetting(name, LABELS.get(name, name), values))
        keys = list(zip(keys, values, strict=True))
    return shown, implied


def _follows(values: Sequence[str | None], keys: Sequence[Hashable]) -> bool:
    """Return whether runs of the same key have the same value."""
    first: dict[Hashable, str | None] = {}
    return all(
        first.setdefault(key, value) == value for key, value in zip(keys, values, strict=True)
    )


def _number_lines(keys: Iterable[Hashable], shares: Sequence[float | None]) -> list[int]:
    """Return a line number for each run; runs that repeat another one get lines of their own."""
    numbers: dict[Hashable, int] = {}
    repeats: Counter[Hashable] = Counter()
    lines = []
    for key, share in zip(keys, shares, strict=True):
        place = (key, share)
        lines.append(numbers.setdefault((key, repeats[place]), len(numbers)))
        repeats[place] += 1
    return lines


def _policy_keys(table: RunTable) -> list[Hashable]:
    """Return every part of each row's policy."""
    parts = [values for name, values in table.settings.items() if name.startswith("policy.")]
    return list(zip(*parts, strict=True))


def format_bits(bits: str | None) -> str | None:
    """Return a fraction as a decimal; any other text unchanged."""
    try:
        return None if bits is None else f"{float(Fraction(bits)):g}"
    except (ValueError, ZeroDivisionError, OverflowError):
        return bits


def _shown_values(
    name: str, values: list[str | None], present: Mapping[str, Sequence[bool]]
) -> list[str | None]:
    """Return a setting's values as shown: ``none`` where a run's is null, None where it has none.

    present: of each of OBJECTS, which runs have it.
    """
    if name in ("machine", JOULES_FROM, MADE_BY):
        return values
    owner = next((part for part in present if name.startswith(f"{part}.")), None)
    applies = present[owner] if owner else [True] * len(values)
    return [
        NONE if value is None and applicable else value
        for value, applicable in zip(values, applies, strict=True)
    ]


def _rank(columns: Iterable[str]) -> Callable[[str], int]:
    """Return a sort key: settings with a label first, in its order, then the others as given."""
    places = {name: place for place, name in enumerate(dict.fromkeys([*LABELS, *columns]))}
    return places.__getitem__
