"""``crisp trace``: look at routing traces, check, import and draw them."""

from __future__ import annotations

import json
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Annotated

import typer
from rich.box import SIMPLE_HEAD
from rich.console import Console
from rich.progress import BarColumn, Progress, TextColumn, TimeElapsedColumn
from rich.table import Table

from crisp.errors import CrispError
from crisp.files import atomic
from crisp.model import ModelSpec
from crisp.profile import Profile, tiers
from crisp.trace import RoutingTrace
from crisp.trace.bundled import resolve
from crisp.trace.chains import read_chains
from crisp.trace.describe import (
    ALPHA,
    BETA,
    BOTTOM,
    TOP,
    WARM_WIDTH,
    Description,
    describe,
    percent_of,
)
from crisp.trace.plot import draw
from crisp.trace.synth import synthesize
from crisp.trace.table import import_table

app = typer.Typer(help="Routing traces: look at them, check, import, capture and draw them.")

Trace = Annotated[str, typer.Argument(help="A trace file, or the name of a bundled one.")]
Out = Annotated[Path, typer.Option(help="The trace: NAME.trace.safetensors.")]


@app.command()
def info(
    trace: Trace,
    plot: Annotated[
        Path | None, typer.Option(help="Draw how skewed it is: a .png, .pdf or .svg.")
    ] = None,
    json_file: Annotated[
        str | None, typer.Option("--json", metavar="FILE", help="All facts as JSON; -: print it.")
    ] = None,
) -> None:
    """Say what a trace holds: its shape, how skewed it is, how it persists."""
    path = resolve(trace)
    with _progress(path.name):
        loaded = RoutingTrace.load(path)
        profile = Profile.from_trace(loaded)
        facts = describe(loaded, profile, tiers(profile, ALPHA, BETA))
    if plot is not None:
        draw(plot, facts, profile)
    text = json.dumps(facts.to_dict(), indent=1)
    if json_file == "-":
        typer.echo(text)
        return
    if json_file is not None:
        with atomic(json_file) as temporary:
            temporary.write_text(text + "\n")
    _print(path.name, facts)


@app.command()
def validate(trace: Trace) -> None:
    """Check everything a trace file promises."""
    path = resolve(trace)
    with _progress(path.name):
        loaded = RoutingTrace.load(path)
    typer.echo(f"ok: {path}: {_shape(loaded)}")


@app.command("import")
def import_(
    table: Annotated[
        Path, typer.Argument(help="One row per sequence, token, layer: .parquet, .csv or .jsonl.")
    ],
    out: Out,
    model: Annotated[
        str | None, typer.Option(help="Its model: a built-in name, or a config.json.")
    ] = None,
    experts: Annotated[int | None, typer.Option(help="Without a model: experts a layer.")] = None,
    layers: Annotated[int | None, typer.Option(help="Without a model: layers.")] = None,
    unordered: Annotated[
        bool, typer.Option("--unordered", help="The experts are not sorted by weight; leave them.")
    ] = False,
    drop_incomplete: Annotated[
        bool, typer.Option("--drop-incomplete", help="Leave out tokens that lack a layer.")
    ] = False,
    dataset: Annotated[str | None, typer.Option(help="Noted in the trace.")] = None,
    tokenizer: Annotated[str | None, typer.Option(help="Noted in the trace.")] = None,
) -> None:
    """Make a trace of a long table of another tool."""
    if (model is None) == (experts is None and layers is None):
        raise CrispError("import: expected either --model, or --experts and --layers")
    spec = None if model is None else ModelSpec.named(model)
    with _progress(table.name) as progress:
        done = import_table(
            table,
            out,
            spec=spec,
            n_experts=experts,
            n_layers=layers,
            unordered=unordered,
            drop_incomplete=drop_incomplete,
            dataset=dataset,
            tokenizer=tokenizer,
            progress=progress,
        )
    for note in done.notes:
        typer.echo(f"note: {note}")
    typer.echo(
        f"{out}: {done.rows:,} rows of {done.table_rows:,} table rows, {done.sequences} sequences, "
        f"{done.layers} layers, top-{done.k}"
    )


@app.command()
def synth(
    pairs: Annotated[
        Path, typer.Option(help="CSV: layer, i, j, count, i_first (i the first choice).")
    ],
    persistence: Annotated[
        Path, typer.Option(help="CSV: layer, shares of tokens with 0, 1, 2 experts of the last.")
    ],
    tokens: Annotated[int, typer.Option(help="Rows of the trace.")],
    out: Out,
    seed: Annotated[int, typer.Option(help="Of the draws.")] = 0,
    sequences: Annotated[int, typer.Option(help="Sequences, of equal length.")] = 1,
) -> None:
    """Draw a synthetic top-2 trace from per-layer statistics of a real one."""
    chains = read_chains(pairs, persistence)
    note = f"drawn from {pairs.name} and {persistence.name}"
    layer, worst = max(chains.items(), key=lambda chain: chain[1].miss)
    if worst.miss > 1e-6:
        note += f"; shares of common experts missed by up to {worst.miss:.2g} (layer {layer})"
        typer.echo(f"note: no chain has both statistics of layer {layer}: off by {worst.miss:.2g}")
    with _progress(out.name) as progress:
        trace = synthesize(chains, tokens, seed, sequences=sequences, note=note, progress=progress)
        trace.save(out)
    typer.echo(f"{out}: synthetic, seed {seed}: {_shape(trace)}")


@contextmanager
def _progress(what: str) -> Iterator[Callable[[float], None]]:
    """A bar on a terminal, told the share that is done; it only pulses until it is told."""
    console = Console(stderr=True)
    columns = (TextColumn("{task.description}"), BarColumn(), TimeElapsedColumn())
    with Progress(
        *columns, console=console, disable=not console.is_terminal, transient=True
    ) as bar:
        task = bar.add_task(what, total=None)
        yield lambda share: bar.update(task, completed=share, total=1)


def _shape(trace: RoutingTrace) -> str:
    return (
        f"{trace.rows:,} rows, {len(trace.sequences()[0])} sequences, {trace.layers} layers "
        f"({len(trace.moe_layers)} MoE), {trace.header.n_experts} experts, top-{trace.k}"
    )


def _print(name: str, facts: Description) -> None:
    """The facts, for people."""
    header = facts.header
    n = header["n_experts"]
    known = {key: header[key] for key in ("model", "dataset", "tokenizer", "note") if header[key]}
    origin = header["origin"] + (f", seed {header['seed']}" if header["seed"] is not None else "")
    has = [what for what in ("weights", "guess", "token") if getattr(facts, what)]
    least, quarter, half, three, most = facts.lengths
    low, high = facts.first_positions
    sorted_ = "sorted by router weight" if header["ordered"] else "not sorted by router weight"
    lines = {
        "rows": f"{facts.rows:,}: {facts.prefill:,} prefill, {facts.decode:,} decode",
        "layers": f"{facts.n_layers}, {len(facts.layers)} of them MoE",
        "experts": f"{n}, top-{header['top_k']}, {sorted_}",
        "sequences": f"{facts.sequences}; rows of each {least} to {most}, quartiles {quarter}, "
        f"{half}, {three}; first position {low if low == high else f'{low} to {high}'}",
        "origin": f"{origin}; {header['tool']}, {header['time']}",
        **known,
        "also has": ", ".join(has) or "nothing (no weights, guess or token ids)",
    }
    width = max(map(len, lines))
    typer.echo(name)
    for key, text in lines.items():
        typer.echo(f"  {key:{width}}  {text}")

    names = (
        "layer",
        f"top {TOP} %",
        f"bottom {BOTTOM} %",
        "entropy",
        "overlap",
        "chance",
        "saving",
    )
    keys = ("top", "bottom", "entropy_bits", "overlap", "chance", "saving")
    table = Table(box=SIMPLE_HEAD)
    for column in names:
        table.add_column(column, justify="right")
    for layer in facts.layers:
        cells = [_cell(key, getattr(layer, key)) for key in keys]
        table.add_row(str(layer.layer), *cells, end_section=layer is facts.layers[-1])
    table.add_row("mean", *(_cell(key, facts.mean(key)) for key in keys))
    Console().print(table)

    top, bottom = (percent_of(share, facts.combinations) for share in (TOP, BOTTOM))
    typer.echo(
        f"top, bottom: activations of the {top:,} most and the {bottom:,} least frequent of "
        f"{facts.combinations:,} possible combinations\n"
        f"entropy: of the experts' shares, in bits; at most {facts.max_entropy_bits:.2f}\n"
        "overlap: of a decode token's experts, those that the decode token before it had too; "
        "chance: were they independent"
    )
    taken = [layer.tier_activations for layer in facts.layers if layer.tier_activations]
    if taken:
        hot, warm, cold = (
            f"{100 * sum(tier) / len(taken):.0f}" for tier in zip(*taken, strict=True)
        )
        typer.echo(
            f"saving: Eq. 4 for tiers counted on this very trace (alpha {float(ALPHA)}, beta "
            f"{float(BETA)}, warm {float(WARM_WIDTH)}): {hot} / {warm} / {cold} % of activations "
            "are HOT / WARM / COLD"
        )
    curve = facts.curve()
    steps = sorted({max(1, n * part // 8) for part in (1, 2, 4, 6)})
    typer.echo(
        "experts: the most frequent "
        + ", ".join(f"{i} ({100 * i / n:.0f} %) take {100 * curve[i - 1]:.0f} %" for i in steps)
    )
    if facts.rows * (header["top_k"] - 1) < facts.combinations:
        typer.echo("note: fewer activations a layer than combinations: their shares say little")


def _cell(key: str, value: float | None) -> str:
    if value is None:
        return "-"
    return f"{value:.2f}" if key == "entropy_bits" else f"{100 * value:.1f} %"
