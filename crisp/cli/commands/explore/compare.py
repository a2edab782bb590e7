"""``crisp compare``: a simulated run beside a measured one."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import IO, TYPE_CHECKING, Annotated, Any

import typer

if TYPE_CHECKING:
    from crisp.run.compare import Comparison
    from crisp.run.result import Run
    from crisp.run.timeline import Rows

_ROWS = 1 << 13  # of a timeline, turned into text at once


def compare(
    simulated: Annotated[
        Path, typer.Argument(metavar="SIMULATED", help="A run by crisp simulate --json.")
    ],
    measured: Annotated[
        Path, typer.Argument(metavar="MEASURED", help="A run by crisp replay --json.")
    ],
    timelines: Annotated[
        tuple[Path, Path] | None,
        typer.Option(
            metavar="SIM MEAS",
            help="Their timelines.  [default: x.parquet beside each x.json, if both are there]",
        ),
    ] = None,
    run: Annotated[
        int | None, typer.Option(help="Which runs of two lists, from 1; they have no timelines.")
    ] = None,
    perfetto: Annotated[
        str | None,
        typer.Option(metavar="FILE", help="Both timelines, for ui.perfetto.dev; -: print them."),
    ] = None,
) -> None:
    """Lay a simulated run beside a measured one of the same case."""
    import sys

    from crisp.cli.options.files import STDOUT, check_outputs
    from crisp.errors import CrispError
    from crisp.run.compare import check_same_case, compare, load_one_run, load_run_timeline

    files = timelines or (_beside(simulated, measured) if run is None else None)
    inputs = [("SIMULATED", simulated), ("MEASURED", measured)]
    inputs += [("--timelines", file) for file in files or ()]
    check_outputs({"--perfetto": perfetto}, inputs)
    if perfetto is not None and files is None:
        raise CrispError("--perfetto: needs timelines; name them after --timelines")
    runs = load_one_run(simulated, run, measured=False), load_one_run(measured, run, measured=True)
    check_same_case(*runs)  # before anything large is read
    rows: list[Rows] = []
    if files is not None:
        try:
            rows = [*map(load_run_timeline, runs, (simulated, measured), files)]
        except CrispError as error:
            if timelines is not None or perfetto is not None:
                raise
            print(f"{error}; timelines are left out", file=sys.stderr)
    comparison = compare(*runs, *(rows or (None, None)))
    if perfetto is not None:
        _draw(sys.stdout if perfetto == STDOUT else Path(perfetto), runs, rows)
    print(
        "\n".join(_lines(comparison, runs)), file=sys.stderr if perfetto == STDOUT else sys.stdout
    )


def _beside(simulated: Path, measured: Path) -> tuple[Path, Path] | None:
    """Return the timelines beside the runs, if both are there."""
    files = simulated.with_suffix(".parquet"), measured.with_suffix(".parquet")
    return files if all(file.is_file() for file in files) else None


def _draw(target: Path | IO[str], runs: Sequence[Run], rows: Sequence[Rows]) -> None:
    from crisp.model.spec import ModelSpec
    from crisp.report.perfetto import side_by_side

    block_bytes = ModelSpec.from_dict(runs[0].settings["model"]).block_bytes
    with side_by_side(target, _names(runs), block_bytes) as sinks:
        for sink, timeline in zip(sinks, rows, strict=True):
            for start in range(0, len(timeline), _ROWS):
                sink.write(timeline[start : start + _ROWS])


def _names(runs: Sequence[Run]) -> list[str]:
    """Return what each run ran on, in words."""
    simulated, measured = (run.settings for run in runs)
    return [
        f"simulated on {(simulated.get('hardware') or {}).get('name', 'an unnamed machine')}",
        f"measured on {(measured.get('device') or {}).get('name', 'an unnamed device')}",
    ]


def _lines(comparison: Comparison, runs: Sequence[Run]) -> list[str]:
    from crisp.cli.output.columns import DASH, align_columns, format_numbers
    from crisp.cli.output.measured import describe_repeats, format_with_error
    from crisp.run.compare import COUNTS, QUANTILES

    settings = runs[0].settings
    policy, budget = settings["policy"]["name"], settings["budget"]["asked"]
    repeats = runs[1].provenance.get("repeats")
    cells: list[list[str]] = []
    for pair in comparison.pairs:
        if pair.simulated is None and pair.measured is None:
            continue
        both = format_numbers([pair.simulated, pair.measured], 0 if pair.metric in COUNTS else None)
        if pair.half_width:
            both[1] = format_with_error(pair.measured, pair.half_width)
        error = DASH if pair.error is None else f"{100 * pair.error:+.1f} %"
        cells.append([pair.metric, *both, error])
        if repeats is not None:
            cells[-1].append({None: DASH, True: "yes", False: "no"}[pair.differs])
    headings = ["", "simulated", "measured", "error", *(["differs"] if repeats else [])]
    lines = [f"{policy} at {budget}: {', '.join(_names(runs))}", ""]
    lines += align_columns(headings, [list(column) for column in zip(*cells, strict=True)], text=1)
    lines += ["", "error: simulated over measured, less 1"]
    if repeats is not None:
        lines += [
            f"measured: {describe_repeats(repeats['runs'], repeats['ended'])}",
            "differs: the simulated value is outside the interval",
        ]
    lines += _calibrated(settings)
    differences = comparison.timelines
    if differences is None:
        return [*lines, "no timelines were given: what happened in each event is not compared"]
    if differences.errors:
        shown = ", ".join(f"{100 * error:+.1f} %" for error in differences.errors)
        of = ", ".join(map(str, QUANTILES))
        lines.append(f"error of the time of an event, percentiles {of}: {shown}")
    for what, difference in (
        ("load order", differences.loads),
        ("computed blocks", differences.computed),
        ("resident blocks after each event", differences.residents),
    ):
        lines.append(f"{what}: {'identical' if difference is None else f'differ: {difference}'}")
    if not differences.identical and settings["policy"]["prefetch"] != "none":
        lines.append("where blocks are prefetched, decisions depend on when things end: they may")
    return lines


def _calibrated(settings: Mapping[str, Any]) -> Iterator[str]:
    """Yield how sure a calibrated profile's times are, and what a layer's time is of."""
    tables = (settings.get("hardware") or {}).get("tables") or {}
    spreads = [
        f"{name} {100 * tables[name]['spread']:.0f} %"
        for name in ("load", "compute", "busy")
        if "spread" in tables.get(name, {})
    ]
    if spreads:
        yield f"calibrated with interquartile ranges: {', '.join(spreads)}"
    if "layer" in tables:
        yield f"a layer without its experts is {tables['layer']['source']}"
