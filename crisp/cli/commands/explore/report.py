"""``crisp report``: runs side by side, as a page to look at or as text."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from crisp.cli.options import flags

if TYPE_CHECKING:
    from crisp.report.conditions import SharedConditions
    from crisp.report.table import RunTable
    from crisp.run.result import Run

_MOST_ROWS = 200  # of a table on a terminal
_WIDEST = 28  # characters of a setting in it


def report(
    runs: Annotated[
        list[Path],
        typer.Argument(
            metavar="RUNS...", help="What --json wrote, or results.parquet of crisp sweep."
        ),
    ],
    html: Annotated[str | None, flags.file("One page with tables, charts and timelines")] = None,
    timeline: Annotated[
        list[Path] | None,
        typer.Option(
            metavar="FILE", help="What --timeline of one of the runs wrote; also several."
        ),
    ] = None,
) -> None:
    """Show runs side by side: conditions, all metrics, charts, one token's time."""
    import sys

    from crisp.cli.options.files import STDOUT, check_no_folder, check_outputs
    from crisp.cli.output.progress import progress_of
    from crisp.cli.output.words import printable
    from crisp.errors import CrispError
    from crisp.files import atomic
    from crisp.report.conditions import conditions
    from crisp.report.page import format_lead, render_page
    from crisp.report.table import join_tables
    from crisp.report.timelines import read_timeline

    given = timeline or []
    if given and html is None:
        raise CrispError("--timeline: is drawn; say where with --html FILE")
    inputs = [("RUNS", file) for file in runs] + [("--timeline", file) for file in given]
    for what, file in inputs:
        check_no_folder(what, file)
    check_outputs({"--html": html}, inputs)
    with progress_of("report"):
        known, tables = _read(runs)
        table = join_tables(tables)
        found = conditions(table)
        if html is None:
            text = "\n".join(map(printable, _lines(table, found)))
        else:
            timelines = [read_timeline(file, known) for file in given]
            text = render_page(table, found, timelines, _names(runs))
    if html is None:
        print(text)
    elif html == STDOUT:
        sys.stdout.write(text)
    else:
        with atomic(html) as temporary:
            temporary.write_text(text, encoding="utf-8")
        print(f"{html}: {format_lead(table, found)}")


def _read(files: Sequence[Path]) -> tuple[list[Run], list[RunTable]]:
    """(the runs of run files, a table of each file)."""
    from crisp.errors import CrispError
    from crisp.report.table import from_parquet, from_runs
    from crisp.run.result import load

    known, tables = [], []
    for file in files:
        if file.suffix == ".parquet":
            tables.append(from_parquet(file))
        else:
            try:
                runs = load(file)
            except CrispError:
                _check_no_losses(file)
                raise
            known += runs
            tables.append(from_runs(runs))
    return known, tables


def _check_no_losses(file: Path) -> None:
    """Raise CrispError if crisp eval wrote a file."""
    from crisp.errors import CrispError
    from crisp.sim.tuning.losses import read_losses

    try:
        read_losses(file)
    except CrispError:
        return
    raise CrispError(
        f"{file}: is what crisp eval wrote; report takes runs of simulate, replay, generate and "
        "sweeps"
    )


def _names(files: Sequence[Path]) -> list[str]:
    return list(dict.fromkeys(file.name for file in files))


def _lines(table: RunTable, found: SharedConditions) -> list[str]:
    """Conditions, table, and what is not in it."""
    from crisp.cli.output.columns import aligned, numbers
    from crisp.report.data import scale_value, shown_metrics
    from crisp.report.metrics import MAIN
    from crisp.report.page import format_lead, format_notes, format_title

    lines = [format_title(table, found), format_lead(table, found), *format_notes(table), ""]
    width = max((len(label) for label, _ in found.common), default=0)
    lines += [f"{label:<{width}}  {value}" for label, value in found.common]
    metrics, absent = shown_metrics(table)
    columns = [found.policies, [asked or "" for asked in table.setting("budget.asked")]]
    heads = ["policy", "budget"]
    if len(set(table.measured())) > 1:
        heads.append("")
        columns.append(["measured" if one else "simulated" for one in table.measured()])
    for one in found.differing:
        heads.append(one.label)
        columns.append([_short(value) for value in one.values])
    text = len(columns)
    for shown in metrics:
        if shown.group == MAIN:
            heads.append(f"{shown.head} {shown.unit}".strip())
            values = [scale_value(value, shown) for value in table.metric(shown.metric)]
            columns.append(numbers(values, shown.decimals))
    rows = aligned(heads, columns, text)
    lines += ["", *rows[: _MOST_ROWS + 1]]
    if len(rows) > _MOST_ROWS + 1:
        lines.append(f"… {_MOST_ROWS} of {table.rows:,} runs; --html FILE has all")
    lines.append("")
    if found.implied:
        lines.append(f"differ with these and the policy: {', '.join(found.implied)}")
    return [*lines, *(f"no run has {one['head']}: {one['why']}" for one in absent)]


def _short(value: str | None) -> str:
    text = "–" if value is None else value
    return text if len(text) <= _WIDEST else f"{text[: _WIDEST - 1]}…"
