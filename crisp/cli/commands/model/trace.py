"""``crisp trace``: look at routing traces, check, import and draw them."""

from __future__ import annotations

import json
from pathlib import Path
from textwrap import wrap
from typing import Annotated

import typer

from crisp.cli.commands.model.import_trace import import_trace
from crisp.cli.options.files import STDOUT, check_outputs
from crisp.cli.output.columns import align_columns
from crisp.cli.output.progress import progress_share
from crisp.files import atomic
from crisp.policy.widths.base import Tiered
from crisp.profile import Profile, tiers
from crisp.report.plots import check_format
from crisp.trace import RoutingTrace
from crisp.trace.bundled import SUFFIX, resolve_trace
from crisp.trace.describe import BOTTOM, TOP, Description, describe, percent_of
from crisp.trace.plot import draw_combinations
from crisp.units import format_count

app = typer.Typer(help="Routing traces: look at them, check, import, capture and draw them.")

Trace = Annotated[str, typer.Argument(help="A trace file, or the name of a bundled one.")]
_WIDTH = 100
Out = Annotated[str, typer.Option(metavar="FILE", help="The trace: NAME.trace.safetensors.")]


@app.command()
def info(
    trace: Trace,
    plot: Annotated[
        str | None,
        typer.Option(metavar="FILE", help="Draw how skewed it is: a .png, .pdf or .svg."),
    ] = None,
    json_file: Annotated[
        str | None, typer.Option("--json", metavar="FILE", help="All facts as JSON; -: print it.")
    ] = None,
) -> None:
    """Describe a trace: its shape, its skew, its persistence."""
    if plot is not None:
        check_format(Path(plot))
    path = resolve_trace(trace)
    check_outputs({"--plot": plot, "--json": json_file}, [("TRACE", path)])
    with progress_share(path.name):
        loaded = RoutingTrace.load(path)
        profile = Profile.from_trace(loaded)
        tiering = Tiered()  # the defaults: the paper's
        facts = describe(loaded, profile, tiers(profile, tiering.alpha, tiering.beta), tiering)
    if plot is not None:
        draw_combinations(Path(plot), path.name.removesuffix(SUFFIX), facts, profile)
    text = json.dumps(facts.to_dict(), indent=1)
    if json_file == STDOUT:
        typer.echo(text)
        return
    if json_file is not None:
        with atomic(json_file) as temporary:
            temporary.write_text(text + "\n")
    _print(path.name, facts)


@app.command()
def validate(trace: Trace) -> None:
    """Check everything a trace file promises."""
    path = resolve_trace(trace)
    with progress_share(path.name):
        loaded = RoutingTrace.load(path)
    typer.echo(f"ok: {path}: {_shape(loaded)}")


app.command("import")(import_trace)


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
    """Draw a synthetic top-2 trace from statistics of a real one."""
    from crisp.trace.chains import read_chains  # here: they import pyarrow
    from crisp.trace.synth import synthesize

    inputs = [("--pairs", pairs), ("--persistence", persistence)]
    check_outputs({"--out": out}, inputs, stdout=False)
    chains = read_chains(pairs, persistence)
    note = f"drawn from {pairs.name} and {persistence.name}"
    layer, worst = max(chains.items(), key=lambda chain: chain[1].miss)
    if worst.miss > 1e-6:
        note += f"; shares of common experts missed by up to {worst.miss:.2g} (layer {layer})"
        typer.echo(f"note: no chain has both statistics of layer {layer}: off by {worst.miss:.2g}")
    with progress_share(Path(out).name) as progress:
        trace = synthesize(chains, tokens, seed, sequences=sequences, note=note, progress=progress)
        trace.save(out)
    typer.echo(f"{out}: synthetic, seed {seed}: {_shape(trace)}")


def _shape(trace: RoutingTrace) -> str:
    return (
        f"{format_count(trace.rows, 'row')}, "
        f"{format_count(len(trace.sequences()[0]), 'sequence')}, "
        f"{format_count(trace.layers, 'layer')} ({len(trace.moe_layers)} MoE), "
        f"{trace.header.n_experts} experts, top-{trace.k}"
    )


def _print(name: str, facts: Description) -> None:
    """Print the facts about a trace, for people."""
    header = facts.header
    n = header["n_experts"]
    named_facts = {
        key: header[key] for key in ("model", "dataset", "tokenizer", "note") if header[key]
    }
    origin = header["origin"] + (f", seed {header['seed']}" if header["seed"] is not None else "")
    has = [
        what
        for what in ("weights", "guess", "token", "scores", "magnitudes")
        if getattr(facts, what)
    ]
    least, quarter, half, three, most = facts.lengths
    each = f"{least} to {most}, quartiles {quarter}, {half}, {three}"
    if least == most:
        each = str(least)
    absent = {}
    if facts.absent:
        of = facts.rows * len(facts.layers)
        absent["absent"] = f"{facts.absent:,} of {of:,} (row, MoE layer)s have no expert"
    low, high = facts.first_positions
    sorted_ = "sorted by router weight" if header["ordered"] else "not sorted by router weight"
    lines = {
        "rows": f"{facts.rows:,}: {facts.prefill:,} prefill, {facts.decode:,} decode",
        "layers": f"{facts.n_layers}, {len(facts.layers)} of them MoE",
        "experts": f"{n}, top-{header['top_k']}, {sorted_}",
        "sequences": f"{facts.sequences:,}; rows of each {each}; "
        f"first position {low if low == high else f'{low} to {high}'}",
        **absent,
        "origin": f"{origin}; {header['tool']}, {header['time']}",
        **named_facts,
        "digest": facts.digest,
        "also has": ", ".join(has) or "nothing (no weights, guess or token ids)",
    }
    width = max(map(len, lines))
    typer.echo(name)
    for key, text in lines.items():
        _fold(f"  {key:{width}}  {text}", width + 4)
    typer.echo()

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
    columns = [[*(str(layer.layer) for layer in facts.layers), "mean"]]
    for key in keys:
        values = [*(getattr(layer, key) for layer in facts.layers), facts.mean(key)]
        columns.append([_cell(key, value) for value in values])
    typer.echo("\n".join(f"  {line}" for line in align_columns(names, columns, text=0)) + "\n")

    top, bottom = (percent_of(share, facts.combinations) for share in (TOP, BOTTOM))
    _fold(
        f"top, bottom: activations of the {top:,} most and the {bottom:,} least frequent of "
        f"{facts.combinations:,} possible combinations"
    )
    _fold(f"entropy: of the experts' shares, in bits; at most {facts.max_entropy_bits:.2f}")
    _fold(
        "overlap: of a decode token's experts, those that the decode token before it had too; "
        "chance: were they independent"
    )
    taken = [layer.tier_activations for layer in facts.layers if layer.tier_activations]
    if taken:
        hot, warm, cold = (
            f"{100 * sum(tier) / len(taken):.0f}" for tier in zip(*taken, strict=True)
        )
        rule = ", ".join(f"{key} {value:g}" for key, value in facts.tiers.items())
        _fold(
            f"saving: Eq. 4 for tiers counted on this very trace ({rule}): {hot} / {warm} / "
            f"{cold} % of activations are HOT / WARM / COLD"
        )
    curve = facts.curve()
    steps = sorted({max(1, n * part // 8) for part in (1, 2, 4, 6)})
    _fold(
        "experts: the most frequent "
        + ", ".join(f"{i} ({100 * i / n:.0f} %) take {100 * curve[i - 1]:.0f} %" for i in steps)
    )
    if facts.rows * (header["top_k"] - 1) < facts.combinations:
        _fold("note: fewer activations a layer than combinations: their shares say little")


def _fold(text: str, indent: int = 8) -> None:
    """Print a text in lines that fit, the later ones indented."""
    rest = " " * indent
    lines = wrap(
        text, _WIDTH, subsequent_indent=rest, break_long_words=False, break_on_hyphens=False
    )
    typer.echo("\n".join(lines))


def _cell(key: str, value: float | None) -> str:
    if value is None:
        return "-"
    return f"{value:.2f}" if key == "entropy_bits" else f"{100 * value:.1f} %"
