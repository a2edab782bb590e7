"""``crisp generate``: a real model writes, with its experts loaded from a store."""

from __future__ import annotations

import sys
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, TextIO

import typer

from crisp.cli.options import flags

if TYPE_CHECKING:
    from crisp.hw.store.reader import Store
    from crisp.policy import Budget, Policy
    from crisp.profile.metadata import Metadata
    from crisp.run.result import Run


def generate(
    model: Annotated[Path, typer.Argument(help="A folder with a transformers checkpoint.")],
    store: flags.StoreFolder,
    policy: Annotated[str, typer.Option(help=flags.POLICIES)],
    budget: Annotated[
        str,
        typer.Option(help="Memory for routed experts: 10%, .1, 4GB, or auto: all that is safe."),
    ],
    prompt: Annotated[str, typer.Option(metavar="TEXT", help="What is continued, greedily.")],
    max_new_tokens: Annotated[int, typer.Option(help="Tokens to write at most.")] = 128,
    device: flags.Device = "cpu",
    threads: flags.Threads = None,
    link_limit: flags.LinkLimit = None,
    verify: Annotated[
        bool,
        typer.Option(
            "--verify", help="Check all weights in MODEL, and every block against its hash."
        ),
    ] = False,
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
    metadata: Annotated[
        Path | None,
        typer.Option(
            metavar="FILE",
            help="What crisp prepare found out.  [default: crisp.safetensors beside the model]",
        ),
    ] = None,
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
    chunk: flags.Chunk = "512",
    seed: flags.Seed = 0,
    json: Annotated[str | None, flags.file("The run")] = None,
    timeline: flags.Timeline = None,
    perfetto: flags.Perfetto = None,
    record: Annotated[
        str | None,
        typer.Option(metavar="FILE", help="The routing that was run, as a trace to simulate."),
    ] = None,
    dry_run: flags.DryRun = False,
    plugin: flags.Plugin = None,
) -> None:
    """Let a model write text, its experts loaded from a store.

    Routed experts are loaded as they are needed; everything else stays in memory.
    """
    from crisp.checkpoint.lean.imports import lean_imports
    from crisp.cli.options.devices import device_options, is_automatic, open_store
    from crisp.cli.options.files import check_no_folder, check_outputs
    from crisp.cli.output.dry_run import dry_run_summary
    from crisp.cli.output.progress import ReadingProgress, progress_share
    from crisp.cli.output.run_files import Outputs
    from crisp.cli.output.setup_lines import check_asked, describe_promise, describe_run
    from crisp.errors import CrispError
    from crisp.hw.model.generate import (
        GeneratedText,
        check_arguments,
        empty_case,
        prompt_tokens,
    )
    from crisp.hw.model.generate import generate as run
    from crisp.hw.model.memory import check_room, generation_budget
    from crisp.hw.model.resident import open_resident, same_geometry
    from crisp.hw.telemetry import meter_for
    from crisp.hw.telemetry.metering import power_model
    from crisp.policy import Budget, named
    from crisp.policy.promise import within_loss
    from crisp.profile.loss_curve import parse_loss
    from crisp.run.case import Conditions, parse_chunk
    from crisp.run.repeats import StoppingRule, repeat_run
    from crisp.run.timeline import Sink
    from crisp.sim.hardware import hardware_profile

    outputs = Outputs(json, timeline, perfetto)
    check_no_folder("--metadata", metadata)
    inputs = [
        ("MODEL", model),
        ("--store", store),
        ("--metadata", metadata),
        ("--hardware", hardware),
    ]
    outputs.check(1, inputs)
    check_outputs({"--record": record}, inputs, stdout=False)
    files = {f"--{option}": name for option, name in vars(outputs).items()}
    check_outputs({**files, "--record": record}, inputs)
    automatic = is_automatic([budget], device)  # until the model is loaded all is checked with 100%
    share = Budget.parse("100%" if automatic else budget)
    asked = None if loss is None else parse_loss(loss)
    rule = StoppingRule.parse(energy_within, energy_repeats, runs=repeats)
    options = device_options(
        device, threads=threads, link_limit=link_limit, verify=verify, host_limit=host_limit,
        loads_from=loads_from, read=read, progress=ReadingProgress(),
    )  # fmt: skip
    conditions = Conditions(granularity, "all", 1, parse_chunk(chunk), seed)
    chosen = named(
        policy, width=width, order=order, cache=cache, scope=scope, unit=unit, prefetch=prefetch,
        rescale=rescale, routing=routing, magnitude=magnitude, seed=seed,
    )  # fmt: skip
    machine = None if hardware is None else hardware_profile(hardware)
    power_model(machine, modelled_energy)  # else it would be missed after loading
    opened = open_store(store)
    share.capacity(opened.spec, chosen.cache)  # raises CrispError
    prepared = _load_metadata(model, metadata, opened)
    counts = None if prepared is None else prepared[1].profile()

    def within(policy: Policy, share: Budget, told: bool) -> Policy:
        if asked is None:
            return policy
        check_asked(asked, [policy])
        curve = None if prepared is None else prepared[1].loss_curve
        policy, promise = within_loss(policy, asked, opened.spec, share, curve)
        if told:
            print(describe_promise(asked, share, promise), file=sys.stderr)
        return policy

    untuned, chosen = chosen, within(chosen, share, not automatic)
    check_arguments(chosen, counts, machine, max_new_tokens)
    case = empty_case(opened, chosen, share, counts, None, conditions)
    power = None if machine is None else machine.power
    if dry_run:
        same_geometry(model, opened)
        if automatic:
            raise CrispError("--budget auto: is known when the model is loaded; see crisp plan")
        print(dry_run_summary([(describe_run(case, f"{options}, experts from {store}"), case)]))
        return
    if automatic:
        check_room(model, opened, chosen, max_new_tokens, options.computing)
    with progress_share("loading") as update:
        lean_imports()
        resident = open_resident(
            model, opened, device=options.torch_device, verify=verify,
            progress=lambda done, total: update(done / max(1, total)),
        )  # fmt: skip
    people = sys.stderr if outputs.to_stdout else sys.stdout
    if automatic:
        tokens = len(prompt_tokens(resident, prompt, max_new_tokens))
        share, why = generation_budget(
            resident, chosen, tokens, max_new_tokens, conditions.chunk, options.computing
        )
        print(why, file=sys.stderr)
        chosen = within(untuned, share, True)
        case = empty_case(opened, chosen, share, counts, None, conditions)
    title = describe_run(case, f"{options}, experts from {store}")

    def once(
        sinks: Sequence[Sink] = (), on_text: Callable[[str], None] = lambda text: None
    ) -> GeneratedText:
        return run(
            resident,
            chosen,
            share,
            options,
            prompt,
            max_new_tokens,
            profile=counts,
            split=None if prepared is None else f"profile: {prepared[0].name}; run: all rows",
            conditions=conditions,
            hardware=machine,
            meter=meter_for(device),
            modelled_energy=modelled_energy,
            sinks=sinks,
            on_text=on_text,
        )

    with outputs.sinks(title, opened.spec, power, "its own") as sinks, _printing(people) as show:
        generated = once(sinks, show)
    if record is not None:
        generated.trace.save(record)
    with progress_share("writing it again"):
        repeated, interrupt = repeat_run(generated.run, lambda: once().run, rule)
    outputs.write_runs([repeated])
    print(f"\n{summary(repeated, len(generated.tokens))}", file=people)
    if interrupt is not None:
        raise interrupt  # what was measured until then has been told


@contextmanager
def _printing(people: TextIO) -> Iterator[Callable[[str], None]]:
    """Print a text piece by piece; whatever ends it, what comes next has a new line."""
    begun = False

    def show(text: str) -> None:
        nonlocal begun
        begun = True
        print(text, end="", file=people, flush=True)

    try:
        yield show
    finally:
        if begun:
            print(file=people, flush=True)


def summary(run: Run, tokens: int) -> str:
    """Return what came of a generation, in a line or two; tokens: that were written."""
    from crisp.cli.output.columns import DASH, format_numbers
    from crisp.cli.output.measured import describe_joules, describe_source, describe_speed
    from crisp.units import format_count

    metrics, why = run.metrics, run.unavailable

    def shown(metric: str, unit: str, factor: float = 1.0) -> str:
        value = metrics[metric]
        number = DASH if value is None else format_numbers([value * factor])[0]
        return f"{number} {unit}"

    parts = [
        f"{format_count(tokens, 'token')} ({metrics['tokens']:,} with the prompt)",
        shown("tokens_per_second", "tokens/s"),
        shown("ttft_ms", "ms to the first"),
        shown("decode_bytes_per_token", "MB/token", 1e-6),
        shown("hit_rate", "% hits", 100),
        shown("decode_energy_j_per_token", "J/token"),
    ]
    setting = f"{run.settings['policy']['name']} at {run.settings['budget']['asked']}"
    lines = [f"{setting}: {', '.join(parts)}"]
    missing = {
        "tokens_per_second": "tokens/s",
        "hit_rate": "hits",
        "decode_energy_j_per_token": "J/token",
    }
    lines += [f"{head} {DASH}: {why[metric]}" for metric, head in missing.items() if metric in why]
    if (speed := describe_speed(run)) is not None:
        lines.append(f"speed: {speed}")
    if metrics["energy_j"] is not None:
        first, *more = describe_joules(run)
        lines += [f"energy {describe_source(run)}: {first}", *more]
    return "\n".join(lines)


def _load_metadata(model: Path, file: Path | None, store: Store) -> tuple[Path, Metadata] | None:
    """Return the metadata that was asked for or lies beside the model, and its path.

    Raises CrispError for metadata of other weights than the store's.
    """
    from crisp.profile.metadata import FILE, Metadata

    beside = model / FILE
    file = file or (beside if beside.is_file() else None)
    if file is None:
        return None
    prepared = Metadata.load(file)
    if store.weights is not None:
        prepared.check_weights(store.weights, str(store.path))
    return file, prepared
