"""``crisp trace capture``: record which experts a real model routes a text's tokens to."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

import crisp.capture
from crisp.adapter import MagnitudePredictor
from crisp.capture import Recipe
from crisp.checkpoint.loading import load_model
from crisp.cli.options.files import Name, check_outputs
from crisp.cli.output.progress import progress_of
from crisp.errors import CrispError
from crisp.profile.metadata import FILE
from crisp.quality.inputs import load_model_metadata
from crisp.text_windows import check_texts
from crisp.units import format_count


def capture(
    model: Annotated[str, typer.Argument(help="A transformers MoE: a folder, or a hub name.")],
    text: Annotated[
        list[Path],
        typer.Option("--text", help="A text to read from (UTF-8); several: --text A B C."),
    ],
    out: Annotated[str, typer.Option(metavar="FILE", help="The trace: NAME.trace.safetensors.")],
    more: Annotated[list[Path] | None, typer.Argument(hidden=True, metavar="TEXT")] = None,
    prompt_tokens: Annotated[
        int, typer.Option(help="Tokens of each prompt.")
    ] = Recipe.prompt_tokens,
    new_tokens: Annotated[
        int, typer.Option(help="Tokens sampled after each prompt; the last has no row.")
    ] = Recipe.new_tokens,
    sequences: Annotated[
        int | None,
        typer.Option(
            help="Prompts, of all texts together (default: 16 of each, or what it holds)."
        ),
    ] = Recipe.sequences,
    batch: Annotated[int, typer.Option(help="Sequences that run side by side.")] = Recipe.batch,
    temperature: Annotated[
        float, typer.Option(help="Of sampling; 0: greedy.")
    ] = Recipe.temperature,
    seed: Annotated[int, typer.Option(help="Of prompts and sampling.")] = Recipe.seed,
    token_ids: Annotated[
        bool, typer.Option("--token-ids", help="Keep the tokens' ids in the trace.")
    ] = Recipe.token_ids,
    scores: Annotated[
        bool,
        typer.Option("--scores", help="Keep the router's logits of all experts in the trace."),
    ] = Recipe.scores,
    magnitudes: Annotated[
        bool,
        typer.Option(
            "--magnitudes",
            help="Keep the predicted magnitudes of experts' outputs; for a model of crisp prepare "
            "--magnitudes.",
        ),
    ] = False,
) -> None:
    """Record which experts a model chooses for texts.

    It reads the beginning of each text and writes on.
    """
    texts = [*text, *(more or [])]
    # What can be said before the work is said before the work.
    check_texts(texts)
    inputs: list[tuple[str, Name]] = [("MODEL", model), *(("--text", path) for path in texts)]
    check_outputs({"--out": out}, inputs, stdout=False)
    recipe = Recipe(
        prompt_tokens, new_tokens, sequences, batch, temperature, seed, token_ids, scores
    )
    prepared = load_model_metadata(model, None, None, progress_of) if magnitudes else None
    if magnitudes and prepared is None:
        raise CrispError(f"--magnitudes: {model} is not prepared: it holds no {FILE}")
    loaded = load_model(model)
    for note in loaded.notes:
        typer.echo(f"note: {note}", err=True)
    predict = None
    if prepared is not None:
        predict = MagnitudePredictor(prepared[1].spec, prepared[1].profile())
    with progress_of(f"{loaded.name}: tokens") as update:
        trace = crisp.capture.capture(loaded, texts, recipe, update, predict)
    trace.save(out)
    decode = int(trace.phase.sum())
    typer.echo(
        f"{out}: {format_count(trace.rows, 'row')} ({decode:,} decode), "
        f"{format_count(len(trace.sequences()[0]), 'sequence')}, "
        f"{format_count(len(trace.moe_layers), 'MoE layer')} of {trace.layers}, "
        f"{trace.header.n_experts} experts, top-{trace.k}"
    )
