"""``crisp prepare`` and ``crisp refresh``: what is done once, before a model runs."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from dataclasses import replace
from fractions import Fraction
from pathlib import Path
from typing import Annotated

import typer

from crisp.cli.options.files import Name, check_outputs
from crisp.cli.output.progress import progress_of
from crisp.errors import CrispError
from crisp.prepare.importance import NeuronOrder
from crisp.prepare.measurements import LOSS_CURVE, Report
from crisp.prepare.request import PreparationRequest
from crisp.prepare.roles import read_method
from crisp.profile.loss_curve import read_budgets
from crisp.profile.metadata import FILE, Metadata
from crisp.units import format_count

_MODEL = typer.Argument(help="A folder with a transformers checkpoint.", show_default=False)
_TEXT = typer.Option("--text", help="A text to calibrate on (UTF-8); several: --text A B C.")
_MORE = typer.Argument(hidden=True, metavar="TEXT")
_ROLES = typer.Option(help="How roles are told: weight, local, grouped(passes=8) or exact.")
_WINDOW = typer.Option(help="Tokens read together.  [default: the model's context, at most 2048]")
_TOKENS = typer.Option(help="Tokens of all texts together.  [default: all]")
_LOSSES = typer.Option(
    "--width-losses",
    metavar="TOKENS",
    help="Measure on so many tokens what each width costs, for width solver.  [default: not]",
)
_CURVE = typer.Option(
    "--loss-curve",
    metavar="BUDGETS",
    help="Measure in these budgets, such as 10%,20%,50%, what thresholds of policy saliency lose: "
    "for --loss.  [default: not]",
)
_MAGNITUDES = typer.Option(
    "--magnitudes",
    help="Measure what a layer's input foretells of each expert's output, for --magnitude "
    "predicted.  [default: not]",
)
_BLOCK = typer.Option(help="Neurons of a block.  [default: an eighth of d_ff, rounded up to 16]")


def prepare(
    model: Annotated[Path, _MODEL],
    text: Annotated[list[Path], _TEXT],
    out: Annotated[Path, typer.Option(help="A new folder for the prepared model.")],
    more: Annotated[list[Path] | None, _MORE] = None,
    order: Annotated[
        str, typer.Option(help="importance, output, magnitude, original or random(SEED).")
    ] = "importance",
    roles: Annotated[str, _ROLES] = "weight",
    window: Annotated[int | None, _WINDOW] = None,
    tokens: Annotated[int | None, _TOKENS] = None,
    block: Annotated[int | None, _BLOCK] = None,
    layerwise: Annotated[
        bool,
        typer.Option("--layerwise", help="One layer in memory at a time."),
    ] = False,
    width_losses: Annotated[int | None, _LOSSES] = None,
    dequantize: Annotated[
        bool,
        typer.Option("--dequantize", help="Write a quantised model in bf16, not in its format."),
    ] = False,
    loss_curve: Annotated[str | None, _CURVE] = None,
    magnitudes: Annotated[bool, _MAGNITUDES] = False,
) -> None:
    """Put a model's neurons in order of importance.

    And count which experts occur together. After a kill the same command goes on.
    """
    import crisp.prepare.pipeline as pipeline

    texts, method = [*text, *(more or [])], read_method(roles)
    budgets = None if loss_curve is None else read_budgets(loss_curve)
    if budgets is not None and layerwise:
        raise CrispError(
            "--loss-curve: needs the whole model in memory; it does not go with --layerwise"
        )
    request = PreparationRequest(
        texts, method, NeuronOrder.read(order), window, tokens, block, layerwise, width_losses,
        dequantize, None if budgets is None else _curve_tokens(tokens), magnitudes,
    )  # fmt: skip
    with _stages() as report:

        def add_curve(metadata: Metadata, folder: Path) -> Metadata:
            assert budgets is not None
            return _with_loss_curve(metadata, folder, texts, tokens, budgets, report)

        metadata = pipeline.prepare(
            model, out, request, report, None if budgets is None else add_curve
        )
    typer.echo("\n".join([f"{out}: {metadata.spec.name}, prepared", *summary(metadata)]))


def refresh(
    model: Annotated[Path, _MODEL],
    text: Annotated[list[Path], _TEXT],
    more: Annotated[list[Path] | None, _MORE] = None,
    out: Annotated[
        str | None,
        typer.Option(metavar="FILE", help="The new metadata.  [default: in place of the model's]"),
    ] = None,
    roles: Annotated[
        str | None, typer.Option(help="As in crisp prepare.  [default: as they were told]")
    ] = None,
    window: Annotated[
        int | None, typer.Option(help="Tokens read together.  [default: as it was]")
    ] = None,
    tokens: Annotated[int | None, _TOKENS] = None,
    width_losses: Annotated[int | None, _LOSSES] = None,
    loss_curve: Annotated[str | None, _CURVE] = None,
    magnitudes: Annotated[bool, _MAGNITUDES] = False,
) -> None:
    """Count anew for a prepared model, from other text.

    Its weights stay as they are.
    """
    import crisp.prepare.pipeline as pipeline

    texts = [*text, *(more or [])]
    inputs: list[tuple[str, Name]] = [("--text", one) for one in texts]
    if out is not None:
        inputs.append(("MODEL", model))
    target = str(model / FILE) if out is None else out
    check_outputs({"--out": target}, inputs, stdout=False)
    budgets = None if loss_curve is None else read_budgets(loss_curve)
    before = pipeline.prepared_metadata(model)
    request = PreparationRequest(
        texts,
        read_method(before.provenance["roles"]["method"] if roles is None else roles),
        NeuronOrder.read(before.order),
        before.provenance["window"] if window is None else window,
        tokens,
        before.spec.block,
        width_losses=width_losses,
        curve_tokens=None if budgets is None else _curve_tokens(tokens),
        magnitudes=magnitudes,
    )
    with _stages() as report:
        metadata = pipeline.refresh(model, request, report)
        if budgets is not None:
            metadata = _with_loss_curve(metadata, model, texts, tokens, budgets, report)
    metadata.save(target)
    typer.echo("\n".join([f"{target}: of {metadata.spec.name}, refreshed", *summary(metadata)]))


def _curve_tokens(tokens: int | None) -> int:
    """Return how many tokens of the text a loss curve is measured on, at most."""
    from crisp.quality.loss_curve import TOKENS

    return min(TOKENS, tokens or TOKENS)


def _with_loss_curve(
    metadata: Metadata,
    model: Path,
    texts: list[Path],
    tokens: int | None,
    budgets: list[Fraction],
    report: Report,
) -> Metadata:
    """Measure the loss curve of a prepared model on some of its text."""
    from crisp.checkpoint.loading import load_model, to_float32
    from crisp.quality.loss_curve import measure_loss_curve
    from crisp.sim.fast_replay import compiled_replay
    from crisp.text_windows import read_windows

    if metadata.sensitivities is None:
        raise CrispError(
            "--loss-curve: is of policy saliency, which asks how sensitive each layer is; that was "
            "not measured here"
        )
    loaded = to_float32(load_model(str(model)))
    window = metadata.provenance["window"]
    curve = measure_loss_curve(
        loaded,
        read_windows(loaded.tokenizer, texts, window, limit=_curve_tokens(tokens)),
        metadata.profile(),
        metadata.spec,
        budgets,
        lambda done, total: report(LOSS_CURVE, done, total),
        compiled_replay,
    )
    return replace(metadata, loss_curve=curve)


def summary(metadata: Metadata) -> list[str]:
    """Describe what was found out about a model, a line each."""
    facts = metadata.provenance
    unreached = facts["unreached"]
    lines = {
        "text": f"{format_count(facts['tokens'], 'token')} of "
        f"{format_count(len(facts['texts']), 'text')}, "
        f"{facts['window']:,} at a time",
        "neurons": f"by {metadata.order}; blocks of {metadata.spec.block}, "
        f"{format_count(metadata.spec.n_blocks, 'block')} an expert",
        "pairs": f"{format_count(facts['roles']['pairs'], 'combination')} seen; "
        f"{metadata.roles_description}",
    }
    if "width_losses" in facts:
        losses = facts["width_losses"]
        lines["widths"] = (
            f"losses at {format_count(len(losses['widths']), 'width')}, on "
            f"{format_count(losses['tokens'], 'token')}"
        )
    if metadata.loss_curve is not None:
        curve = metadata.loss_curve
        budgets = ", ".join(f"{100 * float(budget):g} %" for budget in curve.budgets)
        lines["losses"] = (
            f"of policy saliency at {budgets} and {len(curve.shares)} thresholds, on "
            f"{format_count(curve.tokens, 'token')}"
        )
    if unreached:
        named = ", ".join(f"{layer}.{expert}" for layer, expert in unreached[:6])
        more = ", ..." if len(unreached) > 6 else ""
        ordered = "" if facts.get("refreshed") else ", ordered by magnitude"
        lines["unreached"] = (
            f"{format_count(len(unreached), 'expert')} saw no token{ordered} "
            f"(layer.expert): {named}{more}"
        )
    if "seconds" in facts:
        parts = [f"{stage} {seconds:,.1f} s" for stage, seconds in facts["seconds"].items()]
        lines["times"] = ", ".join(parts)
    return [f"{key:<10}{text}" for key, text in lines.items()]


@contextmanager
def _stages() -> Iterator[Report]:
    """Show a bar for the stage that runs; what is yielded is called with (stage, done, total)."""
    with ExitStack() as stack:
        current: list[str] = []
        update = None

        def report(stage: str, done: int, total: int) -> None:
            nonlocal update
            if current != [stage]:
                stack.close()
                current[:] = [stage]
                update = stack.enter_context(progress_of(stage))
            assert update is not None
            update(done, total)

        yield report
