"""``crisp eval``: what policies cost in quality, measured on the real model."""

from __future__ import annotations

import dataclasses
import sys
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from crisp.cli import flags
from crisp.cli.targets import STDOUT, Name, check_no_folder, check_outputs
from crisp.errors import CrispError
from crisp.files import atomic
from crisp.windows import LONGEST, window_length

if TYPE_CHECKING:
    from crisp.loading import Loaded
    from crisp.metadata import Metadata
    from crisp.model import ModelSpec
    from crisp.policy import Budget, Policy
    from crisp.profile import Profile
    from crisp.windows import Windows


def evaluate(
    model: Annotated[str, typer.Argument(help="A transformers MoE: a folder, or a hub name.")],
    policy: Annotated[
        str, typer.Option(help="fo, lru, mo, up or crisp. A list such as up,crisp gives a table.")
    ],
    text: Annotated[
        list[Path],
        typer.Option("--text", help="A text to read (UTF-8); several: --text A B C."),
    ],
    more: Annotated[list[Path] | None, typer.Argument(hidden=True, metavar="TEXT")] = None,
    width: Annotated[
        str | None,
        typer.Option(help="full, uniform(.5), single or tiered(alpha=.6,beta=.9). Or a list."),
    ] = None,
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
    unit: Annotated[str, typer.Option(help="What is admitted, evicted: expert, block.")] = "expert",
    block: Annotated[
        int | None,
        typer.Option(help="Neurons of a block.  [default: the metadata's, else an eighth of d_ff]"),
    ] = None,
    window: Annotated[
        int | None,
        typer.Option(help=f"Tokens read at once.  [default: the context, at most {LONGEST}]"),
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
    from crisp.cli.lists import split_list
    from crisp.cli.losses import Row, notes, tables, title
    from crisp.cli.progress import progress_of
    from crisp.loading import in_float32, in_groups, load
    from crisp.policy import Budget
    from crisp.quality import Tasks, geometry, to_json
    from crisp.quality import evaluate as measured
    from crisp.quantised import BITS, STORED, check_groups
    from crisp.trace.bundled import resolve
    from crisp.windows import check_vocabulary, read_windows

    # What can be said before the work is said before the work.
    texts = [*text, *(more or [])]
    for path in texts:
        if not path.is_file():
            raise CrispError(f"{path}: no such file; a text was expected")
    check_no_folder("--metadata", metadata)
    named_tasks = [] if tasks is None else split_list(tasks, "--tasks")
    inputs: list[tuple[str, Name]] = [
        ("MODEL", model),
        *(("--text", path) for path in texts),
        ("--metadata", metadata),
        ("--profile", None if profile is None else resolve(profile)),
        *(("--tasks", name) for name in named_tasks),
    ]
    check_outputs({"--json": json}, inputs)
    if dtype is not None and dtype not in BITS:
        raise CrispError(f"--dtype {dtype}: expected {' or '.join(BITS)}")
    asked = None if budget is None else Budget.parse(budget)
    widths = [None] if width is None else split_list(width, "--width")
    chosen = [
        _policy(name, spelled, cache, scope, unit, asked)
        for name in split_list(policy, "--policy")
        for spelled in widths
    ]
    found = _metadata(model, metadata, profile)
    if found is None and profile is None:
        _check_uncounted(chosen, asked)
    questions = None if tasks is None else Tasks.load(named_tasks)

    loaded = in_float32(load(model))
    whole = spec = geometry(loaded, found[1].spec.block if block is None and found else block)
    if dtype is not None:
        check_groups(spec, dtype)
        spec = spec.with_(bits=STORED[dtype])
    for _, one in chosen:
        if asked is not None:
            asked.capacity(spec, one.cache)
    counts, how, origin = _counts(spec, found, profile)
    length, step = _steps(loaded, window, stride, asked)
    windows = read_windows(loaded.tokenizer, texts, length, step, tokens)
    check_vocabulary(windows, loaded.model.config, model)

    rows: list[Row] = []
    for spelled, one in [("full", _full(scope, unit)), *chosen]:
        if len(rows) == 1 and dtype is not None:
            loaded = in_groups(loaded, dtype)
        with progress_of(f"{loaded.name}, {one.name} {spelled}: tokens") as update:
            quality = measured(
                loaded,
                windows,
                one,
                counts,
                spec=spec if rows else whole,
                renormalize=renormalize,
                budget=asked,
                reference=rows[0].quality.scores if rows else None,
                origin=origin,
                tasks=questions,
                batch=batch,
                seed=seed,
                progress=update,
            )
        rows.append(Row(spelled, quality))
    _write(json, to_json([row.quality for row in rows]))
    lines = [
        *title(rows[-1].quality, spec, windows, how),
        "",
        *tables(rows),
        "",
        *notes(rows, spec),
        *_seen(windows, found),
    ]
    print("\n".join(lines), file=sys.stderr if json == STDOUT else sys.stdout)


def _policy(
    name: str, width: str | None, cache: str | None, scope: str, unit: str, budget: Budget | None
) -> tuple[str, Policy]:
    """(its width as it was spelled, the policy)."""
    from crisp.policy import NAMED, named

    policy = named(name, width=width, cache=cache, scope=scope, unit=unit)
    if budget is not None and policy.prefetch.name != "none":
        raise CrispError(
            f"--policy {name}: what its prefetch has brought depends on time, which is not "
            "measured here; with --budget a policy without prefetch was expected"
        )
    return NAMED[name].width if width is None else width, policy


def _full(scope: str, unit: str) -> Policy:
    """The model as it is, fed like the others that are compared with it."""
    from crisp.policy import named

    return dataclasses.replace(named("fo", scope=scope, unit=unit), name="full")


def _check_uncounted(chosen: list[tuple[str, Policy]], budget: Budget | None) -> None:
    """Raise CrispError for what needs counts of combinations, of which there are none."""
    from crisp.policy.width import Tiered

    for width, policy in chosen:
        needs = None
        if isinstance(policy.width, Tiered):
            needs = f"width {width}"
        elif budget is not None and policy.cache.profiled:
            needs = f"cache {policy.cache.name}"
        if needs:
            raise CrispError(
                f"--policy {policy.name}: {needs} needs counts of combinations; give --metadata "
                "FILE, as crisp prepare writes it, or --profile TRACE, a trace of this model"
            )


def _metadata(model: str, file: Path | None, profile: str | None) -> tuple[Path, Metadata] | None:
    """What was asked for or lies beside the model, if it belongs to the model's weights."""
    from crisp.cli.progress import progress_of
    from crisp.metadata import FILE, Metadata
    from crisp.prepare.checkpoint import weights_digest

    if profile is not None:
        if file is not None:
            raise CrispError(
                f"--profile {profile}: counts are taken from --metadata {file} already"
            )
        return None
    beside = Path(model) / FILE
    file = file or (beside if beside.is_file() else None)
    if file is None:
        return None
    if not Path(model).is_dir():
        raise CrispError(
            f"--metadata {file}: belongs to a folder's weights, but {model} is no folder"
        )
    found = Metadata.load(file)
    with progress_of(f"{model}: weights") as update:
        found.check_weights(weights_digest(model, update), model)
    return file, found


def _counts(
    spec: ModelSpec, found: tuple[Path, Metadata] | None, profile: str | None
) -> tuple[Profile | None, str | None, dict[str, Any] | None]:
    """Counts of combinations, and where they came from: in words, and for the record."""
    from crisp.fitting import fit
    from crisp.profile import Profile
    from crisp.trace import RoutingTrace
    from crisp.trace.bundled import resolve

    if found is not None:
        path, own = found
        facts = own.provenance
        told = f"{path}, neurons ordered by {own.order}; {own.roles_told}"
        origin: dict[str, Any] = {"metadata": str(path), "weights": own.weights}
        origin["order"] = own.order
        origin |= {key: facts.get(key) for key in ("roles", "texts", "tokens", "ordered_from")}
        return own.profile(), told, origin
    if profile is None:
        return None, None, None
    trace = RoutingTrace.load(resolve(profile))
    try:
        layers = fit(spec, trace).n_layers
    except CrispError as error:
        raise CrispError(f"--profile {profile}: {error}") from error
    if layers < spec.n_layers:
        raise CrispError(
            f"--profile {profile}: {layers} layers, but {spec.name} has {spec.n_layers}"
        )
    told = f"{trace.rows:,} rows of {Path(profile).name}"
    return Profile.from_trace(trace), told, {"trace": trace.digest(), "texts": trace.header.dataset}


def _seen(windows: Windows, found: tuple[Path, Metadata] | None) -> list[str]:
    """A word of warning where a text was calibrated on: losses there say little of other text."""
    facts = {} if found is None else found[1].provenance
    known = [*facts.get("texts", ()), *facts.get("ordered_from", {}).get("texts", ())]
    hashes = {str(text).rpartition("sha256:")[2] for text in known}
    return [
        f"caution: {name} is a text that the model was prepared with"
        for name, text in zip(windows.names, windows.dataset, strict=True)
        if text.rpartition("sha256:")[2] in hashes
    ]


def _steps(
    loaded: Loaded, window: int | None, stride: int | None, budget: Budget | None
) -> tuple[int, int]:
    """Window and stride, in tokens."""
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
