"""What a sweep asks for: settings with several values each, from a TOML file or from flags.

A million cells cost no more memory here than one: a cell is worked out from its place when it is
wanted.
"""

from __future__ import annotations

import re
import tomllib
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from decimal import Decimal
from fractions import Fraction
from math import prod
from pathlib import Path
from random import Random
from typing import Any, overload

from crisp.errors import CrispError, unknown_name
from crisp.policy.spelling import decimal
from crisp.units import parse_fraction

# The slowest first, so that cells that share a trace follow one another.
BEFORE = (
    "trace", "profile", "metadata", "layers", "model", "bits", "block", "top_k", "hardware",
    "phase", "batch", "chunk", "limit", "granularity", "seed", "loss",
)  # fmt: skip
PARTS = (
    "width", "order", "cache", "scope", "unit", "prefetch", "rescale", "routing", "magnitude",
)  # fmt: skip
KEYS = (*BEFORE, "policy", *PARTS, "budget")
NEEDED = ("trace", "policy", "budget")

CellSettings = Mapping[str, str]  # one value for each key that is set, and for each name in braces
_NAME = re.compile(r"\{([A-Za-z_]\w*)\}")
_RANGE = ("from", "to", "step")
_MOST = 1 << 62  # values of a range: Python has no longer sequences


class ValueRange(Sequence[str]):
    """The values ``from``, ``from + step``, ... up to ``to``, exactly."""

    def __init__(self, first: Fraction, last: Fraction, step: Fraction) -> None:
        self._first, self._step = first, step
        self._n = int((last - first) / step) + 1

    def __len__(self) -> int:
        return self._n

    @overload
    def __getitem__(self, place: int) -> str: ...
    @overload
    def __getitem__(self, place: slice) -> Sequence[str]: ...
    def __getitem__(self, place: int | slice) -> str | Sequence[str]:
        """Return the value at a place, as it would be written."""
        if isinstance(place, slice):
            return [self[i] for i in range(*place.indices(self._n))]
        if not -self._n <= place < self._n:
            raise IndexError(place)
        return decimal(self._first + place % self._n * self._step)


@dataclass(frozen=True)
class Axis:
    """One key of a sweep, with its values."""

    key: str
    values: Sequence[str]
    where: str  # it was found, for errors: "a.toml: width" or "--width"


@dataclass(frozen=True)
class SweepGrid:
    """Every combination of the values of some axes."""

    axes: tuple[Axis, ...]  # the last one varies fastest

    @property
    def count(self) -> int:
        """The number of combinations."""
        return prod(len(axis.values) for axis in self.axes)

    def at(self, place: int) -> CellSettings:
        """Return the combination at a place below `count`."""
        chosen: dict[str, str] = {}
        for axis in reversed(self.axes):
            place, index = divmod(place, len(axis.values))
            chosen[axis.key] = axis.values[index]
        return {key: filled(chosen[key], chosen) for key in reversed(chosen)}


@dataclass(frozen=True)
class Sweep:
    """All cells that are asked for; drawn: how many of each grid, at random, None: all."""

    name: str
    grids: tuple[SweepGrid, ...]
    drawn: int | None = None
    seed: int = 0

    @property
    def count(self) -> int:
        """The number of cells."""
        return sum(grid.count if self.drawn is None else min(grid.count, self.drawn)
                   for grid in self.grids)  # fmt: skip

    def cells(self) -> Iterator[CellSettings]:
        """Yield the settings of each cell, in order."""
        for number, grid in enumerate(self.grids):
            for place in self._places(number, grid):
                yield grid.at(place)

    def some(self, n: int) -> list[CellSettings]:
        """Return the settings of ``n`` cells at most, from all over the sweep, in its order."""
        draw, each = Random(self.count), -(-n // len(self.grids))
        chosen = []
        # drawn: even steps could meet the same half of a grid every time
        for number, grid in enumerate(self.grids):
            drawn_places = None if self._whole(grid) else list(self._places(number, grid))
            places = {draw.randrange(len(drawn_places or ()) or grid.count) for _ in range(each)}
            chosen += [
                grid.at(drawn_places[place] if drawn_places else place) for place in sorted(places)
            ]
        return chosen[:n]

    def _whole(self, grid: SweepGrid) -> bool:
        return self.drawn is None or grid.count <= self.drawn

    def _places(self, number: int, grid: SweepGrid) -> Iterator[int]:
        if self.drawn is None or self._whole(grid):
            place = 0
            while place < grid.count:  # a range may be too long for range()
                yield place
                place += 1
            return
        draw, places = Random(f"{self.seed} {number}"), set[int]()
        while len(places) < self.drawn:
            places.add(draw.randrange(grid.count))
        yield from sorted(places)


def filled(text: str, values: Mapping[str, str]) -> str:
    """Return the text with every ``{name}`` replaced by its value.

    >>> filled("tiered(alpha={a})", {"a": "0.4"})
    'tiered(alpha=0.4)'
    """
    return _NAME.sub(lambda match: values[match[1]], text)


def flag_of(key: str) -> str:
    """Return the option that gives a key."""
    return f"--{key.replace('_', '-')}"


def read(path: Path | None, flags: Mapping[str, Sequence[str]]) -> Sweep:
    """Read the sweep in a TOML file, flags in the place of its keys, or that of flags alone.

    Raises CrispError, one line with file and key, for what is unknown, missing or of a wrong kind.
    """
    content = {} if path is None else _load(path)
    flag_axes = [Axis(key, values, flag_of(key)) for key, values in flags.items()]
    where = "sweep" if path is None else str(path)
    search, tables = content.pop("search", {}), content.pop("grid", [{}])
    if not isinstance(search, dict):
        raise CrispError(f"{where}: search: expected a table, [search]")
    if not isinstance(tables, list) or not tables or not all(isinstance(t, dict) for t in tables):
        raise CrispError(f"{where}: grid: expected tables, each below a line [[grid]]")
    shared = _axes(content, where)
    grids, used = [], set[str]()
    for number, table in enumerate(tables, 1):
        grid_axes = _axes(table, where if tables == [{}] else f"{where}: grid {number}")
        axes = {axis.key: axis for axis in (*shared, *grid_axes, *flag_axes)}
        names = _names(axes)
        unknown = [axis for axis in grid_axes if axis.key not in KEYS and axis.key not in names]
        if unknown:
            raise _unknown(unknown[0], names)
        used |= names
        grids.append(_grid(axes, names, where))
    for axis in shared:
        if axis.key not in KEYS and axis.key not in used:
            raise _unknown(axis, used)
    for key in search:
        if key not in ("random", "seed"):
            raise CrispError(f"{where}: search: {unknown_name(key, ('random', 'seed'), 'key')}")
    for key, least in (("random", 1), ("seed", 0)):
        value = search.get(key, least)
        if type(value) is not int or value < least:
            raise CrispError(
                f"{where}: search: {key}: found {value}, expected a whole number, at least {least}"
            )
    return Sweep(where, tuple(grids), search.get("random"), search.get("seed", 0))


def _load(path: Path) -> dict[str, Any]:
    try:
        return tomllib.loads(path.read_text(encoding="utf-8"), parse_float=Decimal)
    except OSError as error:
        raise CrispError(f"{path}: cannot be read: {error.strerror or error}") from error
    except (ValueError, RecursionError) as error:
        raise CrispError(f"{path}: is not TOML: {error}") from error


def _axes(table: Mapping[str, Any], where: str) -> list[Axis]:
    return [Axis(key, _values(value, f"{where}: {key}"), f"{where}: {key}")
            for key, value in table.items()]  # fmt: skip


def _values(value: Any, where: str) -> Sequence[str]:
    """Read the values of a key: one, a list of them, or a range."""
    if isinstance(value, dict):
        return _steps(value, where)
    texts = [_text(item, where) for item in (value if isinstance(value, list) else [value])]
    if not texts:
        raise CrispError(f"{where}: is empty; at least one value was expected")
    twice = [text for text in texts if texts.count(text) > 1] if len(texts) < 1000 else []
    if twice:
        raise CrispError(f"{where}: {twice[0]} is given twice")
    return texts


def _text(item: Any, where: str) -> str:
    if isinstance(item, bool) or not isinstance(item, str | int | Decimal) or item == "":
        shown = "''" if item == "" else str(item)
        raise CrispError(f"{where}: found {shown}, expected text, a number, or a list of them")
    return str(item)


def _steps(table: Mapping[str, Any], where: str) -> ValueRange:
    for key in table:
        if key not in _RANGE:
            raise CrispError(f"{where}: {unknown_name(key, _RANGE, 'key')}")
    numbers = {}
    for key in _RANGE:
        if key not in table:
            raise CrispError(
                f"{where}: lacks {key}; a range is {{ from = 0.4, to = 0.8, step = 0.1 }}"
            )
        numbers[key] = parse_fraction(_text(table[key], f"{where}: {key}"), f"{where}: {key}")
    first, last, step = numbers.values()
    if step <= 0 or last < first:
        raise CrispError(f"{where}: expected a step above 0 and 'to' not below 'from'")
    if (last - first) / step >= _MOST:
        raise CrispError(f"{where}: so small a step makes too many values; 2**62 are possible")
    return ValueRange(first, last, step)


def _names(axes: Mapping[str, Axis]) -> set[str]:
    """Return all names that stand in braces; CrispError for one that has no values."""
    names = set()
    for axis in axes.values():
        if axis.key in KEYS and not isinstance(axis.values, ValueRange):
            for name in (name for text in axis.values for name in _NAME.findall(text)):
                if name in KEYS or name not in axes:
                    raise CrispError(
                        f"{axis.where}: {{{name}}} has no values; give it some, {name} = [...]"
                    )
                names.add(name)
    return names


def _grid(axes: Mapping[str, Axis], names: set[str], where: str) -> SweepGrid:
    for key in NEEDED:
        if key not in axes:
            raise CrispError(f"{where}: lacks {key}; give it in the file or as --{key}")
    # A name varies more slowly than budgets, as the rest of a policy does.
    order = (*KEYS[:-1], *(key for key in axes if key in names), KEYS[-1])
    return SweepGrid(tuple(axes[key] for key in order if key in axes))


def _unknown(axis: Axis, names: set[str]) -> CrispError:
    place = axis.where.removesuffix(f": {axis.key}")
    return CrispError(
        f"{place}: {unknown_name(axis.key, [*KEYS, *sorted(names), 'search', 'grid'], 'key')}"
    )
