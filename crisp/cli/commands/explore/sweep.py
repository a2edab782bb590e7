"""``crisp sweep``: many simulations, asked for in one file."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

from crisp.cli.options import flags

_LIST = "Or a list."


def _values(help: str) -> typer.models.OptionInfo:
    option: typer.models.OptionInfo = typer.Option(metavar="LIST", help=help)
    return option


Values = str | None


def sweep(
    out: Annotated[
        str,
        typer.Option(
            metavar="FILE", help="The results, parquet; what it holds already is not run again."
        ),
    ],
    spec: Annotated[
        Path | None,
        typer.Argument(metavar="SPEC", help="What to run, a TOML file; options replace its keys."),
    ] = None,
    trace: Annotated[Values, _values("Routing traces: files, or names of bundled ones.")] = None,
    profile: Annotated[Values, _values("Traces to count combinations in.")] = None,
    metadata: Annotated[Values, _values("Prepared models' crisp.safetensors.")] = None,
    layers: Annotated[Values, _values("Run the first layers of a trace only.")] = None,
    model: Annotated[
        Values, _values("Models: built in, folders, config.json, stores, TOML.")
    ] = None,
    bits: Annotated[Values, _values("Stored bits of a routed weight.")] = None,
    block: Annotated[Values, _values("Neurons of a block.")] = None,
    top_k: Annotated[Values, _values("The trace's k, where it is not the model's.")] = None,
    hardware: Annotated[
        Values, _values("Machines' profiles: names or .toml files.  [default: rtx4090-pcie4]")
    ] = None,
    phase: Annotated[Values, _values("decode, prefill or all.")] = None,
    batch: Annotated[Values, _values("Sequences that decode side by side.")] = None,
    chunk: Annotated[Values, _values("Prompt tokens of one prefill step, or whole.")] = None,
    limit: Annotated[Values, _values("Run the first rows only.")] = None,
    granularity: Annotated[
        Values, _values("What must have arrived to compute: expert, block.")
    ] = None,
    seed: Annotated[Values, _values("Of what is random.")] = None,
    policy: Annotated[Values, _values(flags.POLICIES)] = None,
    width: Annotated[Values, _values(flags.WIDTHS)] = None,
    order: Annotated[Values, _values("See crisp simulate --help, as for the next ones.")] = None,
    cache: Annotated[Values, _values("Cache policies.")] = None,
    scope: Annotated[Values, _values("Of the cache: layer, global.")] = None,
    unit: Annotated[Values, _values("What is admitted, evicted: expert, block.")] = None,
    prefetch: Annotated[Values, _values("Prefetchers.")] = None,
    rescale: Annotated[Values, _values("none, measured.")] = None,
    routing: Annotated[Values, _values("Routing rules.")] = None,
    magnitude: Annotated[Values, _values("none, predicted.")] = None,
    loss: Annotated[
        Values, _values("What policy saliency may cost, in the place of its threshold.")
    ] = None,
    budget: Annotated[Values, _values("Memory for routed experts: 10%, .1 or 4GB.")] = None,
    engine: Annotated[
        str,
        typer.Option(help="fast, simpy, or auto: fast where it can do the case exactly."),
    ] = "auto",
    against: Annotated[
        str | None,
        typer.Option(metavar="POLICY", help="Compare with this one, sequence by sequence."),
    ] = None,
    per_sequence: Annotated[
        bool,
        typer.Option("--per-sequence", help="Write what each sequence took, beside the results."),
    ] = False,
    jobs: Annotated[
        int | None, typer.Option(min=1, help="Cells run side by side.  [default: all cores]")
    ] = None,
    backend: Annotated[
        str, typer.Option(help="loky: this machine; dask or ray: a cluster's workers.")
    ] = "loky",
    scheduler: Annotated[
        str | None, typer.Option(metavar="ADDRESS", help="Of the cluster, such as host:8786.")
    ] = None,
    replace: Annotated[
        bool,
        typer.Option("--replace", help="Drop the rows of --out that are not asked for here."),
    ] = False,
    yes: Annotated[bool, typer.Option("--yes", help="Run however many cells there are.")] = False,
    plugin: flags.Plugin = None,
) -> None:
    """Run simulations of many settings: all combinations, or some.

    A file can ask for some at random. An interrupted sweep goes on where it was when it is started
    again.
    """
    from crisp.cli.options.files import check_outputs
    from crisp.cli.options.lists import split_list
    from crisp.cli.output.progress import TerminalReporter
    from crisp.cli.output.sweep_tables import (
        check_baseline,
        check_batch,
        format_comparison,
        format_summary,
    )
    from crisp.cli.output.words import printable
    from crisp.errors import CrispError, unknown_name
    from crisp.sim.experiment import AUTO, ENGINES
    from crisp.sim.parallel import BACKENDS, cores
    from crisp.sim.sweep.options import SweepOptions
    from crisp.sim.sweep.runner import check_sweep, run_sweep
    from crisp.sim.sweep.spec import KEYS, flag_of, read

    flag_values = locals()
    if engine not in (AUTO, *ENGINES):
        raise unknown_name(engine, (AUTO, *ENGINES), "engine")
    if backend not in BACKENDS:
        raise unknown_name(backend, BACKENDS, "backend")
    if (backend == BACKENDS[0]) != (scheduler is None):
        raise CrispError(
            f"--backend {backend}: "
            + ("--scheduler is for dask and ray" if scheduler else "needs --scheduler ADDRESS")
        )
    if backend != BACKENDS[0] and jobs is not None:
        raise CrispError(f"--jobs {jobs}: with --backend {backend} the cluster's workers decide")
    given = {
        key: split_list(flag_values[key], flag_of(key))
        for key in KEYS
        if flag_values[key] is not None
    }
    plan = read(spec, given)
    if against is not None:
        check_baseline(plan, against)
    if per_sequence or against is not None:
        check_batch(plan, "--against" if against else "--per-sequence")
    options = SweepOptions(
        out, engine, per_sequence or against is not None, jobs or cores(), backend, scheduler,
        replace, yes,
    )  # fmt: skip
    files = check_sweep(plan)
    check_outputs(options.outputs, [("SPEC", spec), *files], stdout=False)
    run_sweep(plan, options, TerminalReporter())
    print("\n".join(map(printable, format_summary(options.out))))
    if against is not None:
        lines = format_comparison(options.out, options.beside, against)
        print("\n".join(["", *map(printable, lines)]))
