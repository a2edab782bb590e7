"""``crisp replay``: run a trace's routing with real loads and computations."""

from __future__ import annotations

import sys
from collections.abc import Sequence
from typing import Annotated

import typer

from crisp.cli.options import flags


def replay(
    trace: flags.Trace,
    store: flags.StoreFolder,
    policy: Annotated[str, typer.Option(help=f"{flags.POLICIES} {flags.LISTS}")],
    budget: Annotated[
        str,
        typer.Option(
            help="Memory for routed experts: 10%, .1, 4GB, or auto: all that is safe. A list gives "
            "a table."
        ),
    ],
    device: flags.Device = "cpu",
    threads: flags.Threads = None,
    link_limit: flags.LinkLimit = None,
    verify: flags.Verify = False,
    host_limit: flags.HostLimit = None,
    loads_from: flags.LoadsFrom = None,
    read: flags.Read = "direct",
    hardware: Annotated[
        str | None, typer.Option(help="A machine's profile, for order johnson and modelled energy.")
    ] = None,
    modelled_energy: flags.ModelledEnergy = False,
    repeats: flags.Repeats = None,
    energy_within: flags.EnergyWithin = None,
    energy_repeats: flags.EnergyRepeats = None,
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
    top_k: flags.TopK = None,
    layers: flags.Layers = None,
    seed: flags.Seed = 0,
    limit: flags.Limit = None,
    json: Annotated[str | None, flags.file("The run, or the list of runs")] = None,
    timeline: flags.Timeline = None,
    perfetto: flags.Perfetto = None,
    plot: flags.Plot = None,
    dry_run: flags.DryRun = False,
    plugin: flags.Plugin = None,
) -> None:
    """Run a trace on this machine, its experts loaded from a store."""
    from crisp.cli.options.devices import device_options, is_automatic, open_store
    from crisp.cli.options.files import check_no_folder
    from crisp.cli.options.lists import split_list
    from crisp.cli.output.dry_run import dry_run_summary
    from crisp.cli.output.progress import ReadingProgress, progress
    from crisp.cli.output.run_files import Outputs
    from crisp.cli.output.run_tables import format_report
    from crisp.cli.output.setup_lines import (
        check_asked,
        describe_promises,
        describe_run,
        describe_setup,
    )
    from crisp.extras import import_extra
    from crisp.hw.budget import auto_budget, describe_budget, run_needs
    from crisp.hw.replay import replay as run
    from crisp.hw.telemetry import meter_for
    from crisp.hw.telemetry.metering import power_model
    from crisp.policy import Budget
    from crisp.policy.cache import AUTO
    from crisp.profile.loss_curve import parse_loss
    from crisp.run.case import Case, Conditions, parse_chunk
    from crisp.run.repeats import StoppingRule, repeat_run
    from crisp.run.result import Run
    from crisp.run.setup import load_setup
    from crisp.run.timeline import Sink
    from crisp.sim.hardware import hardware_profile
    from crisp.trace.bundled import resolve_trace

    policies, budgets = split_list(policy, "--policy"), split_list(budget, "--budget")
    outputs = Outputs(json, timeline, perfetto, plot)
    check_no_folder("--metadata", metadata)
    inputs = [
        ("TRACE", resolve_trace(trace)),
        ("--store", store),
        ("--profile", None if profile is None else resolve_trace(profile)),
        ("--metadata", metadata),
        ("--hardware", hardware),
    ]
    outputs.check(len(policies) * len(budgets), inputs)
    automatic = is_automatic(budgets, device)
    shares = [Budget.parse(text) for text in budgets if text != AUTO]
    asked = None if loss is None else parse_loss(loss)
    rule = StoppingRule.parse(energy_within, energy_repeats, runs=repeats)
    options = device_options(
        device, threads=threads, link_limit=link_limit, verify=verify, host_limit=host_limit,
        loads_from=loads_from, read=read, progress=ReadingProgress(),
    )  # fmt: skip
    opened = open_store(store)
    setup = load_setup(
        trace,
        model=str(store),
        hardware=None if hardware is None else hardware_profile(hardware),
        machine=f"{options}, experts from {store}",
        conditions=Conditions(granularity, phase, batch, parse_chunk(chunk), seed, limit),
        profile=profile,
        metadata=metadata,
        block=opened.spec.block,
        top_k=top_k,
        layers=layers,
        loss=asked,
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
    if automatic:
        import_extra("torch")  # what it takes is measured, too
        largest = max((len(step.rows) for step in setup.case(chosen[0], "100%").steps()), default=1)
        needs = run_needs(setup.spec, chosen, largest, threads=options.computing)
        auto, plan = auto_budget(setup.spec, chosen, needs)
        print(describe_budget(setup.spec, auto, plan), file=sys.stderr)
        shares = [auto if text == AUTO else Budget.parse(text) for text in budgets]
    power_model(setup.hardware, modelled_energy)  # else it would be missed after the first run
    check_asked(asked, chosen)
    promises = describe_promises(setup, chosen, shares)
    cases = [setup.case(one, share) for one in chosen for share in shares]
    if dry_run:
        named_cases = [(describe_run(case, setup.machine), case) for case in cases]
        print("\n".join([*describe_setup(setup), *promises, dry_run_summary(named_cases)]))
        return
    power = None if setup.hardware is None else setup.hardware.power
    runs: list[Run] = []
    interrupt = None
    for case in cases:  # one after the other: they would disturb each other's times

        def once(sinks: Sequence[Sink] = (), case: Case = case) -> Run:
            with progress("tokens", setup.rows()) as advance:
                return run(
                    case,
                    opened,
                    options,
                    hardware=setup.hardware,
                    meter=meter_for(device),
                    modelled_energy=modelled_energy,
                    sinks=sinks,
                    progress=advance,
                )

        title = describe_run(case, setup.machine)
        with outputs.sinks(title, setup.spec, power, setup.name) as sinks:
            first = once(sinks)
        repeated, interrupt = repeat_run(first, once, rule)
        runs.append(repeated)
        if interrupt is not None:
            break
    outputs.write_runs(runs)
    report = format_report(setup, runs, promises)
    print(report, file=sys.stderr if outputs.to_stdout else sys.stdout)
    if interrupt is not None:
        raise interrupt  # what was measured until then has been told
