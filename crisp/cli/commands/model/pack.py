"""``crisp pack``: a model's experts as blocks on disk, which runs on real hardware read."""

from __future__ import annotations

import json
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

if TYPE_CHECKING:
    from crisp.model.spec import ModelSpec

_MODEL = "A transformers checkpoint, prepared or not: a folder, or a hub name; or a GGUF file."
_SYNTHETIC = "Random weights instead: of the geometry of a built-in model, config.json or TOML."


def pack(
    out: Annotated[Path, typer.Option(help="A new or an empty folder, for the store.")],
    model: Annotated[Path | None, typer.Argument(help=_MODEL, show_default=False)] = None,
    synthetic: Annotated[str | None, typer.Option(metavar="SPEC", help=_SYNTHETIC)] = None,
    dtype: Annotated[
        str | None, typer.Option(help="bf16, fp16, fp32, int8 or int4.  [default: as published]")
    ] = None,
    block: Annotated[
        int | None,
        typer.Option(help="Neurons of a block.  [default: as prepared, else an eighth of d_ff]"),
    ] = None,
    layers: Annotated[
        int | None, typer.Option(help="With --synthetic: the first layers only.")
    ] = None,
    seed: Annotated[int | None, typer.Option(help="With --synthetic: of the weights.")] = None,
    dry_run: Annotated[
        bool, typer.Option("--dry-run", help="With --synthetic: say how large, write nothing.")
    ] = False,
) -> None:
    """Write a model's routed experts as a store."""
    from crisp.cli.output.progress import progress_share
    from crisp.errors import CrispError
    from crisp.hw.store.packing import pack as pack_checkpoint
    from crisp.hw.store.packing import pack_synthetic, synthetic_geometry

    if (model is None) == (synthetic is None):
        found = "neither" if model is None else "both"
        raise CrispError(f"MODEL, --synthetic: {found} given; one of them was expected")
    for option, value in (("--layers", layers), ("--seed", seed)):
        if model is not None and value is not None:
            raise CrispError(f"{option} {value}: goes with --synthetic, not with a model")
    if dry_run and model is not None:
        raise CrispError("--dry-run: goes with --synthetic, not with a model")
    if synthetic is not None:
        spec, activation = _geometry(synthetic)
        spec = spec.first_layers(spec.n_layers if layers is None else layers).with_(block=block)
    if dry_run:
        kind, stored = synthetic_geometry(spec, dtype, seed or 0)
        typer.echo(f"{out}: dry run, nothing was written")
        typer.echo(_describe_store(stored, kind, "random weights"))
        return
    with progress_share("packing") as update:

        def progress(done: int, total: int) -> None:
            update(done / total)

        if model is not None:
            store = pack_checkpoint(model, out, dtype=dtype, block=block, progress=progress)
        else:
            store = pack_synthetic(
                spec, out, dtype=dtype, activation=activation,
                seed=seed or 0, progress=progress,
            )  # fmt: skip
    weights = "random weights" if store.origin == "synthetic" else "weights"
    typer.echo(f"{out}: {_describe_store(store.spec, store.dtype, weights)}")


def _describe_store(spec: ModelSpec, dtype: str, weights: str) -> str:
    """Describe what a store holds, in three lines."""
    from crisp.units import format_bytes, format_count

    layers = format_count(len(spec.moe_layers), "MoE layer")
    lines = {
        "experts": f"{spec.n_experts:,} in each of {layers}, "
        f"{format_bytes(spec.expert_bytes)} each",
        "blocks": f"{spec.n_blocks} an expert, of {spec.block:,} neurons and "
        f"{spec.block_bytes:,} bytes",
    }
    first = f"{spec.name}, {format_bytes(spec.routed_bytes)} of {weights} in {dtype}"
    return "\n".join([first, *(f"{key:<10}{text}" for key, text in lines.items())])


def _geometry(name: str) -> tuple[ModelSpec, str]:
    """Return a model's geometry by its name or path, and its experts' activation.

    A name is looked up as `crisp.checkpoint.geometry.read.read_model` does.
    """
    from crisp.checkpoint import gguf
    from crisp.checkpoint.geometry.read import read_model
    from crisp.checkpoint.source import cached_snapshot
    from crisp.hw.store.packing import read_activation
    from crisp.hw.store.reader import Store
    from crisp.model.builtin import CONFIGS
    from crisp.model.spec import STORE_INDEX

    spec, path = read_model(name).spec, Path(name)
    if name in CONFIGS:
        return spec, read_activation(CONFIGS[name], name)
    if (path / STORE_INDEX).exists():
        return spec, Store.open(path).activation
    if path.suffix == ".toml":
        return spec, "gpt_oss" if spec.biases else "silu"
    if not path.exists():
        path = cached_snapshot(name) or path
    file = gguf.gguf_file(path)
    if file is not None:
        return spec, gguf.gguf_activation(gguf.read_model(file))
    path = path / "config.json" if path.is_dir() else path
    return spec, read_activation(json.loads(path.read_bytes()), str(path))
