"""The measured tables of a hardware profile, read from and written to sections of its TOML file."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from decimal import Decimal
from fractions import Fraction
from itertools import pairwise
from pathlib import Path
from typing import Any

from crisp.errors import CrispError, unknown_name
from crisp.hardware.measured import BlockGeometry, MeasuredTables, TimeCurve, TimeGrid

# section -> its keys; every section also has a source, and a spread where it says so
SECTIONS: dict[str, tuple[str, ...]] = {
    "geometry": ("d_model", "block", "matrices", "bits", "block_bytes", "dtype", "activation"),
    "load": ("bytes", "ns", "spread"),
    "compute": ("blocks", "rows", "ns", "spread"),
    "layer": ("rows", "ns", "spread"),
    "busy": ("load", "compute", "spread"),
    "page_cache": ("bytes", "ns", "spread"),
}
OPTIONAL = ("page_cache",)
_COUNTS = ("d_model", "block", "matrices", "block_bytes")


def read_tables(content: Mapping[str, Any], path: Path) -> tuple[MeasuredTables, dict[str, str]]:
    """Return (the tables, the source of each section) of a parsed profile.

    Raises CrispError, one line with file and key, for anything missing, unknown, out of range or
    without a source.
    """
    parts = {
        name: _Section(content, name, path)
        for name in SECTIONS
        if name in content or name not in OPTIONAL
    }
    geometry, load, compute = parts["geometry"], parts["load"], parts["compute"]
    layer, busy, pages = parts["layer"], parts["busy"], parts.get("page_cache")
    spreads = {name: part.number("spread", 0) for name, part in parts.items() if part.has("spread")}
    tables = MeasuredTables(
        geometry=BlockGeometry(
            bits=geometry.number("bits", 0, above=True),
            **{key: geometry.count(key) for key in _COUNTS},
            dtype=geometry.word("dtype"),
            activation=geometry.word("activation"),
        ),
        load=_loads(load),
        compute=TimeGrid(
            compute.rising("blocks", 1), compute.rising("rows", 1), compute.grid("blocks", "rows")
        ),
        layer=TimeCurve(
            layer.rising("rows", 1), layer.times("ns", layer.rising("rows", 1), zero=True)
        ),
        slow_load=busy.number("load", 1),
        slow_compute=busy.number("compute", 1),
        spreads=tuple((name, float(spread)) for name, spread in spreads.items()),
        page_cache=None if pages is None else _loads(pages),
    )
    return tables, {name: part.source() for name, part in parts.items()}


def tables_dict(tables: MeasuredTables) -> dict[str, dict[str, Any]]:
    """Return the sections as a file has them, without sources; whole numbers as int."""
    spreads = dict(tables.spreads)
    geometry, load, compute, layer = tables.geometry, tables.load, tables.compute, tables.layer
    sections: dict[str, dict[str, Any]] = {
        "geometry": {key: value for key, value in vars(geometry).items() if value is not None}
        | {"bits": _plain(geometry.bits)},
        "load": {"bytes": list(load.at), "ns": _plains(load.ns)},
        "compute": {
            "blocks": list(compute.blocks),
            "rows": list(compute.rows),
            "ns": [_plains(line) for line in compute.ns],
        },
        "layer": {"rows": list(layer.at), "ns": _plains(layer.ns)},
        "busy": {"load": _plain(tables.slow_load), "compute": _plain(tables.slow_compute)},
    }
    if tables.page_cache is not None:
        pages = tables.page_cache
        sections["page_cache"] = {"bytes": list(pages.at), "ns": _plains(pages.ns)}
    for name, spread in spreads.items():
        sections[name]["spread"] = spread
    return sections


def to_toml(
    kind: str,
    loads_from: str | None,
    no_power: str,
    tables: MeasuredTables,
    sources: Mapping[str, str],
) -> str:
    """Return the text of a profile without power figures.

    loads_from: only for kind unified; sources: by section.
    """
    lines = [f"kind = {_text(kind)}", 'model = "measured"', f"no_power = {_text(no_power)}"]
    if loads_from is not None:
        lines.insert(1, f"loads_from = {_text(loads_from)}")
    for name, section in tables_dict(tables).items():
        lines += ["", f"[{name}]", *(f"{key} = {_value(value)}" for key, value in section.items())]
        lines.append(f"source = {_text(sources[name])}")
    return "\n".join(lines) + "\n"


def _loads(section: _Section) -> TimeCurve:
    """Return the times of loads by their bytes."""
    return TimeCurve(section.rising("bytes"), section.times("ns", section.rising("bytes")))


class _Section:
    """One section of a file, read key by key."""

    def __init__(self, content: Mapping[str, Any], name: str, path: Path) -> None:
        self._name, self._path = name, path
        if not isinstance(content.get(name), dict):
            raise CrispError(f"{path}: {name}: the section is missing")
        self._keys: dict[str, Any] = content[name]
        allowed = (*SECTIONS[name], "source")
        for key in self._keys:
            if key not in allowed:
                names = [f"{name}.{one}" for one in allowed]
                raise CrispError(f"{path}: {unknown_name(f'{name}.{key}', names, 'key')}")

    def has(self, key: str) -> bool:
        return key in self._keys

    def source(self) -> str:
        source = self._keys.get("source")
        if not isinstance(source, str) or not source.strip():
            raise self._error("source", f"found {source!r}, expected where the numbers come from")
        return source.strip()

    def word(self, key: str) -> str | None:
        """Return a word, or None where it is left out."""
        word = self._keys.get(key)
        if not isinstance(word, str | None):
            raise self._error(key, f"found {word!r}, expected a word")
        return word

    def count(self, key: str) -> int:
        return self._whole(key, self._get(key))

    def number(self, key: str, least: int, above: bool = False) -> Fraction:
        """Return a number of at least ``least``, or above it."""
        return self._number(key, self._get(key), least, above)

    def rising(self, key: str, first: int | None = None) -> tuple[int, ...]:
        """Return strictly rising whole numbers, which begin with ``first``."""
        numbers = tuple(self._whole(key, value) for value in self._list(key, self._get(key)))
        if any(later <= earlier for earlier, later in pairwise(numbers)):
            raise self._error(key, f"found {list(numbers)}, expected strictly rising numbers")
        if first is not None and numbers[0] != first:
            raise self._error(key, f"begins with {numbers[0]}, expected {first}")
        return numbers

    def times(self, key: str, at: Sequence[int], zero: bool = False) -> tuple[Fraction, ...]:
        """Return a time for each point; 0 only if ``zero``."""
        return self._times(key, self._get(key), len(at), zero)

    def grid(self, outer: str, inner: str) -> tuple[tuple[Fraction, ...], ...]:
        """Return the ns: for each of ``outer`` a list with a time for each of ``inner``."""
        lines = self._list("ns", self._get("ns"))
        rows, columns = len(self.rising(outer)), len(self.rising(inner))
        if len(lines) != rows:
            raise self._error("ns", f"holds {len(lines)} lists, expected {rows}, one for each of "
                              f"{outer}")  # fmt: skip
        return tuple(self._times("ns", line, columns, zero=False) for line in lines)

    def _times(self, key: str, value: object, count: int, zero: bool) -> tuple[Fraction, ...]:
        values = self._list(key, value)
        if len(values) != count:
            raise self._error(key, f"holds {len(values)} times in a list, expected {count}")
        return tuple(self._number(key, one, 0, above=not zero) for one in values)

    def _get(self, key: str) -> object:
        if key not in self._keys:
            raise self._error(key, "is missing")
        return self._keys[key]

    def _list(self, key: str, value: object) -> list[Any]:
        if not isinstance(value, list) or not value:
            raise self._error(key, f"found {value!r}, expected a list")
        return value

    def _whole(self, key: str, value: object) -> int:
        number = self._number(key, value, 0, above=True)
        if number.denominator != 1:
            raise self._error(key, f"found {value}, expected a whole number")
        return number.numerator

    def _number(self, key: str, value: object, least: int, above: bool) -> Fraction:
        if not isinstance(value, int | Decimal) or isinstance(value, bool):
            raise self._error(key, f"found {value!r}, expected a number")
        number = Decimal(value)
        # an absurd exponent would fill the memory
        if not number.is_finite() or abs(number.adjusted()) > 18:
            raise self._error(key, f"found {value}, expected a finite number")
        if number < least or (above and number == least):
            wanted = f"more than {least}" if above else f"{least} or more"
            raise self._error(key, f"found {value}, expected {wanted}")
        return Fraction(number)

    def _error(self, key: str, text: str) -> CrispError:
        return CrispError(f"{self._path}: {self._name}.{key}: {text}")


def _plains(numbers: Sequence[Fraction]) -> list[int | float]:
    return [_plain(number) for number in numbers]


def _plain(number: Fraction) -> int | float:
    return number.numerator if number.denominator == 1 else float(number)


def _text(text: str) -> str:
    return json.dumps(text, ensure_ascii=False)  # a JSON string is a TOML string


def _value(value: object) -> str:
    """Format a value; a list of lists takes a line each."""
    if isinstance(value, list) and value and isinstance(value[0], list):
        return "[\n" + "".join(f"  {json.dumps(line)},\n" for line in value) + "]"
    return json.dumps(value)
