"""``crisp model``: a model's geometry, what it came from, and what can be done with the model."""

from __future__ import annotations

import json as json_text
import sys
from collections.abc import Callable
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from crisp.cli.options import flags
from crisp.cli.options.files import STDOUT, check_outputs
from crisp.errors import CrispError
from crisp.files import atomic

if TYPE_CHECKING:
    from crisp.model.geometry import ModelGeometry
    from crisp.model.spec import ModelSpec

_ONLY_EXPERTS = "of a GGUF file only the experts are read"
_NO_WEIGHTS = "there are no weights here: a checkpoint's folder was expected"


def model(
    name: Annotated[
        str,
        typer.Argument(
            metavar="MODEL",
            help="Built in, in the hub's cache, a folder, GGUF file, config.json, store or TOML.",
        ),
    ],
    bits: Annotated[str | None, typer.Option(help="Stored bits of a routed weight.")] = None,
    json: Annotated[str | None, flags.file("All of it")] = None,
) -> None:
    """Say what a model's experts are like, and which commands take it."""
    from crisp.checkpoint.geometry.read import read_model
    from crisp.units import parse_fraction

    check_outputs({"--json": json}, [("MODEL", name)])
    geometry = read_model(name, None if bits is None else parse_fraction(bits, "--bits"))
    support = _support(name, geometry)
    content = {
        "model": geometry.spec.to_dict(),
        "source": geometry.source,
        "notes": list(geometry.notes),
        "expert_bytes": geometry.spec.expert_bytes,
        "routed_bytes": geometry.spec.routed_bytes,
        "supported": {command: reason is None for command, reason in support.items()},
        "reasons": {command: reason for command, reason in support.items() if reason},
    }
    text = json_text.dumps(content, indent=1) + "\n"
    if json == STDOUT:
        print(text, end="")
    elif json is not None:
        with atomic(json) as temporary:
            temporary.write_text(text, encoding="utf-8")
    lines = [*_geometry_lines(geometry), *_support_lines(support)]
    print("\n".join(lines), file=sys.stderr if json == STDOUT else sys.stdout)


def _geometry_lines(geometry: ModelGeometry) -> list[str]:
    """Describe a geometry, a line each."""
    from crisp.cli.output.setup_lines import describe_bits, describe_size
    from crisp.units import format_bytes, format_count

    spec = geometry.spec
    parts = f"{spec.matrices} matrices" + (" and biases" if spec.biases else "")
    blocks = format_count(spec.n_blocks, "block")
    lines = {
        "model": spec.name,
        "from": geometry.source,
        "layers": f"{spec.n_layers}, routed experts in {_describe_layers(spec)}",
        "experts": f"{spec.n_experts:,} a layer, top-{spec.top_k}",
        "neurons": f"{spec.d_ff:,} an expert on {spec.d_model:,} inputs, {parts}; {blocks} of "
        f"{spec.block:,}",
        "stored": f"{describe_bits(spec)} a routed weight; experts of {describe_size(spec)}, "
        f"{format_bytes(spec.routed_bytes)} in all",
        "beside": f"{_describe_dense(spec)} parameters a layer, in {spec.dtype_bits} bits",
    }
    described = [f"{key:<10}{text}" for key, text in lines.items()]
    return [*described, *(f"{'note':<10}{note}" for note in geometry.notes)]


def _describe_layers(spec: ModelSpec) -> str:
    layers = spec.moe_layers
    if len(layers) == spec.n_layers:
        return "all"
    if layers == tuple(range(layers[0], layers[-1] + 1)):
        return f"{len(layers)} of them, {layers[0]} to {layers[-1]}"
    return f"{len(layers)} of them: {', '.join(map(str, layers[:8]))}" + (
        ", ..." if len(layers) > 8 else ""
    )


def _describe_dense(spec: ModelSpec) -> str:
    least, most = min(spec.dense_params), max(spec.dense_params)
    return f"{most:,}" if least == most else f"{least:,} to {most:,}"


def _support_lines(support: dict[str, str | None]) -> list[str]:
    return [
        f"{command:<10}{'yes' if reason is None else f'no: {reason}'}"
        for command, reason in support.items()
    ]


def _support(name: str, geometry: ModelGeometry) -> dict[str, str | None]:
    """Return for each command why it does not take the model; None: it does."""
    from crisp.checkpoint.geometry.read import GGUF, has_weights
    from crisp.checkpoint.source import local_model
    from crisp.model.spec import BUILTIN

    support: dict[str, str | None] = {"simulate": None}
    folder = local_model(name)
    real = ("capture", "eval", "prepare", "pack", "generate")
    if geometry.source == GGUF:
        pack = _reason(lambda: _check_gguf(folder))
        return support | dict.fromkeys(real, _ONLY_EXPERTS) | {"pack": pack}
    if name in BUILTIN or not has_weights(folder):
        return support | dict.fromkeys(real, _NO_WEIGHTS)
    checks = {
        "capture": lambda: _admit(folder, tokenizer=True),
        "eval": lambda: _check_eval(folder),
        "prepare": lambda: _check_prepare(folder),
        "pack": lambda: _check_pack(folder, geometry),
        "generate": lambda: _check_generate(folder, geometry),
    }
    return support | {command: _reason(check) for command, check in checks.items()}


def _reason(check: Callable[[], Any]) -> str | None:
    """Return why a check refuses; None: it does not."""
    try:
        check()
    except CrispError as error:
        return str(error)
    return None


def _admit(folder: Path, **needs: bool) -> Any:
    from crisp.checkpoint.admission import admit

    return admit(folder, **needs)


def _check_eval(folder: Path) -> None:
    from crisp.adapter import Experts

    admitted = _admit(folder, tokenizer=True, geometry=True)
    for layer in admitted.layout.layers:
        Experts.of(layer)


def _check_prepare(folder: Path) -> None:
    from crisp.checkpoint.expert_tensors import expert_tensors
    from crisp.checkpoint.files import refuse_prepared
    from crisp.checkpoint.quantised import DecodedCheckpoint
    from crisp.prepare.quantised_reorder import neuron_runs

    refuse_prepared(folder)
    admitted = _admit(folder, tokenizer=True, geometry=True)
    neurons = expert_tensors(admitted.checkpoint, admitted.layout)
    if isinstance(admitted.checkpoint, DecodedCheckpoint):
        neuron_runs(admitted.checkpoint, neurons)


def _check_gguf(path: Path) -> None:
    from crisp.checkpoint.gguf import gguf_activation, gguf_file, read_model

    file = gguf_file(path)
    assert file is not None
    gguf_activation(read_model(file))


def _check_pack(folder: Path, geometry: ModelGeometry) -> None:
    from crisp.checkpoint.expert_tensors import expert_tensors
    from crisp.hw.store.checkpoint_experts import locate_experts

    admitted = _admit(folder, geometry=True)
    locate_experts(folder, geometry.spec)
    expert_tensors(admitted.checkpoint, admitted.layout)


def _check_generate(folder: Path, geometry: ModelGeometry) -> None:
    _admit(folder, tokenizer=True, geometry=True)
    _check_pack(folder, geometry)
