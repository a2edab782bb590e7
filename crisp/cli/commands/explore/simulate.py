"""``crisp simulate``: run a trace under policies on a simulated machine."""

from __future__ import annotations

import sys
from typing import Annotated

import typer

from crisp.cli.options import flags


def simulate(
    trace: flags.Trace,
    policy: Annotated[str, typer.Option(help=f"{flags.POLICIES} {flags.LISTS}")],
    budget: Annotated[
        str,
        typer.Option(help="Memory for routed experts: 10%, .1 or 4GB. A list gives a table."),
    ],
    model: Annotated[
        str | None,
        typer.Option(
            help="A model: built in, a folder, config.json, store, TOML.  [default: the traced one]"
        ),
    ] = None,
    hardware: Annotated[
        str, typer.Option(help="A machine's profile: a name or a .toml file.")
    ] = "rtx4090-pcie4",
    page_cache: Annotated[
        str | None,
        typer.Option(
            metavar="BYTES",
            help="Read a disk through a page cache of so much, such as 2GB.  [default: past it]",
        ),
    ] = None,
    profile: flags.ProfileTrace = None,
    metadata: flags.MetadataFile = None,
    width: flags.Width = None,
    order: flags.Order = None,
    cache: flags.Cache = None,
    scope: flags.Scope = "layer",
    unit: flags.Unit = None,
    granularity: flags.Granularity = "expert",
    prefetch: flags.Prefetch = None,
    rescale: flags.Rescale = None,
    routing: flags.Routing = None,
    magnitude: flags.Magnitude = "none",
    loss: flags.Loss = None,
    phase: flags.Phase = "decode",
    batch: flags.Batch = 1,
    chunk: flags.Chunk = "512",
    block: Annotated[
        int | None,
        typer.Option(help="Neurons of a block.  [default: the metadata's, else an eighth of d_ff]"),
    ] = None,
    bits: Annotated[
        str | None, typer.Option(help="Stored bits of a routed weight.  [default: as published]")
    ] = None,
    top_k: flags.TopK = None,
    layers: flags.Layers = None,
    seed: flags.Seed = 0,
    limit: flags.Limit = None,
    engine: flags.Engine = "simpy",
    json: Annotated[str | None, flags.file("The run, or the list of runs")] = None,
    timeline: flags.Timeline = None,
    perfetto: flags.Perfetto = None,
    plot: flags.Plot = None,
    plugin: flags.Plugin = None,
) -> None:
    """Run a trace under policies on a simulated machine."""
    from crisp.checkpoint.geometry.read import read_model
    from crisp.cli.options.files import check_no_folder
    from crisp.cli.options.lists import check_one, split_list
    from crisp.cli.output.progress import progress
    from crisp.cli.output.run_files import Outputs
    from crisp.cli.output.run_tables import format_report
    from crisp.cli.output.setup_lines import check_asked, describe_promises, describe_run
    from crisp.errors import unknown_name
    from crisp.policy import Budget
    from crisp.profile.loss_curve import parse_loss
    from crisp.run.case import Conditions, parse_chunk
    from crisp.run.setup import load_setup
    from crisp.sim.experiment import ENGINES, plan_run, run_all, run_case
    from crisp.sim.hardware import hardware_profile
    from crisp.trace.bundled import resolve_trace
    from crisp.units import format_bytes, parse_bytes

    policies, budgets = split_list(policy, "--policy"), split_list(budget, "--budget")
    parts = (("width", width), ("order", order), ("cache", cache), ("prefetch", prefetch))
    for name, value in parts:
        check_one(value, f"--{name}")
    if engine not in ENGINES:
        raise unknown_name(engine, ENGINES, "engine")
    outputs = Outputs(json, timeline, perfetto, plot)
    check_no_folder("--metadata", metadata)
    inputs = [
        ("TRACE", resolve_trace(trace)),
        ("--profile", None if profile is None else resolve_trace(profile)),
        ("--metadata", metadata),
        ("--model", model),
        ("--hardware", hardware),
    ]
    outputs.check(len(policies) * len(budgets), inputs, timeline=engine == "simpy")
    shares = [Budget.parse(text) for text in budgets]
    asked = None if loss is None else parse_loss(loss)
    pages = None if page_cache is None else parse_bytes(page_cache, "--page-cache")
    machine = hardware_profile(hardware).with_page_cache(pages)
    setup = load_setup(
        trace,
        model=model,
        hardware=machine,
        machine=None if pages is None else f"{machine.name}, page cache of {format_bytes(pages)}",
        conditions=Conditions(granularity, phase, batch, parse_chunk(chunk), seed, limit),
        profile=profile,
        metadata=metadata,
        bits=bits,
        block=block,
        top_k=top_k,
        layers=layers,
        loss=asked,
        read=read_model,
    )
    chosen = setup.policies(
        policies,
        width=width,
        order=order,
        cache=cache,
        scope=scope,
        unit=unit,
        prefetch=prefetch,
        rescale=rescale,
        routing=routing,
        magnitude=magnitude,
    )
    check_asked(asked, chosen)
    promises = describe_promises(setup, chosen, shares)
    planned = [plan_run(setup, one, share, engine) for one in chosen for share in shares]
    if len(planned) == 1:
        case, machine = planned[0].case(setup.inputs), planned[0].hardware
        title = describe_run(case, setup.machine)
        with (
            outputs.sinks(title, setup.spec, machine.power, setup.name) as sinks,
            progress("tokens", setup.rows()) as advance,
        ):
            runs = [run_case(case, machine, engine, sinks=sinks, progress=advance)]
    else:
        with progress("runs", len(planned)) as advance:
            runs = run_all(planned, lambda: advance(1))
    outputs.write_runs(runs)
    report = format_report(setup, runs, promises)
    print(report, file=sys.stderr if outputs.to_stdout else sys.stdout)
