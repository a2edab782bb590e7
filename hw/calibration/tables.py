"""Turn a calibration's samples into the tables of a hardware profile."""

from __future__ import annotations

import datetime
import platform
from dataclasses import dataclass, replace
from fractions import Fraction
from pathlib import Path

import numpy as np

from crisp.hardware.measured import BlockGeometry, MeasuredTables, TimeCurve, TimeGrid
from crisp.hardware.tables import SECTIONS, to_toml
from crisp.hw.devices.protocol import Device
from crisp.hw.store.reader import Store
from crisp.units import format_bytes

Key = tuple[str, int, int, bool]  # stream, blocks, rows, whether the other stream is busy
KINDS = {"cpu": "disk", "cuda": "discrete", "unified": "unified"}  # a machine's kind, by device


@dataclass(frozen=True)
class DeviceTimes:
    """A device's measured times, and the source of every section."""

    kind: str  # of the machine, as a hardware profile has it
    loads_from: str | None  # of kind unified
    tables: MeasuredTables
    sources: dict[str, str]

    def toml(self) -> str:
        """Return the text of a hardware profile."""
        why = "calibration measures times, not power"
        return to_toml(self.kind, self.loads_from, why, self.tables, self.sources)


def tabulate(
    device: Device,
    store: Store,
    samples: dict[Key, list[int]],
    layer: TimeCurve,
    model: str | None,
) -> DeviceTimes:
    """Return the medians of the samples as tables.

    samples: ns, each the mean of some operations in a row. layer: the time between two events.
    model: the name of the model that ``layer`` is of; None: of a replay.
    """
    spec = store.spec
    medians = {key: Fraction(int(np.median(times))) for key, times in samples.items()}
    sizes = sorted({key[1] for key in samples if key[0] == "load"})
    blocks = sorted({key[1] for key in samples if key[0] == "compute"})
    rows = sorted({key[2] for key in samples if key[0] == "compute"})
    by_table: dict[str, list[list[int]]] = {}
    for (stream, _, _, busy), times in samples.items():
        by_table.setdefault("busy" if busy else stream, []).append(times)
    names = [name for name in SECTIONS if name in by_table]
    spreads = {name: round(_spread(by_table[name]), 4) for name in names}
    cached = sorted(key[1] for key in samples if key[0] == "page_cache")
    tables = MeasuredTables(
        geometry=replace(BlockGeometry.of(spec), dtype=store.dtype, activation=store.activation),
        load=_loads(medians, "load", sizes, spec.block_bytes),
        compute=TimeGrid(
            tuple(blocks),
            tuple(rows),
            tuple(tuple(medians["compute", n, row, False] for row in rows) for n in blocks),
        ),
        layer=layer,
        slow_load=_slower(medians, "load"),
        slow_compute=_slower(medians, "compute"),
        spreads=tuple(spreads.items()),
        page_cache=_loads(medians, "page_cache", cached, spec.block_bytes) if cached else None,
    )
    where = f"crisp calibrate on {processor_name()}, {datetime.date.today().isoformat()}"
    how = ", ".join(f"{key} {value}" for key, value in device.describe().items() if value)
    what = f"{spec.name} in {store.dtype}, {format_bytes(spec.block_bytes)} a block"
    sources = {
        name: f"measured: {where}; {how}; {what}; median of {min(map(len, lists))} to "
        f"{max(map(len, lists))} means of some in a row, interquartile range "
        f"{_format_percent(spreads[name])} of it"
        for name, lists in by_table.items()
    }
    device_kind = KINDS[device.name]
    return DeviceTimes(
        device_kind,
        device.describe()["loads_from"] if device_kind == "unified" else None,
        tables,
        {
            "geometry": f"the store: {what}",
            "load": f"{sources['load']}; back to back, of random experts",
            "compute": f"{sources['compute']}; each handed over when the one before had ended",
            "layer": f"measured: {where}; "
            + (
                "median time between two events of a replay, everything resident"
                if model is None
                else f"mean time between two events while {model} writes"
            ),
            "busy": f"{sources['busy']}; beside whole experts back to back, computing single rows",
            "page_cache": f"{sources.get('page_cache')}; back to back, of what was read before",
        },
    )


def _loads(
    medians: dict[Key, Fraction], stream: str, sizes: list[int], block_bytes: int
) -> TimeCurve:
    """Return the times of loads by their bytes; sizes: in blocks."""
    return TimeCurve(
        tuple(size * block_bytes for size in sizes),
        tuple(medians[stream, size, 0, False] for size in sizes),
    )


def _slower(medians: dict[Key, Fraction], stream: str) -> Fraction:
    """Return the time while the other stream is busy over the time alone, of all sizes together;
    at least 1.
    """
    busy = [key for key in medians if key[0] == stream and key[3]]
    alone = sum(medians[*key[:3], False] for key in busy)
    beside = sum(medians[key] for key in busy)
    return max(Fraction(1), round(Fraction(beside) / alone, 4))


def _spread(lists: list[list[int]]) -> float:
    """Return the interquartile range over the median: the median over the sizes."""
    quartiles = [np.percentile(times, (25, 50, 75)) for times in lists]
    return float(np.median([(high - low) / middle for low, middle, high in quartiles]))


def _format_percent(spread: float) -> str:
    return f"{100 * spread:.0f} %"


def processor_name() -> str:
    """Return the processor's name, or its architecture where the system has no name for it."""
    try:
        lines = Path("/proc/cpuinfo").read_text(encoding="utf-8").splitlines()
    except OSError:
        lines = []
    names = [line.partition(":")[2].strip() for line in lines if line.startswith("model name")]
    return names[0] if names else platform.processor() or platform.machine()
