"""``crisp eval``: what policies cost in quality, measured on the real model."""

from __future__ import annotations

import dataclasses
import sys
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from crisp.cli.options import flags
from crisp.cli.options.files import STDOUT, Name, check_no_folder, check_outputs
from crisp.errors import CrispError
from crisp.files import atomic
from crisp.text_windows import MAX_WINDOW, window_length

if TYPE_CHECKING:
    from fractions import Fraction

    from crisp.checkpoint.loading import LoadedModel
    from crisp.policy import Budget, Policy
    from crisp.profile.metadata import Metadata


def evaluate(
    model: Annotated[str, typer.Argument(help="A transformers MoE: a folder, or a hub name.")],
    policy: Annotated[
        str, typer.Option(help=f"{flags.POLICIES} A list such as up,crisp gives a table.")
    ],
    text: Annotated[
        list[Path],
        typer.Option("--text", help="A text to read (UTF-8); several: --text A B C."),
    ],
    more: Annotated[list[Path] | None, typer.Argument(hidden=True, metavar="TEXT")] = None,
    width: Annotated[str | None, typer.Option(help=f"{flags.WIDTHS} Or a list.")] = None,
    metadata: Annotated[
        Path | None,
        typer.Option(
            metavar="FILE",
            help="What crisp prepare found out.  [default: crisp.safetensors beside the model]",
        ),
    ] = None,
    profile: Annotated[
        str | None, typer.Option(metavar="TRACE", help="Count combinations here instead.")
    ] = None,
    budget: Annotated[
        str | None,
        typer.Option(help="Replay a cache of 10%, .1 or 4GB: what it holds, what is loaded."),
    ] = None,
    cache: flags.Cache = None,
    scope: Annotated[str, typer.Option(help="Of the cache: layer or global.")] = "layer",
    unit: flags.Unit = None,
    rescale: flags.Rescale = None,
    routing: flags.Routing = None,
    magnitude: flags.Magnitude = "none",
    loss: flags.Loss = None,
    plugin: flags.Plugin = None,
    block: Annotated[
        int | None,
        typer.Option(help="Neurons of a block.  [default: the metadata's, else an eighth of d_ff]"),
    ] = None,
    window: Annotated[
        int | None,
        typer.Option(help=f"Tokens read at once.  [default: the context, at most {MAX_WINDOW}]"),
    ] = None,
    stride: Annotated[
        int | None,
        typer.Option(
            help="Tokens between the starts of windows; a window scores what is new in it.  "
            "[default: half a window; with --budget a whole one]"
        ),
    ] = None,
    tokens: Annotated[
        int | None, typer.Option(help="Read so many tokens, of all texts together.")
    ] = None,
    dtype: Annotated[
        str | None,
        typer.Option(
            help="int8 or int4: experts' weights as crisp pack stores them, for all but full."
        ),
    ] = None,
    batch: Annotated[
        int, typer.Option(min=1, help="Windows read side by side; with --budget one.")
    ] = 8,
    renormalize: Annotated[
        bool,
        typer.Option(
            "--renormalize", help="Give the router's weight of skipped experts to the others."
        ),
    ] = False,
    seed: Annotated[int, typer.Option(min=0, help="Of the resampled windows.")] = 0,
    json: Annotated[
        str | None, typer.Option(metavar="FILE", help="All that was measured; -: print it.")
    ] = None,
    tasks: Annotated[
        str | None,
        typer.Option(help="Tasks of lm-eval, by name or YAML file (a list); needs the extra eval."),
    ] = None,
) -> None:
    """Measure what policies cost in quality.

    That is a model's perplexity at their widths.
    """
    from crisp.checkpoint.loading import load_model, quantize_experts, to_float32
    from crisp.cli.options.lists import split_list
    from crisp.cli.output.progress import progress_of
    from crisp.cli.output.quality_tables import Row, format_notes, format_tables, format_title
    from crisp.cli.output.setup_lines import check_asked
    from crisp.model.quantization import BITS, STORED_BITS, check_groups
    from crisp.policy import Budget
    from crisp.profile.loss_curve import parse_loss
    from crisp.quality import EvaluationTasks, geometry, to_json
    from crisp.quality import evaluate as measured
    from crisp.quality.inputs import calibration_warnings, load_model_counts, load_model_metadata
    from crisp.sim.fast_replay import compiled_replay
    from crisp.text_windows import check_texts, check_vocabulary, read_windows
    from crisp.trace.bundled import resolve_trace

    # What can be said before the work is said before the work.
    texts = [*text, *(more or [])]
    check_texts(texts)
    check_no_folder("--metadata", metadata)
    named_tasks = [] if tasks is None else split_list(tasks, "--tasks")
    inputs: list[tuple[str, Name]] = [
        ("MODEL", model),
        *(("--text", path) for path in texts),
        ("--metadata", metadata),
        ("--profile", None if profile is None else resolve_trace(profile)),
        *(("--tasks", name) for name in named_tasks),
    ]
    check_outputs({"--json": json}, inputs)
    if dtype is not None and dtype not in BITS:
        raise CrispError(f"--dtype {dtype}: expected {' or '.join(BITS)}")
    cache_budget = None if budget is None else Budget.parse(budget)
    widths = [None] if width is None else split_list(width, "--width")
    chosen = [
        _policy(name, spelled, cache, scope, unit, rescale, routing, magnitude, cache_budget)
        for name in split_list(policy, "--policy")
        for spelled in widths
    ]
    asked = None if loss is None else parse_loss(loss)
    if asked is not None and cache_budget is None:
        raise CrispError("--loss: needs --budget, in which it is kept")
    check_asked(asked, [one for _, one in chosen])
    prepared = load_model_metadata(model, metadata, profile, progress_of)
    if prepared is None and profile is None:
        _check_uncounted(chosen, cache_budget)
    promises: list[str] = []
    if asked is not None and cache_budget is not None:
        chosen, promises = _within_loss(chosen, asked, cache_budget, prepared, dtype)
    questions = None if tasks is None else EvaluationTasks.load(named_tasks)

    loaded = to_float32(load_model(model))
    for note in loaded.notes:
        print(f"note: {note}", file=sys.stderr)
    whole = spec = geometry(loaded, prepared[1].spec.block if block is None and prepared else block)
    if dtype is not None:
        check_groups(spec, dtype)
        spec = spec.with_(bits=STORED_BITS[dtype])
    for _, one in chosen:
        if cache_budget is not None:
            cache_budget.capacity(spec, one.cache)  # raises CrispError
    counts = load_model_counts(spec, prepared, profile)
    length, step = _steps(loaded, window, stride, cache_budget)
    windows = read_windows(loaded.tokenizer, texts, length, step, tokens)
    check_vocabulary(windows, loaded.model.config, model)

    rows: list[Row] = []
    for spelled, one in [("full", _full(scope, unit)), *chosen]:
        if len(rows) == 1 and dtype is not None:
            moments = None if prepared is None else prepared[1].moments()
            loaded = quantize_experts(loaded, dtype, moments)
        with progress_of(f"{loaded.name}, {one.name} {spelled}: tokens") as update:
            quality = measured(
                loaded,
                windows,
                one,
                counts.profile,
                spec=spec if rows else whole,
                renormalize=renormalize,
                budget=cache_budget,
                reference=rows[0].quality.scores if rows else None,
                origin=counts.record,
                tasks=questions,
                batch=batch,
                seed=seed,
                progress=update,
                replay=compiled_replay,
            )
        rows.append(Row(spelled, quality))
    _write(json, to_json([row.quality for row in rows]))
    lines = [
        *format_title(rows[-1].quality, spec, windows, counts.origin),
        *promises,
        "",
        *format_tables(rows),
        "",
        *format_notes(rows, spec),
        *calibration_warnings(windows, prepared),
    ]
    print("\n".join(lines), file=sys.stderr if json == STDOUT else sys.stdout)


def _policy(
    name: str,
    width: str | None,
    cache: str | None,
    scope: str,
    unit: str | None,
    rescale: str | None,
    routing: str | None,
    magnitude: str,
    budget: Budget | None,
) -> tuple[str, Policy]:
    """Return (its width as it was spelled, the policy)."""
    from crisp.policy import NAMED, named, policy_name

    policy = named(
        name,
        width=width,
        cache=cache,
        scope=scope,
        unit=unit,
        rescale=rescale,
        routing=routing,
        magnitude=magnitude,
    )
    if budget is None and policy.routing.active:
        raise CrispError(
            f"--routing {policy.routing_name}: depends on what is resident; give a --budget"
        )
    if budget is not None and policy.prefetch.active:
        raise CrispError(
            f"--policy {name}: what its prefetch has brought depends on time, which is not "
            "measured here; with --budget a policy without prefetch was expected"
        )
    return NAMED[policy_name(name)].width if width is None else width, policy


def _within_loss(
    chosen: list[tuple[str, Policy]],
    loss: Fraction,
    budget: Budget,
    prepared: tuple[Path, Metadata] | None,
    dtype: str | None,
) -> tuple[list[tuple[str, Policy]], list[str]]:
    """Return the policies with the thresholds that keep the loss, and what is promised.

    dtype: of stored experts, by whose blocks a budget in bytes is counted.
    """
    from crisp.cli.output.setup_lines import describe_promise
    from crisp.model.quantization import STORED_BITS
    from crisp.policy.promise import no_curve, within_loss
    from crisp.profile.loss_curve import POLICY

    kept: list[tuple[str, Policy]] = []
    promises: list[str] = []
    for width, policy in chosen:
        if policy.name != POLICY:
            kept.append((width, policy))
            continue
        if prepared is None:
            raise no_curve(policy)
        metadata = prepared[1]
        spec = metadata.spec if dtype is None else metadata.spec.with_(bits=STORED_BITS[dtype])
        policy, promise = within_loss(policy, loss, spec, budget, metadata.loss_curve)
        kept.append((f"{POLICY}({float(promise.share):g})", policy))
        promises = [describe_promise(loss, budget, promise)]
    return kept, promises


def _full(scope: str, unit: str | None) -> Policy:
    """Return the policy of the unchanged model, fed like those that are compared with it."""
    from crisp.policy import named

    return dataclasses.replace(named("fo", scope=scope, unit=unit), name="full")


def _check_uncounted(chosen: list[tuple[str, Policy]], budget: Budget | None) -> None:
    """Raise CrispError for what needs counts of combinations, of which there are none."""
    for width, policy in chosen:
        needs = None
        if policy.width.counted:
            needs = f"width {width}"
        elif budget is not None and policy.cache.profiled:
            needs = f"cache {policy.cache.name}"
        if needs:
            raise CrispError(
                f"--policy {policy.name}: {needs} needs counts of combinations; give --metadata "
                "FILE, as crisp prepare writes it, or --profile TRACE, a trace of this model"
            )


def _steps(
    loaded: LoadedModel, window: int | None, stride: int | None, budget: Budget | None
) -> tuple[int, int]:
    """Return window and stride, in tokens."""
    window = window_length(loaded.model.config, window)
    if budget is None:
        return window, max(1, window // 2) if stride is None else stride
    if stride not in (None, window):
        raise CrispError(
            f"--stride {stride}: with --budget every token is fed once, so the stride is the "
            f"window's {window}"
        )
    return window, window


def _write(json: str | None, content: str) -> None:
    if json == STDOUT:
        sys.stdout.write(content)
    elif json is not None:
        with atomic(json) as temporary:
            temporary.write_text(content, encoding="utf-8")
