"""``crisp tune``: the thresholds that load least, or take least, within a loss of quality."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

from crisp.cli.options import flags


def tune(
    trace: flags.Trace,
    loss: Annotated[
        str,
        typer.Option(
            metavar="FILE|SHARE",
            help="What widths lose: as crisp eval --json writes it. Or a loss such as 2%, which "
            "the --metadata of crisp prepare --loss-curve promises to keep.",
        ),
    ],
    budget: Annotated[
        str,
        typer.Option(help="Memory for routed experts: 10%, .1 or 4GB; with --loss SHARE a list."),
    ],
    max_loss: Annotated[
        str | None,
        typer.Option(
            metavar="SHARE", help="With --loss FILE: increase of perplexity at most, such as 3.6%."
        ),
    ] = None,
    minimise: Annotated[str, typer.Option(help="Of a token: bytes, energy or time.")] = "bytes",
    model: Annotated[
        str | None,
        typer.Option(
            help="A model: built in, a folder, config.json, store, TOML.  [default: the traced one]"
        ),
    ] = None,
    hardware: Annotated[
        str, typer.Option(help="A machine's profile: a name or a .toml file.")
    ] = "rtx4090-pcie4",
    profile: flags.ProfileTrace = None,
    metadata: flags.MetadataFile = None,
    granularity: flags.Granularity = "expert",
    batch: flags.Batch = 1,
    block: Annotated[
        int | None,
        typer.Option(help="Neurons of a block.  [default: the metadata's, else an eighth of d_ff]"),
    ] = None,
    bits: Annotated[
        str | None, typer.Option(help="Stored bits of a routed weight.  [default: as published]")
    ] = None,
    top_k: flags.TopK = None,
    layers: flags.Layers = None,
    limit: flags.Limit = None,
    plugin: flags.Plugin = None,
) -> None:
    """Find the widths, the cache and the settings that take least within a loss.

    Every width whose loss was measured is simulated at the budget. What is printed is what no other
    one beats: the least that a token takes, against the loss of quality. With a share in the place
    of a file: the rule and the settings that take least, budget by budget, at no more than it.
    """
    from crisp.checkpoint.geometry.read import read_model
    from crisp.cli.options.files import check_no_folder
    from crisp.cli.options.lists import split_list
    from crisp.cli.output.progress import progress
    from crisp.cli.output.setup_lines import describe_promises, describe_setup
    from crisp.cli.output.tuning_tables import (
        describe_losses,
        format_command,
        format_promised,
        format_promised_command,
        format_report,
    )
    from crisp.cli.output.words import printable
    from crisp.errors import CrispError, unknown_name
    from crisp.policy import Budget
    from crisp.profile.loss_curve import POLICY, parse_loss
    from crisp.run.case import Conditions
    from crisp.run.setup import load_setup
    from crisp.sim.hardware import hardware_profile
    from crisp.sim.tuning.candidates import METRICS, find_candidates
    from crisp.sim.tuning.candidates import tune as run_candidates
    from crisp.sim.tuning.losses import read_losses
    from crisp.sim.tuning.promised import plan_promised, tune_promised
    from crisp.units import parse_fraction

    if minimise not in METRICS:
        raise CrispError(f"--minimise: {unknown_name(minimise, METRICS, 'quantity')}")
    check_no_folder("--metadata", metadata)
    asked = None
    if loss.rstrip("%").replace(".", "", 1).isdecimal() and not Path(loss).exists():
        asked = parse_loss(loss)
        if max_loss is not None:
            raise CrispError(f"--max-loss {max_loss}: --loss {loss} says it already")
    elif max_loss is None and not Path(loss).exists():
        raise CrispError(
            f"--loss {loss}: is no file; without --max-loss a share such as 2% will do"
        )
    elif max_loss is None:
        raise CrispError("--max-loss: was not given; with --loss FILE it says what may be lost")
    else:
        check_no_folder("--loss", loss)
    most = parse_fraction(max_loss or "0", "--max-loss")
    if most < 0:
        raise CrispError(f"--max-loss {max_loss}: must not be below 0")
    if most > 1:
        raise CrispError(f"--max-loss {max_loss}: above 100 %; ten per cent is 10% or .1")
    setup = load_setup(
        trace,
        model=model,
        hardware=hardware_profile(hardware),
        conditions=Conditions(granularity, batch=batch, limit=limit),
        profile=profile,
        metadata=metadata,
        bits=bits,
        block=block,
        top_k=top_k,
        layers=layers,
        loss=asked,
        read=read_model,
    )
    given = {
        "--model": model,
        "--hardware": hardware,
        "--profile": profile,
        "--metadata": metadata,
        "--granularity": granularity,
        "--batch": batch,
        "--block": block,
        "--bits": bits,
        "--top-k": top_k,
        "--layers": layers,
        "--limit": limit,
    }
    if asked is not None:
        budgets = [Budget.parse(text) for text in split_list(budget, "--budget")]
        promises = describe_promises(setup, [setup.policy(POLICY)], budgets)
        with progress("policies", len(plan_promised(setup, budgets))) as advance:
            tuned = tune_promised(setup, budgets, minimise, lambda: advance(1))
        lines = [*describe_setup(setup), *promises, "", *format_promised(tuned, minimise), ""]
        print("\n".join(map(printable, lines)))
        print(format_promised_command(tuned, minimise, trace, {**given, "--loss": loss}))
        return
    losses = read_losses(Path(loss))
    candidates = find_candidates(setup, losses, str(loss), budget, minimise)
    with progress("policies", len(candidates.tried)) as advance:
        tuning = run_candidates(candidates, lambda: advance(1))
    title = [*describe_setup(setup), *describe_losses(setup, losses, str(loss))]
    lines = [*title, "", *format_report(tuning, max_loss or "0", float(most), minimise), ""]
    print("\n".join(map(printable, lines)))
    print(format_command(tuning.best(float(most)), trace, budget, given))
