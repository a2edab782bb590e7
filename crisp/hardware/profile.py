"""HardwareProfile: the published or measured numbers of a machine, each with its source."""

from __future__ import annotations

import tomllib
from collections.abc import Mapping
from dataclasses import dataclass, replace
from decimal import Decimal
from fractions import Fraction
from pathlib import Path
from typing import Any

from crisp.errors import CrispError, reason_of, unknown_name
from crisp.files import check_readable
from crisp.hardware.cost import AnalyticCost, CostModel, TableCost
from crisp.hardware.measured import MeasuredTables, TimeCurve, measured_cost
from crisp.hardware.page_cache import PageCacheCost
from crisp.hardware.tables import SECTIONS, read_tables, tables_dict
from crisp.model.spec import ModelSpec

__all__ = ["CostModel", "HardwareProfile", "Power", "cost_model"]

KINDS = ("discrete", "unified", "disk")
MODELS = ("analytic", "table", "measured")
ORIGINS = ("memory", "mapped", "disk")
WORDS = ("kind", "model", "loads_from", "no_power")

# section.key; the unit is the key's ending, and gb means 10^9 bytes
LINK = ("link.bandwidth_gb_s", "link.latency_us")
COMPUTE = ("compute.rate_tflops", "compute.launch_us", "memory.bandwidth_gb_s")
TABLE = ("table.expert_load_ms", "table.expert_compute_ms", "table.layer_ms")
POWER = ("power.idle_w", "power.link_w", "power.compute_w", "power.both_w")
PAGE_CACHE = ("page_cache.bandwidth_gb_s", "page_cache.latency_us")  # may be left out
MAY_BE_ZERO = (
    "link.latency_us", "compute.launch_us", "table.layer_ms", "page_cache.latency_us", *POWER
)  # fmt: skip


@dataclass(frozen=True)
class Power:
    """Watts drawn while nothing runs, only the link, only compute, or both."""

    idle: float
    link: float
    compute: float
    both: float


@dataclass(frozen=True)
class HardwareProfile:
    """A machine: the numbers of its link, processor and memory, and its power.

    `numbers` holds the exact value of each `section.key` of the file, in the unit that the key
    ends in; `sources` says, for the same keys and for each section of measured tables, where they
    come from.
    """

    name: str
    kind: str  # discrete: a link of its own; unified: link and compute share the memory; disk
    model: str  # analytic: from rates; table: times of one expert; measured: by calibration
    loads_from: str | None  # unified only: memory (a copy), mapped (nothing to load) or disk
    numbers: Mapping[str, Fraction]
    sources: Mapping[str, str]
    power: Power | None
    no_power: str | None  # why there is no power; energy is then null for this reason
    tables: MeasuredTables | None = None  # of a measured one
    page_cache: int | None = None  # bytes of the system's page cache; None: reads pass it by

    @classmethod
    def load(cls, path: str | Path) -> HardwareProfile:
        """Read and check a profile (TOML); its name is the file's, without the ending.

        Raises CrispError, one line with file and key, for anything missing, unknown, negative,
        not a number, without a source, or contradicting another entry.
        """
        path = Path(path)
        check_readable(path)
        try:
            text = path.read_text(encoding="utf-8")
            content = tomllib.loads(text, parse_float=Decimal)
        except OSError as error:
            raise CrispError(f"{path}: cannot be read: {error.strerror or error}") from error
        except ValueError as error:
            raise CrispError(f"{path}: is not TOML: {reason_of(error)}") from error
        return _check_content(content, path)

    def to_dict(self) -> dict[str, Any]:
        """Return everything, safe for JSON; numbers stand by section, beside their sources."""
        values = {
            key: {"value": _plain(number), "source": self.sources[key]}
            for key, number in self.numbers.items()
        }
        words = {word: getattr(self, word) for word in ("name", *WORDS)}
        printed = words | {"numbers": values}
        if self.page_cache is not None:
            printed["page_cache"] = self.page_cache
        if self.tables is not None:
            printed["tables"] = {
                name: section | {"source": self.sources[name]}
                for name, section in tables_dict(self.tables).items()
            }
        return printed

    def with_page_cache(self, n_bytes: int | None) -> HardwareProfile:
        """Return the machine with its disk read through so many bytes of page cache; None: past it.

        Raises CrispError for a machine whose reads from the page cache have no rate.
        """
        if n_bytes is not None and self._cached_reads() is None:
            raise CrispError(
                f"--page-cache: hardware profile {self.name} has no section page_cache, the rate "
                "of reads from there; crisp calibrate --read buffered measures it"
            )
        return replace(self, page_cache=n_bytes)

    @property
    def has_page_cache(self) -> bool:
        """Whether reads from the system's page cache have a rate."""
        return self._cached_reads() is not None

    def _cached_reads(self) -> tuple[TimeCurve, Fraction] | None:
        """Return (ns of a request by its bytes, ns of a byte) of reads from the page cache."""
        curve = None if self.tables is None else self.tables.page_cache
        if curve is not None:
            return curve, curve.ns[-1] / curve.at[-1]
        if PAGE_CACHE[0] not in self.numbers:
            return None
        byte_ns = 1 / self.numbers[PAGE_CACHE[0]]  # 1 GB/s is 1 byte/ns
        latency = 1000 * self.numbers[PAGE_CACHE[1]]
        return TimeCurve((1, 2), (latency + byte_ns, latency + 2 * byte_ns)), byte_ns


def cost_model(profile: HardwareProfile, spec: ModelSpec) -> CostModel:
    """Return the cost model of `spec` on `profile`; with a page cache, for a single run.

    Raises CrispError if the profile was measured with blocks of another kind.
    """
    cached = profile._cached_reads()
    if profile.page_cache is None or cached is None:
        return _plain_cost(profile, spec)
    disk = _plain_cost(profile, spec)
    return PageCacheCost(disk, *cached, spec.row_block_bytes, profile.page_cache)


def _plain_cost(profile: HardwareProfile, spec: ModelSpec) -> CostModel:
    """Return the costs without a page cache."""
    number = profile.numbers
    if profile.tables is not None:
        return measured_cost(profile.tables, spec, profile.name)
    if profile.model == "table":
        load, compute, layer = (1_000_000 * number[key] for key in TABLE)  # ns
        return TableCost(spec, expert_load=load, expert_compute=compute, layer_time=layer)
    # 1 GB/s is 1 byte/ns; 1 TFLOPS is 1000 FLOP/ns
    return AnalyticCost(
        spec,
        link=number.get("link.bandwidth_gb_s"),
        latency=1000 * number.get("link.latency_us", Fraction(0)),
        rate=1000 * number["compute.rate_tflops"],
        launch=1000 * number["compute.launch_us"],
        memory=number["memory.bandwidth_gb_s"],
        shared=profile.kind == "unified",
        copies=2 if profile.loads_from == "memory" else 1,
    )


# -- checks --------------------------------------------------------------------------------------


def _check_content(content: dict[str, Any], path: Path) -> HardwareProfile:
    """Return the profile in a parsed file; raise CrispError for anything wrong with it."""
    words = {key: value for key, value in content.items() if not isinstance(value, dict)}
    for key in words:
        if key not in WORDS:
            raise CrispError(f"{path}: {unknown_name(key, WORDS, 'key')}")
    kind = _word(words, "kind", KINDS, path)
    model = _word(words, "model", MODELS, path)
    origin = None
    if kind == "unified":
        origin = _word(words, "loads_from", ORIGINS, path)
        if model == "table":
            raise CrispError(f"{path}: model: 'table' needs kind discrete or disk, found unified")
        if model == "measured" and origin == "mapped":
            raise CrispError(f"{path}: loads_from: 'mapped' loads nothing that could be measured")
    elif "loads_from" in words:
        raise CrispError(f"{path}: loads_from: only a unified memory has it, kind is {kind}")

    expected: tuple[str, ...] = LINK + COMPUTE
    if model == "table":
        expected = TABLE
    elif model == "measured":
        expected = ()
    elif origin == "mapped":
        expected = COMPUTE
    if "page_cache" in content and kind != "disk":
        raise CrispError(f"{path}: page_cache: only kind disk has one, found {kind}")
    if "page_cache" in content and model != "measured":
        expected += PAGE_CACHE
    no_power = words.get("no_power")
    if "power" in content:
        expected += POWER
        if no_power is not None:
            raise CrispError(f"{path}: no_power: given although there is a section power")
    elif not isinstance(no_power, str) or not no_power.strip():
        raise CrispError(f"{path}: power: neither the section nor the reason, no_power = '...'")

    numbers, sources, tables = {}, {}, None
    measured = tuple(SECTIONS) if model == "measured" else ()
    for key, entry in _entries(content, expected, path, measured):
        numbers[key], sources[key] = _number(key, entry, path)
    for key in expected:
        if key not in numbers:
            raise CrispError(f"{path}: {key}: is missing")
    if measured:
        tables, where = read_tables(content, path)
        sources |= where
    elif origin is not None and origin != "mapped":
        _check_copy_rate(origin, numbers, path)
    power = Power(*(float(numbers[key]) for key in POWER)) if "power" in content else None
    return HardwareProfile(
        path.stem, kind, model, origin, numbers, sources, power, no_power, tables
    )


def _word(words: dict[str, Any], key: str, choices: tuple[str, ...], path: Path) -> str:
    """Return the word at ``key``, one of ``choices``."""
    if key not in words:
        raise CrispError(f"{path}: {key}: is missing, expected one of {', '.join(choices)}")
    if words[key] not in choices:
        raise CrispError(f"{path}: {key}: {unknown_name(str(words[key]), choices, key)}")
    return str(words[key])


def _entries(
    content: dict[str, Any], expected: tuple[str, ...], path: Path, tables: tuple[str, ...]
) -> list[tuple[str, Any]]:
    """Return (section.key, entry) of every section but ``tables``; refuse unexpected ones."""
    sections = {*(key.split(".")[0] for key in expected), *tables}
    entries = []
    for section, keys in content.items():
        if not isinstance(keys, dict) or section in tables:
            continue
        if section not in sections:
            raise CrispError(f"{path}: {unknown_name(section, sorted(sections), 'section')}")
        for key, entry in keys.items():
            name = f"{section}.{key}"
            if name not in expected:
                raise CrispError(f"{path}: {unknown_name(name, expected, 'key')}")
            entries.append((name, entry))
    return entries


def _number(key: str, entry: object, path: Path) -> tuple[Fraction, str]:
    """Return the value and the source of one entry."""
    if not isinstance(entry, dict) or entry.keys() - {"value", "source"} or "value" not in entry:
        raise CrispError(f"{path}: {key}: expected {{ value = NUMBER, source = '...' }}")
    value, source = entry["value"], entry.get("source")
    if not isinstance(value, int | Decimal) or isinstance(value, bool):
        raise CrispError(f"{path}: {key}: found {value!r}, expected a number")
    number = Decimal(value)
    # no machine is near 10^18 of anything; an absurd exponent would fill the memory instead
    if not number.is_finite() or abs(number.adjusted()) > 18:
        raise CrispError(f"{path}: {key}: found {value}, expected a finite number")
    zero = key in MAY_BE_ZERO
    if number < 0 or (number == 0 and not zero):
        least = "0 or more" if zero else "more than 0"
        raise CrispError(f"{path}: {key}: found {value}, expected {least}")
    if not isinstance(source, str) or not source.strip():
        raise CrispError(f"{path}: {key}: has no source; say where the number comes from")
    return Fraction(number), source.strip()


def _check_copy_rate(origin: str, numbers: dict[str, Fraction], path: Path) -> None:
    """Raise CrispError for a copy that is faster than the memory it reads and writes."""
    link, memory = numbers["link.bandwidth_gb_s"], numbers["memory.bandwidth_gb_s"]
    most = memory / 2 if origin == "memory" else memory
    if link > most:
        why = "a copy reads and writes" if origin == "memory" else "what is loaded is written"
        raise CrispError(
            f"{path}: link.bandwidth_gb_s: found {_plain(link)}, expected at most {_plain(most)}:"
            f" {why} the memory of memory.bandwidth_gb_s"
        )


def _plain(number: Fraction) -> int | float:
    """Return a whole number as int, any other as float."""
    return number.numerator if number.denominator == 1 else float(number)
