"""``crisp energy``: the joules of any command."""

from __future__ import annotations

import sys
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

if TYPE_CHECKING:
    from crisp.hw.telemetry.metered_command import MeteredCommand

_LONG = 60  # characters of a command that are shown


def energy(
    command: Annotated[
        list[str], typer.Argument(metavar="COMMAND", help="What is run, with its arguments.")
    ],
    meter: Annotated[
        str | None,
        typer.Option(
            metavar="NAME",
            help="Which meter, as crisp doctor calls it.  [default: one that can be read]",
        ),
    ] = None,
    idle: Annotated[
        float, typer.Option(metavar="SECONDS", help="How long the machine is measured at rest.")
    ] = 2,
    within: Annotated[
        str | None,
        typer.Option(
            metavar="SHARE",
            help="Repeat until the 95 % interval of J is +- this share of it, such as 5%.",
        ),
    ] = None,
    repeats: Annotated[
        int | None,
        typer.Option(
            metavar="N",
            help="Runs at most; alone: run so often.  [default: 20 with a share, else 1]",
        ),
    ] = None,
    tokens: Annotated[
        int | None, typer.Option(metavar="N", help="Tokens of a run: tells joules by token, too.")
    ] = None,
    json: Annotated[
        str | None, typer.Option(metavar="FILE", help="The same, and each run, as JSON.")
    ] = None,
) -> None:
    """Run any command and measure the joules that it takes.

    The result is printed on standard error.
    """
    from json import dumps
    from math import isfinite
    from shutil import which

    from crisp.cli.options.files import check_outputs
    from crisp.errors import CrispError
    from crisp.files import atomic
    from crisp.hw.telemetry.metered_command import find_meter, measure_command
    from crisp.run.repeats import StoppingRule

    rule = StoppingRule.parse(within, repeats, "--")
    if not (isfinite(idle) and idle >= 0):
        raise CrispError(f"--idle {idle:g}: expected seconds, 0 or more")
    if tokens is not None and tokens < 1:
        raise CrispError(f"--tokens {tokens}: expected 1 or more")
    check_outputs({"--json": json}, [], stdout=False)
    if which(command[0]) is None:
        there = Path(command[0]).exists() and "/" in command[0]
        why = "cannot be run" if there else "there is no such command"
        raise CrispError(f"{command[0] or repr('')}: {why}")
    measured = measure_command(command, find_meter(meter), idle, rule)
    print("\n".join(lines(measured, tokens)), file=sys.stderr)
    if json is not None:
        with atomic(json) as temporary:
            temporary.write_text(dumps(measured.to_dict(tokens), indent=1) + "\n", encoding="utf-8")
    if measured.interrupt is not None:
        raise measured.interrupt
    raise typer.Exit(measured.code)


def lines(measured: MeteredCommand, tokens: int | None) -> list[str]:
    """Describe what was measured, a line each; tokens: of a run."""
    import shlex
    from statistics import fmean

    from crisp.cli.output.columns import DASH, format_numbers
    from crisp.cli.output.measured import describe_repeats, format_with_error, short_window_notes
    from crisp.hw.telemetry.metered_command import NO_REST

    text = " ".join(shlex.join(measured.command).split())
    seconds = format_numbers([fmean(run.ended.ns for run in measured.runs) / 1e9])[0]
    text_lines = [
        f"command  {text if len(text) <= _LONG else text[: _LONG - 3] + '...'}",
        f"time     {seconds} s" + (f", exit code {measured.code}" if measured.code else ""),
    ]
    gross, net = measured.gross, measured.net
    if gross is None:
        return [*text_lines, f"energy   {DASH} J: {measured.ended}"]

    def both(unit: str, divisor: float) -> str:
        values = [
            format_with_error(one.mean / divisor, one.half_width and one.half_width / divisor)
            if one
            else DASH
            for one in (gross, net)
        ]
        return f"{values[0]} {unit}, of it {values[1]} above rest"

    text_lines.append(f"energy   {both('J', 1)}" + ("" if net else f" ({NO_REST})"))
    if tokens is not None:
        text_lines.append(f"tokens   {tokens:,}: {both('J/token', tokens)}")
    text_lines.append(f"power    {format_numbers([measured.watts])[0]} W on average")
    first = measured.metered[0]
    blur = (
        "" if first.uncertainty_j is None else f", ± {format_numbers([first.uncertainty_j])[0]} J"
    )
    text_lines.append(f"meter    {first.source}, {first.samples} samples{blur}")
    text_lines.append(f"         {first.method}")
    if measured.rule.most > 1:
        each = " ".join(format_numbers([energy.gross_j for energy in measured.metered]))
        text_lines.append(f"runs     {describe_repeats(len(measured.runs), measured.ended)}")
        text_lines.append(f"         {each} J")
    short = short_window_notes([run.to_dict() for run in measured.runs], measured.rule.within)
    return text_lines + [f"note     {line}" for line in short]
