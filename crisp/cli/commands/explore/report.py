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
    """Show runs side by side, as text or as an HTML page.

    Shown are the conditions, all metrics, charts, and the time of one token.
    """
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

    timeline_files = timeline or []
    if timeline_files and html is None:
        raise CrispError("--timeline: is drawn; say where with --html FILE")
    inputs = [("RUNS", file) for file in runs] + [("--timeline", file) for file in timeline_files]
    for what, file in inputs:
        check_no_folder(what, file)
    check_outputs({"--html": html}, inputs)
    with progress_of("report"):
        all_runs, tables = _read(runs)
        table = join_tables(tables)
        shared = conditions(table)
        if html is None:
            text = "\n".join(map(printable, _lines(table, shared)))
        else:
            timelines = [read_timeline(file, all_runs) for file in timeline_files]
            text = render_page(table, shared, timelines, _names(runs))
    if html is None:
        print(text)
    elif html == STDOUT:
        sys.stdout.write(text)
    else:
        with atomic(html) as temporary:
            temporary.write_text(text, encoding="utf-8")
        print(f"{html}: {format_lead(table, shared)}")


def _read(files: Sequence[Path]) -> tuple[list[Run], list[RunTable]]:
    """Return (the runs of run files, a table of each file)."""
    from crisp.errors import CrispError
    from crisp.report.table import from_parquet, from_runs
    from crisp.run.result import load_runs

    all_runs, tables = [], []
    for file in files:
        if file.suffix == ".parquet":
            tables.append(from_parquet(file))
        else:
            try:
                runs = load_runs(file)
            except CrispError:
                _check_no_losses(file)
                raise
            all_runs += runs
            tables.append(from_runs(runs))
    return all_runs, tables


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


def _lines(table: RunTable, shared: SharedConditions) -> list[str]:
    """Return the conditions, the table, and what is not in it, as text."""
    from crisp.cli.output.columns import align_columns, format_numbers
    from crisp.report.data import scale_value, shown_metrics
    from crisp.report.metrics import MAIN
    from crisp.report.page import format_lead, format_notes, format_title

    lines = [format_title(table, shared), format_lead(table, shared), *format_notes(table), ""]
    width = max((len(label) for label, _ in shared.common), default=0)
    lines += [f"{label:<{width}}  {value}" for label, value in shared.common]
    metrics, absent = shown_metrics(table)
    columns = [shared.policies, [asked or "" for asked in table.setting("budget.asked")]]
    heads = ["policy", "budget"]
    if len(set(table.measured())) > 1:
        heads.append("")
        columns.append(["measured" if one else "simulated" for one in table.measured()])
    for one in shared.differing:
        heads.append(one.label)
        columns.append([_short(value) for value in one.values])
    text = len(columns)
    for shown in metrics:
        if shown.group == MAIN:
            heads.append(f"{shown.head} {shown.unit}".strip())
            values = [scale_value(value, shown) for value in table.metric(shown.metric)]
            columns.append(format_numbers(values, shown.decimals))
    rows = align_columns(heads, columns, text)
    lines += ["", *rows[: _MOST_ROWS + 1]]
    if len(rows) > _MOST_ROWS + 1:
        lines.append(f"… {_MOST_ROWS} of {table.rows:,} runs; --html FILE has all")
    lines.append("")
    if shared.implied:
        lines.append(f"differ with these and the policy: {', '.join(shared.implied)}")
    return [*lines, *(f"no run has {one['head']}: {one['why']}" for one in absent)]


def _short(value: str | None) -> str:
    text = "–" if value is None else value
    return text if len(text) <= _WIDEST else f"{text[: _WIDEST - 1]}…"
