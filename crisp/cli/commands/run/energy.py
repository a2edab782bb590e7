"""``crisp energy``: the joules of any command."""

from __future__ import annotations

import sys
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

if TYPE_CHECKING:
    from crisp.hw.telemetry.command import MeteredCommand

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
    """Run any command and say, on standard error, how many joules it took."""
    from json import dumps
    from math import isfinite
    from shutil import which

    from crisp.cli.options.files import check_outputs
    from crisp.errors import CrispError
    from crisp.files import atomic
    from crisp.hw.telemetry.command import find_meter, measure
    from crisp.run.repeats import Rule

    rule = Rule.parse(within, repeats, "--")
    if not (isfinite(idle) and idle >= 0):
        raise CrispError(f"--idle {idle:g}: expected seconds, 0 or more")
    if tokens is not None and tokens < 1:
        raise CrispError(f"--tokens {tokens}: expected 1 or more")
    check_outputs({"--json": json}, [], stdout=False)
    if which(command[0]) is None:
        there = Path(command[0]).exists() and "/" in command[0]
        why = "cannot be run" if there else "there is no such command"
        raise CrispError(f"{command[0] or repr('')}: {why}")
    done = measure(command, find_meter(meter), idle, rule)
    print("\n".join(lines(done, tokens)), file=sys.stderr)
    if json is not None:
        with atomic(json) as temporary:
            temporary.write_text(dumps(done.to_dict(tokens), indent=1) + "\n", encoding="utf-8")
    if done.interrupt is not None:
        raise done.interrupt
    raise typer.Exit(done.code)


def lines(done: MeteredCommand, tokens: int | None) -> list[str]:
    """What people are told. tokens: of a run."""
    import shlex
    from statistics import fmean

    from crisp.cli.output.columns import DASH, numbers
    from crisp.cli.output.joules import means, off, short_windows
    from crisp.hw.telemetry.command import NO_REST

    text = " ".join(shlex.join(done.command).split())
    seconds = numbers([fmean(run.ended.ns for run in done.runs) / 1e9])[0]
    told = [
        f"command  {text if len(text) <= _LONG else text[: _LONG - 3] + '...'}",
        f"time     {seconds} s" + (f", exit code {done.code}" if done.code else ""),
    ]
    gross, net = done.gross, done.net
    if gross is None:
        return [*told, f"energy   {DASH} J: {done.ended}"]

    def both(unit: str, divisor: float) -> str:
        values = [
            off(one.mean / divisor, one.half_width and one.half_width / divisor) if one else DASH
            for one in (gross, net)
        ]
        return f"{values[0]} {unit}, of it {values[1]} above rest"

    told.append(f"energy   {both('J', 1)}" + ("" if net else f" ({NO_REST})"))
    if tokens is not None:
        told.append(f"tokens   {tokens:,}: {both('J/token', tokens)}")
    told.append(f"power    {numbers([done.watts])[0]} W on average")
    first = done.metered[0]
    blur = "" if first.uncertainty_j is None else f", ± {numbers([first.uncertainty_j])[0]} J"
    told.append(f"meter    {first.source}, {first.samples} samples{blur}")
    told.append(f"         {first.method}")
    if done.rule.most > 1:
        each = " ".join(numbers([energy.gross_j for energy in done.metered]))
        told.append(f"runs     {means(len(done.runs), done.ended)}")
        told.append(f"         {each} J")
    short = short_windows([run.to_dict() for run in done.runs], done.rule.within)
    return told + [f"note     {line}" for line in short]
