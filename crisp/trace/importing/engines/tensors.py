"""Matrices saved by hand: counts of MoE-Infinity, and router logits of transformers."""

from __future__ import annotations

import re
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from crisp.errors import CrispError
from crisp.trace import DECODE
from crisp.trace.importing.engines import arrays
from crisp.trace.importing.engines.assembly import files
from crisp.trace.importing.engines.assembly.counts import count_experts
from crisp.trace.importing.engines.assembly.rows import LoggedRows, assemble, needed
from crisp.trace.importing.engines.log import MOST_LAYERS, EngineLog, ExpertCounts, KnownSizes

_STEP = 1 << 12  # rows whose experts are chosen together


def recognise_counts(path: Path, head: bytes) -> bool:
    """Return whether the file is a .npy of counts [sequences, layers, experts]."""
    if not head.startswith(files.NPY):
        return False
    try:
        array = files.read_npy(path)
    except CrispError:
        return False
    some = np.asarray(array[:256]) if array.ndim == 3 else array
    return (
        array.ndim == 3
        and some.dtype.kind in "iuf"
        and bool((some >= 0).all() and (some == np.floor(some)).all())
        and not (some.dtype.kind in "iu" and arrays.looks_like_ids(some))
    )


def read_counts(paths: Sequence[Path], sizes: KnownSizes) -> ExpertCounts:
    """Read MoE-Infinity's trace_path: counts [sequences, layers, experts], summed."""
    total: NDArray[np.float64] | None = None
    for path in paths:
        array = files.read_npy(path)
        if array.ndim != 3 or array.dtype.kind not in "iuf" or 0 in array.shape:
            raise CrispError(
                f"{path}: {array.dtype} {list(array.shape)} found; expected counts "
                "[sequences, layers, experts]"
            )
        if not np.asarray(array).min() >= 0:
            raise CrispError(f"{path}: a count is negative or no number")
        counts = np.asarray(array, np.float64).sum(axis=0)
        if total is not None and total.shape != counts.shape:
            raise CrispError(f"{path}: {list(counts.shape)} found, before {list(total.shape)}")
        total = counts if total is None else total + counts
    assert total is not None
    return count_experts("moe-infinity", total, str(paths[0]))


def recognise_logits(path: Path, head: bytes) -> bool:
    """Return whether the file is a .npy, .npz or .pt of floating-point arrays, as logits are."""
    if path.suffix not in (".npy", ".npz", ".pt", ".pth"):
        return False
    try:
        kinds = {(array.dtype.kind, array.ndim in (2, 3)) for _, array in _matrices(path)}
    except CrispError:
        return False
    return kinds == {("f", True)}


def read_logits(paths: Sequence[Path], sizes: KnownSizes) -> EngineLog:
    """Read ``output_router_logits``: [tokens, experts] or [batch, tokens, experts] of each layer.

    The k largest logits of a token are taken as its experts, of equal ones the lowest id.
    """
    path = paths[0]
    if len(paths) > 1:
        raise CrispError(f"{paths[1]}: one file of router logits is read at a time")
    k = needed(sizes.top_k, str(path), "experts a token is routed to", "--top-k")
    layers = _layers(path, sizes)
    shapes = {array.shape for array in layers if array is not None}
    if len(shapes) != 1 or 0 in next(iter(shapes)):
        found = ", ".join(str(list(shape)) for shape in sorted(shapes)[:3]) or "nothing"
        raise CrispError(f"{path}: layers of {found}; expected one shape, not empty")
    (shape,) = shapes
    batch, tokens, n_experts = (1, *shape) if len(shape) == 2 else shape
    if k > n_experts:
        raise CrispError(f"{path}: top-{k} of {n_experts} experts")
    rows = batch * tokens
    files.check_total(rows * len(layers) * (2 * n_experts + 8 * k), str(path))
    scores = np.zeros((rows, len(layers), n_experts), np.float16)
    experts = np.full((rows, len(layers), k), -1, np.int64)
    for layer, array in enumerate(layers):
        if array is None:
            continue
        logits = array.reshape(rows, n_experts)
        for start in range(0, rows, _STEP):
            some = slice(start, start + _STEP)
            piece = np.asarray(logits[some], np.float32)
            if not np.isfinite(piece).all():
                raise CrispError(f"{path}: layer {layer}: a logit is not a finite number")
            if np.abs(piece).max() > np.finfo(np.float16).max:
                raise CrispError(f"{path}: layer {layer}: a logit is beyond float16")
            experts[some, layer] = np.argsort(-piece, axis=1, kind="stable")[:, :k]
            scores[some, layer] = piece
    logged = LoggedRows(
        experts=experts,
        sequence=np.repeat(np.arange(batch), tokens),
        position=np.tile(np.arange(tokens), batch),
        phase=np.full(rows, DECODE, np.uint8),
        scores=scores,
    )
    notes = [
        f"experts are the {k} largest logits: a router that adds a bias, or limits groups, "
        "chooses others",
        "no phases: all taken as decode",
    ]
    if len(shape) == 2:
        notes.append("rows are taken as one sequence; padding of a batch cannot be told")
    known = sizes._replace(n_experts=n_experts)
    return assemble(logged, "router-logits", path, known, notes)


def _layers(path: Path, sizes: KnownSizes) -> list[NDArray[Any] | None]:
    """Return the logits of each layer; None for a layer that has none."""
    matrices = list(_matrices(path))
    if not matrices:
        raise CrispError(f"{path}: holds no arrays of logits")
    for name, array in matrices:
        if array.dtype.kind != "f":
            raise CrispError(f"{path}: {name} is {array.dtype}; logits are floating-point numbers")
    if len(matrices) == 1 and matrices[0][1].ndim == 3 and sizes.n_layers != 1:
        array = matrices[0][1]
        if sizes.n_layers is None or array.shape[0] != sizes.n_layers:
            raise CrispError(
                f"{path}: one array {list(array.shape)}; expected one a layer, or the layers first "
                "(--layers or --model says how many)"
            )
        return list(array)
    for name, array in matrices:
        if array.ndim not in (2, 3):
            raise CrispError(
                f"{path}: {name} is {list(array.shape)}; expected [tokens, experts] or "
                "[batch, tokens, experts]"
            )
    numbered = [re.search(r"\d+", name) for name, _ in matrices]
    if all(numbered):
        numbers = [int(match[0]) for match in numbered if match]
        if len(set(numbers)) == len(numbers) and max(numbers) < MOST_LAYERS:
            layers: list[NDArray[Any] | None] = [None] * (max(numbers) + 1)
            for number, (_, array) in zip(numbers, matrices, strict=True):
                layers[number] = array
            return layers
    return [array for _, array in matrices]


def _matrices(path: Path) -> Iterator[tuple[str, NDArray[Any]]]:
    """Yield the arrays of a file with their names, numbers in a list."""
    with path.open("rb") as file:
        head = file.read(8)
    if head.startswith(files.NPY):
        yield "0", files.read_npy(path)
        return
    if path.suffix == ".npz":
        yield from files.read_npz(path).items()
        return
    value = files.read_pt(path)
    if isinstance(value, dict) and "router_logits" in value:
        value = value["router_logits"]
    if hasattr(value, "detach"):
        value = [value]
    named = (
        value.items()
        if isinstance(value, dict)
        else enumerate(value)
        if isinstance(value, list | tuple)
        else ()
    )
    for key, item in named:
        if hasattr(item, "detach"):
            yield str(key), files.to_array(item, f"{path}: {key}")
