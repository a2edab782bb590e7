"""The commands, and the options that come before them."""

from __future__ import annotations

from typing import Annotated, Any

import typer
from typer.core import TyperGroup

from crisp.cli.commands.explore.compare import compare
from crisp.cli.commands.explore.demo import demo
from crisp.cli.commands.explore.diagnose import diagnose
from crisp.cli.commands.explore.explain import explain
from crisp.cli.commands.explore.report import report
from crisp.cli.commands.explore.reproduce import reproduce
from crisp.cli.commands.explore.simulate import simulate
from crisp.cli.commands.explore.sweep import sweep
from crisp.cli.commands.explore.tune import tune
from crisp.cli.commands.model import trace
from crisp.cli.commands.model.capture import capture
from crisp.cli.commands.model.evaluate import evaluate
from crisp.cli.commands.model.model import model
from crisp.cli.commands.model.pack import pack
from crisp.cli.commands.model.prepare import prepare, refresh
from crisp.cli.commands.run.calibrate import calibrate
from crisp.cli.commands.run.doctor import doctor
from crisp.cli.commands.run.energy import energy
from crisp.cli.commands.run.generate import generate
from crisp.cli.commands.run.plan import plan
from crisp.cli.commands.run.replay import replay
from crisp.errors import unknown_name
from crisp.version import TOOL


class Group(TyperGroup):
    """A group of commands; the error for an unknown one names the nearest."""

    def resolve_command(self, ctx: Any, args: list[str]) -> Any:
        """Return the command called ``args[0]``."""
        if args[0] not in self.commands:
            raise unknown_name(args[0], self.commands, "command")
        return super().resolve_command(ctx, args)


app = typer.Typer(
    cls=Group,
    add_completion=False,
    rich_markup_mode=None,
    pretty_exceptions_enable=False,
)
app.command()(demo)
app.command()(simulate)
app.command()(sweep)
app.command()(tune)
app.command()(explain)
app.command()(diagnose)
app.command()(model)
app.command()(prepare)
app.command()(refresh)
app.command("eval")(evaluate)
app.command()(pack)
app.command()(plan)
app.command()(replay)
app.command()(generate)
app.command()(calibrate)
app.command()(compare)
app.command()(report)
app.command()(reproduce)
# what follows the first word that is no option is another command's
app.command(context_settings={"allow_interspersed_args": False})(energy)
app.command()(doctor)
app.add_typer(
    trace.app,
    name="trace",
    cls=Group,
    short_help="Routing traces: info, validate, import, synth, capture.",
)
trace.app.command()(capture)


def _version(wanted: bool) -> None:
    if wanted:
        typer.echo(TOOL)
        raise typer.Exit


@app.callback()
def options(
    version: Annotated[
        bool,
        typer.Option(
            "--version", callback=_version, is_eager=True, help="Print the version and exit."
        ),
    ] = False,
    debug: Annotated[
        bool, typer.Option("--debug", help="Print the traceback of an error; comes first.")
    ] = False,
) -> None:
    """Explore offline how an MoE model runs when its experts do not fit into device memory."""
