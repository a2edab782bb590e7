"""Write docs/fidelity.md from the record of all runs."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from statistics import median, quantiles
from typing import Any

Record = dict[str, Any]
KEY = ("mode", "geometry", "policy", "budget", "granularity")
DOMINATED = 20  # loading dominates a run if it takes so many times all that does not overlap it
TITLES = {
    "paced": "(a) Link paced to {pace:.0f} MB/s",
    "free": "(b) Disk as fast as it goes",
    "buffered": "(c) Through the page cache, which is empty when a run begins",
    "prompts 512": "(d) Prompts in chunks of 512 rows",
    "prompts whole": "(e) Prompts as a whole",
}


@dataclass(frozen=True)
class Cell:
    """A combination of settings: its simulation, and its measured runs."""

    simulated: Record
    runs: list[Record]

    @property
    def measured(self) -> float:
        """The measured ms per token: the median of the runs."""
        return median(run["ms_per_token"] for run in self.runs)

    @property
    def error(self) -> float:
        """The relative error of the simulation."""
        return self.simulated["ms_per_token"] / self.measured - 1

    @property
    def spread(self) -> float:
        """The spread of the runs: largest less smallest, over the median."""
        times = [run["ms_per_token"] for run in self.runs]
        return (max(times) - min(times)) / self.measured

    @property
    def same(self) -> bool:
        """Whether every run decided as it should."""
        return all(run["same_decisions"] for run in self.runs)

    @property
    def megabytes(self) -> float:
        """MB loaded per token."""
        return float(self.simulated["bytes_loaded"] / self.simulated["tokens"] / 1e6)

    @property
    def probed(self) -> float:
        """The median speed of the probes before and after the runs, in GB/s."""
        return median(rate for run in self.runs for rate in run["probes_gb_per_s"])


def read(content: Record) -> list[Cell]:
    """Return the cells of a record."""
    runs: dict[tuple[str, ...], list[Record]] = {}
    for run in content["runs"]:
        runs.setdefault(_key(run), []).append(run)
    return [Cell(simulated, runs[_key(simulated)]) for simulated in content["simulated"]]


def page(content: Record) -> str:
    """Return the text of docs/fidelity.md."""
    cells, told = read(content), content["conditions"]
    parts = [_head(told, cells)]
    for mode, title in TITLES.items():
        own = [cell for cell in cells if cell.simulated["mode"] == mode]
        if own:
            pace = (told["paced_bytes_per_s"] or 0) / 1e6
            parts += [f"## {title.format(pace=pace)}", _summary(mode, own), _table(own)]
    free = [cell for cell in cells if cell.simulated["mode"] == "free"]
    parts += [_against_raw(content["beside_raw"]), _granularities(free)]
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
over measured, less 1; spread: of the runs, largest less smallest, over the median; probes: reads
of as much at places drawn at random, one after the other and none ahead, right before and after
each run, GB/s (they tell how steady the disk is; what a run's own loads could take stands further
down); events: 5, 50 and 95 % quantiles of the same error of single events, of the first run."""


def _summary(mode: str, cells: list[Cell]) -> str:
    errors = [abs(cell.error) for cell in cells]
    middle, worst = median(errors), max(errors)
    spread = median(cell.spread for cell in cells)
    drift = ""
    if mode == "paced":
        good = middle <= 0.02 and worst <= 0.05
        aim = "aim: median at most 2 %, worst at most 5 %"
    else:
        good = middle <= max(0.05, 2 * spread)
        drift = " A disk may be slower while it is calibrated than when it runs, or faster."
        aim = "aim: median at most the larger of 5 % and twice the median spread"
    slower = sum(cell.error > 0 for cell in cells)
    return (
        f"Error: median {_percent(middle)} (with its sign: "
        f"{_signed(median(cell.error for cell in cells))}), worst {_percent(worst)}; spread of the "
        f"runs: median {_percent(spread)}. **{'Met' if good else 'Not met'}** ({aim}). "
        f"Simulated slower than measured in {slower} of {len(cells)} cells.{drift}"
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
        "probes": lambda cell: f"{cell.probed:.2f}",
        "events": lambda cell: " ".join(_signed(q) for q in cell.runs[0]["event_errors"]),
        "decisions": lambda cell: "same" if cell.same else "**differ**",
    }
    return _markdown(columns, cells)


def _against_raw(runs: list[Record]) -> str:
    by_cell: dict[tuple[str, ...], list[Record]] = {}
    for run in runs:
        by_cell.setdefault(_key(run), []).append(run)
    rows = list(by_cell.values())
    own = [median(map(_over_raw, row)) for row in rows if _loading(row) >= DOMINATED]
    columns: dict[str, Callable[[list[Record]], str]] = {
        "experts": lambda row: row[0]["geometry"].partition(",")[0],
        "policy": lambda row: row[0]["policy"],
        "budget": lambda row: row[0]["budget"],
        "runs": lambda row: str(len(row)),
        "plain reads, GB/s": lambda row: _quartiles(
            [2 * r["bytes"] / sum(r["raw_ns"]) for r in row], 2
        ),
        "loading over the rest": lambda row: f"{_loading(row):.0f}",
        "over these": lambda row: f"{median(map(_over_raw, row)):.3f}",
        "quartiles": lambda row: _quartiles(list(map(_over_raw, row)), 3),
        "loads alone": lambda row: (
            f"{median(2 * r['link_ns'] / sum(r['raw_ns']) for r in row):.3f}"
        ),
    }
    told = "In no cell does loading dominate so far."
    if own:
        met = "Met" if max(own) <= 1.1 else "Not met"
        told = (
            f"Where loading takes at least {DOMINATED} times all that does not overlap with it:\n"
            f"median {median(own):.3f}, largest {max(own):.3f}. **{met}** (aim: at most 1.10)."
        )
    return (
        "## Against plain reads\n\nMeasured time over that of plain O_DIRECT reads of the same\n"
        "blocks in the same order, into huge pages too, one right after the other: the mean of\n"
        "the readings right before and right after each run. Granularity block; the middle of\n"
        "all runs. What a run loads the one before has loaded too, and a disk may have a cache.\n"
        "Loads alone: without the time in which the link waits. They begin when somebody decides\n"
        "on them and end when that is seen, which plain reads have no need of; but a task's next\n"
        "blocks are asked for while one is read, which plain reads are not. Mixtral 8x7B's: only\n"
        "one layer of experts of its size.\n" + told + "\n\n" + _markdown(columns, rows)
    )


def _over_raw(run: Record) -> float:
    return float(2 * run["ns"] / sum(run["raw_ns"]))


def _quartiles(values: Sequence[float], decimals: int) -> str:
    low, middle, high = quantiles(values, n=4)
    return f"{low:.{decimals}f} {middle:.{decimals}f} {high:.{decimals}f}"


def _loading(runs: list[Record]) -> float:
    """Return the time of loading over all that does not overlap with it, in the median run."""
    return median(run["link_ns"] / max(1, run["ns"] - run["link_ns"]) for run in runs)


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
