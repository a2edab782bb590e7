"""The section of docs/policies.md about prefetching."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

from benchmarks.policies.prefetching import BEST, BOUND, BYTES, MACHINES, NONE, PREFETCHERS
from benchmarks.policies.words import Row, table

Cell = dict[str, Row]
"""The runs of one machine, model and budget, by prefetcher."""


def prefetching_section(models: Sequence[Row]) -> str:
    """Return the section about prefetching."""
    cells = prefetching_cells(models)
    lines = [[_gain(cells_of, BEST) for cells_of in by_machine] for by_machine in _apart(cells)]
    told = [
        f"{_span(gains)} on {machine} ({sum(gain < 0 for gain in gains)} of {len(gains)} faster)"
        for machine, gains in zip(MACHINES, lines, strict=True)
    ]
    bounds = [
        f"{_span([_gain(cell, BOUND) for cell in by_machine])} on {machine}"
        for machine, by_machine in zip(MACHINES, _apart(cells), strict=True)
    ]
    plainer = [_gain(cell, "guess") - _gain(cell, BEST) for *_, cell in _rows(cells)]
    vain = [
        sum(float(cell[name]["prefetch_wasted_bytes"]) for cell in cells.values())
        for name in ("guess", BEST)
    ]
    head = (
        "## Prefetching\n\n`saliency` as chosen for the largest loss, with what a prefetcher "
        "brings while the link has nothing else to do, simulated: the small model's routing, "
        "experts of 44 and 17 MB in the place of its own. What is brought takes free room of the "
        "budget, or waits in staging. `saliency(...)` brings, of what is predicted, only blocks "
        "worth loading, the one worth most first (contract, rule 25).\n\n"
        f"Does it pay? `{BEST}` changes a token's time by {'; '.join(told)}. It is no slower "
        f"than plain `guess` in {sum(more >= 0 for more in plainer)} of {len(plainer)} cells, and "
        f"brings {vain[0] / vain[1]:.1f} times fewer bytes in vain. "
        f"A prefetcher that knows what the next event is routed to (`{BOUND}`) changes the time by "
        f"{'; '.join(bounds)}: no prediction of the next event can be expected to bring more. "
        "Where a block takes longer to load than a layer to compute, as those of 44-MB experts on "
        "rtx4090-pcie4, what is brought is late: it gains no more than the time in which the link "
        "would have idled, and what is in vain costs the rest of its own. Where link and compute "
        "share one memory, loading ahead slows down what it runs beside. So `saliency` prefetches "
        "nothing unless asked."
    )
    times: dict[str, Callable[[Any], str]] = {
        "machine": lambda line: line[0],
        "model": lambda line: line[1],
        "budget": lambda line: line[2],
        "none, ms": lambda line: f"{line[3][NONE]['ms_per_token_mean']:.2f}",
        **{
            f"`{name}`": lambda line, name=name: f"{100 * _gain(line[3], name):+z.1f} %"  # type: ignore[misc]
            for name in PREFETCHERS[1:]
        },
    }
    brought: dict[str, Callable[[Any], str]] = {
        "machine": lambda line: line[0],
        "model": lambda line: line[1],
        "budget": lambda line: line[2],
        "none, MB": lambda line: f"{line[3][NONE]['bytes_per_token'] / 1e6:.1f}",
        **{
            f"`{name}`": lambda line, name=name: _brought(line[3][name])  # type: ignore[misc]
            for name in PREFETCHERS[1:]
        },
    }
    rows = _rows(cells)
    return (
        f"{head}\n\nms a token without a prefetcher, and how much more or less with each:\n\n"
        f"{table(times, rows)}\n\nMB a token without a prefetcher; of what each brings, MB a token "
        "that were useful / late / wasted: there when their event asked for them; asked for, but "
        f"still on their way; not asked for.\n\n{table(brought, rows)}"
    )


def prefetching_cells(models: Sequence[Row]) -> dict[tuple[str, str, str], Cell]:
    """Return the simulated runs by (machine, model, budget), in this order."""
    cells: dict[tuple[str, str, str], Cell] = {}
    for machine in MACHINES:
        for model in models:
            for row in model["prefetching"]:
                if row["machine"] == machine:
                    key = machine, model["facts"]["name"], row["budget"]
                    cells.setdefault(key, {})[row["prefetch"]] = row
    return cells


def _rows(cells: dict[tuple[str, str, str], Cell]) -> list[tuple[str, str, str, Cell]]:
    return [(*key, cell) for key, cell in cells.items()]


def _apart(cells: dict[tuple[str, str, str], Cell]) -> list[list[Cell]]:
    """Return the cells machine by machine."""
    return [[cell for key, cell in cells.items() if key[0] == machine] for machine in MACHINES]


def _gain(cell: Cell, prefetch: str) -> float:
    """Return by what share a token takes longer than without a prefetcher."""
    return float(cell[prefetch]["ms_per_token_mean"] / cell[NONE]["ms_per_token_mean"] - 1)


def _span(gains: Sequence[float]) -> str:
    return f"{100 * min(gains):+z.1f} to {100 * max(gains):+z.1f} %"


def _brought(row: Row) -> str:
    return " / ".join(
        f"{row[f'prefetch_{what}_bytes'] / row['tokens'] / 1e6:.1f}" for what in BYTES
    )
