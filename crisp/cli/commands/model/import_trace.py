"""``crisp trace import``: make a trace of another engine's log, or of a long table."""

from __future__ import annotations

from collections import ChainMap
from pathlib import Path
from typing import Annotated

import typer

from crisp.checkpoint.geometry.read import read_model
from crisp.cli.options import flags
from crisp.cli.options.files import Name, check_outputs
from crisp.cli.output.progress import progress_share
from crisp.errors import CrispError
from crisp.extensions import find_name
from crisp.files import check_readable
from crisp.model.spec import ModelSpec
from crisp.trace.importing.engine_names import ENGINE_NAMES
from crisp.units import format_count

_TABLE = "table"  # --from: whichever kind of table the file's ending says


def import_trace(
    files: Annotated[
        list[Path],
        typer.Argument(metavar="FILE...", help="A log, or a long table: .parquet, .csv, .jsonl."),
    ],
    out: Annotated[str, typer.Option(metavar="FILE", help="The trace: NAME.trace.safetensors.")],
    model: Annotated[
        str | None, typer.Option(help="Its model: built in, a folder, config.json or TOML.")
    ] = None,
    experts: Annotated[
        int | None, typer.Option(help="Without a model: experts a layer, if the log does not say.")
    ] = None,
    layers: Annotated[
        int | None, typer.Option(help="Without a model: layers, if the log does not say.")
    ] = None,
    top_k: Annotated[
        int | None,
        typer.Option("--top-k", help="Experts a token, for router logits and counts."),
    ] = None,
    unordered: Annotated[
        bool, typer.Option("--unordered", help="The experts are not sorted by weight; leave them.")
    ] = False,
    drop_incomplete: Annotated[
        bool,
        typer.Option("--drop-incomplete", help="Of a table: leave out tokens that lack a layer."),
    ] = False,
    dataset: Annotated[str | None, typer.Option(help="Noted in the trace.")] = None,
    tokenizer: Annotated[str | None, typer.Option(help="Noted in the trace.")] = None,
    column: Annotated[
        str | None,
        typer.Option(
            metavar="OURS=THEIRS,...", help="Names of a table's columns: sequence=problem_id,..."
        ),
    ] = None,
    reader: Annotated[
        str | None,
        typer.Option(
            "--from",
            metavar="NAME",
            help=f"{', '.join(ENGINE_NAMES)}; table, or parquet, csv, jsonl; or a plugin's "
            "importer. Default: by content.",
        ),
    ] = None,
    plugin: flags.Plugin = None,
) -> None:
    """Make a trace of another engine's log, or of a long table."""
    # here, so that other commands need not import pyarrow
    from crisp.trace.importing.engines.cache_eval import BELONG
    from crisp.trace.importing.engines.log import check_sizes
    from crisp.trace.importing.log import import_log
    from crisp.trace.importing.table import import_table

    if model is not None and (experts is not None or layers is not None):
        raise CrispError("import: expected either --model, or --experts and --layers; found both")
    check_sizes(experts, layers, top_k)
    for file in files:
        if not file.is_file():
            raise CrispError(f"{file}: {'not a file' if file.exists() else 'no such file'}")
    belonging = [file.with_name(name) for file in files for name in BELONG.get(file.name, ())]
    read = [*files, *belonging]
    inputs: list[tuple[str, Name]] = [*(("FILE", file) for file in read), ("--model", model)]
    check_outputs({"--out": out}, inputs, stdout=False)
    spec = None if model is None else read_model(model).spec
    engine = _engine_of(files, reader, column)
    with progress_share(files[0].name) as progress:
        if engine is not None:
            if drop_incomplete:
                raise CrispError(
                    "--drop-incomplete: is for tables; rows of a log keep the layers they have"
                )
            try:
                imported = import_log(
                    files,
                    Path(out),
                    engine,
                    spec=spec,
                    n_experts=experts,
                    n_layers=layers,
                    top_k=top_k,
                    unordered=unordered,
                    dataset=dataset,
                    tokenizer=tokenizer,
                )
            except CrispError as error:
                if reader is not None:
                    raise
                raise CrispError(f"{error} (taken as --from {engine}, by its content)") from error
        else:
            imported = import_table(
                _only_table(files, spec, experts, layers, top_k),
                Path(out),
                spec=spec,
                n_experts=experts,
                n_layers=layers,
                unordered=unordered,
                drop_incomplete=drop_incomplete,
                dataset=dataset,
                tokenizer=tokenizer,
                reader=None if reader == _TABLE else reader,
                called=_read_columns(column),
                progress=progress,
            )
    if engine is not None and reader is None:
        typer.echo(f"note: {files[0].name} is taken as --from {engine}, by its content")
    for note in imported.notes:
        typer.echo(f"note: {note}")
    record = "table row" if engine is None else "logged row"
    origin = "" if imported.drawn else f" of {format_count(imported.table_rows, record)}"
    typer.echo(
        f"{out}: {format_count(imported.rows, 'row')}{origin}, "
        f"{format_count(imported.sequences, 'sequence')}, "
        f"{format_count(imported.layers, 'layer')}, top-{imported.k}"
        + (", synthetic" if imported.drawn else "")
    )


def _engine_of(files: list[Path], reader: str | None, column: str | None) -> str | None:
    """Return the engine whose log the files are, as said or by their content; None: a table."""
    from crisp.trace.importing.engines import not_recognised, recognise_log
    from crisp.trace.importing.readers import ENDINGS, READERS

    if reader is not None:
        find_name(ChainMap(READERS, dict.fromkeys([*ENGINE_NAMES, _TABLE])), reader, "importer")
        if reader in ENGINE_NAMES and column is not None:
            raise CrispError(f"--column: is for tables; --from {reader} knows its columns")
        return reader if reader in ENGINE_NAMES else None
    if column is not None:
        return None
    check_readable(files[0])
    engine = recognise_log(files[0])
    if engine is None and files[0].suffix.lower() not in ENDINGS:
        raise not_recognised(files[0])
    return engine


def _only_table(
    files: list[Path],
    spec: ModelSpec | None,
    experts: int | None,
    layers: int | None,
    top_k: int | None,
) -> Path:
    """Return the one table to import; CrispError for several, and for sizes that are not known."""
    if len(files) > 1:
        raise CrispError(f"import: {len(files)} files; a table is one")
    if spec is None and (experts is None or layers is None):
        raise CrispError("import: expected either --model, or --experts and --layers")
    if top_k is not None:
        raise CrispError("--top-k: is for router logits and counts; a table says how many it has")
    return files[0]


def _read_columns(text: str | None) -> dict[str, str]:
    """Return the file's own names of columns, by ours, of ``sequence=problem_id,...``."""
    called: dict[str, str] = {}
    for pair in (text or "").split(",") if text is not None else []:
        ours, equals, theirs = (part.strip() for part in pair.partition("="))
        if not (ours and equals and theirs):
            raise CrispError(f"--column '{pair}': expected OURS=THEIRS, as sequence=problem_id")
        if ours in called:
            raise CrispError(f"--column: names {ours} twice")
        called[ours] = theirs
    return called
