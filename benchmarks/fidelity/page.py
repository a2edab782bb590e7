"""docs/fidelity.md, from the record of all runs."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from dataclasses import dataclass
from statistics import median
from typing import Any

Record = dict[str, Any]
KEY = ("mode", "geometry", "policy", "budget", "granularity")
DOMINATED = 20  # times all that does not overlap: then loading is nearly all there is
TITLES = {
    "paced": "(a) Link paced to {pace:.0f} MB/s",
    "free": "(b) Disk as fast as it goes",
}


@dataclass(frozen=True)
class Cell:
    """One place of the matrix: what was simulated, and its repeats."""

    simulated: Record
    runs: list[Record]

    @property
    def measured(self) -> float:
        """ms per token: the median of the repeats."""
        return median(run["ms_per_token"] for run in self.runs)

    @property
    def error(self) -> float:
        """Of the simulation, relative to what was measured."""
        return self.simulated["ms_per_token"] / self.measured - 1

    @property
    def spread(self) -> float:
        """Of the repeats: largest less smallest, over the median."""
        times = [run["ms_per_token"] for run in self.runs]
        return (max(times) - min(times)) / self.measured

    @property
    def same(self) -> bool:
        """Whether every repeat decided as was expected."""
        return all(run["same_decisions"] for run in self.runs)

    @property
    def megabytes(self) -> float:
        """Loaded a token."""
        return float(self.simulated["bytes_loaded"] / self.simulated["tokens"] / 1e6)

    @property
    def raw(self) -> float:
        """GB/s of the plain reads before and after the runs, their median."""
        return median(rate for run in self.runs for rate in run["raw_gb_per_s"])

    @property
    def over_raw(self) -> float:
        """Measured time over that of the bytes at the rate of the plain reads just before and after
        each run: the median of the runs.
        """
        return median(
            run["ms_per_token"] / (self.megabytes * 2 / sum(run["raw_gb_per_s"]))
            for run in self.runs
        )

    @property
    def dominated(self) -> bool:
        """Whether loading is at least `DOMINATED` times all that does not overlap with it."""
        total, busy = self.simulated["total_ns"], self.simulated["link_busy"]
        return busy * total >= DOMINATED * (total - busy * total)


def read(content: Record) -> list[Cell]:
    """The cells of a record."""
    runs: dict[tuple[str, ...], list[Record]] = {}
    for run in content["runs"]:
        runs.setdefault(_key(run), []).append(run)
    return [Cell(simulated, runs[_key(simulated)]) for simulated in content["simulated"]]


def page(content: Record) -> str:
    """The text of docs/fidelity.md."""
    cells, told = read(content), content["conditions"]
    parts = [_head(told, cells)]
    for mode, title in TITLES.items():
        own = [cell for cell in cells if cell.simulated["mode"] == mode]
        if own:
            pace = (told["paced_bytes_per_s"] or 0) / 1e6
            parts += [f"## {title.format(pace=pace)}", _summary(mode, own), _table(own)]
    free = [cell for cell in cells if cell.simulated["mode"] == "free"]
    parts += [_against_raw(free), _granularities(free)]
    return "\n\n".join(parts) + "\n"


def _head(told: Record, cells: list[Cell]) -> str:
    same = sum(cell.same for cell in cells)
    return f"""# Simulation beside measurement

Written by `make fidelity`: {told["date"]}, {told["processor"]}, {told["cores"]} cores, Linux
{told["kernel"]}. Random weights in bf16 on disk, read with O_DIRECT into memory, computed by one
thread; {told["tokens"]} tokens a run, {told["repeats"]} runs of each cell: all cells in random
order, one round after the other. Calibrated for {told["calibration_s"]:g} s, once for each
geometry and link, on nothing but the store. Routing: tiny-mixtral-docs and tiny-deepseek-docs,
their second halves; the first give the counts of combinations. Every run is in
[fidelity.json](fidelity.json), none was left out.

**Decisions.** In {same} of {len(cells)} cells every run decided what it should: without prefetch
(fo, lru, crisp) all loads and their order, and the blocks resident after every event, are those of
the simulation; with it (mo) the run's completions, fed to a fresh scheduler, give every load and
every residency once more.

Columns: ms a token as simulated and as measured (median of the runs, and each); error: simulated
over measured, less 1; spread: of the runs, largest less smallest, over the median; raw: plain
reads of the same size right before and after each run, GB/s; events: 5, 50 and 95 % quantiles of
measured over simulated time of an event, less 1, of the first run."""


def _summary(mode: str, cells: list[Cell]) -> str:
    errors = [abs(cell.error) for cell in cells]
    middle, worst = median(errors), max(errors)
    spread = median(cell.spread for cell in cells)
    if mode == "paced":
        good = middle <= 0.02 and worst <= 0.05
        aim = "aim: median at most 2 %, worst at most 5 %"
    else:
        good = middle <= max(0.05, 2 * spread)
        aim = "aim: median at most the larger of 5 % and twice the median spread"
    return (
        f"Error: median {_percent(middle)}, worst {_percent(worst)}; spread of the runs: median "
        f"{_percent(spread)}. **{'Met' if good else 'Not met'}** ({aim})."
    )


def _table(cells: list[Cell]) -> str:
    columns: dict[str, Callable[[Cell], str]] = {
        "experts": lambda cell: cell.simulated["geometry"].partition(",")[0],
        "policy": lambda cell: cell.simulated["policy"],
        "budget": lambda cell: cell.simulated["budget"],
        "granularity": lambda cell: cell.simulated["granularity"],
        "MB/token": lambda cell: (
            f"{cell.simulated['bytes_loaded'] / cell.simulated['tokens'] / 1e6:.0f}"
        ),
        "simulated": lambda cell: f"{cell.simulated['ms_per_token']:.1f}",
        "measured": lambda cell: f"{cell.measured:.1f}",
        "each": lambda cell: " ".join(f"{run['ms_per_token']:.1f}" for run in cell.runs),
        "error": lambda cell: _signed(cell.error),
        "spread": lambda cell: _percent(cell.spread),
        "raw": lambda cell: f"{cell.raw:.2f}",
        "events": lambda cell: " ".join(_signed(q) for q in cell.runs[0]["event_errors"]),
        "decisions": lambda cell: "same" if cell.same else "**differ**",
    }
    return _markdown(columns, cells)


def _against_raw(cells: list[Cell]) -> str:
    own = [c for c in cells if c.dominated and c.simulated["granularity"] == "block"]
    if not own:
        return (
            "## Against plain reads\n\nIn no cell is loading at least "
            f"{DOMINATED} times all that does not overlap with it."
        )
    ratios = [cell.over_raw for cell in own]
    columns: dict[str, Callable[[Cell], str]] = {
        "experts": lambda cell: cell.simulated["geometry"].partition(",")[0],
        "policy": lambda cell: cell.simulated["policy"],
        "budget": lambda cell: cell.simulated["budget"],
        "MB/token": lambda cell: f"{cell.megabytes:.0f}",
        "raw, GB/s": lambda cell: f"{cell.raw:.2f}",
        "measured, ms": lambda cell: f"{cell.measured:.1f}",
        "over raw": lambda cell: f"{cell.over_raw:.3f}",
    }
    met = "Met" if max(ratios) <= 1.1 else "Not met"
    return (
        f"## Against plain reads\n\nCells in which loading takes at least {DOMINATED} times all\n"
        "that does not overlap with it, granularity block: measured time over (bytes / rate of\n"
        "plain O_DIRECT reads of one block just before and after the run), median of the runs.\n"
        "Median "
        f"{median(ratios):.3f},\nlargest {max(ratios):.3f}. **{met}** (aim: at most 1.10).\n\n"
        + _markdown(columns, own)
    )


def _granularities(cells: list[Cell]) -> str:
    by_place: dict[tuple[str, ...], dict[str, Cell]] = {}
    for cell in cells:
        key = tuple(cell.simulated[name] for name in KEY[1:-1])
        by_place.setdefault(key, {})[cell.simulated["granularity"]] = cell
    pairs = [pair for pair in by_place.values() if len(pair) == 2]
    columns: dict[str, Callable[[dict[str, Cell]], str]] = {
        "experts": lambda pair: pair["block"].simulated["geometry"].partition(",")[0],
        "policy": lambda pair: pair["block"].simulated["policy"],
        "budget": lambda pair: pair["block"].simulated["budget"],
        "block, ms": lambda pair: f"{pair['block'].measured:.1f}",
        "expert, ms": lambda pair: f"{pair['expert'].measured:.1f}",
        "block less": lambda pair: _signed(pair["block"].measured / pair["expert"].measured - 1),
        "simulated": lambda pair: _signed(
            pair["block"].simulated["ms_per_token"] / pair["expert"].simulated["ms_per_token"] - 1
        ),
    }
    return (
        "## Block against expert granularity\n\nComputing what has arrived while the rest is on\n"
        "its way, against waiting for the whole expert; the disk as fast as it goes.\n\n"
        + _markdown(columns, pairs)
    )


def _markdown(columns: dict[str, Callable[[Any], str]], rows: Iterable[Any]) -> str:
    lines = ["| " + " | ".join(columns) + " |", "|" + "---|" * len(columns)]
    lines += ["| " + " | ".join(shown(row) for shown in columns.values()) + " |" for row in rows]
    return "\n".join(lines)


def _percent(share: float) -> str:
    return f"{100 * share:.1f} %"


def _signed(share: float) -> str:
    return f"{100 * share:+.1f} %"


def _key(record: Record) -> tuple[str, ...]:
    return tuple(record[name] for name in KEY)
