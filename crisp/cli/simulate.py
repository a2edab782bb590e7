"""``crisp simulate``: run a trace under policies on a simulated machine."""

from __future__ import annotations

import sys
from pathlib import Path
from typing import Annotated

import typer

_TRACE = "A routing trace: a file, or the name of a bundled one."
_LISTS = "A list such as fo,lru gives a table."


def _file(help: str) -> typer.models.OptionInfo:
    option: typer.models.OptionInfo = typer.Option(metavar="FILE", help=f"{help}; -: print it.")
    return option


def simulate(
    trace: Annotated[str, typer.Argument(metavar="TRACE", help=_TRACE)],
    policy: Annotated[str, typer.Option(help=f"fo, lru, mo, up or crisp. {_LISTS}")],
    budget: Annotated[
        str,
        typer.Option(help="Memory for routed experts: 10%, .1 or 4GB. A list gives a table."),
    ],
    model: Annotated[
        str | None,
        typer.Option(help="A built-in model or a config.json.  [default: the traced one]"),
    ] = None,
    hardware: Annotated[
        str, typer.Option(help="A machine's profile: a name or a .toml file.")
    ] = "rtx4090-pcie4",
    profile: Annotated[
        str | None,
        typer.Option(metavar="TRACE", help="Count combinations here, and simulate all of TRACE."),
    ] = None,
    metadata: Annotated[
        Path | None,
        typer.Option(
            metavar="FILE", help="A prepared model's crisp.safetensors, in place of --profile."
        ),
    ] = None,
    width: Annotated[
        str | None, typer.Option(help="full, uniform(.5), single or tiered(alpha=.6,beta=.9).")
    ] = None,
    order: Annotated[
        str | None, typer.Option(help="sequential, fifo, random(SEED), widest or johnson.")
    ] = None,
    cache: Annotated[str | None, typer.Option(help="none, lru, lfu or static.")] = None,
    scope: Annotated[str, typer.Option(help="Of the cache: layer or global.")] = "layer",
    unit: Annotated[str, typer.Option(help="What is admitted, evicted: expert, block.")] = "expert",
    granularity: Annotated[
        str, typer.Option(help="What must have arrived to compute: expert or block.")
    ] = "expert",
    prefetch: Annotated[str | None, typer.Option(help="none, previous or guess.")] = None,
    phase: Annotated[str, typer.Option(help="decode, prefill or all.")] = "decode",
    batch: Annotated[int, typer.Option(help="Sequences that decode side by side.")] = 1,
    chunk: Annotated[int, typer.Option(help="Prompt tokens of one prefill step.")] = 512,
    block: Annotated[
        int | None,
        typer.Option(help="Neurons of a block.  [default: the metadata's, else an eighth of d_ff]"),
    ] = None,
    bits: Annotated[
        str | None, typer.Option(help="Stored bits of a routed weight.  [default: as published]")
    ] = None,
    top_k: Annotated[
        int | None, typer.Option(help="The trace's k, where it is not the model's.")
    ] = None,
    seed: Annotated[int, typer.Option(help="Of order random.")] = 0,
    limit: Annotated[int | None, typer.Option(help="Simulate the first rows only.")] = None,
    json: Annotated[str | None, _file("The run, or the list of runs")] = None,
    timeline: Annotated[str | None, _file("Every interval, as parquet")] = None,
    perfetto: Annotated[str | None, _file("The timeline, for ui.perfetto.dev")] = None,
    plot: Annotated[str | None, _file("A picture of some events: .png, .pdf or .svg")] = None,
) -> None:
    """Run a trace under policies on a simulated machine."""
    from crisp.cli.cells import run_cell, run_cells
    from crisp.cli.lists import split_list
    from crisp.cli.outputs import Outputs
    from crisp.cli.progress import progress
    from crisp.cli.setup import prepare
    from crisp.cli.tables import notes, table
    from crisp.cli.targets import check_no_folder
    from crisp.policy import Budget, named
    from crisp.trace.bundled import resolve
    from sim.simulate import Conditions

    policies, budgets = split_list(policy, "--policy"), split_list(budget, "--budget")
    outputs = Outputs(json, timeline, perfetto, plot)
    check_no_folder("--metadata", metadata)
    inputs = [
        ("TRACE", resolve(trace)),
        ("--profile", None if profile is None else resolve(profile)),
        ("--metadata", metadata),
        ("--model", model),
        ("--hardware", hardware),
    ]
    outputs.check(len(policies) * len(budgets), inputs)
    asked = [Budget.parse(text) for text in budgets]
    setup = prepare(
        trace,
        model=model,
        hardware=hardware,
        conditions=Conditions(granularity, phase, batch, chunk, seed, limit),
        profile=profile,
        metadata=metadata,
        bits=bits,
        block=block,
        top_k=top_k,
    )
    chosen = [
        named(
            name,
            width=width,
            order=order,
            cache=cache,
            scope=scope,
            unit=unit,
            prefetch=prefetch,
            has_guess=setup.routing.simulated.guess is not None,
            seed=seed,
        )
        for name in policies
    ]
    cells = [setup.cell(one, share) for one in chosen for share in asked]
    if len(cells) == 1:
        with (
            outputs.sinks(cells[0], setup.name) as sinks,
            progress("tokens", setup.rows()) as advance,
        ):
            runs = [run_cell(cells[0], setup.routing, sinks, advance)]
    else:
        with progress("runs", len(cells)) as advance:
            runs = run_cells(cells, lambda: advance(1))
    outputs.write_runs(runs)
    lines = [*setup.title(), "", *table(runs, phase), "", *notes(setup, runs)]
    print("\n".join(lines), file=sys.stderr if outputs.to_stdout else sys.stdout)
